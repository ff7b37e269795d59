"""Approvals that wait in a file: who decides elsewhere, what is cancelled, several processes."""

import asyncio
import os
import sqlite3
import struct
import subprocess
import sys
import threading
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from cloche import ApprovalDenied, InvalidRequest
from cloche.agent.approval import ApprovalRequest, Decision, Gate, Risk
from cloche.agent.queue import ApprovalQueue

HIGH = ApprovalRequest(tool="run_code", risk=Risk.HIGH, arguments={"code": "print(1)"}, rules={"runs_on": "local"})
YES = Decision(is_approved=True, by="test")


def passes(gate: Gate, request: ApprovalRequest) -> bool:
    """Tell whether a gate lets a call through."""
    try:
        asyncio.run(gate.approve(request))
    except ApprovalDenied:
        return False
    return True


def test_a_queue_waits_for_who_decides_elsewhere(tmp_path: Path) -> None:
    """Another holder of the same file sees the request as it was asked, and decides."""
    path = tmp_path / "approvals.db"
    asked: list[ApprovalRequest] = []

    def decide() -> None:
        other = ApprovalQueue(path)
        while not (waiting := other.waiting()):
            time.sleep(0.001)  # else others hardly get at the file, or at the processor
        asked.append(waiting[0].request)
        other.decide(waiting[0].number, YES)

    thread = threading.Thread(target=decide)
    thread.start()
    decision = asyncio.run(ApprovalQueue(path, patience_s=60)(HIGH))
    thread.join(60)
    assert decision == YES
    assert asked == [HIGH]
    assert ApprovalQueue(path).waiting() == []


def test_a_queue_is_made_while_another_process_writes(tmp_path: Path) -> None:
    """Whoever comes second waits, and finds it."""
    path = tmp_path / "approvals.db"
    ApprovalQueue(path)
    other = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    timer = threading.Timer(0.3, other.execute, ["COMMIT"])
    timer.start()
    try:
        assert ApprovalQueue(path).waiting() == []
    finally:
        timer.join()
        other.close()


def test_a_queue_denies_at_its_deadline_and_takes_no_late_word(tmp_path: Path) -> None:
    """Nor one about what was decided, or was never asked."""
    queue = ApprovalQueue(tmp_path / "approvals.db", patience_s=0.1)
    assert not asyncio.run(queue(HIGH)).is_approved
    for number in (1, 7):
        with pytest.raises(InvalidRequest, match=f"no approval {number} waits"):
            queue.decide(number, YES)


def test_what_nobody_waits_for_any_more_leaves_the_queue(tmp_path: Path) -> None:
    """A gate that lost its patience has its request closed."""
    queue = ApprovalQueue(tmp_path / "approvals.db")
    assert not passes(Gate(queue, patience_s=0.2), HIGH)
    assert queue.waiting() == []


def test_a_file_that_is_no_queue_is_named(tmp_path: Path) -> None:
    """Before anything waits in it."""
    path = tmp_path / "notes.txt"
    path.write_text("not a database, however long this text may be" * 100)
    with pytest.raises(InvalidRequest, match=r"notes\.txt is not a queue of approvals"):
        ApprovalQueue(path)


def test_a_queue_is_its_owners_alone(tmp_path: Path) -> None:
    """Who may write to it may approve."""
    path = tmp_path / "approvals.db"
    before = os.umask(0)
    try:
        queue = ApprovalQueue(path)
        assert not asyncio.run(Gate(queue, patience_s=0.1).approve(replace(HIGH, risk=Risk.LOW)))
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o666)
    with pytest.raises(InvalidRequest, match="is writable by every user"):
        ApprovalQueue(path)


def test_a_queue_that_everybody_may_replace_is_refused(tmp_path: Path) -> None:
    """Sticky or not: a journal that anybody puts beside the file would be believed."""
    ApprovalQueue(tmp_path / "approvals.db")
    for mode in (0o777, 0o1777):
        tmp_path.chmod(mode)
        with pytest.raises(InvalidRequest, match="everybody may put files beside it or in its place"):
            ApprovalQueue(tmp_path / "approvals.db")


def forged_journal(approved: Path) -> bytes:
    """Return the journal of a write that was interrupted, after which SQLite takes all pages of another database."""
    pages, size, nonce = approved.read_bytes(), 4096, 7
    count = len(pages) // size
    header = bytes.fromhex("d9d505f920a163d7") + struct.pack(">5I", count, nonce, count, 512, size)
    journal = header.ljust(512, b"\0")
    for number in range(count):
        page = pages[number * size :][:size]
        check = (nonce + sum(page[place] for place in range(size - 200, 0, -200))) & 0xFFFFFFFF
        journal += struct.pack(">I", number + 1) + page + struct.pack(">I", check)
    return journal


def test_a_journal_beside_the_file_approves_which_is_why_its_folder_is_private(tmp_path: Path) -> None:
    """Whoever may only put a file into the folder approves all; such a folder is refused, so nobody is asked there."""
    other = ApprovalQueue(tmp_path / "other.db", patience_s=60)
    number = other._ask(HIGH)
    other.decide(number, YES)
    folder = tmp_path / "shared"
    folder.mkdir()
    queue = ApprovalQueue(folder / "approvals.db", patience_s=60)
    queue._ask(HIGH)
    (folder / "approvals.db-journal").write_bytes(forged_journal(tmp_path / "other.db"))
    assert queue.entry(1).decision == YES
    folder.chmod(0o1777)
    with pytest.raises(InvalidRequest, match="name one in a folder of your own"):
        ApprovalQueue(folder / "approvals.db")


@pytest.mark.root
def test_nothing_is_asked_in_another_users_folder(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """That user could put another file in its place, and say yes."""
    folder = tmp_path / "theirs"
    folder.mkdir()
    queue = ApprovalQueue(folder / "approvals.db")
    os.chown(folder, 12345, 12345)
    assert not passes(Gate(queue, patience_s=60), HIGH)
    assert "belongs to user 12345, so that user could approve" in caplog.text


def test_a_number_that_no_approval_can_have_is_none_of_them(tmp_path: Path) -> None:
    """However large."""
    with pytest.raises(InvalidRequest, match="there is no approval 9223372036854775808"):
        ApprovalQueue(tmp_path / "approvals.db").entry(1 << 63)


@pytest.mark.root
def test_nothing_is_asked_in_another_users_queue(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """That user could say yes; looking at it and deciding is root's right."""
    path = tmp_path / "approvals.db"
    queue = ApprovalQueue(path)
    os.chown(path, 12345, 12345)
    assert not passes(Gate(queue, patience_s=60), HIGH)
    assert "belongs to user 12345, so that user could approve" in caplog.text
    assert ApprovalQueue(path).waiting() == []


def test_a_row_that_cannot_be_read_hides_no_other(tmp_path: Path) -> None:
    """Whoever wrote it."""
    path = tmp_path / "approvals.db"
    queue = ApprovalQueue(path)
    with closing(sqlite3.connect(path)) as database, database:
        odd = '{"tool": "run_code", "risk": 3, "arguments": [1]}'
        for text in ("{", "[]", "{}", '{"risk": 9}', '{"risk": 3, "more": 1}', odd):
            database.execute("INSERT INTO approvals (asked_at, expires_at, request) VALUES (0, 9e9, ?)", (text,))
        good = '{"tool": "run_code", "risk": 3, "arguments": {}, "rules": {}, "changes": "", "is_confirmation": false}'
        for text in ("{", "[]", "{}", '{"is_approved": true, "by": 1}'):
            row = (good, text)
            database.execute("INSERT INTO approvals (asked_at, expires_at, request, decision) VALUES (0, 0, ?, ?)", row)
        database.execute("INSERT INTO approvals (asked_at, expires_at, request) VALUES ('when', 'later', ?)", (good,))
    assert queue.entries() == []
    waiting: list[ApprovalRequest] = []

    async def main() -> None:
        asking = asyncio.create_task(queue(HIGH))
        while not (found := queue.waiting()):  # noqa: ASYNC110 - what another process sees, too
            await asyncio.sleep(0.01)
        waiting.extend(one.request for one in found)
        queue.decide(found[0].number, YES)
        await asking

    asyncio.run(main())
    assert waiting == [HIGH]


def test_what_is_cancelled_at_once_leaves_the_queue(tmp_path: Path) -> None:
    """Also before it is known under which number it waits."""
    queue = ApprovalQueue(tmp_path / "approvals.db")

    async def main() -> None:
        asking = asyncio.create_task(queue(HIGH))
        for _ in range(2):
            await asyncio.sleep(0)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking

    asyncio.run(main())
    assert queue.waiting() == []


def test_a_locked_queue_does_not_hold_up_who_cancels(tmp_path: Path) -> None:
    """The loop goes on meanwhile."""
    path = tmp_path / "approvals.db"
    queue = ApprovalQueue(path)

    async def main() -> float:
        asking = asyncio.create_task(queue(HIGH))
        while not queue.waiting():  # noqa: ASYNC110 - what another process sees, too
            await asyncio.sleep(0.01)
        with closing(sqlite3.connect(path, timeout=60)) as database:
            database.execute("BEGIN EXCLUSIVE")
            begun = time.monotonic()
            asking.cancel()
            await asyncio.sleep(0.1)
            held_up = time.monotonic() - begun
            database.rollback()
        with pytest.raises(asyncio.CancelledError):
            await asking
        return held_up

    assert asyncio.run(main()) < 30


def test_several_processes_make_and_use_one_queue(tmp_path: Path) -> None:
    """None of them finds it broken, and none of the requests is lost."""
    program = (
        "import asyncio, sys\n"
        "from cloche.agent.approval import ApprovalRequest\n"
        "from cloche.agent.queue import ApprovalQueue\n"
        "from cloche.agent.approval import Risk\n"
        "asked = ApprovalRequest(tool='run_code', risk=Risk.HIGH, arguments={'code': '1'})\n"
        "print(asyncio.run(ApprovalQueue(sys.argv[1])(asked)).by)"
    )
    path = tmp_path / "approvals.db"
    asking = [
        subprocess.Popen([sys.executable, "-c", program, path], stdout=subprocess.PIPE, text=True) for _ in "1234"
    ]
    queue = ApprovalQueue(path)
    decided, deadline = 0, time.monotonic() + 60
    while decided < 4:
        assert time.monotonic() < deadline
        for one in queue.waiting():
            queue.decide(one.number, YES)
            decided += 1
        time.sleep(0.01)
    assert [process.communicate(timeout=60)[0] for process in asking] == ["test\n"] * 4
