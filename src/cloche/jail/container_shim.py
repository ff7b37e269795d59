"""Run programs of the host, such as runsc, in namespaces that end with the caller, every process and mount included.

Two processes do it. The *shim* (`Shim`) is a helper outside: it makes the control groups, forwards the caller's orders,
and clears up. The *init* (`Init`) is pid 1 of new namespaces: it makes the mounts, starts the programs and reaps them.
End of file on the caller's socket, for any reason, means that the caller is gone: the init is killed, and the kernel
then ends every process and mount of these namespaces. If the shim itself is killed, the init dies with it. The guest is
never one of these programs: they are the isolation around it.

The caller sends "open" with the set-up, "start" with a program, "kill" with its number. It receives "opened", "failed",
"started", and "ended" with the wait status, the reason for a kill, and how often the program ran out of memory.
"""

from __future__ import annotations

import gc
import posix

from . import messages, user_namespaces
from .cgroups import Cgroup
from .network import open_sockets
from .steps import perform_calls
from .syscalls import (
    CLONE_NEWIPC,
    CLONE_NEWNET,
    CLONE_NEWNS,
    CLONE_NEWPID,
    CLONE_NEWUSER,
    CLONE_NEWUTS,
    MNT_DETACH,
    PR_SET_DUMPABLE,
    PR_SET_PDEATHSIG,
    WNOHANG,
    call,
    clone,
    close_range,
    ppoll,
    prctl,
    socketpair,
    unshare,
    wait4,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn

_signal: Any = __import__("_signal")

SIGINT, SIGKILL, SIGCHLD = 2, 9, 17
NAMESPACES = CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS
POLL_S = 0.05
BLOCK = 512
GO = b"g"
NOT_STARTED = 127


def main(fd: int) -> None:
    """Be the shim for the caller at socket `fd`."""
    _signal.signal(SIGINT, _signal.SIG_DFL)
    posix.umask(0o077)
    gc.freeze()
    gc.enable()
    Shim(fd).serve()


class Shim:
    """Be the shim: hold the objects outside of the namespaces, their init and a control group for each program."""

    def __init__(self, caller: int):
        self.caller, self.link, self.init = caller, -1, 0
        self.groups: dict[int, Cgroup] = {}

    def serve(self) -> NoReturn:
        """Hand on orders and answers until either end is gone; then leave nothing."""
        try:
            while True:
                ready = {fd for fd, _ in ppoll((self.caller, *((self.link,) if self.link >= 0 else ())), None)}
                if self.caller in ready and not self._handle(*messages.receive(self.caller)):
                    break
                if self.link in ready and not self._report(*messages.receive(self.link)):
                    break
        finally:
            self._clear_up()
            posix._exit(0)

    def _handle(self, tag: str, body: dict[str, Any], fds: list[int]) -> bool:
        if tag == "open":
            self._open(body)
        elif tag:
            self._forward(tag, body, fds)
        for fd in fds:
            posix.close(fd)
        return bool(tag)

    def _open(self, body: dict[str, Any]) -> None:
        ours, theirs = socketpair()
        waiting, go = posix.pipe()
        has_users = body["inside_id"] is not None
        try:
            self.init = clone(NAMESPACES | (CLONE_NEWUSER if has_users else 0))
        except OSError as error:
            self._send("failed", {"number": 0, "why": f"clone: {error.strerror}", "errno": error.errno})
            return
        if self.init == 0:
            posix.close(go)
            posix.close(ours)
            posix.close(self.caller)
            Init(theirs).live(waiting, body)
        posix.close(theirs)
        posix.close(waiting)
        self.link = ours
        try:
            if has_users:
                ids = {"outside_uid": posix.geteuid(), "outside_gid": posix.getegid()}
                user_namespaces.write_maps(self.init, inside_id=body["inside_id"], **ids, privileged=False)
            prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
            posix.write(go, GO)
        except OSError as error:
            self._send("failed", {"number": 0, "why": f"cannot map ids: {error}", "errno": error.errno})
        finally:
            posix.close(go)

    def _forward(self, tag: str, body: dict[str, Any], fds: list[int]) -> None:
        number, cgroup = body["number"], body.get("cgroup")
        try:
            if cgroup is not None:
                group = self.groups[number] = Cgroup(cgroup["version"], cgroup["folders"])
                group.create(**cgroup["amounts"])
            messages.send(self.link, tag, body, fds)
        except OSError as error:
            self._send("failed", {"number": number, "why": str(error), "errno": error.errno})

    def _report(self, tag: str, body: dict[str, Any], fds: list[int]) -> bool:  # noqa: ARG002 - none ever come
        group = self.groups.pop(body["number"], None) if tag in ("ended", "failed") else None
        if group is not None:
            body |= _counted(group)
            _empty(group)
            group.remove()
        if tag:
            self._send(tag, body)
        return bool(tag)

    def _send(self, tag: str, body: dict[str, Any]) -> None:
        try:
            messages.send(self.caller, tag, body)
        except OSError:
            pass  # the caller is gone, which the loop will notice

    def _clear_up(self) -> None:
        if self.init > 0:
            posix.kill(self.init, SIGKILL)
            wait4(self.init, 0)
        for group in self.groups.values():
            _empty(group)
            group.remove()


def _counted(group: Cgroup) -> dict[str, int]:
    try:
        return group.counters()
    except OSError:
        return {}


def _empty(group: Cgroup) -> None:
    """Kill the remaining processes of a group; a second kill does no harm to a dying process."""
    for pid in group.members():
        try:
            if pid > 0:
                posix.kill(pid, SIGKILL)
        except ProcessLookupError:
            pass


class Init:
    """Be the init: pid 1 of the namespaces."""

    def __init__(self, link: int):
        self.link = link
        self.wake, self.waker = posix.pipe()
        self.programs: dict[int, int] = {}  # number by pid
        self.folders: dict[int, str] = {}
        self.memory: dict[int, int] = {}  # the limit of each, if no control group enforces it
        self.causes: dict[int, str] = {}

    def live(self, waiting: int, body: dict[str, Any]) -> NoReturn:
        """Make the mounts, then handle messages from the link until its other end is closed."""
        try:
            prctl(PR_SET_PDEATHSIG, SIGKILL)
            if posix.read(waiting, 1) != GO:
                posix._exit(1)
            posix.close(waiting)
            posix.umask(0o022)
            for fd in (self.wake, self.waker):
                posix.set_blocking(fd, False)
            _signal.set_wakeup_fd(self.waker, warn_on_full_buffer=False)
            _signal.signal(SIGCHLD, lambda *_: None)
            perform_calls(body["calls"])
            messages.send(self.link, "opened", {"number": 0})
            self._serve()
        except Exception as error:
            failure = {"number": 0, "why": f"{type(error).__name__}: {error}", "errno": getattr(error, "errno", 0)}
            messages.send(self.link, "failed", failure)
        finally:
            posix._exit(1)

    def _serve(self) -> None:
        while True:
            ready = {fd for fd, _ in ppoll((self.link, self.wake), POLL_S if self.memory else None)}
            if self.wake in ready:
                posix.read(self.wake, 4096)
            self._reap()
            if self.memory:
                self._check_memory()
            if self.link in ready:
                tag, body, fds = messages.receive(self.link)
                if not tag:
                    return
                self._handle(tag, body, fds)
                for fd in fds:
                    posix.close(fd)

    def _handle(self, tag: str, body: dict[str, Any], fds: list[int]) -> None:
        number = body["number"]
        if tag == "kill":
            self._kill(number, "asked")
            return
        try:
            self.folders[number] = body["folder"]
            perform_calls(body["calls"])
            pid = posix.fork()
            if pid == 0:
                _become(body, fds)
            self.programs[pid] = number
            if body["watched_bytes"]:
                self.memory[number] = body["watched_bytes"]
            messages.send(self.link, "started", {"number": number})
        except OSError as error:
            self._unmount(number)
            messages.send(self.link, "failed", {"number": number, "why": str(error), "errno": error.errno})

    def _kill(self, number: int, cause: str) -> None:
        for pid, program in self.programs.items():
            if program == number:
                self.causes.setdefault(number, cause)
                posix.kill(pid, SIGKILL)

    def _reap(self) -> None:
        while True:
            try:
                pid, status, _ = wait4(-1, WNOHANG)
            except OSError:  # there are no children
                return
            if pid == 0:
                return
            number = self.programs.pop(pid, None)
            if number is not None:
                self.memory.pop(number, None)
                self._unmount(number)
                messages.send(
                    self.link, "ended", {"number": number, "status": status, "cause": self.causes.pop(number, "")}
                )

    def _unmount(self, number: int) -> None:
        folder = self.folders.pop(number, "")
        try:
            if folder:
                call("umount2", folder.encode(), MNT_DETACH)
                posix.rmdir(folder)
        except OSError:
            pass  # it never came to be, or goes with the namespaces

    def _check_memory(self) -> None:
        """Kill the youngest program if all memory files together exceed the sum of the limits."""
        number = max(self.memory)
        if memfd_bytes() > sum(self.memory.values()):
            self._kill(number, "out_of_memory")


def memfd_bytes() -> int:
    """Return the bytes in all files of memory that processes of this namespace have open: a guest's memory is there."""
    bytes_by_inode: dict[int, int] = {}
    for name in posix.listdir("/proc"):
        if name.isdigit() and name != "1":
            try:
                _add_memfds(f"/proc/{name}/fd", bytes_by_inode)
            except OSError:
                continue  # it has ended
    return sum(bytes_by_inode.values())


def _add_memfds(folder: str, bytes_by_inode: dict[int, int]) -> None:
    for name in posix.listdir(folder):
        path = f"{folder}/{name}"
        try:
            if posix.readlink(path).startswith("/memfd:"):
                state = posix.stat(path)
                bytes_by_inode[state.st_ino] = state.st_blocks * BLOCK
        except OSError:
            continue  # it was closed


def _become(body: dict[str, Any], fds: list[int]) -> NoReturn:
    """Become a program. Sockets of a served network are sent over the last of `fds`, from a new network namespace."""
    try:
        if body.get("network") is not None:
            unshare(CLONE_NEWNET)
            open_sockets(body["network"], fds.pop())
        prctl(PR_SET_PDEATHSIG, SIGKILL)
        _signal.set_wakeup_fd(-1)
        for number in (SIGCHLD, _signal.SIGPIPE, _signal.SIGXFSZ):
            _signal.signal(number, _signal.SIG_DFL)
        posix.setsid()
        cgroup = body["cgroup"]
        if cgroup is not None:
            group = Cgroup(cgroup["version"], cgroup["folders"])
            if group.version == 1:
                group.enter()
            else:
                group.attach(0)
        if body["processors"]:
            posix.sched_setaffinity(0, sorted(posix.sched_getaffinity(0))[: body["processors"]])
        posix.chdir("/")
        for number, fd in enumerate(fds):  # all above these three
            posix.dup2(fd, number)
        close_range(3)
        posix.execve(body["argv"][0], body["argv"], body["env"])
    except Exception as error:
        posix.write(2, f"cloche: cannot start {body['argv'][0]}: {error}\n".encode())
    finally:
        posix._exit(NOT_STARTED)
