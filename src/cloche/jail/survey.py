"""Try every kernel feature on its own, for `cloche doctor`: which of them work here, and the kernel's answer.

The probe asks one question, whether all of them together make a jail, and a run waits for its answer. This asks
many, in a process of its own as well, and nobody waits but the doctor. Each attempt is one function; what cannot be
taken back happens in a child. A finding is `(ok, detail)`: the kernel's error when it refused, a fact when it did not.
"""

from __future__ import annotations

import marshal
import os
import sys

from . import probe
from .syscalls import (
    CLONE_NEWCGROUP,
    CLONE_NEWIPC,
    CLONE_NEWNET,
    CLONE_NEWNS,
    CLONE_NEWPID,
    CLONE_NEWUSER,
    CLONE_NEWUTS,
    MS_NODEV,
    MS_NOEXEC,
    MS_NOSUID,
    MS_PRIVATE,
    MS_REC,
    PR_SET_NO_NEW_PRIVS,
    address_of,
    call,
    clone,
    close_range,
    prctl,
)  # fmt: skip

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    Finding = tuple[bool, str]

NAMESPACES = {
    "user": 0,
    "mount": CLONE_NEWNS,
    "pid": CLONE_NEWPID,
    "network": CLONE_NEWNET,
    "ipc": CLONE_NEWIPC,
    "uts": CLONE_NEWUTS,
    "cgroup": CLONE_NEWCGROUP,
}
SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_NEW_LISTENER = 1, 8
RET_ALLOW = (0x7FFF0000_00_00_0006).to_bytes(8, "little")
SIGKILL = 9
EPERM = 1
OUTSIDE_ID = 1_900_000_000


def main() -> None:
    """Try everything and write the findings to standard output; the survey process's whole life."""
    findings: dict[str, Any] = {f"{name} namespace": _namespace(flag) for name, flag in NAMESPACES.items()}
    findings |= {name: attempt() for name, attempt in ATTEMPTS.items()}
    findings |= _controllers()
    sys.stdout.buffer.write(marshal.dumps(findings))
    sys.stdout.flush()
    os._exit(0)


def _answer(error: str, fact: str = "") -> Finding:
    """Return a finding from an attempt's error text, empty when it worked."""
    return not error, error or fact


def _namespace(flag: int) -> Finding:
    """Make one namespace, in a user namespace of its own as the jail does."""
    return _answer(_in_namespaces(flag, lambda: None))


def _in_namespaces(flags: int, attempt: Callable[[], object]) -> str:
    """Attempt something as the creator of new namespaces; empty when it works, else the kernel's answer."""
    reading, writing = os.pipe()
    try:
        pid = clone(CLONE_NEWUSER | flags)
    except OSError as error:
        os.close(reading)
        os.close(writing)
        return str(error)
    if pid == 0:
        os.write(writing, probe._outcome(attempt).encode()[:4000])
        os._exit(0)
    os.close(writing)
    said = os.read(reading, 4096).decode()
    os.close(reading)
    os.waitpid(pid, 0)
    return "" if said == "ok" else said or "the attempt was killed"


def _own_proc() -> Finding:
    from .calls import perform_calls
    from .mounts import mount

    calls = [
        mount("none", "/", "", MS_REC | MS_PRIVATE),
        mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC),
    ]
    return _answer(_in_namespaces(CLONE_NEWNS | CLONE_NEWPID, lambda: perform_calls(calls)))


def _detached_mounts() -> Finding:
    """Copy a mount, make it read-only and attach it: the calls that the jail's root is built from."""
    from .calls import perform_calls
    from .mounts import STAGE, Bind, mount, move_mount

    system = Bind("/usr", "usr")
    calls = [
        mount("none", "/", "", MS_REC | MS_PRIVATE),
        *system.opening(),
        move_mount(system.register, STAGE),
    ]
    return _answer(_in_namespaces(CLONE_NEWNS, lambda: perform_calls(calls)))


def _whole_jail() -> Finding:
    return _answer(probe._namespaces())


def _idmapped() -> Finding:
    return _answer(probe._idmapped())


def _seccomp() -> Finding:
    return _answer(probe._seccomp())


def _seccomp_listener() -> Finding:
    """Install a filter with a listener, as the fork of a live session will need."""

    def attempt() -> None:
        prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        program = (1).to_bytes(8, "little") + address_of(RET_ALLOW)
        call("seccomp", SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_NEW_LISTENER, program)

    return _answer(probe._in_child(attempt))


def _landlock() -> Finding:
    """Let Landlock refuse a file in a child, and see that it does."""
    from .landlock import CREATE_RULESET_VERSION, abi, restrict

    def attempt() -> None:
        prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        restrict([("/usr", "read")])
        try:
            os.close(os.open("/proc/self/status", os.O_RDONLY))
        except PermissionError:
            return
        raise OSError(0, "a ruleset is accepted but refuses nothing")

    version = abi()
    if not version:
        return False, probe._outcome(lambda: call("landlock_create_ruleset", 0, 0, CREATE_RULESET_VERSION))
    return _answer(probe._in_child(attempt), f"version {version}")


def _landlock_scopes() -> Finding:
    """Signal the parent from inside a Landlock domain; with scopes that is refused."""
    from .landlock import abi, restrict

    def attempt() -> None:
        prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        restrict([])
        try:
            os.kill(os.getppid(), 0)
        except OSError as error:
            if error.errno == EPERM:
                return
            raise
        raise OSError(0, "a signal still leaves the domain")

    if abi() < 6:
        return False, f"they need Landlock version 6; this is {abi()}"
    return _answer(probe._in_child(attempt), "signals and abstract sockets stay inside")


def _no_new_privileges() -> Finding:
    return _answer(probe._in_child(lambda: prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)))


def _close_range() -> Finding:
    return _answer(probe._in_child(lambda: close_range(4000)))


def _pidfd() -> Finding:
    answer = probe._outcome(lambda: os.close(os.pidfd_open(os.getpid())))
    return _answer("" if answer == "ok" else answer)


def _proc_children() -> Finding:
    """Find a child of ours in /proc: how trees are seen where there is no process namespace."""
    pid = os.fork()
    if pid == 0:
        os.read(os.pipe()[0], 1)
    try:
        with open(f"/proc/self/task/{os.getpid()}/children", encoding="ascii") as file:
            return str(pid) in file.read().split(), ""
    except OSError as error:
        return False, str(error)
    finally:
        os.kill(pid, SIGKILL)
        os.waitpid(pid, 0)


def _outside_id() -> Finding:
    """Become an id of nobody's, as root does for every sandbox."""
    if os.geteuid() != 0:
        return False, f"an ordinary user (uid {os.geteuid()}) keeps their own id, but for a range in /etc/subuid"
    return _answer(probe._in_child(lambda: os.setresuid(OUTSIDE_ID, OUTSIDE_ID, OUTSIDE_ID)), f"from {OUTSIDE_ID}")


def _cgroup_version() -> Finding:
    found = probe._cgroup()
    return bool(found["version"]), f"version {found['version']}" if found["version"] else found["reason"]


def _controllers() -> dict[str, Finding]:
    """Make a group per controller, write its limit, remove it."""
    from .cgroups import FILES, Cgroup

    found = probe._cgroup()
    if not found["version"]:
        return {f"{name} controller": (False, found["reason"]) for name in probe.CONTROLLERS}
    version, answers = found["version"], {}
    for name in probe.CONTROLLERS:
        folder = f"{found['folders'][name]}/cloche-probe-{os.getpid()}-{name}"
        group = Cgroup(version, {name: folder})
        answer = probe._outcome(lambda group=group: group.create(memory_bytes=1 << 28, pids=64, cpus=0.5))  # type: ignore[misc]
        group.remove()
        fact = f"{FILES[version][name][0][0]} is writable"
        answers[f"{name} controller"] = _answer("" if answer == "ok" else answer, fact)
    return answers


def _clone_into_cgroup() -> Finding:
    """Give birth to a child inside a group of version 2."""
    found = probe._cgroup_v2()
    if found is None:
        return False, "needs a delegated control group of version 2"
    folder = f"{found['folders']['pids']}/cloche-probe-{os.getpid()}-born"
    os.mkdir(folder)
    try:
        return _answer(_be_born_in(folder))
    finally:
        os.rmdir(folder)


def _be_born_in(folder: str) -> str:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        pid = clone(0, fd)
    except OSError as error:
        return str(error)
    finally:
        os.close(fd)
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    return ""


ATTEMPTS: dict[str, Callable[[], Finding]] = {
    "own /proc": _own_proc,
    "detached mounts": _detached_mounts,
    "all namespaces together": _whole_jail,
    "id-mapped mounts": _idmapped,
    "outside id": _outside_id,
    "no new privileges": _no_new_privileges,
    "seccomp filter": _seccomp,
    "seccomp listener": _seccomp_listener,
    "landlock": _landlock,
    "landlock scopes": _landlock_scopes,
    "control groups": _cgroup_version,
    "birth in a group": _clone_into_cgroup,
    "close_range": _close_range,
    "pidfd": _pidfd,
    "children in /proc": _proc_children,
}
