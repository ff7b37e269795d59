"""The audit log: events in a chain that shows what was done to it, whole after a crash, private."""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import os
import random
import resource
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cloche.audit import log, writer
from cloche.audit import verify as verify_verify
from cloche.audit.artifacts import load
from cloche.audit.chain import FIRST, MOST_LINE_BYTES, bounded, line_after, sha256_of
from cloche.audit.log import Audit, acting, audit_for
from cloche.audit.redaction import Redactor
from cloche.audit.verify import ExpectedHead, Reading, read_heads, verify
from cloche.config.keys import Settings
from cloche.core.enforcement import Level
from cloche.core.errors import AuditFailed, InvalidRequest
from tests.harness.audits import (
    TAMPERINGS,
    be_killed_while_writing,
    change_a_byte,
    cut_the_end,
    lines_of,
    rewrite,
    write_from_processes,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Give a folder that is not there yet."""
    return tmp_path / "state" / "cloche"


@pytest.fixture
def audit(folder: Path) -> Audit:
    """Give an empty log."""
    return Audit(str(folder))


_FORKING = """
import os, sys
from cloche.audit.log import Audit
audit = Audit(sys.argv[1])
audit.head()
child = os.fork()
for number in range(20):
    audit.record("execution", number=number)
if child:
    sys.exit(os.waitpid(child, 0)[1])
"""


def fill(audit: Audit, count: int = 12) -> None:
    """Write some events."""
    for number in range(count):
        audit.record("execution", number=number, status="ok")


def test_events_are_numbered_and_each_names_the_one_before(audit: Audit, folder: Path) -> None:
    """The first names nothing; every other has the hash of the one before."""
    links = [audit.record("start"), audit.record("execution", status="ok"), audit.record("denial", by="policy")]
    events = [json.loads(line) for line in lines_of(folder)]
    assert [link.seq for link in links] == [event["seq"] for event in events] == [1, 2, 3]
    assert [event["prev"] for event in events] == ["0" * 64, links[0].hash, links[1].hash]
    assert [event["hash"] for event in events] == [link.hash for link in links]
    assert audit.head() == links[2]
    assert verify(str(folder)).is_whole


@pytest.mark.parametrize("text", [b'"]}', b'","kind":' + b"[" * 20_000, b'","kind":3', b'\xff","kind":"x"'])
def test_a_line_that_is_no_event_is_a_fault_and_no_crash(audit: Audit, folder: Path, text: bytes) -> None:
    """Whoever computes its hash can write anything."""
    link = audit.record("start")
    body = b'{"v":1,"seq":2,"time":"' + text + b',"prev":"' + link.hash.encode() + b'"'
    rewrite(folder, [*lines_of(folder), body + b',"hash":"' + hashlib.sha256(body).hexdigest().encode() + b'"}\n'])
    found = verify(str(folder))
    assert (found.events, found.fault_count) == (1, 1)


def test_the_log_is_for_its_owner_alone(audit: Audit, folder: Path) -> None:
    """File and folder are private, whatever the umask."""
    before = os.umask(0)
    try:
        fill(audit, 1)
    finally:
        os.umask(before)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert (folder / "audit.jsonl").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("what", TAMPERINGS)
def test_tampering_is_found(audit: Audit, folder: Path, what: str) -> None:
    """A changed byte, a removed, swapped or repeated line is found, wherever it is."""
    fill(audit)
    lines = lines_of(folder)
    for seed in range(60):
        rewrite(folder, TAMPERINGS[what](lines, random.Random(seed)))
        assert not verify(str(folder)).is_whole, f"{what} (seed {seed}) was not found"
    rewrite(folder, lines)
    assert verify(str(folder)).is_whole


def test_every_single_byte_counts(audit: Audit, folder: Path) -> None:
    """No byte of a log can be changed without its being found."""
    fill(audit, 2)
    whole = b"".join(lines_of(folder))
    for place in range(len(whole)):
        rewrite(folder, [whole[:place], bytes([whole[place] ^ 1]), whole[place + 1 :]])
        assert not verify(str(folder)).is_whole, f"byte {place} of {len(whole)}"


def test_a_cut_end_is_found_by_a_head_that_was_kept(audit: Audit, folder: Path) -> None:
    """Nothing in the log shows that its end is missing; the head does, and so it does that all was rewritten."""
    fill(audit)
    kept = read_heads(str(audit.head()), name="")
    lines = lines_of(folder)
    rewrite(folder, cut_the_end(lines, random.Random(1)))
    assert verify(str(folder)).is_whole
    assert "its end was cut" in str(verify(str(folder), heads=kept).faults[0])
    (folder / "audit.jsonl").unlink()
    assert verify(str(folder), heads=kept).fault_count == 1
    fill(audit)
    assert verify(str(folder)).is_whole
    assert verify(str(folder), heads=kept).fault_count == 1


def test_heads_of_any_time_are_found(audit: Audit, folder: Path) -> None:
    """A head that was kept long ago is still in the chain, by its number and hash, or by its hash alone."""
    links = [audit.record("start", number=number) for number in range(5)]
    text = f"# kept elsewhere\n{links[0]}\n2026-01-01 {links[2]}\n{links[4].hash}\n\n"
    assert verify(str(folder), heads=read_heads(text, name="")).is_whole
    assert not verify(str(folder), heads=[ExpectedHead(seq=None, hash="ab" * 32)]).is_whole
    with pytest.raises(InvalidRequest, match="not a head"):
        read_heads("something", name="file")


@pytest.mark.parametrize("written", [0.02, 0.5, 0.98])
def test_an_interrupted_write_is_no_tampering(audit: Audit, folder: Path, written: float) -> None:
    """What a killed process left is told as that, stays, and the next event says what it is."""
    fill(audit, 3)
    be_killed_while_writing(folder, written=written)
    left = lines_of(folder)[-1]
    found = verify(str(folder))
    assert (found.is_whole, found.is_cut_off, found.events) == (True, True, 3)
    fill(audit, 1)
    found = verify(str(folder))
    assert (found.is_whole, found.is_cut_off, found.interrupted, found.events) == (True, False, 1, 5)
    assert lines_of(folder)[3] == left + b"\n"
    lines = lines_of(folder)
    lines[3] = lines[3][:-2] + b"?\n"  # whoever changes what was left is found, too
    rewrite(folder, lines)
    assert not verify(str(folder)).is_whole


def test_several_interrupted_writes_are_no_tampering_either(audit: Audit, folder: Path) -> None:
    """A process may die while it tells of the one before; and the very first event of all may be cut off."""
    be_killed_while_writing(folder)
    be_killed_while_writing(folder, written=0.9)
    be_killed_while_writing(folder, written=0.3)
    fill(audit, 2)
    found = verify(str(folder))
    assert found.is_whole, found.faults
    assert found.events >= 3
    assert found.interrupted >= 1


def test_a_line_that_lacks_only_its_newline_is_an_event(audit: Audit, folder: Path) -> None:
    """It was written, and gets its newline from the next one."""
    fill(audit, 2)
    rewrite(folder, [b"".join(lines_of(folder))[:-1]])
    fill(audit, 1)
    found = verify(str(folder))
    assert (found.is_whole, found.events, found.interrupted) == (True, 3, 0)


def test_nothing_is_added_to_a_log_whose_end_was_changed(audit: Audit, folder: Path) -> None:
    """Writing fails until somebody has looked at it; what is there stays as it is."""
    fill(audit, 3)
    lines = lines_of(folder)
    lines[-1] = lines[-1].replace(b'"ok"', b'"no"')
    rewrite(folder, lines)
    with pytest.raises(AuditFailed, match=r"its end is damaged.*cloche audit verify"):
        fill(audit, 1)
    assert lines_of(folder) == lines


def test_a_full_disk_leaves_the_chain_whole(audit: Audit, folder: Path) -> None:
    """An event that does not fit is not there at all, and the error says why and what to do."""
    fill(audit, 3)
    path = folder / "audit.jsonl"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 100, hard))
    try:
        with pytest.raises(AuditFailed, match=r"audit\.jsonl cannot be written: .*CLOCHE_AUDIT=off"):
            fill(audit, 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert verify(str(folder)).events == 3
    fill(audit, 1)
    found = verify(str(folder))
    assert (found.is_whole, found.events, found.interrupted) == (True, 4, 0)


def test_places_that_are_not_ours_alone_are_refused(tmp_path: Path) -> None:
    """Links, other kinds of file, second names and loose permissions: each is named with its reason."""
    for name in ("link", "file", "fifo", "named", "loose", "open"):
        (tmp_path / name).mkdir(mode=0o700)
    target = tmp_path / "target"
    target.write_text("")
    target.chmod(0o600)
    (tmp_path / "folder-link").symlink_to(tmp_path / "open")
    (tmp_path / "link" / "audit.jsonl").symlink_to(target)
    os.mkfifo(tmp_path / "fifo" / "audit.jsonl", 0o600)
    (tmp_path / "named" / "audit.jsonl").hardlink_to(target)
    (tmp_path / "loose" / "audit.jsonl").touch(0o600)
    (tmp_path / "loose" / "audit.jsonl").chmod(0o644)
    (tmp_path / "open").chmod(0o777)
    reasons = {
        "link": "symbolic link", "folder-link": "symbolic link", "fifo": "not a regular file", "named": "another name",
        "loose": "chmod 600", "open": "chmod go-w", "target": "no folder",
    }  # fmt: skip
    for name, reason in reasons.items():
        with pytest.raises(AuditFailed, match=reason):
            Audit(str(tmp_path / name)).record("start")
    with pytest.raises(AuditFailed, match="absolute"):
        Audit("relative").record("start")
    assert target.read_text() == ""


@pytest.mark.root
def test_a_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    """Whoever owns it could write there."""
    place = tmp_path / "theirs"
    place.mkdir(mode=0o700)
    os.chown(place, 12345, 12345)
    with pytest.raises(AuditFailed, match="belongs to user 12345"):
        Audit(str(place)).record("start")


def test_a_full_file_is_set_aside_and_the_chain_goes_on(folder: Path) -> None:
    """Events go to a new file, the log is bounded, and that files were dropped is an event."""
    audit = Audit(str(folder), file_bytes=2000, most_files=3)
    fill(audit, 60)
    names = sorted(path.name for path in folder.iterdir())
    assert len(names) == 4
    found = verify(str(folder))
    assert found.is_whole, found.faults
    assert found.dropped > 0
    assert found.last == audit.head()
    assert [line.link.seq for line in Reading(str(folder))] == list(range(found.dropped + 1, found.last.seq + 1))
    (folder / names[2]).unlink()
    assert not verify(str(folder)).is_whole


def test_dropped_files_and_missing_ones_are_told_apart(folder: Path) -> None:
    """The oldest file may not be taken away by somebody else."""
    audit = Audit(str(folder), file_bytes=2000, most_files=30)
    fill(audit, 30)
    min(folder.glob("audit-*.jsonl")).unlink()
    assert "no event says that they were dropped" in str(verify(str(folder)).faults[0])


def test_the_chain_goes_on_when_the_growing_file_was_only_just_set_aside(folder: Path) -> None:
    """A crash between the two files is no gap."""
    audit = Audit(str(folder))
    fill(audit, 4)
    (folder / "audit.jsonl").rename(folder / "audit-000000000001.jsonl")
    assert audit.head() is not None
    fill(audit, 2)
    found = verify(str(folder))
    assert (found.is_whole, found.events) == (True, 7)


def test_a_reader_that_waits_while_the_file_is_set_aside_reads_nothing_twice(audit: Audit, folder: Path) -> None:
    """What it had opened is a full file by then; the one that grows is another."""
    fill(audit, 5)
    growing = folder / "audit.jsonl"
    with growing.open("rb") as held, ThreadPoolExecutor(1) as pool:
        fcntl.flock(held, fcntl.LOCK_EX)
        reading = pool.submit(verify, str(folder))
        while [os.path.realpath(link) for link in Path("/proc/self/fd").iterdir()].count(str(growing)) < 2:
            pass
        growing.rename(folder / "audit-000000000001.jsonl")
        audit.record("execution")
        fcntl.flock(held, fcntl.LOCK_UN)
        found = reading.result(60)
    assert found.is_whole, found.faults
    assert found.last == audit.head()


def test_a_reader_does_not_wait_for_ever(audit: Audit, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that was stopped while it held the lock is named as what it waits for."""
    fill(audit, 1)
    for module in (writer, verify_verify):
        monkeypatch.setattr(module, "LOCK_TIMEOUT_S", 0.05)
    with (folder / "audit.jsonl").open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        for read in (lambda: verify(str(folder)), audit.head):
            with pytest.raises(AuditFailed, match=r"cannot be read: another process has held its lock"):
                read()


def test_what_cannot_be_read_is_not_called_unwritable(tmp_path: Path) -> None:
    """Nor is somebody who only looks told to switch the audit off."""
    (tmp_path / "file").write_text("")
    with pytest.raises(AuditFailed, match="cannot be read") as caught:
        verify(str(tmp_path / "file"))
    assert "switch it off" not in str(caught.value)


def test_processes_write_at_once(folder: Path) -> None:
    """Each event is there once, in one chain over several files."""
    write_from_processes(folder, writers=4, events=40, file_bytes=20_000)
    found = verify(str(folder))
    assert found.is_whole, found.faults
    events = [line.fields() for line in Reading(str(folder))]
    told = [(event["writer"], event["number"]) for event in events if event["kind"] == "execution"]
    assert sorted(told) == [(writer, number) for writer in range(4) for number in range(40)]


def test_threads_and_forked_children_write_at_once(audit: Audit, folder: Path) -> None:
    """Locks hold within a process, too, and a child that was forked has none of its parent's."""
    with ThreadPoolExecutor(4) as pool:
        writing = [pool.submit(fill, audit, 10) for _ in range(8)]
        children = [subprocess.Popen([sys.executable, "-c", _FORKING, str(folder)]) for _ in range(2)]
        for one in writing:
            one.result(60)
    assert [child.wait(60) for child in children] == [0, 0]
    found = verify(str(folder))
    assert (found.faults, found.events) == ([], 80 + 2 * 2 * 20)


def test_fields_are_bounded(audit: Audit, folder: Path) -> None:
    """Whatever somebody tells, a line has a bounded length, and is JSON."""
    endless: list[object] = []
    endless.append(endless)
    audit.record("fix_round", text="x" * 100_000, many=[["y" * 3000] * 64] * 64, number=10**40, bad=float("nan"))
    audit.record("fix_round", half="\ud800", data=b"\xff", deep={"a": {"b": {"c": {"d": {"e": 1}}}}})
    assert all(len(line) <= MOST_LINE_BYTES for line in lines_of(folder))
    assert verify(str(folder)).is_whole
    with pytest.raises(InvalidRequest, match="prev"):
        audit.record("fix_round", prev="mine")
    with pytest.raises(InvalidRequest, match="kind"):
        audit.record("Fix round")


@pytest.mark.parametrize(
    "fields",
    [
        {"text": "plain", "odd": 'ü "quoted" \\ \n \ud800', "long": "x" * 2001, "huge": 1 << 63, "none": None},
        {"float": 0.1, "exponent": 1e300, "endless": math.inf, "yes": True, "no": False, "small": -5, "zero": -0.0},
        {"deep": {"a": {"b": {"c": {"d": 1}}}}, "list": [1, "x", None, {"y": 2.5}], "set": {1}, "names": {1: 2}},
        {"wide": {str(number): number for number in range(100)}, "long": {"n" * 65: 1, "n" * 66: 2}, "empty": {}},
        {"n" * 65: 1, "n" * 66: 2, "word": Level.JAIL, "path": Path("x"), "nothing": {"in": None}},
        {},
    ],
    ids=range(6),
)  # fmt: skip
def test_the_short_way_to_json_writes_the_same(fields: dict[str, object]) -> None:
    """What is told without a walk through all of it is what the walk tells."""
    line, link = line_after(FIRST, "execution", "now", fields)
    event = {"v": 1, "seq": 1, "time": "now", "kind": "execution", **bounded(fields)}
    expected = json.dumps({**event, "prev": FIRST.hash, "hash": link.hash}, separators=(",", ":"))
    assert line.decode() == expected + "\n"


def test_a_line_of_another_writer_is_seen(audit: Audit, folder: Path) -> None:
    """What this process remembers of the end counts for nothing once somebody else has written."""
    fill(audit, 3)
    before = lines_of(folder)
    write_from_processes(folder, writers=1, events=1)
    fill(audit, 1)
    assert verify(str(folder)).events == 5
    rewrite(folder, before)  # as it was remembered, and no more
    fill(audit, 1)
    found = verify(str(folder))
    assert (found.is_whole, found.events) == (True, 4)


def test_data_that_cannot_be_written_down_is_a_failure_of_the_log(audit: Audit, folder: Path) -> None:
    """Before a run that is the end of it; afterwards it ends nothing."""
    endless: list[object] = []
    endless.append(endless)
    with pytest.raises(AuditFailed, match=r"an event \(start\) cannot be written down: RecursionError"):
        audit.record("start", data=endless)
    assert "RecursionError" in audit.note("execution", data=endless)
    assert audit.record("start").seq == 1


def test_secrets_never_reach_the_file(audit: Audit, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither those of this process nor those that the program was given, in whatever field."""
    monkeypatch.setenv("DEPLOY_TOKEN", "correct-horse")
    redactor = Redactor({"DB_PASSWORD": "battery staple"})
    told = ["it was correct-horse", {"inner": "and battery staple"}]
    audit.record("denial", redactor=redactor, reason=told, url="https://me:s3cr3t@host/")
    text = (folder / "audit.jsonl").read_text()
    assert "and [redacted]" in text
    for secret in ("correct-horse", "battery", "s3cr3t"):
        assert secret not in text


def test_artifacts_are_kept_by_their_hash_where_they_may_be(folder: Path) -> None:
    """Once each, private, without secrets; one that is changed or missing is a fault."""
    audit = Audit(str(folder), keep=("code",))
    redactor = Redactor({"MY_SECRET": "hunter22"})
    digest = audit.store("code", "print('hunter22')", redactor)
    assert digest is not None
    assert audit.store("code", "print('hunter22')", redactor) == digest
    assert audit.store("output", "text", redactor) is None
    assert load(str(folder), digest) == b"print('[redacted]')"
    audit.record("start", code_artifact_sha256=digest)
    path = folder / "audit-artifacts" / digest[:2] / digest
    assert path.stat().st_mode & 0o777 == 0o600
    assert verify(str(folder)).is_whole
    path.write_bytes(b"something else")
    assert "was changed" in str(verify(str(folder)).faults[0])


def test_what_is_in_place_of_an_artifact_is_a_fault_and_hides_no_other(folder: Path) -> None:
    """A link, or a file that others may read: the log is checked to its end all the same."""
    audit = Audit(str(folder), keep=["code"])
    for code in ("print(1)", "print(2)"):
        audit.record("start", code_artifact_sha256=audit.store("code", code, Redactor({}, environ={})))
    one, other = sorted(path for path in (folder / "audit-artifacts").rglob("*") if path.is_file())
    one.chmod(0o644)
    other.unlink()
    other.symlink_to("/dev/zero")
    found = verify(str(folder))
    assert (found.events, found.fault_count) == (2, 2)
    assert "chmod 600" in " ".join(map(str, found.faults))


def test_settings_and_doors_say_whether_it_is_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Off in the library, on in a door that says so, and in either case what is configured holds."""
    assert audit_for(Settings()) is None
    found = audit_for(Settings(audit=True, audit_folder="/somewhere", audit_keep=("code",)))
    assert found is not None
    assert (found.folder, found.keep) == ("/somewhere", ("code",))
    monkeypatch.setattr(log, "_front_end", "cli")
    assert audit_for(Settings()) is not None
    assert audit_for(Settings(audit=False)) is None


def test_without_a_home_there_is_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says so, and what to do."""
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.setenv("HOME", "~")
    with pytest.raises(AuditFailed, match=r"no home folder.*CLOCHE_AUDIT=/FOLDER"):
        audit_for(Settings(audit=True))


def test_what_acts_is_in_every_event_inside(audit: Audit, folder: Path) -> None:
    """The outer fields hold for the inner events, too."""
    with acting(tool="run_code"), acting(approved_by="me"):
        audit.record("execution")
    audit.record("execution")
    first, second = (json.loads(line) for line in lines_of(folder))
    assert (first["tool"], first["approved_by"]) == ("run_code", "me")
    assert "tool" not in second


def test_code_has_the_hash_of_its_file(audit: Audit, folder: Path) -> None:
    """Whatever its bytes are; and code that no file can hold has one, too."""
    data = b"print('\xff')"
    assert sha256_of(data.decode("utf-8", "surrogateescape")) == hashlib.sha256(data).hexdigest()
    assert sha256_of("\ud800") != sha256_of("\ud801")
    assert Audit(str(folder), keep=("code",)).store("code", "\ud800", Redactor()) is not None


def test_the_tests_tampering_is_real() -> None:
    """What tests do to a log changes it."""
    lines = [b"a\n", b"b\n", b"c\n"]
    for seed in range(20):
        for tamper in (*TAMPERINGS.values(), change_a_byte, cut_the_end):
            assert b"".join(tamper(list(lines), random.Random(seed))) != b"".join(lines)
