"""Give a clone of a live session a home of its own: ids, /workspace, /tmp, /dev/shm, /proc and a loopback device.

A clone is born with namespaces in which nobody can do anything yet: its ids are not mapped, and it sees its parent's
files. Two short-lived processes of the helper's put that right while both are stopped. The first enters the parent's
user namespace, which owns all that the clone's will, and copies the host's mounts, because a file system such as
/proc can only be made where a whole one is to be seen. The second is its child in the clone's process namespace,
since a /proc shows the namespace of who made it.
"""

from __future__ import annotations

import posix

from . import wire
from .calls import perform
from .copying import FOLDER, copy_tree
from .syscalls import (
    CLONE_NEWNS,
    MS_PRIVATE,
    MS_REC,
    call,
    socketpair,
    unshare,
    wait4,
)  # fmt: skip

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from .calls import Step
    from .spec import Spec

SIGKILL = 9
PLACES = {"workspace": "workspace", "tmp": "tmp", "shm": "dev/shm"}  # by register: where each is, in the parent


class Errand:
    """Let a process of its own do some work, while the caller goes on; `finish` must be called, or its two parts.

    `link` can be read from when it is done.
    """

    def __init__(self, work: Callable[[int], list[int] | None]):
        """Start the work, which is given its end of a link to us, and may return descriptors."""
        self.link, theirs = socketpair()
        try:
            self._pid = posix.fork()
        except BaseException:
            posix.close(self.link)
            posix.close(theirs)
            raise
        if self._pid == 0:
            posix.close(self.link)
            _tell(theirs, work)
        posix.close(theirs)

    def tell(self, tag: str, body: dict[str, Any] | None = None) -> None:
        """Send it a word; what came of it `finish` will know."""
        try:
            wire.send(self.link, tag, body)
        except OSError:
            pass

    def abandon(self) -> None:
        """End it where it is; what it brings nobody needs any more."""
        posix.kill(self._pid, SIGKILL)
        posix.close(self.link)
        wait4(self._pid, 0)

    def finish(self) -> list[int]:
        """Wait until it is done and gone, and return its descriptor, if it has one. Raises OSError with what failed."""
        try:
            return self.hear()
        finally:
            self.bury()

    def bury(self) -> None:
        """Wait until a process whose end was heard of is gone, which takes a moment."""
        wait4(self._pid, 0)

    def hear(self) -> list[int]:
        """Wait until it is done, and return its descriptor; `bury` must follow. Raises OSError with what failed."""
        tag, body, fds = wire.receive(self.link)
        posix.close(self.link)
        if tag != "done":
            raise OSError(body.get("errno", 0), body.get("message", "the builder died"))
        return fds


def new_builder(spec: Spec) -> Errand:
    """Start who will build a clone's home, while it is yet to be born; `rehouse` must follow, or `abandon`."""
    return Errand(lambda link: _build(spec, link))


def rehouse(builder: Errand, steps: dict[str, list[Step]], parent: int, clone: int) -> None:
    """Begin to build the home of `clone` after that of `parent`, both stopped; it ends with the new workspace's mounts.

    `steps` are those of `enter.compile_rehousing`. Raises OSError where it cannot be told.
    """
    wire.send(builder.link, "build", {"steps": steps, "parent": parent, "clone": clone})


def _tell(link: int, work: Callable[[int], list[int] | None]) -> None:
    """Do the work of a child process, tell what came of it, and end."""
    try:
        found = work(link)
        wire.send(link, "done", fds=found or [])
    except BaseException as error:
        wire.send(link, "failed", {"message": str(error)[:500], "errno": getattr(error, "errno", 0) or 0})
    finally:
        posix._exit(0)


def _build(spec: Spec, link: int) -> list[int]:
    tag, body, _ = wire.receive(link)
    if tag != "build":
        posix._exit(0)  # the helper is gone
    return _outside(spec, body["steps"], body["parent"], body["clone"])


def _outside(spec: Spec, steps: dict[str, list[Step]], parent: int, clone: int) -> list[int]:
    """Enter what owns the clone's namespaces, map its ids, make its places and fill them."""
    registers = {
        "network": _open(f"/proc/{clone}/ns/net"),
        "mounts": _open(f"/proc/{clone}/ns/mnt"),
    }
    processes = _open(f"/proc/{clone}/ns/pid")
    call("setns", _open(f"/proc/{parent}/ns/user"), 0)
    inside = spec.inside_id
    for name in ("gid_map", "uid_map"):
        _write(f"/proc/{clone}/{name}", f"{inside} {inside} 1")
    call("setresgid", inside, inside, inside)
    call("setresuid", inside, inside, inside)
    unshare(CLONE_NEWNS)
    call("mount", b"none", b"/", b"", MS_REC | MS_PRIVATE, None)
    posix.umask(0)
    perform(steps["outside"], registers)
    for register, place in PLACES.items():
        source = posix.open(f"/proc/{parent}/root/{place}", FOLDER)
        copy_tree(source, registers[register])
        posix.close(source)
    call("setns", processes, 0)
    # A child alone is in the process namespace that was entered.
    return Errand(lambda _: _inside(steps, registers)).finish()


def _inside(steps: dict[str, list[Step]], registers: dict[str, int]) -> list[int]:
    perform(steps["inside"], registers)
    return [registers[name] for name in ("kept", "shown") if name in registers]


def _open(path: str) -> int:
    return posix.open(path, posix.O_RDONLY | posix.O_CLOEXEC)


def _write(path: str, text: str) -> None:
    fd = posix.open(path, posix.O_WRONLY | posix.O_CLOEXEC)
    try:
        posix.write(fd, text.encode())
    finally:
        posix.close(fd)
