"""What a supervisor decides about a run, beside a process of the test's own as pid 1, and when none can be cloned."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from time import monotonic
from types import SimpleNamespace
from typing import Any

import pytest

from cloche.jail import cgroups, messages, shared_status, supervisor, user_namespaces
from cloche.jail.cgroups import Cgroup
from cloche.jail.messages import Spec
from cloche.jail.sandbox_state import SandboxState
from cloche.jail.supervisor import PreforkSupervisor, RunState, Supervisor
from cloche.jail.syscalls import ppoll, socketpair

LONG_S = 100.0
SPENT = {"user_s": 0.25, "system_s": 0.5, "most_kib": 8}
ENDED = {"wait_status": 0, "is_alone": True, "is_worn": False, "tasks": 0, "full": 0, "denied": 0, **SPENT}


class Stage:
    """A supervisor whose pid 1 sleeps: the test sends what pid 1 and the caller would."""

    def __init__(self, kind: type[Supervisor]):
        self.caller, theirs = socketpair()
        self.state = SandboxState(theirs, None)
        self.state.spec = Spec(level="jail")
        self.state.status, self.state.timer = shared_status.make()
        self.supervisor = kind(self.state, None)
        self.link = self.supervisor._reaper_link
        pid1 = os.posix_spawn("/bin/sleep", ["sleep", "60"], {}, file_actions=[(os.POSIX_SPAWN_DUP2, self.link, 0)])
        self.supervisor.reaper = pid1

    def order(self, number: int, timeout_s: float = LONG_S, **fields: Any) -> None:
        """Order a run, of which the caller has said something where it is a prefork jail's."""
        shared_status.note_order(self.state.status, number, timeout_s, rebuilds=False)
        body = {"number": number, "timeout_s": timeout_s, "is_last": False, "again": True, "has_files": False}
        fds = [] if isinstance(self.supervisor, PreforkSupervisor) else [0]
        self.supervisor.order({**body, "cause": "", "ended": None, **fields}, fds)

    def start_and_end(self, number: int, *, at: float, ends: bool) -> None:
        """Have a program started, and perhaps ended, as pid 1 reports it."""
        if isinstance(self.supervisor, PreforkSupervisor):
            shared_status.note_start(self.state.status, number, at, 0)
            if ends:
                shared_status.note_end(self.state.status, number)
            return
        messages.send(self.link, "started", {"at": at})
        if ends:
            messages.send(self.link, "ended", ENDED)

    def send(self, tag: str, **body: Any) -> None:
        """Send a message as the caller."""
        messages.send(self.caller, tag, body)

    def attend(self) -> None:
        """Have the supervisor wait for the end; the other end of its link is held by pid 1 alone from then on."""
        if self.link >= 0:
            os.close(self.link)
        self.link = -1
        self.supervisor.attend()

    def received(self) -> list[tuple[str, dict[str, Any], list[int]]]:
        """Return what the caller was sent."""
        found = []
        while ppoll((self.caller,), 0.0):
            found.append(messages.receive(self.caller))
        return found

    def is_killed(self) -> bool:
        """Tell whether pid 1 was killed and waited for."""
        return self.supervisor.reaper == 0

    def close(self) -> None:
        """End what is left."""
        if not self.is_killed():
            self.supervisor.kill()
            os.close(self.supervisor.link)
        for fd in (self.caller, self.state.caller, self.state.status, self.state.timer):
            os.close(fd)


@pytest.fixture
def stage() -> Iterator[Stage]:
    """Return the supervisor of one run."""
    one = Stage(Supervisor)
    yield one
    one.close()


@pytest.fixture
def prefork() -> Iterator[Stage]:
    """Return the supervisor of a prefork jail."""
    one = Stage(PreforkSupervisor)
    yield one
    one.close()


def test_who_has_ended_is_killed_by_nobody(stage: Stage) -> None:
    """What the reaper sent comes before the caller's message and before the clock, though all are there at once."""
    stage.order(1, timeout_s=1)
    stage.start_and_end(1, at=monotonic() - LONG_S, ends=True)
    stage.send("kill", number=1, cause="cancelled")
    stage.attend()
    assert [(tag, body["cause"]) for tag, body, _ in stage.received()[1:]] == [("ended", "")]


def test_a_guest_that_has_ended_is_killed_by_nobody(prefork: Stage) -> None:
    """What the shared status says comes first; how it ended the caller is to forward, and nothing is reported."""
    prefork.order(1, timeout_s=1)
    prefork.start_and_end(1, at=monotonic() - LONG_S, ends=True)
    prefork.send("kill", number=1, cause="cancelled")
    prefork.attend()
    run = prefork.supervisor.run
    assert (run.is_undecided, run.can_go_on, prefork.is_killed(), prefork.received()) == (True, True, False, [])


def test_a_guest_that_has_ended_before_its_clock_is_looked_at_is_not_killed(
    prefork: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its end may be noted while the helper finds that its time is up: the status is looked at before the kill."""
    prefork.order(1, timeout_s=1)
    prefork.start_and_end(1, at=monotonic() - LONG_S, ends=False)
    check = prefork.supervisor._check_limits

    def end_and_check() -> None:
        shared_status.note_end(prefork.state.status, 1)
        check()

    monkeypatch.setattr(prefork.supervisor, "_check_limits", end_and_check)
    prefork.attend()
    assert prefork.supervisor.run.cause == "timeout"
    assert (prefork.supervisor.run.is_undecided, prefork.is_killed(), prefork.received()) == (True, False, [])


def test_whom_the_caller_kills_meets_no_limit(stage: Stage) -> None:
    """Where the time is up in the same moment, the cause is the caller's."""
    stage.order(1, timeout_s=1)
    stage.start_and_end(1, at=monotonic() - LONG_S, ends=False)
    stage.send("kill", number=1, cause="output_limit")
    stage.attend()
    assert stage.is_killed()
    assert [(tag, body["cause"]) for tag, body, _ in stage.received()[1:]] == [("ended", "output_limit")]


def test_a_kill_is_for_the_run_that_it_names(prefork: Stage) -> None:
    """That of an earlier run is too late, that of a later one waits for it."""
    prefork.order(2)
    prefork.start_and_end(2, at=monotonic(), ends=False)
    prefork.send("kill", number=1, cause="cancelled")
    prefork.send("kill", number=3, cause="cancelled")
    prefork.send("over", number=1, ended={**ENDED, "at": 0.0, "wait_status": 9})
    prefork.send("over", number=2, ended={**ENDED, "at": monotonic()})
    prefork.attend()
    ((tag, body, _),) = prefork.received()
    assert (tag, body["number"], body["cause"], body["ended"]["wait_status"]) == ("ended", 2, "", 0)
    prefork.order(3)
    assert prefork.supervisor.run.cause == "cancelled"


def test_a_stale_timer_ends_nothing(prefork: Stage) -> None:
    """One that was wound for an earlier run goes off while another one goes on, whose own clock counts."""
    prefork.order(1)
    prefork.start_and_end(1, at=monotonic() - 2 * LONG_S, ends=True)
    prefork.order(2)
    shared_status.set_timer(prefork.state.timer, 0.001)
    begun = monotonic()
    shared_status.note_start(prefork.state.status, 2, begun - LONG_S + 0.2, 0)
    prefork.attend()
    ((_, body, _),) = prefork.received()
    assert (body["number"], body["cause"]) == (2, "timeout")
    assert monotonic() - begun >= 0.2


def test_nothing_of_a_run_is_left_to_the_next(prefork: Stage) -> None:
    """Neither its cause, its start and its end, nor the largest sums of its memory and its processes."""
    prefork.order(1, cause="cancelled")
    prefork.start_and_end(1, at=monotonic() - LONG_S / 2, ends=True)
    prefork.attend()  # the caller is about to report that it ended by itself
    prefork.order(1, ended={**ENDED, "at": monotonic(), "wait_status": 256})
    prefork.supervisor.accounting.peak_bytes, prefork.supervisor.accounting.peak_tasks = 1 << 30, 40
    prefork.attend()
    prefork.order(2)
    assert not prefork.supervisor._look_at_status()  # in which the run before has started and ended
    assert vars(prefork.supervisor.run) == vars(RunState(2, LONG_S))
    prefork.start_and_end(2, at=monotonic() - 1, ends=True)
    prefork.order(2, ended={**ENDED, "at": monotonic()})
    prefork.attend()
    (_, first, _), (_, second, _) = prefork.received()
    assert (first["number"], first["peak_bytes"], first["tasks"]) == (1, 1 << 30, 40)
    assert (second["number"], second["peak_bytes"], second["tasks"]) == (2, 8 << 10, 0)
    assert (second["cause"], second["ended"]["wait_status"]) == ("", 0)
    assert 1 <= second["wall_s"] < LONG_S / 2 <= first["wall_s"]
    prefork.order(3, cause="cancelled")
    prefork.start_and_end(3, at=monotonic(), ends=True)
    prefork.attend()  # too late, and the caller knows all of its end
    prefork.order(4)
    assert vars(prefork.supervisor.run) == vars(RunState(4, LONG_S))


@pytest.mark.parametrize("way", ["well", "worn", "killed", "killed too late"])
def test_a_jail_goes_on_after_a_guest_that_ended_well(prefork: Stage, way: str) -> None:
    """Else it is killed, and the report names the next jail's number, so that no guest of this one is waited for."""
    prefork.order(1)
    prefork.start_and_end(1, at=monotonic(), ends=way != "killed")
    ended = {**ENDED, "at": monotonic(), "is_worn": way == "worn"}
    prefork.send("kill", number=1, cause="cancelled")
    if way == "killed too late":
        prefork.state.early.append(("kill", {"number": 1, "cause": "cancelled"}, []))
    if way != "killed":
        prefork.order(1, ended=ended)
    prefork.attend()
    ((tag, body, _),) = prefork.received()
    goes_on = way == "well"
    assert (tag, body["generation"]) == ("ended", prefork.state.generation + (not goes_on))
    assert (prefork.supervisor.run.can_go_on, prefork.is_killed()) == (goes_on, not goes_on)


@pytest.mark.parametrize("is_last", [False, True])
def test_the_workspace_is_sent_once(stage: Stage, is_last: bool) -> None:
    """With the start, and never again; at the last run the mount is held until the end."""
    mount, other = os.pipe()
    before = os.listdir("/proc/self/fd")
    messages.send(stage.link, "ready", {"seconds": []}, (mount,))
    stage.order(1, is_last=is_last)
    stage.start_and_end(1, at=monotonic(), ends=False)
    stage.supervisor._receive_all_from_reaper()
    assert len(stage.supervisor.ready.mounts) == is_last
    messages.send(stage.link, "ended", ENDED)
    stage.attend()
    received = stage.received()
    assert [(tag, len(fds)) for tag, _, fds in received] == [("ready", 1), ("started", 0), ("ended", 0)]
    for fd in (mount, other, *received[0][2]):
        os.close(fd)
    assert len(os.listdir("/proc/self/fd")) == len(before) - 4  # the pipe, and both ends of the link


def _supervisor(folder: Path) -> Supervisor:
    helper: Any = SimpleNamespace(
        spec=SimpleNamespace(level="jail", outside=None),
        generation=0,
        cgroup=Cgroup(2, {"memory": str(folder)}),
    )
    return Supervisor(helper, None)


@pytest.mark.parametrize("number", [errno.EAGAIN, errno.ENOMEM, errno.EACCES, errno.EBUSY])
def test_a_refused_clone_into_a_group_is_no_clone_outside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Nothing is forked without its limits, nothing stays open, and nobody may look into the helper afterwards."""
    tried, settings = list[int](), list[int]()

    def clone(flags: int, group_fd: int = -1) -> int:
        tried.append(group_fd)
        assert flags == supervisor.CLONED_NAMESPACES
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(cgroups, "clone", clone)
    for module in (supervisor, user_namespaces):
        monkeypatch.setattr(module, "prctl", lambda *arguments: settings.append(arguments[1]))
    before = os.listdir("/proc/self/fd")
    one = _supervisor(tmp_path)
    with pytest.raises(OSError, match=os.strerror(number)):
        one.start(-1, [])
    assert len(tried) == 1
    assert tried[0] >= 0
    assert settings == [1, 0]
    assert os.listdir("/proc/self/fd") == before
    assert one.abandon() is None


def test_a_group_that_is_not_there_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then there are no limits, and so there is no group to clone into."""
    settings = list[int]()
    monkeypatch.setattr(cgroups, "clone", lambda *_: pytest.fail("cloned without limits"))
    for module in (supervisor, user_namespaces):
        monkeypatch.setattr(module, "prctl", lambda *arguments: settings.append(arguments[1]))
    before = os.listdir("/proc/self/fd")
    one = _supervisor(tmp_path / "gone")
    with pytest.raises(FileNotFoundError):
        one.start(-1, [])
    assert settings == [1, 0]
    assert os.listdir("/proc/self/fd") == before
