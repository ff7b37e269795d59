"""Calls that change metadata, made in a guest's place: by every way, and while a thread changes what they are for."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cloche.jail import answered_calls, messages, metadata_calls, seccomp_notify
from cloche.jail.setup import seccomp
from cloche.jail.syscalls import POLLIN, ppoll

pytestmark = pytest.mark.both_users
PROGRAM = Path(__file__).parents[2] / "harness/programs/asking.py"
RACES = ("path", "link", "descriptor", "directory")
TRIES = 2_000
ENOUGH = 1_000_000  # the kernel is soon taken in: the first hit ends it
MADE = seccomp.answered_calls(os.uname().machine, one_uid=True, network=False)


class Folders:
    """Have one folder that is a guest's own, and another."""

    def __init__(self, path: Path):
        self.own, self.outside = path / "own", path / "outside"
        for folder in (self.own, self.outside):
            folder.mkdir(parents=True)
            (folder / "file").touch(mode=0o600)

    def spec(self) -> messages.Spec:
        """Return what says that `own` is."""
        return messages.Spec(workspace=str(self.own), tmp=str(self.own), answered=MADE)


@pytest.fixture
def folders(tmp_path: Path) -> Folders:
    """Give both."""
    return Folders(tmp_path)


def ask(
    folders: Folders,
    kind: str,
    answerers: dict[int, Callable[[int, bytes], None]] | None,
    tries: int = 1,
) -> Any:
    """Have the program make its calls, and answer them; return what it printed. Without answerers it has no filter."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    where = "outside" if answerers is None else "inside"
    words = [theirs.fileno(), where, kind, folders.own, folders.outside, tries]
    with subprocess.Popen(
        [sys.executable, str(PROGRAM), *map(str, words)], stdout=subprocess.PIPE, text=True, pass_fds=[theirs.fileno()]
    ) as program:
        theirs.close()
        _, _, listeners = messages.receive(ours.fileno())
        ours.close()
        for listener in listeners:
            while ppoll([listener], None)[0][1] & POLLIN:
                seccomp_notify.answer(listener, (), lambda _pid: False, answerers or {})
            os.close(listener)
        assert program.stdout is not None
        return json.loads(program.stdout.read())


def looking_first(spec: messages.Spec) -> dict[int, Callable[[int, bytes], None]]:
    """Return who only looks whether a call is for a file of the guest's own, and then lets the kernel make it."""
    own = metadata_calls.OwnFolders([spec.workspace])

    def look(listener: int, question: bytes) -> None:
        with answered_calls.HeldCall(listener, question) as asked:
            row = metadata_calls.CALLS[MADE["metadata_calls"][asked.number]]
            try:
                os.close(metadata_calls.open_file(own, asked, row))
            except OSError as error:
                refusal = error.errno or 1
            else:
                refusal = 0
        seccomp_notify.reply(listener, question, refusal)

    return dict.fromkeys(MADE["metadata_calls"], look)


def test_every_call_changes_what_is_the_guests_own_and_nothing_else(folders: Folders) -> None:
    """By path, below a directory and by a descriptor that was opened to be read; without the filter all are done.

    Extended attributes are refused: nothing would bound what a file has of them.
    """
    plain = ask(folders, "ways", None)[0]
    unknown = {what for what, end in plain.items() if end == "ENOSYS"}  # in some containers: what is young
    assert all(what.startswith("fchmodat2") for what in unknown), unknown
    assert set(plain.values()) - {"ENOSYS"} == {"done"}, plain
    own, _ = ask(folders, "ways", answered_calls.load(folders.spec()))
    attributes = dict.fromkeys([what for what in plain if "xattr" in what], "ENOTSUP")
    assert own == {**plain, **attributes}
    (folders.outside / "file").chmod(0o600)
    before = (folders.outside / "file").stat()
    _, outside = ask(folders, "ways", answered_calls.load(folders.spec()))
    refused = {what: end for what, end in outside.items() if what not in unknown | attributes.keys()}
    assert set(refused.values()) == {"EACCES"}, outside
    assert {what: outside[what] for what in attributes} == attributes
    assert (folders.outside / "file").stat() == before


def test_flags_of_inodes_are_refused(folders: Folders) -> None:
    """Without the filter they are set, where the file system has any."""
    for ends in ask(folders, "flags", None):
        assert set(ends.values()) <= {"done", "ENOTTY", "EOPNOTSUPP"}, ends
    for ends in ask(folders, "flags", {}):
        assert set(ends.values()) == {"EPERM"}, ends


@pytest.mark.parametrize("kind", RACES)
def test_no_race_changes_a_file_outside(folders: Folders, kind: str) -> None:
    """Where the call is only looked at and then let go on, the same race does."""
    assert "hit" in ask(folders, kind, looking_first(folders.spec()), ENOUGH)
    again = Folders(folders.own.parent / "again")
    ends = ask(again, kind, answered_calls.load(again.spec()), TRIES)
    assert {"done", "EACCES"} <= set(ends) <= {"done", "EACCES", "ELOOP"}, ends
    assert (again.outside / "file").stat().st_mode & 0o777 == 0o600
