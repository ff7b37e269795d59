"""Spans and measurements by OpenTelemetry's API; whoever wants them configures its SDK.

Names are those of its semantic conventions where there are any: `execute_tool {name}` with `gen_ai.*` for tools,
`process.exit.code` and `error.type` for what was run. Ours begin with `cloche.`. Never code, output or arguments.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib.metadata import version
from typing import TYPE_CHECKING

from opentelemetry import metrics, trace

from cloche.core.result import Result, Status

if TYPE_CHECKING:
    Attributes = dict[str, str | int | float | bool]

# Seconds; those that the conventions advise for what agents do.
_BUCKETS = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)


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
    except TypeError:  # an older API knows of no advice
        return meter.create_histogram(name, unit="s", description=description)


@contextmanager
def execution_span(*, kind: str, backend: str, language: str) -> Iterator[Callable[[Result], None]]:
    """Trace one execution; the function that this gives is called with the result."""
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
    """Trace one call of a tool; the function that this gives is called with the kind of an error."""
    attributes: Attributes = {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": name}
    with _span(f"execute_tool {name}", attributes, _tools()) as (span, measured):
        span.set_attribute("gen_ai.tool.type", "function")
        span.set_attribute("gen_ai.tool.description", description)
        span.set_attribute("gen_ai.tool.call.id", call)
        yield lambda error: _fail(span, measured, error)


def decision_event(name: str, **attributes: str | bool) -> None:
    """Add an event to the span that is open, of a decision about a call."""
    trace.get_current_span().add_event(name, {f"cloche.approval.{word}": value for word, value in attributes.items()})


def _executions() -> metrics.Histogram:
    return _durations("cloche.execution.duration", "How long executions took, from their start to their result.")


def _tools() -> metrics.Histogram:
    return _durations("gen_ai.execute_tool.duration", "How long calls of tools took, approvals included.")


@contextmanager
def _span(name: str, attributes: Attributes, histogram: metrics.Histogram) -> Iterator[tuple[trace.Span, Attributes]]:
    """Trace and measure what is inside; an exception is an error of its type, without its text."""
    measured, begun = dict(attributes), time.monotonic()
    with _tracer().start_as_current_span(
        name,
        kind=trace.SpanKind.INTERNAL,
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
