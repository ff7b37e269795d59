"""Resources that killed processes left on this host: their owner, whether it is certainly dead, and their removal.

Theory of operation: names identify their makers. `owner` names this process by host, boot, process namespace, pid and
start time, so that `is_dead` can judge a name written by another process; labels of containers carry it.

The names of control groups carry pid, namespace and start time. The helper or shim that made a group removes it; the
caller removes groups of a killed helper. If both were killed, empty groups stay until a later process removes them. The
kernel refuses to remove a group that holds a process (cgroups(7)), so live runs are not at risk.

Below level jail, a folder of the host serves as workspace. A helper holds a flock(2) on its folder as long as it lives,
and the kernel releases the lock however the helper ends. So a folder of this user's without a lock is unused, unless a
process left by the guest still uses it.

`Background` runs removals in threads; the process waits for them at exit.
"""

from __future__ import annotations

import atexit
import fcntl
import functools
import hashlib
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator

from cloche import hostfs
from cloche.core.errors import BackendUnavailable
from cloche.core.suppressed import suppress_logged
from cloche.jail.work_folder import SPARE, WorkFolder

from .host import Host

HOSTS_OWN = "4026531836"  # PROC_PID_INIT_INO, the inode of the initial pid namespace (include/linux/proc_ns.h)
log = logging.getLogger("cloche.jail")
_NAME = re.compile(rf"cloche-[0-9]+-work-[0-9a-f]{{12}}({SPARE})?")  # of folders that serve as workspaces


@functools.cache
def _host() -> tuple[str, str]:
    """Return hashes that identify this host and its boot without disclosing either."""

    def hashed(path: str) -> str:
        try:
            with open(path, "rb") as file:
                text = file.read()
        except OSError:
            text = b""
        return hashlib.sha256(b"cloche" + text).hexdigest()[:12]

    return hashed("/etc/machine-id"), hashed("/proc/sys/kernel/random/boot_id")


def owner() -> str:
    """Return a name for this process from which another process can tell whether it still lives."""
    return ":".join([*_host(), namespace(), str(os.getpid()), started_at(os.getpid())])


def is_dead(name: str) -> bool:
    """Tell whether the process named by `owner` is certainly gone: it was on this host, and is visible from here.

    A later boot proves the end of processes in the host's own namespace only. Containers of one image have the same
    machine-id or an empty one, so an equal machine-id with another boot may belong to another host.
    """
    fields = name.split(":")
    if len(fields) != 5 or fields[0] != _host()[0]:
        return False
    if fields[1] != _host()[1]:
        return fields[2] == namespace() == HOSTS_OWN
    return fields[2] == namespace() and started_at(fields[3]) != fields[4] and not _is_hidden(fields[3])


def _is_hidden(pid: str) -> bool:
    """Tell whether another user's process exists that this user cannot see in /proc (mount option `hidepid`,
    proc(5)).
    """
    if not pid.isdecimal() or started_at(pid):
        return False
    try:
        os.kill(int(pid), 0)
    except PermissionError:
        return True
    except (OSError, OverflowError):
        return False
    return False


def namespace() -> str:
    """Return the inode number of this process's pid namespace; empty if it cannot be read."""
    try:
        return os.readlink("/proc/self/ns/pid").strip("pid:[]")
    except OSError:
        return ""


def started_at(pid: int | str) -> str:
    """Return a process's start time in clock ticks since boot (field 22 of /proc/PID/stat); empty if it does not
    exist.
    """
    try:
        with open(f"/proc/{pid}/stat", errors="replace") as file:
            line = file.read()
    except OSError:
        return ""
    return line[line.rindex(")") + 2 :].split()[19]


def group_name(kind: str) -> str:
    """Return a new name for a control group of this process; `kind` is its purpose, in letters."""
    return f"{_maker(os.getpid(), kind)}-{os.urandom(6).hex()}"


@functools.lru_cache(8)
def _maker(pid: int, kind: str) -> str:
    return f"cloche-{pid}-{kind}-{namespace()}-{started_at(pid)}"


def is_left_over(name: str, kind: str) -> bool:
    """Tell whether a control group was made by Cloche for this purpose, by a process that is certainly dead."""
    fields = name.split("-")
    if (
        len(fields) != 6
        or fields[0] != "cloche"
        or fields[2] != kind
        or not (fields[1].isdigit() and fields[4].isdigit())
    ):
        return False
    return fields[3] == namespace() and started_at(fields[1]) != fields[4]


def clear_groups(host: Host, kind: str) -> None:
    """Remove the empty groups of dead processes, once per process."""
    _clear_once(os.getpid(), _folders(host), kind)


def remove_groups(host: Host, kind: str) -> list[str]:
    """Remove the empty groups of dead processes now; return the name of each, the same in every hierarchy."""
    return _remove(_folders(host), kind)


def _folders(host: Host) -> tuple[str, ...]:
    return tuple(sorted(set(host.cgroup_folders.values())))


@functools.lru_cache(64)
def _clear_once(_pid: int, folders: tuple[str, ...], kind: str) -> None:
    _remove(folders, kind)


def _remove(folders: Iterable[str], kind: str) -> list[str]:
    removed = set()
    for folder in folders:
        try:
            names = os.listdir(folder)
        except OSError:
            continue
        for name in names:
            if not is_left_over(name, kind):
                continue
            try:
                os.rmdir(f"{folder}/{name}")
            except OSError:
                continue  # EBUSY: it is not empty; ENOENT: another process was faster
            removed.add(name)
    return sorted(removed)


class Background:
    """Hold the threads of one backend; a forked child starts with none. For use from any thread."""

    def __init__(self, name: str, timeout_s: float):
        self._name, self._timeout_s = name, timeout_s
        self._turn = threading.Lock()
        self._threads: set[threading.Thread] = set()
        os.register_at_fork(after_in_child=self._forget)
        atexit.register(self.wait_for_all)

    def begin(self, work: Callable[[], None]) -> None:
        """Run `work` in a new thread."""
        thread = threading.Thread(target=self._do, args=(work,), name=self._name, daemon=True)
        with self._turn:  # a thread in the set must have been started, because it may be joined
            thread.start()
            self._threads.add(thread)

    def wait_for_all(self) -> None:
        """Wait for all threads, for a bounded time in total."""
        deadline = time.monotonic() + self._timeout_s
        while True:
            with self._turn:
                threads = list(self._threads)
            if not threads or time.monotonic() > deadline:
                return
            threads[0].join(max(0.0, deadline - time.monotonic()))

    def _do(self, work: Callable[[], None]) -> None:
        try:
            work()
        finally:
            with self._turn:
                self._threads.discard(threading.current_thread())

    def _forget(self) -> None:
        self._turn = threading.Lock()
        self._threads.clear()


def new_folder() -> str:
    """Return the path of a folder that a helper will create."""
    return os.path.join(hostfs.temporary_folder(), f"cloche-{os.getpid()}-work-{os.urandom(6).hex()}")


def remove_folders() -> list[str]:
    """Remove this user's unused workspace folders from the temporary folder; return their paths."""
    names: list[str] = []
    folder = ""
    with suppress_logged(log, "nobody may look into the temporary folder, or it is gone", OSError, BackendUnavailable):
        folder = os.path.realpath(hostfs.temporary_folder())
        names = os.listdir(folder)
    folder_names = sorted(name for name in names if _NAME.fullmatch(name))
    return [path for name in folder_names if _remove_unused(path := os.path.join(folder, name))]


def _remove_unused(path: str) -> bool:
    """Remove a folder that is this user's and not in use, following no link; tell whether it was removed."""
    is_removed = False
    with suppress_logged(log, f"{path} stays", OSError):
        held = hostfs.open_folder(path)
        try:
            if os.fstat(held).st_uid == os.geteuid():
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if not any(used == path or used.startswith(f"{path}/") for used in _paths_in_use()):
                    WorkFolder(path, "", "", None).remove()
                    is_removed = True
        finally:
            os.close(held)
    return is_removed


def _paths_in_use() -> Iterator[str]:
    """Yield mount points, and working folders, roots and open files of other processes, as far as they are readable."""
    with open("/proc/self/mountinfo", errors="surrogateescape") as file:
        yield from [line.split()[4] for line in file]
    ours = str(os.getpid())
    for pid in (name for name in os.listdir("/proc") if name.isdigit() and name != ours):
        with suppress_logged(log, f"process {pid} is gone, or another user's", OSError):
            yield os.readlink(f"/proc/{pid}/cwd")
            for fd in os.listdir(f"/proc/{pid}/fd"):
                with suppress_logged(log, f"descriptor {fd} of {pid} is closed", OSError):
                    yield os.readlink(f"/proc/{pid}/fd/{fd}")
