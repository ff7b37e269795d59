"""What pid 1 of a prefork jail does for its guests, with processes of the test's own: it waits for all its children.

How it ends everybody is for the attempts to escape: outside of a process namespace that would be everybody.
"""

from __future__ import annotations

import ctypes
import os
import platform
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable

import pytest

from cloche.jail import messages, seccomp_notify
from cloche.jail.guest import give_exit_notice
from cloche.jail.messages import Spec
from cloche.jail.prefork import PreforkWatcher
from cloche.jail.setup.seccomp import build_filter
from cloche.jail.syscalls import CLONE_NEWNET, CLONE_NEWUSER, EXIT_NOTICE, attempt, unshare

PR_SET_NO_NEW_PRIVS = 38
RELEASE = tuple(int(part) for part in platform.release().split("-")[0].split(".")[:2])
HOLDS = RELEASE >= (5, 19)  # before that no filter holds who asks, and every end is waited for


def in_fork(work: Callable[[PreforkWatcher], str]) -> str:
    """Return what `work` says in a process that has a watcher and no children, in a network namespace of its own."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.alarm(60)
        try:
            unshare(CLONE_NEWNET | (CLONE_NEWUSER if os.geteuid() else 0))
            os.write(writing, work(PreforkWatcher(Spec(level="jail"))).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        said = pipe.read()
    assert os.waitpid(pid, 0)[1] == 0
    return said


def guest(work: Callable[[], int]) -> int:
    """Fork a process that exits with what `work` returns."""
    pid = os.fork()
    if pid == 0:
        os._exit(work())
    return pid


def test_a_guest_that_dies_before_it_is_made_hands_nothing_over() -> None:
    """Nobody waits for it."""
    assert in_fork(lambda watcher: str(watcher.receive_made(guest(lambda: 1)))) == "[]"


def test_each_guest_hands_over_what_it_has_made() -> None:
    """By the same link; the end of the one before, of which a byte may be left, is not taken for that of the next."""

    def work(watcher: PreforkWatcher) -> str:
        said = []
        for turn in range(3):
            watcher.renew()
            reading, writing = os.pipe()

            def make(code: int = turn, kept: int = reading, ours: int = writing) -> int:
                os.close(kept)
                messages.send(watcher.theirs, "made", {"holds": False}, [ours])
                return code

            pid = guest(make)
            (given,) = watcher.receive_made(pid)
            os.close(given)
            os.close(writing)
            status = watcher.wait_for(pid, reading, lambda: None, lambda: True)
            said.append(f"{os.waitstatus_to_exitcode(status)} {watcher.most_kib > 0}")
        return ", ".join(said)

    assert in_fork(work) == "0 True, 1 True, 2 True"


def see_off(watcher: PreforkWatcher, work: Callable[[], int], *, is_last: bool = True, is_alone: bool = True) -> str:
    """Attend to a guest behind a filter that asks; tell how it ended, and whether that was known early.

    Who was made last is what a file of the test's own says: the machine's number is everybody's.
    """
    watcher.renew()

    def live() -> int:
        ctypes.CDLL(None).prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        listener, holds = seccomp_notify.install(
            build_filter(platform.machine(), confined=False, prefork=True), holds=True
        )
        messages.send(watcher.theirs, "made", {"holds": holds}, [listener])
        os.close(listener)
        return work()

    pid = guest(live)
    with tempfile.TemporaryFile() as file:
        file.write(b"%d\n" % (pid if is_last else pid + 1))
        file.flush()
        watcher.last_pid = file.fileno()
        (listener,) = watcher.receive_made(pid)
        quiet: list[bool] = []
        status = watcher.wait_for(pid, listener, lambda: quiet.append(watcher.is_exiting), lambda: is_alone)
        watcher.kill_exiting()
    assert len(quiet) == 1, "it was said once that all was quiet"
    return f"{os.waitstatus_to_exitcode(status)} {watcher.is_exiting} {watcher.most_kib > 0}"


def exit_notice(code: int) -> Callable[[], int]:
    """Return what gives an exit notice, and is still there if nobody takes it."""

    def say() -> int:
        give_exit_notice(code)
        return 99

    return say


@pytest.mark.parametrize("code", [0, 1, 124, 255])
def test_who_gives_an_exit_notice_is_known_to_end(code: int) -> None:
    """With its exit code, and what it used; it has gone when the next one comes."""

    def work(watcher: PreforkWatcher) -> str:
        told = see_off(watcher, exit_notice(code))
        pid = watcher.exiting
        watcher.renew()
        return f"{told} {os.path.exists(f'/proc/{pid}')}"

    assert in_fork(work) == f"{code} {HOLDS} True False"


def test_one_exit_notice_is_not_the_next_guests() -> None:
    """Whatever the one before did."""

    def work(watcher: PreforkWatcher) -> str:
        return ", ".join(see_off(watcher, one) for one in (exit_notice(3), lambda: 4, exit_notice(5), exit_notice(6)))

    assert in_fork(work) == f"3 {HOLDS} True, 4 False True, 5 {HOLDS} True, 6 {HOLDS} True"


def test_an_exit_notice_beside_others_is_no_end() -> None:
    """Where any process or thread was made after it, it ends as everybody does: its wait status is waited for."""
    assert in_fork(lambda watcher: see_off(watcher, exit_notice(7), is_last=False)) == "7 False True"


@pytest.mark.parametrize("reason", ["a shared workspace", "a list of futexes", "a socket", "a pair of sockets"])
def test_an_exit_notice_with_something_left_is_no_end(reason: str) -> None:
    """Where a session works in the same files, the kernel has yet to write for it, or a socket may hold things."""

    def with_list() -> int:
        attempt("set_robust_list", bytes(24), 24)
        attempt("exit_group", EXIT_NOTICE << 32 | 7)
        return 99

    def with_socket() -> int:
        socket.socket().close()
        give_exit_notice(7)
        return 99

    def with_pair() -> int:
        _pair = socket.socketpair()
        give_exit_notice(7)
        return 99

    ways = {"a list of futexes": with_list, "a socket": with_socket, "a pair of sockets": with_pair}
    work = ways.get(reason, exit_notice(7))
    assert in_fork(lambda watcher: see_off(watcher, work, is_alone=reason != "a shared workspace")) == "7 False True"


def test_sockets_that_no_process_holds_wear_a_jail() -> None:
    """They may be on their way, in a socket of another network namespace; when they are gone, nothing is left."""
    sending, receiving = socket.socketpair()

    def leave() -> int:
        pair = socket.socketpair()
        socket.send_fds(sending, [b"x"], [end.fileno() for end in pair])
        return 0

    def work(watcher: PreforkWatcher) -> str:
        told = [(see_off(watcher, one), watcher.is_worn())[1] for one in (lambda: 0, leave)]
        for fd in socket.recv_fds(receiving, 1, 2)[1]:
            os.close(fd)
        return f"{told} {watcher.is_worn()}"

    with sending, receiving:
        assert in_fork(work) == "[False, True] False"


def test_a_name_of_a_process_is_no_figure() -> None:
    """The first line of what is read of it is the guest's own words."""

    def work() -> int:
        ctypes.CDLL(None).prctl(15, b"VmHWM:1", 0, 0, 0)
        give_exit_notice(0)
        return 99

    def see(watcher: PreforkWatcher) -> str:
        return f"{see_off(watcher, work)} {watcher.most_kib > 1000}"

    assert in_fork(see) == f"0 {HOLDS} True True"


def test_an_exit_notice_that_nobody_receives_is_no_end() -> None:
    """Where the kernel does not hold who asks."""

    def work(watcher: PreforkWatcher) -> str:
        watcher.renew()
        pid = guest(lambda: messages.send(watcher.theirs, "made", {"holds": False}, [1]) or 0)
        for fd in watcher.receive_made(pid):
            os.close(fd)
        os.waitpid(pid, 0)
        return str(watcher.stats)

    assert in_fork(work) == "None"


def test_a_child_s_exit_notice_is_its_own() -> None:
    """The guest's is its guest's alone: a child that says it ends, and the guest goes on."""

    def work() -> int:
        child = guest(exit_notice(9))
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    assert in_fork(lambda watcher: see_off(watcher, work)) == "9 False True"


def test_a_thread_s_exit_notice_ends_all() -> None:
    """It ends the process, as the call does, but nobody is notified before it is over."""

    def work() -> int:
        threading.Thread(target=give_exit_notice, args=(8,)).start()
        time.sleep(30)
        return 99

    assert in_fork(lambda watcher: see_off(watcher, work)) == "8 False True"


def test_who_was_killed_has_given_no_exit_notice() -> None:
    """Nor who ends by the same call with another argument."""

    def kill_itself() -> int:
        os.kill(os.getpid(), signal.SIGKILL)
        return 99

    def nearly() -> int:
        attempt("exit_group", (EXIT_NOTICE ^ 1) << 32 | 5)
        return 99

    assert (
        in_fork(lambda watcher: f"{see_off(watcher, kill_itself)}, {see_off(watcher, nearly)}")
        == "-9 False True, 5 False True"
    )
