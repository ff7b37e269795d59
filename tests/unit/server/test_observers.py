"""What the queue and the database report to the metrics, and when a service sends telemetry."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import text

from cloche.core.errors import InvalidRequest, PolicyDenied, RecordsFailed
from cloche.records.database import Database
from cloche.records.writer import Writer
from cloche.server.metrics import Metrics
from cloche.server.run_rows import StoredRuns
from cloche.server.telemetry import configure_telemetry
from cloche.wire.problems import Refused
from cloche.wire.queue import RunOrder, RunQueue


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    """Give a database."""
    database = Database(tmp_path / "records.db")
    yield database
    database.close()


def _order(size: int = 1) -> RunOrder:
    async def start(_: object) -> None:
        raise PolicyDenied("no")

    return RunOrder(project="default", api_key=None, session_id=None, start=start, summary={}, size=size)  # type: ignore[arg-type]


def test_the_queue_reports_how_runs_ended_and_which_had_no_room(database: Database) -> None:
    """One that its rules refuse has ended with an error, and has no seconds; one without room is refused."""
    metrics, writer = Metrics(), Writer(database)

    async def submit() -> RunQueue:
        queue = RunQueue(StoredRuns(writer, "worker"), queue_limit=1, deadline_s=5, observer=metrics)
        live = await queue.submit(_order())
        with pytest.raises(PolicyDenied):
            await live.wait()
        with pytest.raises(Refused, match="are waiting already"):
            await queue.submit(_order(size=1 << 40))
        return queue

    told = metrics.render(asyncio.run(submit()))[0].decode()
    writer.close()
    for line in (
        'cloche_runs_total{status="error"} 1.0', "cloche_runs_refused_total 1.0", "cloche_run_seconds_count 0.0",
        "cloche_runs_waiting 0.0", "cloche_sandboxes_open NaN",
    ):  # fmt: skip
        assert f"\n{line}\n" in told


def test_what_the_database_cannot_do_is_counted_and_quotes_no_value(database: Database) -> None:
    """Each failure of a transaction, whoever asked for it."""
    metrics = Metrics()
    database.on_failure = metrics.database_failed
    with pytest.raises(RecordsFailed) as failed, database.writing() as session:
        session.execute(text("INSERT INTO nothing VALUES (:value)"), {"value": "hunter2"})
    assert "hunter2" not in f"{failed.value} {failed.value.__cause__}"
    with pytest.raises(RecordsFailed), database.reading() as session:
        session.execute(text("SELECT * FROM nothing"))
    queue = RunQueue(StoredRuns(None, "worker"), queue_limit=1, deadline_s=5)  # type: ignore[arg-type]
    assert b"\ncloche_database_errors_total 2.0\n" in metrics.render(queue)[0]


@pytest.mark.parametrize(
    ("variables", "told"),
    [
        (
            {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"},
            "OTEL_EXPORTER_OTLP_PROTOCOL=grpc: the service supports http/protobuf",
        ),
        ({"OTEL_TRACES_EXPORTER": "console"}, "OTEL_TRACES_EXPORTER=console: the service supports otlp only"),
    ],
)
def test_what_telemetry_cannot_do_is_wrong_usage(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], told: str
) -> None:
    """And not silence: the variable, and what to do."""
    for name, value in {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1", **variables}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InvalidRequest, match=told):
        configure_telemetry()


def test_without_its_variables_nothing_is_traced() -> None:
    """Nor where they switch it off; although some version of the framework imports OpenTelemetry's API by itself."""
    script = (
        "import os, sys, opentelemetry.trace\n"
        "from cloche.audit.recording import is_traced\n"
        "from cloche.server.telemetry import configure_telemetry\n"
        "configure_telemetry()()\n"
        "os.environ.update(OTEL_EXPORTER_OTLP_ENDPOINT='http://127.0.0.1:1', OTEL_SDK_DISABLED='true')\n"
        "configure_telemetry()()\n"
        "os.environ.update(OTEL_SDK_DISABLED='', OTEL_TRACES_EXPORTER='none', OTEL_METRICS_EXPORTER='none')\n"
        "configure_telemetry()()\n"
        "print(is_traced(), 'opentelemetry.sdk' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "False False\n"
