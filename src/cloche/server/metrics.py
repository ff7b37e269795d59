"""Prometheus metrics: outcomes and durations of runs, the queue, requests, failures of the database.

Labels have few values: statuses, methods, route templates. They contain no code, output, name or id.
"""

from __future__ import annotations

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from cloche.wire.queue import RunQueue

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


class Metrics:
    """Hold the metrics of one worker."""

    def __init__(self) -> None:
        registry = self._registry = CollectorRegistry()
        self._runs = Counter("cloche_runs", "Runs that ended", ["status"], registry=registry)
        self._seconds = Histogram("cloche_run_seconds", "Wall clock of runs", buckets=_SECONDS, registry=registry)
        self._refused = Counter("cloche_runs_refused", "Runs refused because the queue was full", registry=registry)
        self._waiting = Gauge("cloche_runs_waiting", "Runs that wait for their turn", registry=registry)
        self._running = Gauge("cloche_runs_running", "Runs that are running", registry=registry)
        self._sandboxes = Gauge("cloche_sandboxes_open", "Live sandboxes", registry=registry)
        labels = ["method", "route", "status"]
        self._requests = Counter("cloche_http_requests", "Requests that were answered", labels, registry=registry)
        self._request_seconds = Histogram(
            "cloche_http_request_seconds", "Time to the end of an answer", ["route"], buckets=_SECONDS,
            registry=registry,
        )  # fmt: skip
        self._failures = Counter("cloche_database_errors", "Failed operations of the database", registry=registry)

    def run_ended(self, status: str, seconds: float | None) -> None:
        """Count a run that ended. `seconds` is its duration, None unless it ran to its end."""
        self._runs.labels(status).inc()
        if seconds is not None:
            self._seconds.observe(seconds)

    def run_refused(self) -> None:
        """Count a run that was refused because the queue was full."""
        self._refused.inc()

    def request_ended(self, method: str, route: str, status: int | None, seconds: float) -> None:
        """Count a request by its route's template and its status class (`none` without a response)."""
        self._requests.labels(method, route, "none" if status is None else f"{status // 100}xx").inc()
        self._request_seconds.labels(route).observe(seconds)

    def database_failed(self) -> None:
        """Count a failure of the database."""
        self._failures.inc()

    def render(self, runs: RunQueue, *, sandboxes: int | None = None) -> tuple[bytes, str]:
        """Return the text and its media type. `sandboxes` is the number of open ones, None if unknown."""
        self._waiting.set(runs.waiting)
        self._running.set(runs.running)
        self._sandboxes.set(float("nan") if sandboxes is None else sandboxes)
        return generate_latest(self._registry), CONTENT_TYPE_LATEST
