"""What ends up in the audit log of real runs, and what happens where it cannot be written."""

from __future__ import annotations

import asyncio
import csv
import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import cloche
from cloche.agent.approval import Decision, auto, callback
from cloche.agent.toolbox import Toolbox
from cloche.audit.artifacts import load
from cloche.audit.chain import sha256_of
from cloche.audit.log import Audit
from cloche.autofix.loop import AutoFix
from cloche.cli import audit as verbs
from cloche.config.keys import Settings
from cloche.core.errors import AuditFailed
from cloche.skills.loader import load_skill
from cloche.skills.run import run_skill
from tests.harness.audits import cloche as call
from tests.harness.audits import lines_of, rewrite
from tests.harness.texts import write_skill


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Give the folder of a log that is not there yet."""
    return tmp_path / "log"


def events_in(folder: Path) -> list[dict[str, Any]]:
    """Return all events."""
    return [json.loads(line) for line in lines_of(folder)]


def kinds_in(folder: Path) -> list[str]:
    """Return the kinds of all events."""
    return [event["kind"] for event in events_in(folder)]


def test_a_run_is_two_events_without_its_code(folder: Path) -> None:
    """Before it starts, and when it is over: hash, limits, what was enforced, how it ended."""
    code = "print('a word of mine')"
    result = cloche.run(code, audit=folder, warm=False, timeout=30)
    start, end = events_in(folder)
    assert (start["kind"], end["kind"], start["run"]) == ("start", "execution", end["run"])
    assert start["code_sha256"] == end["code_sha256"] == sha256_of(code)
    assert (end["status"], end["exit_code"], end["level"], end["limits"]["timeout_s"]) == ("ok", 0, "jail", 30)
    assert set(end["enforcement"].values()) <= {"enforced", "partial"}
    assert result.meta["audit"] == {"run": end["run"], "seq": 2, "hash": end["hash"]}
    assert "a word of mine" not in (folder / "audit.jsonl").read_text()


def test_the_library_writes_nothing_unless_it_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No log and no folder for one."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    assert "audit" not in cloche.run("1", warm=False).meta
    assert not (tmp_path / "state").exists()


def test_code_and_output_are_kept_only_where_configured(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By their hash, and without the secrets that the program was given."""
    monkeypatch.setenv("CLOCHE_AUDIT_KEEP", "code,output")
    code = "import os\nprint('it is', os.environ['DB_PASSWORD'])  # hunter2222"
    result = cloche.run(code, env={"DB_PASSWORD": "hunter2222"}, audit=folder, warm=False)
    assert result.stdout == "it is hunter2222\n"
    end = events_in(folder)[-1]
    assert load(str(folder), end["stdout_artifact_sha256"]) == b"it is [redacted]\n"
    assert load(str(folder), end["code_artifact_sha256"]) == code.replace("hunter2222", "[redacted]").encode()
    assert subprocess.run(["grep", "-r", "hunter2222", str(folder)], check=False, capture_output=True).returncode == 1
    assert call("audit", "verify", "--folder", str(folder)).returncode == 0


def test_a_word_that_no_event_has_is_an_error(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It lists the words, those of events that somebody's own code has added, too."""
    Audit(str(folder)).record("review", status="odd")
    for verb, option, word in (
        ("show", "--kind", "executions"),
        ("show", "--status", "fine"),
        ("export", "--kind", "x"),
    ):
        done = call("audit", verb, "--folder", str(folder), option, word)
        assert (done.returncode, done.stdout) == (2, "")
        assert f"{option} {word}: there is no such event; use one of " in done.stderr
        assert ("review" if option == "--kind" else "odd") in done.stderr
    for kinds, statuses in ((["review", "execution"], []), ([], ["odd", "cancelled"])):
        filters = verbs.Filters(kinds=kinds, statuses=statuses)
        assert verbs.show_events(str(folder), filters, last=5, as_json=True) == 0
        assert '"kind": "review"' in capsys.readouterr().out


def test_cells_of_sessions_are_executions(folder: Path) -> None:
    """Each with its own hash; forks', too."""
    with cloche.Sandbox(live=False, audit=folder) as sandbox:
        session = sandbox.session()
        session.run("x = 1")
        session.run("1 / 0")
        session.fork()[0].run("x")
    ends = [event for event in events_in(folder) if event["kind"] == "execution"]
    assert [(end["what"], end["status"]) for end in ends] == [("cell", "ok"), ("cell", "error"), ("cell", "ok")]
    assert [end["code_sha256"] for end in ends] == [sha256_of(code) for code in ("x = 1", "1 / 0", "x")]


def test_what_the_rules_refuse_is_a_denial(folder: Path) -> None:
    """A language, a screen, a tier: with the reason, and nothing ran."""
    with pytest.raises(cloche.PolicyDenied):
        cloche.run("1", language="csharp", audit=folder)
    with pytest.raises(cloche.PolicyDenied):
        cloche.run("import os", screen="block", audit=folder)
    with pytest.raises(cloche.PolicyDenied):
        cloche.run("1", tier=1, audit=folder)
    with cloche.Sandbox(live=False, screen="block", languages=["python"], audit=folder) as sandbox:
        with pytest.raises(cloche.PolicyDenied):
            sandbox.session("bash")
        with pytest.raises(cloche.PolicyDenied):
            sandbox.session().run("import os")
    assert kinds_in(folder) == ["denial"] * 5
    assert all(event["by"] == "policy" and event["reason"] for event in events_in(folder))


def test_a_fallback_is_an_event(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was asked for, what runs instead, and why."""
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere")
    cloche.run("1", backend="docker", fallback="process", trusted=True, audit=folder, warm=False)
    event = events_in(folder)[0]
    assert (event["kind"], event["asked"], event["used"]) == ("fallback", "docker", "local")
    assert event["reason"]


def test_a_skill_that_may_not_run_is_a_denial_and_one_that_may_is_a_run(folder: Path, tmp_path: Path) -> None:
    """Its script is code as any other, and what it may not have is refused by the same rules."""
    script = "print(1)\n"
    good = write_skill(tmp_path, "good", manifest=None, go__py=script)
    bad = write_skill(tmp_path, "bad", manifest="packages: [x@git+y]\n", go__py=script)
    assert run_skill(load_skill(good, Settings()), "scripts/go.py", audit=folder).stdout == "1\n"
    with pytest.raises(cloche.PolicyDenied):
        run_skill(load_skill(bad, Settings()), "scripts/go.py", audit=folder)
    start, execution, denial = events_in(folder)
    assert (start["kind"], execution["kind"], denial["kind"]) == ("start", "execution", "denial")
    assert start["code_sha256"] == sha256_of(script)
    assert "packages" in denial["reason"]


def test_approvals_and_denials_lead_to_executions(folder: Path) -> None:
    """Who approved stands in what ran; who denied, beside the hash of what did not."""

    def answer(request: Any) -> Decision:
        is_fine = "fine" in request.arguments["code"]
        return Decision(is_approved=is_fine, by="alice", reason="" if is_fine else "token=abcd1234 in it")

    with Toolbox(approve=callback(answer), audit=folder) as tools:
        assert not tools.call_and_wait("run_code", {"code": "print('fine')"}).is_error
        assert tools.call_and_wait("run_code", {"code": "print('bad')"}).is_error
    approval, start, end, denial = events_in(folder)
    assert [event["kind"] for event in (approval, start, end, denial)] == ["approval", "start", "execution", "denial"]
    assert approval["by"] == end["approved_by"] == "alice"
    assert approval["call"] == start["call"] == end["call"] != denial["call"]
    assert approval["tool"] == end["tool"] == "run_code"
    assert denial["code_sha256"] == sha256_of("print('bad')")
    assert denial["reason"] == "token=[redacted] in it"


def test_the_host_tool_is_audited_with_both_its_approvals(folder: Path) -> None:
    """Critical calls are approved and confirmed; what ran on the host is an execution there."""
    approve = callback(lambda _: Decision(is_approved=True, by="bob"))
    with Toolbox(approve=approve, tier=4, audit=folder) as tools:
        tools.call_and_wait("os.execute", {"shell": "sh", "command": "echo here"})
    assert kinds_in(folder) == ["approval", "approval", "start", "execution"]
    assert [event.get("is_confirmation") for event in events_in(folder)[:2]] == [False, True]
    assert (events_in(folder)[3]["backend"], events_in(folder)[3]["level"]) == ("host", "none")


def test_rounds_of_auto_fix_are_events(folder: Path) -> None:
    """Which round, the hash of the model's code, and what came of it."""
    fixer = AutoFix(model=lambda _: "```python\nprint(1)\n```")
    assert cloche.run("1 / 0", autofix=fixer, audit=folder, warm=False).ok
    (event,) = [event for event in events_in(folder) if event["kind"] == "fix_round"]
    assert (event["round"], event["status"], event["is_fixed"]) == (1, "ok", True)
    assert event["code_sha256"] == events_in(folder)[-2]["code_sha256"]


def unwritable(tmp_path: Path) -> Path:
    """Return a folder in which no log can be, whoever asks."""
    place = tmp_path / "unwritable"
    place.mkdir(mode=0o700)
    (place / "audit.jsonl").symlink_to("/dev/null")
    return place


def test_nothing_runs_where_the_log_cannot_be_written(tmp_path: Path) -> None:
    """Neither runs, nor cells, nor tools; the error names the file and what to do."""
    place = unwritable(tmp_path)
    target = tmp_path / "done"
    with pytest.raises(AuditFailed, match=r"audit\.jsonl.*symbolic link.*CLOCHE_AUDIT=off"):
        cloche.run(["nothing"][0], audit=place, warm=False)
    with cloche.Sandbox(live=False, audit=place) as sandbox, pytest.raises(AuditFailed):
        sandbox.session().run(f"open({str(target)!r}, 'w')")
    with Toolbox(approve=auto("high"), audit=place) as tools:
        answer = tools.call_and_wait("run_code", {"code": "print(1)"})
    assert answer.is_error
    assert str(place) not in answer.text
    done = call("run", "-c", "print('it ran')", CLOCHE_AUDIT=str(place))
    assert (done.returncode, done.stdout) == (125, "")
    assert "symbolic link" in done.stderr
    assert call("run", "-c", "print('it ran')", CLOCHE_AUDIT="off").stdout == "it ran\n"


def test_an_end_that_is_lost_is_said_loudly(folder: Path) -> None:
    """The run is over: its result comes, and says what is missing; so does the command line."""

    def spoil(*_: object) -> None:
        if (folder / "audit.jsonl").exists():
            (folder / "audit.jsonl").chmod(0o644)

    result = asyncio.run(cloche.arun("print(1)", audit=folder, on_output=spoil))
    assert result.stdout == "1\n"
    assert "chmod 600" in result.meta["audit"]["lost"]
    assert kinds_in(folder) == ["start"]
    place = folder.parent / "mine"
    code = f"import os; os.chmod({str(place / 'audit.jsonl')!r}, 0o644); print('ran')"
    done = call("run", "--no-sandbox", "--screen", "off", "-c", code, CLOCHE_AUDIT=str(place))
    assert (done.returncode, done.stdout) == (0, "ran\n")
    assert "is not in the audit log" in done.stderr


def test_a_cancelled_run_is_over_in_the_log(folder: Path) -> None:
    """Its end says so."""

    async def cancel() -> None:
        started = asyncio.Event()
        run = asyncio.ensure_future(
            cloche.arun("print(1, flush=True)\nwhile True: pass", audit=folder, on_output=lambda *_: started.set())
        )
        await started.wait()
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run

    asyncio.run(cancel())
    assert [event.get("status") for event in events_in(folder)] == [None, "cancelled"]


def test_a_run_whose_caller_was_killed_is_unfinished(folder: Path) -> None:
    """A start without an end says that something ran, and `show` says so."""
    words = [sys.executable, "-m", "cloche", "run", "-c", "print(1, flush=True)\nwhile True: pass"]
    environ = {**os.environ, "CLOCHE_AUDIT": str(folder)}
    running = subprocess.Popen(words, env=environ, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
    assert running.stdout is not None
    assert running.stdout.readline() == b"1\n"
    running.send_signal(signal.SIGKILL)
    running.wait()
    running.stdout.close()
    assert kinds_in(folder) == ["start"]
    assert "unfinished" in call("audit", "show", "--folder", str(folder)).stdout


def test_the_command_line_verifies_and_exports(folder: Path) -> None:
    """Whether the log is whole, with a head that was kept, and all of it for other programs, by exit codes."""
    where = ("--folder", str(folder))
    assert call("audit", "verify", *where).returncode == 1
    for code in ("print(1)", "raise SystemExit(3)"):
        cloche.run(code, audit=folder, warm=False)
    head = call("audit", "head", *where).stdout.strip()
    out = folder.parent / "export.jsonl"
    assert call("audit", "export", *where, "--out", str(out)).returncode == 0
    assert out.read_bytes() == b"".join(lines_of(folder))
    assert out.stat().st_mode & 0o777 == 0o600
    verified = call("audit", "verify", "--file", str(out), "--head", head)
    assert (verified.returncode, verified.stdout.splitlines()[-1]) == (0, f"head {head}")
    lines = lines_of(folder)
    rewrite(folder, lines[:-2])
    cut = call("audit", "verify", *where, "--head", head)
    assert cut.returncode == 1
    assert "its end was cut" in cut.stdout
    rewrite(folder, [lines[0], *lines[2:]])
    exported = call("audit", "export", *where)
    assert exported.returncode == 1
    assert "NOT whole" in exported.stderr


def test_events_are_shown_as_they_are_asked_for(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By time, kind and status, the last ones, as a table, JSON or CSV."""
    for code in ("print(1)", "raise SystemExit(3)", "print(2)"):
        cloche.run(code, audit=folder, warm=False)
    with pytest.raises(cloche.PolicyDenied, match="csharp"):
        cloche.run("1", language="csharp", audit=folder)
    place = str(folder)

    def shown(**chosen: Any) -> str:
        last, as_json = chosen.pop("last", 0), chosen.pop("as_json", False)
        assert verbs.show_events(place, verbs.Filters(**chosen), last=last, as_json=as_json) == 0
        return capsys.readouterr().out

    assert [shown().count(word) for word in ("execution", "denied", "unfinished")] == [3, 1, 0]
    chosen = shown(kinds=("execution",), statuses=("ok",), last=1, since="1h", as_json=True)
    assert [json.loads(line)["seq"] for line in chosen.splitlines()] == [6]
    assert shown(since="2999-01-01").startswith("no such events")
    with pytest.raises(cloche.InvalidRequest, match="--since"):
        shown(since="whenever")
    verbs.export(place, verbs.Filters(), form="csv", out=None)
    table = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [row["kind"] for row in table] == [*["start", "execution"] * 3, "denial"]
    verbs.export(place, verbs.Filters(), form="json", out=None)
    assert len(json.loads(capsys.readouterr().out)) == 7
    rewrite(folder, [line for number, line in enumerate(lines_of(folder)) if number != 2])
    assert verbs.check(place, heads=(), head_file=None, file=None, as_json=True) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["is_whole"], found["fault_count"], found["faults"][0]["line"]) == (False, 1, 3)


def test_a_log_cannot_drive_a_terminal_or_a_spreadsheet(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Words of others are shown as text, also where they would be obeyed."""
    Audit(str(folder)).record("denial", by="=cmd()", reason="\x1b]0;title\x07 \u202e=1+1")
    verbs.show_events(str(folder), verbs.Filters(), last=0, as_json=False)
    assert "\x1b" not in capsys.readouterr().out
    verbs.export(str(folder), verbs.Filters(), form="csv", out=None)
    row = next(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert row["by"] == "'=cmd()"


def test_an_export_is_private_and_never_takes_the_logs_place(folder: Path, tmp_path: Path) -> None:
    """A file that others could read is closed to them first; the log's own files are refused, through links too."""
    Audit(str(folder)).record("denial", by="policy")
    before = lines_of(folder)
    (tmp_path / "link").symlink_to(folder)
    for place in (folder / "audit.jsonl", tmp_path / "link" / "audit.jsonl", folder / "audit-000000000001.jsonl"):
        with pytest.raises(cloche.InvalidRequest, match="overwrite a file of the log"):
            verbs.export(str(folder), verbs.Filters(), form="jsonl", out=str(place))
    assert lines_of(folder) == before
    out = tmp_path / "export"
    out.write_text("something longer" * 1000)
    out.chmod(0o644)
    assert verbs.export(str(folder), verbs.Filters(), form="jsonl", out=str(out)) == 0
    assert out.read_bytes() == b"".join(before)
    assert out.stat().st_mode & 0o777 == 0o600


def test_a_log_larger_than_memory_is_shown(folder: Path) -> None:
    """One event after another: all of them as JSON, and the last of them as a table."""
    audit = Audit(str(folder))
    for _ in range(700):
        audit.record("denial", by="policy", **{f"reason{number}": "x" * 2000 for number in range(30)})
    code = (
        "import resource, sys; from cloche.cli import audit; from rich import table\n"
        "now = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (now + (32 << 20),) * 2)\n"
        "sys.exit(audit.show_events(sys.argv[1], audit.Filters(), last=int(sys.argv[2]), as_json=len(sys.argv) > 3))"
    )
    for chosen in (("0", "as JSON"), ("20",)):
        command = [sys.executable, "-c", code, str(folder), *chosen]
        done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, check=False, timeout=120)
        assert done.returncode == 0, done.stderr[-2000:]


def test_a_full_disk_is_no_defect(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is said in words, and once, also where output waits in a buffer until the end."""
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    Audit(str(folder)).record("denial", by="policy")
    for words in (("show",), ("show", "--json"), ("verify", "--json"), ("head",), ("export",)):
        with open("/dev/full", "wb") as full:
            command = [sys.executable, "-m", "cloche", "audit", *words, "--folder", str(folder)]
            done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False, timeout=60)
        assert done.returncode == 125
        assert done.stderr.startswith("cloche: cannot write the output: No space left on device")
        assert done.stderr.count("\n") == 1


def test_a_checkout_may_not_switch_it_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor may it say where the log is, or have code kept."""
    monkeypatch.chdir(tmp_path)
    for text in ("audit: off", f"audit: {tmp_path}", "audit_keep: [code]"):
        (tmp_path / "cloche.yaml").write_text(text)
        with pytest.raises(cloche.InvalidRequest, match="may only tighten"):
            cloche.run("1")
