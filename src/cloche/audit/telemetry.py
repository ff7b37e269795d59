"""Spans and metrics through OpenTelemetry's API; the user configures its SDK to collect them.

Names follow its semantic conventions where these exist: `execute_tool {name}` with `gen_ai.*` for tools,
`process.exit.code` and `error.type` for runs, `http.*` for requests of the service. Others begin with `cloche.`. Code,
output and arguments are never included. The spans of a run's phases are created at its end, from times noted meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from functools import cache
from importlib.metadata import version
from typing import TYPE_CHECKING, TypeVar

from opentelemetry import metrics, propagate, trace

from cloche.core.events import Event, PlanStep, Started
from cloche.core.result import Result, Status

if TYPE_CHECKING:
    from opentelemetry.context import Context

    Attributes = dict[str, str | int | float | bool]

T = TypeVar("T")
_STAND_INS = ("ProxyTracerProvider", "_ProxyMeterProvider")
_NS_PER_S = 1_000_000_000
# Seconds; the boundaries that the semantic conventions for generative AI advise.
_BUCKETS = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)


def is_collected() -> bool:
    """Tell whether this process has a provider of spans or metrics; the API's own providers collect nothing."""
    return is_provided(trace.get_tracer_provider()) or is_provided(metrics.get_meter_provider())


def is_provided(provider: object) -> bool:
    """Tell whether a provider is a real one, not the API's proxy for a missing one."""
    return type(provider).__name__ not in _STAND_INS


@cache
def _tracer() -> trace.Tracer:
    return trace.get_tracer("cloche", version("cloche"))


@cache
def _durations(name: str, description: str) -> metrics.Histogram:
    meter = metrics.get_meter("cloche", version("cloche"))
    try:
        return meter.create_histogram(
            name, unit="s", description=description, explicit_bucket_boundaries_advisory=_BUCKETS
        )
    except TypeError:  # an older API lacks the parameter
        return meter.create_histogram(name, unit="s", description=description)


@contextmanager
def execution_span(*, kind: str, backend: str, language: str) -> Iterator[Callable[[Result], None]]:
    """Trace one execution; call the yielded function with the result."""
    attributes: Attributes = {"cloche.backend": backend, "cloche.language": language, "cloche.execution.kind": kind}
    with _span(f"{kind} {language}", attributes, _executions()) as (span, measured):

        def ended(result: Result) -> None:
            level = str(result.enforcement.level)
            span.set_attribute("process.exit.code", result.exit_code)
            span.set_attribute("cloche.status", str(result.status))
            span.set_attribute("cloche.level", level)
            if result.usage.peak_memory_bytes is not None:
                span.set_attribute("cloche.memory.peak", result.usage.peak_memory_bytes)
            if result.truncated:
                span.set_attribute("cloche.output.truncated", True)
            measured["cloche.level"] = level
            measured["cloche.status"] = str(result.status)
            if result.status is not Status.OK:
                _fail(span, measured, str(result.status))

        yield ended


@contextmanager
def tool_span(name: str, description: str, call: str) -> Iterator[Callable[[str], None]]:
    """Trace one call of a tool; call the yielded function with the kind of an error."""
    attributes: Attributes = {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": name}
    with _span(f"execute_tool {name}", attributes, _tools()) as (span, measured):
        span.set_attribute("gen_ai.tool.type", "function")
        span.set_attribute("gen_ai.tool.description", description)
        span.set_attribute("gen_ai.tool.call.id", call)
        yield lambda error: _fail(span, measured, error)


@contextmanager
def request_span(method: str, headers: Mapping[str, str]) -> Iterator[Callable[[str, int | None], None]]:
    """Trace one request of the service, as a child of the caller's span if `traceparent` names one.

    Call the yielded function with the route's template and the status.
    """
    attributes: Attributes = {"http.request.method": method}
    kind, above = trace.SpanKind.SERVER, propagate.extract(headers)
    with _span(method, attributes, _requests(), kind=kind, above=above) as (span, measured):

        def ended(route: str, status: int | None) -> None:
            span.update_name(f"{method} {route}")
            route_attributes: Attributes = {"http.route": route}
            if status is not None:
                route_attributes["http.response.status_code"] = status
            span.set_attributes(route_attributes)
            measured.update(route_attributes)
            if status is None or status >= 500:
                _fail(span, measured, str(status or "unanswered"))

        yield ended


@contextmanager
def queue_span(run_id: str) -> Iterator[None]:
    """Trace how long a run of the service waits in the queue."""
    with _span("queue", {}, _waits()) as (span, _):
        span.set_attribute("cloche.run.id", run_id)
        yield


@asynccontextmanager
async def opened_in_span(opening: AbstractAsyncContextManager[T], backend: str) -> AsyncIterator[T]:
    """Enter the context manager of a backend's sandbox; trace how long opening takes, if there is a current span."""
    if trace.get_current_span().get_span_context().is_valid:
        with _span(f"open {backend}", {"cloche.backend": backend}, _openings()):
            opened = await opening.__aenter__()
    else:
        opened = await opening.__aenter__()
    try:
        yield opened
    except BaseException as error:
        if not await opening.__aexit__(type(error), error, error.__traceback__):
            raise
    else:
        await opening.__aexit__(None, None, None)


class Phases:
    """Note when the guest's program starts, and create spans of a run's phases at its end."""

    def __init__(self) -> None:
        self._begun_ns = time.time_ns()
        self._started_ns: int | None = None
        self._plan: tuple[PlanStep, ...] = ()

    def note(self, event: Event) -> None:
        """Note the time of the Started event."""
        if isinstance(event, Started) and self._started_ns is None:
            self._started_ns, self._plan = time.time_ns(), event.plan

    def end(self, result: Result) -> None:
        """Create the spans below the current one: `start` with the jail's steps, `guest`, `collect`."""
        over_ns = time.time_ns()
        started_ns = min(self._started_ns or over_ns, over_ns)
        ended_ns = min(started_ns + int(result.duration * _NS_PER_S), over_ns)
        _past_span("start", self._begun_ns, started_ns, self._plan)
        if self._started_ns is not None:
            _past_span("guest", started_ns, ended_ns)
            _past_span("collect", ended_ns, over_ns)


def _past_span(name: str, begun_ns: int, ended_ns: int, steps: Iterable[PlanStep] = ()) -> None:
    """Create a span of the past; each step of the jail's setup is an event of it, with its duration in seconds."""
    span = _tracer().start_span(name, start_time=begun_ns)
    for step in steps:
        span.add_event("cloche.jail.step", {"cloche.jail.step": step.name, "seconds": step.seconds}, begun_ns)
    span.end(ended_ns)


def watch_queue(waiting: Callable[[], int], running: Callable[[], int]) -> None:
    """Measure how many runs of the service are waiting and running."""
    meter = metrics.get_meter("cloche", version("cloche"))
    for name, count in (("cloche.runs.waiting", waiting), ("cloche.runs.running", running)):
        meter.create_observable_gauge(name, [_counting(count)], unit="{run}")


def _counting(count: Callable[[], int]) -> Callable[[metrics.CallbackOptions], Iterable[metrics.Observation]]:
    return lambda _: [metrics.Observation(count())]


def decision_event(name: str, **attributes: str | bool) -> None:
    """Add an event about an approval decision to the current span."""
    trace.get_current_span().add_event(
        name, {f"cloche.approval.{attribute}": value for attribute, value in attributes.items()}
    )


def _executions() -> metrics.Histogram:
    return _durations("cloche.execution.duration", "How long executions took, from their start to their result.")


def _requests() -> metrics.Histogram:
    return _durations("http.server.request.duration", "How long requests of the service took.")


def _waits() -> metrics.Histogram:
    return _durations("cloche.queue.duration", "How long runs of the service waited for a place.")


def _openings() -> metrics.Histogram:
    return _durations("cloche.open.duration", "How long opening a sandbox took.")


def _tools() -> metrics.Histogram:
    return _durations("gen_ai.execute_tool.duration", "How long calls of tools took, approvals included.")


@contextmanager
def _span(
    name: str, attributes: Attributes, histogram: metrics.Histogram, *,
    kind: trace.SpanKind = trace.SpanKind.INTERNAL, above: Context | None = None,
) -> Iterator[tuple[trace.Span, Attributes]]:  # fmt: skip
    """Trace and measure the block; an exception is recorded by its type, without its text."""
    measured, begun = dict(attributes), time.monotonic()
    with _tracer().start_as_current_span(
        name,
        context=above,
        kind=kind,
        attributes=attributes,
        record_exception=False,
        set_status_on_exception=False,
    ) as span:
        try:
            yield span, measured
        except BaseException as error:
            _fail(span, measured, type(error).__qualname__)
            raise
        finally:
            histogram.record(time.monotonic() - begun, measured)


def _fail(span: trace.Span, measured: Attributes, error: str) -> None:
    span.set_attribute("error.type", error)
    span.set_status(trace.StatusCode.ERROR)
    measured["error.type"] = error
