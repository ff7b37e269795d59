"""Control groups: one per sandbox, made, read and removed by the helper outside.

Version 1 has a tree per controller; version 2 has one. Counters are compared with their values at the start of the run,
so a group that serves several runs shows each run's own hits.
"""

from __future__ import annotations

import posix

from .syscalls import clone

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

PERIOD_US = 100_000
SOCKETS_SHARE = 8  # version 1 counts socket buffers apart from all other memory: this share of it is added
MOST_LEFT_BYTES = 4 << 20  # of the kernel's memory, by a group that is removed: 20,000 names, say
EBUSY, ENOENT = 16, 2
NO_SUCH_CLONE = (1, 7, 22, 38)  # EPERM, E2BIG, EINVAL, ENOSYS

# The limits to write, per controller and version; an optional file may be missing (swap accounting, mostly).
FILES: Mapping[int, Mapping[str, tuple[tuple[str, str, bool], ...]]] = {
    1: {
        "memory": (
            ("memory.limit_in_bytes", "{memory}", True),
            ("memory.memsw.limit_in_bytes", "{memory}", False),
            ("memory.swappiness", "0", False),
            ("memory.kmem.tcp.limit_in_bytes", "{sockets}", False),  # else buffers of sockets count nowhere
        ),
        "pids": (("pids.max", "{pids}", True),),
        "cpu": (("cpu.cfs_period_us", str(PERIOD_US), True), ("cpu.cfs_quota_us", "{quota}", True)),
    },
    2: {
        "memory": (("memory.max", "{memory}", True), ("memory.swap.max", "0", False)),
        "pids": (("pids.max", "{pids}", True),),
        "cpu": (("cpu.max", f"{{quota}} {PERIOD_US}", True),),
    },
}
# Where each counter is: version, controller, file, key.
COUNTERS: Mapping[int, Mapping[str, tuple[str, str, str]]] = {
    1: {"oom_kills": ("memory", "memory.oom_control", "oom_kill"), "pids_hits": ("pids", "pids.events", "max")},
    2: {"oom_kills": ("memory", "memory.events", "oom_kill"), "pids_hits": ("pids", "pids.events", "max")},
}
TASKS = {1: "tasks", 2: "cgroup.threads"}
NO_QUOTA = {1: "-1", 2: "max"}
USAGE = {1: "memory.usage_in_bytes", 2: "memory.current"}
ANONYMOUS = {1: "rss", 2: "anon"}


class Cgroup:
    """Hold one sandbox's control group: `folders` maps each controller to its directory, not yet made."""

    __slots__ = ("folders", "version")

    def __init__(self, version: int, folders: Mapping[str, str]):
        self.version, self.folders = version, folders

    def create(self, *, memory_bytes: int, pids: int, cpus: float) -> None:
        """Make the directories and write the limits. Raises OSError naming the file that refused."""
        values = {
            "memory": memory_bytes,
            "sockets": memory_bytes // SOCKETS_SHARE,
            "pids": pids,
            "quota": _quota(cpus),
        }
        for controller, folder in self.folders.items():
            _make(folder)
            for name, template, is_required in FILES[self.version][controller]:
                path = f"{folder}/{name}"
                if is_required or _exists(path):
                    _write(path, template.format(**values))

    def loosen(self) -> None:
        """Lift the limit that blocks the change of another: version 1 requires memory to be below memory with swap."""
        path = f"{self.folders.get('memory')}/memory.memsw.limit_in_bytes"
        if self.version == 1 and _exists(path):
            _write(path, "-1")

    def renew_quota(self, cpus: float) -> None:
        """Write the processor quota again, which refills it: one run shall not pay for the one before."""
        controller = self.folders["cpu"]
        name, template, _ = FILES[self.version]["cpu"][-1]
        _write(f"{controller}/{name}", template.format(quota=_quota(cpus)))

    def lift_quota(self) -> None:
        """Lift the processor quota for killed processes: a process must run to die, and a quota can prevent it.

        If some processes are not killed, the quota must be set again. A group that is about to be removed needs none.
        """
        controller = self.folders.get("cpu")
        if controller is None:
            return
        name, template, _ = FILES[self.version]["cpu"][-1]
        try:
            _write(f"{controller}/{name}", template.format(quota=NO_QUOTA[self.version]))
        except OSError:
            pass  # they die as fast as they may

    def allow_pids(self, pids: int) -> None:
        """Write another limit on processes."""
        _write(f"{self.folders['pids']}/pids.max", str(pids))

    def enter(self) -> None:
        """Move the calling process in, which has one thread; its later children are inside.

        Version 1 only. A thread that moves itself needs no lock. Moving a process by its pid does, and after a pause
        that lock waits for an RCU grace period: ten milliseconds.
        """
        for folder in self.folders.values():
            _write(f"{folder}/tasks", "0")

    def open(self) -> int:
        """Open the group, for a child to be cloned into. Version 2 only. Raises OSError."""
        folder = next(iter(self.folders.values()))
        return posix.open(folder, posix.O_RDONLY | posix.O_DIRECTORY | posix.O_CLOEXEC)

    def attach(self, pid: int) -> None:
        """Move a process in; its later children are inside."""
        for folder in dict.fromkeys(self.folders.values()):
            _write(f"{folder}/cgroup.procs", str(pid))

    def counters(self) -> dict[str, int]:
        """Return how often a limit was hit so far, by counter."""
        counts = {}
        for counter, (controller, name, key) in COUNTERS[self.version].items():
            folder = self.folders.get(controller)
            counts[counter] = _keyed(f"{folder}/{name}").get(key, 0) if folder else 0
        return counts

    def memory_bytes(self) -> int:
        """Return the memory charged now, page cache and tmpfs included."""
        return int(_read(f"{self.folders['memory']}/{USAGE[self.version]}"))

    def anonymous_bytes(self) -> int:
        """Return the memory that belongs to processes alone."""
        return _keyed(f"{self.folders['memory']}/memory.stat").get(ANONYMOUS[self.version], 0)

    def most_pids(self) -> int:
        """Return the most processes and threads at once, 0 where the kernel does not keep it."""
        try:
            return int(_read(f"{self.folders['pids']}/pids.peak"))
        except (OSError, KeyError):
            return 0

    def members(self) -> list[int]:
        """Return the processes inside."""
        folder = next(iter(self.folders.values()))
        try:
            return [int(pid) for pid in _read(f"{folder}/cgroup.procs").split()]
        except OSError:
            return []

    def tasks(self) -> list[int]:
        """Return the threads inside, also those that are on their way out and could still do something."""
        folder = next(iter(self.folders.values()))
        return [int(tid) for tid in _read_whole(f"{folder}/{TASKS[self.version]}").split()]

    def kernel_bytes(self) -> int:
        """Return the memory that the kernel holds on behalf of the group: names of files that it looked up, mostly."""
        folder = self.folders["memory"]
        if self.version == 1:
            return int(_read(f"{folder}/memory.kmem.usage_in_bytes"))
        return _keyed(f"{folder}/memory.stat").get("slab_reclaimable", 0)

    def give_back(self) -> None:
        """Have the kernel free the memory that it keeps for an empty group, if that is much.

        A removed group leaves this memory to the host, until the host is short of it. Pages of files go too, so small
        amounts, as every run leaves them, are not freed: other runs read the same files.
        """
        try:
            if "memory" in self.folders and self.kernel_bytes() > MOST_LEFT_BYTES:
                name, amount = ("force_empty", 0) if self.version == 1 else ("reclaim", self.memory_bytes())
                _write(f"{self.folders['memory']}/memory.{name}", str(amount))
        except OSError:
            pass  # a kernel that has no such thing, or that keeps a part of it

    def freeze(self) -> bool:
        """Freeze all processes inside, soon; False if the kernel cannot, or could not kill frozen ones."""
        if self.version != 2:
            return False
        try:
            _write(f"{next(iter(self.folders.values()))}/cgroup.freeze", "1")
        except OSError:  # before Linux 5.2, or where the group is another's
            return False
        return True

    def is_frozen(self) -> bool:
        """Tell whether all processes inside are frozen."""
        return _keyed(f"{next(iter(self.folders.values()))}/cgroup.events").get("frozen", 0) == 1

    def thaw(self) -> None:
        """Have all inside go on."""
        _write(f"{next(iter(self.folders.values()))}/cgroup.freeze", "0")

    def remove(self) -> None:
        """Remove the directories. A group whose last process is just leaving is busy for a moment."""
        self.give_back()
        for folder in dict.fromkeys(self.folders.values()):
            for _ in range(200):
                try:
                    posix.rmdir(folder)
                except OSError as error:
                    if error.errno == EBUSY:
                        _nap()
                        continue
                break


class Gauges:
    """Read the figures of a control group after every run: their files stay open, which spares most of the time."""

    __slots__ = ("_group", "_open", "_read")

    def __init__(self, group: Cgroup):
        self._group = group
        self._open: dict[str, int] = {}
        self._read: dict[str, tuple[bytes, int]] = {}  # the last text of each file, and its figure

    def read(self) -> dict[str, int]:
        """Return how often each limit was hit so far, and the most `tasks` at once, 0 where that is not kept."""
        counts = {}
        for counter, (controller, name, key) in COUNTERS[self._group.version].items():
            counts[counter] = self._figure(counter, controller, name, key)
        try:
            counts["tasks"] = self._figure("tasks", "pids", "pids.peak", "")
        except OSError:
            counts["tasks"] = 0  # the kernel does not keep it
        return counts

    def _figure(self, counter: str, controller: str, name: str, key: str) -> int:
        """Return the number of `key` in a file, or its only number; 0 for none."""
        folder = self._group.folders.get(controller)
        if folder is None:
            return 0
        fd = self._open.get(name, -1)
        if fd < 0:
            fd = self._open[name] = posix.open(f"{folder}/{name}", posix.O_RDONLY | posix.O_CLOEXEC)
        data = posix.pread(fd, 4096, 0)
        before = self._read.get(counter)
        if before is not None and before[0] == data:  # as after nearly every run
            return before[1]
        rows = [row.split() for row in data.decode().splitlines()]
        figure = next((int(row[-1]) for row in rows if row[:-1] == ([key] if key else [])), 0)
        self._read[counter] = data, figure
        return figure

    def close(self) -> None:
        """Let go of the files."""
        while self._open:
            posix.close(self._open.popitem()[1])


def clone_into(namespaces: int, cgroup: Cgroup | None) -> tuple[int, bool]:
    """Fork into new namespaces, and into a control group of version 2; tell whether the child must be moved there.

    It must where the kernel or a filter around us has no call for it: before Linux 5.7, or in a plain container.
    """
    must_move = cgroup is not None and cgroup.version == 2
    if cgroup is not None and must_move:
        group = cgroup.open()
        try:
            return clone(namespaces, group), False
        except OSError as error:
            if error.errno not in NO_SUCH_CLONE:
                raise
        finally:
            posix.close(group)
    return clone(namespaces) if namespaces else posix.fork(), must_move


def _quota(cpus: float) -> int:
    """Return microseconds per period."""
    return max(1000, int(cpus * PERIOD_US))


def _make(folder: str) -> None:
    try:
        posix.mkdir(folder, 0o755)
    except FileExistsError:
        pass  # the next controller of the same tree


def _exists(path: str) -> bool:
    try:
        posix.stat(path)
    except FileNotFoundError:
        return False
    return True


def _nap() -> None:
    import time

    time.sleep(0.002)


def _read(path: str) -> str:
    fd = posix.open(path, posix.O_RDONLY | posix.O_CLOEXEC)
    try:
        return posix.read(fd, 65536).decode()
    finally:
        posix.close(fd)


def _read_whole(path: str) -> str:
    fd = posix.open(path, posix.O_RDONLY | posix.O_CLOEXEC)
    try:
        return b"".join(iter(lambda: posix.read(fd, 1 << 16), b"")).decode()
    finally:
        posix.close(fd)


def _write(path: str, text: str) -> None:
    fd = posix.open(path, posix.O_WRONLY | posix.O_CLOEXEC)
    try:
        posix.write(fd, text.encode())
    except OSError as error:
        raise OSError(error.errno, f"cannot write {text!r} to {path}: {error.strerror}") from None
    finally:
        posix.close(fd)


def _keyed(path: str) -> dict[str, int]:
    pairs = (line.split() for line in _read(path).splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}
