"""What Prometheus reads: how many runs ended how, how long they took, how many wait. No code, no output, no name."""

from __future__ import annotations

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from .runs import RunQueue

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


class Metrics:
    """Hold the counters of one worker."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.runs = Counter("cloche_runs", "Runs that ended", ["status"], registry=self._registry)
        self.seconds = Histogram("cloche_run_seconds", "Wall clock of runs", buckets=_SECONDS, registry=self._registry)
        self.refused = Counter("cloche_runs_refused", "Runs for which there was no room", registry=self._registry)
        self._waiting = Gauge("cloche_runs_waiting", "Runs that wait for a place", registry=self._registry)
        self._running = Gauge("cloche_runs_running", "Runs that go on", registry=self._registry)

    def render(self, runs: RunQueue) -> tuple[bytes, str]:
        """Return the text, and its media type."""
        self._waiting.set(runs.waiting)
        self._running.set(runs.running)
        return generate_latest(self._registry), CONTENT_TYPE_LATEST
