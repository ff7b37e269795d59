"""Give a clone of a live session its own ids, mounts and files, and check from outside its remains of its parent.

Theory of operation: a clone starts in namespaces without any rights: its ids are not mapped, and it sees its parent's
files. Two worker processes of the helper (`NamespaceWorker`) correct this while clone and parent are stopped. The
first enters the parent's user namespace, which will own the clone's namespaces, and copies the host's mounts, because
a file system such as /proc can only be made where a complete one is visible. It makes /workspace, /tmp and /dev/shm
and copies the parent's files. The second is its child in the clone's process namespace, since a /proc shows the
namespace of the process that made it; it puts everything in place, and brings the loopback device up.

Files are copied by descriptors alone: a guest chose their names and may have chosen them to mislead. Folders, regular
files with their holes, links and fifos are copied, with modes and times. Sockets and devices are left out, and of
mounted file systems only the mount point is made. The target is a file system of bounded size.

The checks (`check_rest`) read /proc of stopped processes. A process chooses its own name, so lines are split at the
kernel's own line ends and at nothing else.
"""

from __future__ import annotations

import posix

from . import messages, procfs
from .network import open_sockets
from .procfs import text_of
from .steps import MOUNT_NAMESPACE, NETWORK_NAMESPACE, NEXT_WORKSPACE, OWN_MOUNTS, SHOWN_WORKSPACE, perform
from .syscalls import CLONE_NEWNS, MS_PRIVATE, MS_REC, call, socketpair, unshare, wait4

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

    from .messages import Spec
    from .steps import Step

FOLDER = posix.O_RDONLY | posix.O_DIRECTORY | posix.O_NOFOLLOW | posix.O_CLOEXEC
FILE = posix.O_RDONLY | posix.O_NOFOLLOW | posix.O_CLOEXEC | posix.O_NONBLOCK
NEW_FILE = posix.O_WRONLY | posix.O_CREAT | posix.O_EXCL | posix.O_NOFOLLOW | posix.O_CLOEXEC
KIND, DIRECTORY, REGULAR, LINK, FIFO = 0o170000, 0o040000, 0o100000, 0o120000, 0o010000
MODES = 0o7777
MAX_DEPTH, ELOOP, ENXIO = 200, 40, 6
CHUNK_BYTES = 1 << 24
SEEK_DATA, SEEK_HOLE = 3, 4


def copy_tree(source: int, target: int, depth: int = 0) -> None:
    """Copy everything below folder `source` into the empty folder `target`. Raises OSError."""
    device = posix.fstat(source).st_dev
    if depth > MAX_DEPTH:
        raise OSError(ELOOP, f"folders are nested more than {MAX_DEPTH} deep")
    for name in posix.listdir(source):
        state = posix.stat(name, dir_fd=source, follow_symlinks=False)
        kind = state.st_mode & KIND
        if state.st_dev != device:  # mounted
            if kind == DIRECTORY:
                posix.mkdir(name, 0o755, dir_fd=target)
            else:
                posix.close(posix.open(name, NEW_FILE, 0o600, dir_fd=target))
            continue
        if kind == DIRECTORY:
            _copy_folder(name, source, target, depth)
        elif kind == REGULAR:
            _copy_file(name, source, target)
        elif kind == LINK:
            posix.symlink(posix.readlink(name, dir_fd=source), name, dir_fd=target)
            continue
        elif kind == FIFO:
            posix.mkfifo(name, 0o600, dir_fd=target)
        else:
            continue
        posix.chmod(name, state.st_mode & MODES, dir_fd=target)
        posix.utime(name, ns=(state.st_atime_ns, state.st_mtime_ns), dir_fd=target, follow_symlinks=False)


def _copy_folder(name: str, source: int, target: int, depth: int) -> None:
    posix.mkdir(name, 0o700, dir_fd=target)
    ours = theirs = -1
    try:
        ours, theirs = posix.open(name, FOLDER, dir_fd=source), posix.open(name, FOLDER, dir_fd=target)
        copy_tree(ours, theirs, depth + 1)
    finally:
        _close(ours, theirs)


def _copy_file(name: str, source: int, target: int) -> None:
    ours = theirs = -1
    try:
        ours, theirs = posix.open(name, FILE, dir_fd=source), posix.open(name, NEW_FILE, 0o600, dir_fd=target)
        size = posix.fstat(ours).st_size
        posix.ftruncate(theirs, size)
        offset = 0
        while offset < size:
            try:
                offset = posix.lseek(ours, offset, SEEK_DATA)
            except OSError as error:
                if error.errno == ENXIO:  # nothing but a hole is left
                    return
                raise
            end = posix.lseek(ours, offset, SEEK_HOLE)
            posix.lseek(theirs, offset, 0)
            while offset < end:
                sent = posix.sendfile(theirs, ours, offset, min(CHUNK_BYTES, end - offset))
                if sent == 0:
                    return
                offset += sent
    finally:
        _close(ours, theirs)


def _close(*fds: int) -> None:
    for fd in fds:
        if fd >= 0:
            posix.close(fd)


SIGKILL = 9


class NamespaceWorker:
    """Be a worker process, while the caller goes on; `finish` must be called, or its two parts.

    `link` can be read from when it is done.
    """

    def __init__(self, work: Callable[[int], list[int] | None]):
        """Start it; `work` is given its end of a link to us, and may return descriptors."""
        self.link, theirs = socketpair()
        try:
            self._pid = posix.fork()
        except BaseException:
            posix.close(self.link)
            posix.close(theirs)
            raise
        if self._pid == 0:
            posix.close(self.link)
            _run_worker(theirs, work)
        posix.close(theirs)

    def send(self, tag: str, body: dict[str, Any] | None = None) -> None:
        """Send it a message; where that fails, `finish` raises."""
        try:
            messages.send(self.link, tag, body)
        except OSError:
            pass

    def kill(self) -> None:
        """Kill it: its result is not needed any more."""
        posix.kill(self._pid, SIGKILL)
        posix.close(self.link)
        wait4(self._pid, 0)

    def finish(self) -> list[int]:
        """Wait until it has ended, and return its descriptors. Raises OSError with its failure."""
        try:
            return self.receive()
        finally:
            self.reap()

    def reap(self) -> None:
        """Wait for the process, whose result was received: that takes a moment."""
        wait4(self._pid, 0)

    def receive(self) -> list[int]:
        """Receive its result, the descriptors; `reap` must follow. Raises OSError with its failure."""
        tag, body, fds = messages.receive(self.link)
        posix.close(self.link)
        if tag != "done":
            raise OSError(body.get("errno", 0), body.get("message", "the builder died"))
        return fds


def new_builder(spec: Spec, network_link: int = -1) -> NamespaceWorker:
    """Start the builder of a clone's mounts, before the clone exists; `start_building` or `kill` must follow.

    It sends the sockets of the clone's network over `network_link`, if the clone has one.
    """
    return NamespaceWorker(lambda link: _build(spec, link, network_link))


def start_building(
    builder: NamespaceWorker, steps: dict[str, list[Step]], parent: int, clone: int, number: int
) -> None:
    """Begin to give `clone` ids, mounts and files like those of `parent`; both are stopped.

    The result is the new workspace's mounts. `number` is the clone's among all of its session, `steps` are those of
    `setup.plan.compile_clone_mounts`. Raises OSError where the builder cannot be reached.
    """
    messages.send(builder.link, "build", {"steps": steps, "parent": parent, "clone": clone, "number": number})


def _run_worker(link: int, work: Callable[[int], list[int] | None]) -> None:
    try:
        result_fds = work(link)
        messages.send(link, "done", fds=result_fds or [])
    except BaseException as error:
        messages.send(link, "failed", {"message": str(error)[:500], "errno": getattr(error, "errno", 0) or 0})
    finally:
        posix._exit(0)


def _build(spec: Spec, link: int, network_link: int) -> list[int]:
    tag, body, _ = messages.receive(link)
    if tag != "build":
        posix._exit(0)  # the helper is gone

    def open_network() -> None:
        if spec.network is not None:
            open_sockets(spec.network, network_link, body["number"])

    return _outside(spec, body["steps"], body["parent"], body["clone"], open_network)


def _outside(
    spec: Spec, steps: dict[str, list[Step]], parent: int, clone: int, open_network: Callable[[], None]
) -> list[int]:
    """Enter the owner of the clone's namespaces, map its ids, make its mounts and fill them."""
    registers = {
        NETWORK_NAMESPACE: _open(f"/proc/{clone}/ns/net"),
        MOUNT_NAMESPACE: _open(f"/proc/{clone}/ns/mnt"),
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
    for path, register in OWN_MOUNTS.items():
        source = posix.open(f"/proc/{parent}/root/{path}", FOLDER)
        copy_tree(source, registers[register])
        posix.close(source)
    call("setns", processes, 0)
    # A child alone is in the process namespace that was entered.
    return NamespaceWorker(lambda _: _inside(steps, registers, open_network)).finish()


def _inside(steps: dict[str, list[Step]], registers: dict[str, int], open_network: Callable[[], None]) -> list[int]:
    perform(steps["inside"], registers)
    open_network()
    return [registers[name] for name in (NEXT_WORKSPACE, SHOWN_WORKSPACE) if name in registers]


def _open(path: str) -> int:
    return posix.open(path, posix.O_RDONLY | posix.O_CLOEXEC)


def _write(path: str, text: str) -> None:
    fd = posix.open(path, posix.O_WRONLY | posix.O_CLOEXEC)
    try:
        posix.write(fd, text.encode())
    finally:
        posix.close(fd)


SYSTEM = ("/usr/", "/lib", "/opt/")  # read-only mounts: a shared mapping of them carries no data
OWN_MOUNT_POINTS = ("/workspace", "/tmp", "/dev/shm")
CAPABILITIES = ("CapInh:", "CapPrm:", "CapEff:", "CapBnd:", "CapAmb:")


class ForkTreeError(Exception):
    """Say why a session cannot be cloned, in a text for the caller."""


def check_is_apart(pid: int) -> None:
    """Check that a clone leads its own session, which it cannot undo: else kill(0, …) reaches other processes."""
    if posix.getpgid(pid) != pid or posix.getsid(pid) != pid:
        raise ForkTreeError("the clone is in a process group with others")


def check_rest(pid: int, bound: Sequence[str] = ()) -> None:
    """Check all that a clone could keep but descriptors: folders, its program's file, memory, processes, capabilities.

    `bound` are the paths of the host that its mounts show read-only: mappings of these belong to no guest.
    """
    if posix.readlink(f"/proc/{pid}/cwd") != "/" or posix.readlink(f"/proc/{pid}/root") != "/":
        raise ForkTreeError("the clone has kept its parent's working directory")
    if len(posix.listdir(f"/proc/{pid}/task")) != 1:
        raise ForkTreeError("the clone has threads")
    if procfs.children(pid):
        raise ForkTreeError("the clone has started a process")
    program = posix.readlink(f"/proc/{pid}/exe")
    if program.startswith(OWN_MOUNT_POINTS) and not _is_bound(pid, program, _device(f"/proc/{pid}/exe"), bound):
        raise ForkTreeError("the clone runs a file of its parent's")
    capabilities = [
        line.split()[1] for line in text_of(f"/proc/{pid}/status").split("\n") if line.startswith(CAPABILITIES)
    ]
    if len(capabilities) != len(CAPABILITIES) or any(int(mask, 16) for mask in capabilities):
        raise ForkTreeError("the clone has kept capabilities")
    maps = text_of(f"/proc/{pid}/maps")
    if not maps:
        raise ForkTreeError("the clone's memory cannot be looked at")
    if _are_all_private(maps):
        return  # as is usual: then no single line needs to be looked at
    for line in maps.rstrip("\n").split("\n"):
        fields = line.split(maxsplit=5)
        name = fields[5] if len(fields) > 5 else ""
        if fields[1][3] == "s" and not name.startswith(SYSTEM):
            raise ForkTreeError(f"the clone shares memory with its parent: {name or 'an anonymous mapping'}")
        if name.startswith(OWN_MOUNT_POINTS) and not _is_bound(pid, name, fields[3], bound):
            raise ForkTreeError(f"the clone has a file of its parent's mapped: {name}")


def _is_bound(pid: int, name: str, device: str, bound: Sequence[str]) -> bool:
    """Tell whether a file is one of the host's: by its name, and by its file system, which no guest's mount has."""
    is_below = any(name == path or name.startswith(f"{path}/") for path in bound)
    return is_below and device not in {_device(f"/proc/{pid}/root{mount_point}") for mount_point in OWN_MOUNT_POINTS}


def _device(path: str) -> str:
    """Return the number of a file's file system as /proc/PID/maps has it."""
    number = posix.stat(path).st_dev
    return f"{posix.major(number):02x}:{posix.minor(number):02x}"


def _are_all_private(maps: str) -> bool:
    """Tell whether no memory is shared and none maps a file of the guest's mounts, by the kernel's list."""
    lines = maps.rstrip("\n").split("\n")
    if {line.partition(" ")[2][3:4] for line in lines} != {"p"}:
        return False
    return not any(path.startswith(OWN_MOUNT_POINTS) for path in {line[line.find("/") :] for line in lines})


def number_inside(pid: int) -> int:
    """Return the number that pid 1 of the first node knows a process by."""
    for line in text_of(f"/proc/{pid}/status").split("\n"):
        if line.startswith("NSpid:"):
            return int(line.split()[2])
    raise ForkTreeError("the kernel does not tell process numbers of namespaces")
