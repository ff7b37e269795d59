"""Bug reproductions: what is stored, how a run ends, and that no run is lost or made twice."""

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cloche.core.errors import Conflict, InvalidRequest, NotFound
from cloche.records.database import Database
from cloche.records.reproductions import GONE, Reproductions
from cloche.records.workers import is_gone, own_worker
from tests.harness.processes import wait_for_word

BASE = {"title": "wrong sum", "code": "print(1)"}


@pytest.fixture
def database(location: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Database]:
    """Open an empty database, where no configuration of the machine's counts."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    opened = Database(location)
    yield opened
    opened.close()


@pytest.fixture
def records(database: Database) -> Reproductions:
    """Return the reproductions of this process."""
    return Reproductions(database)


def run(records: Reproductions, code: str, **fields: Any) -> dict[str, Any]:
    """Create one and run it."""
    backend = fields.pop("backend", None)
    made = records.create({**BASE, "code": code, **fields})
    return asyncio.run(records.run(made["id"], backend))


def test_what_is_created_is_listed_shown_and_deleted(records: Reproductions) -> None:
    """A list has no code and can be cut by status, session and page; one is shown whole, and gone once deleted."""
    first = records.create({**BASE, "description": "1 + 1 is 3", "sessionId": "agent-7", "expect": {"exitCode": 3}})
    second = records.create(BASE)

    assert (first["status"], first["language"], first["expect"]) == ("queued", "python", {"exitCode": 3})
    assert records.get(first["id"]) == first
    assert [one["id"] for one in records.list()["items"]] == [second["id"], first["id"]]
    assert "code" not in records.list()["items"][0]
    assert [one["id"] for one in records.list(session_id="agent-7", status="queued")["items"]] == [first["id"]]
    page = records.list(limit=1)
    assert records.list(limit=1, cursor=page["nextCursor"])["items"][0]["id"] == first["id"]
    records.delete(first["id"])
    with pytest.raises(NotFound):
        records.get(first["id"])


def test_another_projects_are_not_there(database: Database, records: Reproductions) -> None:
    """Whoever has another project finds, runs and deletes nothing of this one."""
    made = records.create(BASE)
    other = Reproductions(database, project="other")
    assert other.list()["items"] == []
    for attempt in (other.get, other.delete, other.start):
        with pytest.raises(NotFound):
            attempt(made["id"])
    assert records.get(made["id"])["status"] == "queued"


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"title": ""}, "title"),
        ({"title": "x" * 201}, "title"),
        ({"code": None}, "code"),
        ({"code": "\ud800"}, "code"),
        ({"language": "cobol"}, "language"),
        ({"sessionId": "x" * 65}, "sessionId"),
        ({"expect": {"exitCode": 256}}, "expect.exitCode"),
        ({"expect": {"exitcode": 1}}, "expect"),
        ({"colour": "red"}, "colour"),
    ],
)
def test_a_wrong_field_is_named(records: Reproductions, fields: dict[str, Any], word: str) -> None:
    """A wrong or unknown field is an error that begins with it, and nothing is stored."""
    with pytest.raises(InvalidRequest, match=word):
        records.create({**BASE, **fields})
    assert records.list()["items"] == []


def test_a_run_passes_or_fails_by_its_exit_code(records: Reproductions) -> None:
    """Passed is the exit code that was expected, failed any other and a time-out; the result is stored whole."""
    passed = run(records, "import sys; print('seen'); sys.exit(3)", expect={"exitCode": 3})
    failed = run(records, "assert 1 + 1 == 3")

    assert (passed["status"], passed["result"]["stdout"], passed["error"]) == ("passed", "seen\n", None)
    assert passed["result"]["meta"]["backend"] == "local"
    assert passed["result"]["enforcement"]["filesystem"]["state"] == "enforced"
    assert (failed["status"], failed["result"]["exitCode"]) == ("failed", 1)
    assert "AssertionError" in records.get(failed["id"])["result"]["stderr"]


def test_what_json_lacks_is_stored_as_text(records: Reproductions) -> None:
    """A value that is no number in JSON, and a lone surrogate, neither break the record nor vanish."""
    ended = run(records, "[float('nan'), '\\ud800']")
    assert ended["status"] == "passed"
    assert records.get(ended["id"]) == ended


def test_no_backend_is_weaker_than_what_is_configured(records: Reproductions) -> None:
    """A run at level process works where that is configured; named for one run, it is an error and nothing ran."""
    code = "open('/tmp/cloche-was-here', 'x')"
    ended = run(records, code, backend="subprocess")
    assert ended["status"] == "error"
    assert "level jail is required" in ended["error"]
    assert ended["result"] is None
    assert not Path("/tmp/cloche-was-here").exists()
    with pytest.raises(InvalidRequest, match="unknown backend"):
        records.start(ended["id"], "dokcer")
    assert records.get(ended["id"])["status"] == "error"


def test_a_run_cannot_start_twice_at_once(records: Reproductions) -> None:
    """Of two that start it one is refused, and it cannot be deleted; when it has ended it may run again."""
    made = records.create(BASE)

    async def both() -> list[Any]:
        return await asyncio.gather(records.run(made["id"]), records.run(made["id"]), return_exceptions=True)

    outcomes = asyncio.run(both())
    assert sorted(type(one) for one in outcomes if isinstance(one, Exception)) == [Conflict]
    assert [one["status"] for one in outcomes if isinstance(one, dict)] == ["passed"]
    records.start(made["id"])
    with pytest.raises(Conflict, match="is running"):
        records.delete(made["id"])
    assert asyncio.run(records.finish(made["id"]))["status"] == "passed"


@pytest.mark.parametrize("runs_already", [False, True])
def test_a_cancelled_run_is_an_error(records: Reproductions, runs_already: bool) -> None:
    """Cancelling kills the run, whether it has begun or is just taken, and its record says so."""
    made = records.create({**BASE, "language": "bash", "code": "sleep 91731; true"})

    async def cancel() -> None:
        running = asyncio.ensure_future(records.run(made["id"]))
        while records.get(made["id"])["status"] != "running":  # noqa: ASYNC110 - a thread sets it
            await asyncio.sleep(0)
        if runs_already:
            await asyncio.to_thread(wait_for_word, "91731")
        running.cancel()
        await asyncio.wait([running])
        assert running.cancelled()

    asyncio.run(cancel())
    assert (records.get(made["id"])["status"], records.get(made["id"])["error"]) == ("error", "the run was cancelled")
    wait_for_word("91731", is_there=False)


def test_what_a_killed_worker_ran_is_found(database: Database, records: Reproductions) -> None:
    """A run whose process was killed is an error with the reason; one whose worker lives, or is unknown, is left."""
    program = f"""
import signal, os
from cloche.records.database import Database
from cloche.records.reproductions import Reproductions
records = Reproductions(Database({database.url.render_as_string(hide_password=False)!r}))
records.start(records.create({BASE!r})["id"])
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == -9
    lost = records.list()["items"][0]
    assert lost["status"] == "running"
    elsewhere, ours = records.create(BASE), records.create(BASE)
    Reproductions(database, worker="of-another-host").start(elsewhere["id"])
    records.start(ours["id"])

    assert records.recover() == 1
    assert (records.get(lost["id"])["status"], records.get(lost["id"])["error"]) == ("error", GONE)
    assert {records.get(one["id"])["status"] for one in (elsewhere, ours)} == {"running"}
    assert asyncio.run(records.finish(ours["id"]))["status"] == "passed"


def test_a_worker_is_gone_with_its_process() -> None:
    """A worker's name tells whether its process lives, also where the id is another's now; others' are not known."""
    host, boot, pid, started = own_worker().split("-")
    assert not is_gone(own_worker())
    assert is_gone(f"{host}-{boot}-{pid}-{int(started) - 1}")
    assert is_gone(f"{host}-00000000-{pid}-{started}")
    assert not is_gone(f"00000000-{boot}-{pid}-1")
    assert not is_gone("somebody")
