"""Spans and measurements, as an application gets them that has configured OpenTelemetry's SDK.

It is a process of its own: an SDK is configured once, and everything else here is tested as it is without one.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import pytest

_APPLICATION = """
import json
from opentelemetry import metrics, trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import cloche
from cloche.agent.approval import auto
from cloche.agent.toolbox import Toolbox

exporter, reader = InMemorySpanExporter(), InMemoryMetricReader()
provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(exporter))
trace.set_tracer_provider(provider)
metrics.set_meter_provider(MeterProvider(metric_readers=[reader]))
told = {}

def tell(name):
    told[name] = [json.loads(span.to_json()) for span in exporter.get_finished_spans()]
    exporter.clear()

cloche.run("print('a word of mine')", warm=False)
tell("run")
cloche.run("raise SystemExit(3)", warm=False)
with cloche.Sandbox() as sandbox:
    sandbox.session().run("1 / 0")
tell("failed")
with Toolbox(approve=auto("high")) as tools:
    tools.call_and_wait("run_code", {"code": "print('a word of mine')"})
tell("approved")
with Toolbox() as tools:
    tools.call_and_wait("run_code", {"code": "print(2)"})
tell("denied")
try:
    cloche.run("1", audit="/dev/null/log", warm=False)
except cloche.ClocheError:
    pass
tell("raised")
told["metrics"] = json.loads(reader.get_metrics_data().to_json())
print(json.dumps(told))
"""


@pytest.fixture(scope="module")
def told() -> Mapping[str, Any]:
    """Run the application once and return what it collected."""
    done = subprocess.run([sys.executable, "-c", _APPLICATION], capture_output=True, text=True, timeout=120, check=True)
    found: Mapping[str, Any] = json.loads(done.stdout)
    return found


def points(told: Mapping[str, Any], name: str) -> list[Any]:
    """Return the points of one metric."""
    scopes = [scope for resource in told["metrics"]["resource_metrics"] for scope in resource["scope_metrics"]]
    found = [metric for scope in scopes for metric in scope["metrics"] if metric["name"] == name]
    assert [metric["unit"] for metric in found] == ["s"]
    return list(found[0]["data"]["data_points"])


def test_a_run_is_a_span(told: Mapping[str, Any]) -> None:
    """With where it ran and how it ended."""
    (span,) = told["run"]
    assert (span["name"], span["kind"], span["status"]["status_code"]) == ("run python", "SpanKind.INTERNAL", "UNSET")
    attributes = span["attributes"]
    assert attributes["process.exit.code"] == 0
    assert (attributes["cloche.status"], attributes["cloche.backend"], attributes["cloche.level"]) == (
        "ok",
        "local",
        "jail",
    )
    assert "error.type" not in attributes


def test_a_run_that_failed_says_how(told: Mapping[str, Any]) -> None:
    """The status is the type of error, of the span and of what was measured."""
    run, cell = told["failed"]
    assert [span["attributes"]["error.type"] for span in (run, cell)] == ["error", "error"]
    assert [span["status"]["status_code"] for span in (run, cell)] == ["ERROR", "ERROR"]
    assert (run["attributes"]["process.exit.code"], cell["name"]) == (3, "cell python")
    measured = points(told, "cloche.execution.duration")
    assert {point["attributes"].get("error.type") for point in measured} == {None, "error", "AuditFailed"}
    assert all(0 < point["sum"] < 60 for point in measured)


def test_a_run_that_could_not_be_is_an_error_of_its_type(told: Mapping[str, Any]) -> None:
    """Without its message, which may name anything."""
    (span,) = told["raised"]
    assert (span["attributes"]["error.type"], span["events"]) == ("AuditFailed", [])


def test_a_tool_is_a_span_by_the_conventions(told: Mapping[str, Any]) -> None:
    """The run is its child, the decision an event of it."""
    run, tool = told["approved"]
    attributes = tool["attributes"]
    assert tool["name"] == "execute_tool run_code"
    assert (attributes["gen_ai.operation.name"], attributes["gen_ai.tool.name"]) == ("execute_tool", "run_code")
    assert (attributes["gen_ai.tool.type"], bool(attributes["gen_ai.tool.call.id"])) == ("function", True)
    assert run["parent_id"] == tool["context"]["span_id"]
    assert [event["attributes"]["cloche.approval.is_approved"] for event in tool["events"]] == [True]
    assert {point["attributes"]["gen_ai.tool.name"] for point in points(told, "gen_ai.execute_tool.duration")} == {
        "run_code"
    }


def test_a_call_that_was_denied_is_an_error(told: Mapping[str, Any]) -> None:
    """And nothing ran below it."""
    (tool,) = told["denied"]
    assert tool["attributes"]["error.type"] == "ApprovalDenied"
    assert [event["attributes"]["cloche.approval.is_approved"] for event in tool["events"]] == [False]


def test_code_and_output_are_in_no_span(told: Mapping[str, Any]) -> None:
    """They stay where they are."""
    assert "a word of mine" not in json.dumps(told)


def test_nothing_of_it_is_imported_where_nobody_wants_it() -> None:
    """A program that has not imported OpenTelemetry pays nothing for it."""
    program = (
        "import sys, cloche\ncloche.run('1', warm=False)\n"
        "print([name for name in sys.modules if name.startswith('opentelemetry') or name.endswith('telemetry')])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"
