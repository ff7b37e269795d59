"""What the operator of a service sees: log, metrics, traces and debug lines; and nothing of a guest is in them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.harness.otlp import PATIENCE_S, Receiver, receiving
from tests.harness.service import Service, serving

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SECRET = "hunter2-tiger-lilies"
# Says it in code, output, error output, a value, the name of a file, and an error's text.
TELLS = f"""
import os, sys
print({SECRET!r}, os.environ["TOKEN"], input()); print({SECRET!r}, file=sys.stderr)
open({SECRET!r}, "w").write({SECRET!r})
raise ValueError({SECRET!r})
"""


@pytest.fixture(scope="module")
def receiver_and_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Receiver, Service]]:
    """Give a service that sends its telemetry to a receiver, and what that received."""
    variables = {"OTEL_BSP_SCHEDULE_DELAY": "100", "OTEL_METRIC_EXPORT_INTERVAL": "300", "CLOCHE_DEBUG": "runtime"}
    with receiving() as (receiver, address):
        home = tmp_path_factory.mktemp("service")
        with serving(home, OTEL_EXPORTER_OTLP_ENDPOINT=address, **variables) as service:
            yield receiver, service


@pytest.fixture(scope="module")
def service(receiver_and_service: tuple[Receiver, Service]) -> Service:
    """Give the service."""
    return receiver_and_service[1]


@pytest.fixture(scope="module")
def receiver(receiver_and_service: tuple[Receiver, Service]) -> Receiver:
    """Give the receiver."""
    return receiver_and_service[0]


def logged(service: Service) -> list[dict[str, Any]]:
    """Return the lines of the log, without what is said to whoever started it."""
    lines = service.log.read_text().splitlines()
    return [json.loads(line) for line in lines if not line.startswith("cloche: ")]


def wait_for(service: Service, fits: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """Return the first line of the log that fits, once it is there."""
    ends = time.monotonic() + PATIENCE_S
    while time.monotonic() < ends:
        if (found := next((line for line in logged(service) if fits(line)), None)) is not None:
            return found
        time.sleep(0.02)
    raise AssertionError(service.log.read_text())


def test_a_traced_request_has_a_span_for_each_phase(receiver: Receiver, service: Service) -> None:
    """Below the caller's own span: the request, the queue, opening the sandbox, and the run with its phases."""
    with service.client() as client:
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
        assert client.post("/api/code/exec", json={"code": "print(6 * 7)"}, headers=headers).json()["stdout"] == "42\n"
    trace = bytes.fromhex(TRACE)
    receiver.wait(lambda: "POST /api/code/exec" in receiver.of_trace(trace))
    spans = receiver.of_trace(trace)
    request, run = spans["POST /api/code/exec"], spans["run python"]
    assert (request.parent_span_id, request.kind) == (bytes.fromhex(PARENT), request.SPAN_KIND_SERVER)
    above = {name: span.parent_span_id for name, span in spans.items() if span is not request}
    assert above == {
        **dict.fromkeys(("queue", "open local", "run python"), request.span_id),
        **dict.fromkeys(("start", "guest", "collect"), run.span_id),
    }
    phases = [spans[name] for name in ("queue", "open local", "start", "guest", "collect")]
    times = [time_ns for span in phases for time_ns in (span.start_time_unix_nano, span.end_time_unix_nano)]
    assert times == sorted(times)
    assert request.start_time_unix_nano <= times[0]
    assert times[-1] <= request.end_time_unix_nano
    assert receiver.services == {"cloche"}


def test_measurements_reach_the_receiver(receiver: Receiver, service: Service) -> None:
    """How long requests, queue, opening and runs took, and how many wait and run."""
    with service.client() as client:
        client.post("/api/code/exec", json={"code": "1"}).raise_for_status()
    wanted = {
        "http.server.request.duration", "cloche.queue.duration", "cloche.open.duration", "cloche.execution.duration",
        "cloche.runs.waiting", "cloche.runs.running",
    }  # fmt: skip
    receiver.wait(lambda: wanted <= receiver.metrics)


def test_each_request_is_one_line_of_the_log(service: Service) -> None:
    """With method, route template, status, seconds, key and the id that the client has too; no path, no query."""
    with service.client() as client:
        answer = client.get(f"/api/runs/run_00000000000000000000?q={SECRET}")
        missing = client.get(f"/{SECRET}%1b[31m", headers={"X-Request-ID": b"\x9b31m no word"})
    line = wait_for(service, lambda line: line.get("requestId") == answer.headers["x-request-id"])
    assert set(line) == {"time", "level", "logger", "event", "method", "route", "status", "seconds", "key", "requestId"}
    told = (line["logger"], line["method"], line["route"], line["status"], line["key"][:4])
    assert told == ("cloche.access", "GET", "/api/runs/{run_id}", 404, "key_")
    line = wait_for(service, lambda line: line.get("requestId") == missing.headers["x-request-id"])
    assert (line["route"], line["status"], line["key"]) == ("(none)", 404, None)


def test_a_switch_takes_effect_within_a_second_by_api_and_command_line(service: Service) -> None:
    """Who may only read cannot; each says who switched, and when it takes effect where; the environment's stays on."""
    with service.client(service.new_key("run", "read")) as reader, service.client() as admin:
        assert reader.put("/api/sandbox/debug", json={"namespaces": {"jail": True}}).status_code == 403
        before = reader.get("/api/sandbox/debug").json()
        assert (before["enabled"], before["namespaces"]["runtime"], before["source"]) == (True, True, "environment")
        wrong = admin.put("/api/sandbox/debug", json={"namespaces": {"jails": True}})
        assert (wrong.status_code, "jails is not a debug namespace" in wrong.json()["detail"]) == (422, True)
        after = admin.put("/api/sandbox/debug", json={"namespaces": {"jail": True, "runtime": False}}).json()
        assert (after["namespaces"]["jail"], after["namespaces"]["warm"], after["source"]) == (
            True, False, "environment, stored",
        )  # fmt: skip
        assert after["namespaces"]["runtime"] is True
        assert after["appliesTo"]["keepers"] == "at their next start"
        reader.post("/api/code/exec", json={"code": "1"}).raise_for_status()
    wait_for(service, lambda line: line["logger"] == "cloche.jail" and line["level"] == "debug")
    command = [sys.executable, "-m", "cloche", "debug", "off", "jail", "--json", "--database", str(service.database)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=dict(service.environ))
    begun = time.time()
    assert json.loads(done.stdout)["namespaces"]["jail"] is False
    wait_for(service, lambda line: line["event"] == "debug namespaces that are on: runtime")
    assert time.time() - begun < 3  # one, on a machine that is not busy


def test_no_line_or_span_or_metric_has_anything_of_a_guest(receiver: Receiver, service: Service) -> None:
    """With all namespaces on; what the answer has whole is nowhere else, and a key's text is nowhere at all."""
    with service.client() as client:
        client.put("/api/sandbox/debug", json={"namespaces": {"*": True}}).raise_for_status()
        asked = {"code": TELLS, "env": {"TOKEN": SECRET}, "stdin": SECRET, "sessionId": SECRET}
        answer = client.post("/api/code/exec", json=asked, headers={"traceparent": f"00-{TRACE[::-1]}-{PARENT}-01"})
        assert answer.text.count(SECRET) > 4
        client.post("/api/code/exec", json={"code": TELLS, SECRET: 1}, headers={"X-Secret": SECRET})
        figures = client.get("/metrics").text
        client.put("/api/sandbox/debug", json={"namespaces": {"*": False}}).raise_for_status()
    receiver.wait(lambda: "POST /api/code/exec" in receiver.of_trace(bytes.fromhex(TRACE[::-1])))
    log = service.log.read_text()
    begun, log = log.partition("login?code=")[::2]  # to whoever started it: with the key, once
    assert begun.count(service.key) == 1
    assert {"cloche.jail", "cloche.warm", "cloche.service"} <= {line["logger"] for line in logged(service)}
    for text in (begun, log, figures, *(body.decode("latin-1") for body in receiver.bodies)):
        assert SECRET not in text
    assert service.key not in log
    assert log.isascii()
    assert all(character.isprintable() or character == "\n" for character in log)


def test_metrics_count_runs_by_status_and_requests_by_route(service: Service) -> None:
    """As sums since the start, and the gauges as they are now."""
    with service.client() as client:
        before = figures(client.get("/metrics").text)
        client.post("/api/code/exec", json={"code": "while True: pass", "timeout": "200ms"}).raise_for_status()
        client.post("/api/code/exec", json={"code": "1", "nonsense": 1})
        after = figures(client.get("/metrics").text)

    def grown(name: str) -> float:
        return after[name] - before.get(name, 0)

    assert grown('cloche_runs_total{status="timeout"}') == 1
    assert grown("cloche_run_seconds_count") == 1
    assert grown('cloche_http_requests_total{method="POST",route="/api/code/exec",status="4xx"}') == 1
    assert (after["cloche_runs_running"], after["cloche_sandboxes_open"]) == (0, 0)


def figures(text: str) -> dict[str, float]:
    """Return the figures of Prometheus' text."""
    rows = [line.rpartition(" ") for line in text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in rows}


def test_the_environment_switches_one_command(tmp_path: Path) -> None:
    """CLOCHE_DEBUG=jail prints the lines of the jail alone; a word that is no namespace is wrong usage."""
    command = [sys.executable, "-m", "cloche", "run", "-c", "print(1)"]
    plain = {**os.environ, "XDG_STATE_HOME": str(tmp_path)}
    told = subprocess.run(
        command, env={**plain, "CLOCHE_DEBUG": "warm, runtime"}, capture_output=True, text=True, check=True
    )
    assert "cloche.runtime: local: ok" in told.stderr
    assert "cloche.jail" not in told.stderr
    wrong = subprocess.run(command, env={**plain, "CLOCHE_DEBUG": "jial"}, capture_output=True, text=True, check=False)
    assert (wrong.returncode, "jial is not a debug namespace; use * or some of jail, warm" in wrong.stderr) == (2, True)
