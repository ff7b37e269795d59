"""Measure, by trying, the features that this host allows: whether a jail is possible, and each kernel feature.

All is tried in a separate process. Nothing is inferred from a version or from a file that announces a feature, because
containers, distributions and hardening often behave differently.

`main` answers one question, whether all features together make a jail, and a run waits for its answer: it makes the
namespaces, builds a root, mounts /proc, requests Landlock and seccomp, and makes and removes a control group.

`main_of_survey` tries every feature separately, for `cloche doctor`, and no run waits for it. Each attempt is one
function; changes that cannot be undone happen in a child. A finding is `(ok, detail)`: the kernel's error on refusal,
else a fact.
"""

from __future__ import annotations

import functools
import marshal
import os
import sys

from ..syscalls import (
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
    PR_SET_CHILD_SUBREAPER,
    PR_SET_NO_NEW_PRIVS,
    address_of,
    call,
    clone,
    close_range,
    prctl,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

CONTROLLERS = ("memory", "pids", "cpu")
PROBE_TIMEOUT_S = 20
PROBE_ID = 1_900_000_000  # the first of the outside ids


def main() -> None:
    """Try everything and write the findings to standard output; the probe process's whole life."""
    findings: dict[str, Any] = {
        "landlock": _landlock(),
        "seccomp": _seccomp(),
        "namespaces": _namespaces(),
        "idmapped": _idmapped(),
        "can_switch_identity": _can_switch_identity(),
        "processes": _processes(),
        **look(),
    }
    sys.stdout.buffer.write(marshal.dumps(findings))
    sys.stdout.flush()
    os._exit(0)


def look() -> dict[str, Any]:
    """Measure the features that need no separate process: the caller uses this too, if the others were tried before."""
    return {
        "cgroup": _cgroup(),
        "uid": os.geteuid(),
        "owns_ids": owns_ids(),
        "lists_children": os.path.exists("/proc/self/task/" + str(os.getpid()) + "/children"),
    }


def _landlock() -> int:
    from .privileges import abi

    return abi()


def _seccomp() -> str:
    """Install a filter that allows everything and could notify, in a child; empty when that works."""
    from ..seccomp_notify import install

    program = (0x7FFF0000_00_00_0006).to_bytes(8, "little")

    def attempt() -> None:
        prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        install(program)

    return _in_child(attempt)


def _namespaces() -> str:
    """Enter all namespaces and build a root with a bind and a /proc in it; empty when that works."""
    from .. import user_namespaces
    from ..steps import perform_calls
    from ..supervisor import ALL_NAMESPACES
    from .mounts import Bind, Proc, stage_root
    from .plan import switch_identity

    can_map = owns_ids()
    system = Bind("/usr", "usr")
    calls = [
        *system.opening(),
        *switch_identity(1000, can_set_groups=can_map),
        *stage_root(),
        *system.calls(),
        *Proc([]).calls(),
    ]

    def build() -> None:
        perform_calls(calls)

    if os.geteuid() == 0 and not can_map and _is_outside_root():
        return "uid_map: this root may not give the guest another id, and the guest is never root"
    ready, go = os.pipe()
    report, writing = os.pipe()
    try:
        pid = clone(ALL_NAMESPACES)
    except OSError as error:
        return str(error.strerror)
    if pid == 0:
        os.close(go)  # the pipe ends with the parent then, so that a killed one leaves no child that waits for it
        if os.read(ready, 1):
            os.write(writing, _outcome(build).encode()[:4000])
        os._exit(0)
    os.close(writing)
    try:
        outside = PROBE_ID if can_map else os.geteuid()
        gid = outside if can_map else os.getegid()
        user_namespaces.write_maps(pid, inside_id=1000, outside_uid=outside, outside_gid=gid, privileged=can_map)
    except OSError as error:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
        return f"uid_map: {error.strerror}"
    os.write(go, b"g")
    answer = os.read(report, 4096).decode()
    os.waitpid(pid, 0)
    return answer if answer != "ok" else ""


def owns_ids() -> bool:
    """Tell whether we are a root that may give out the outside ids: they are mapped where we are."""
    if os.geteuid() != 0:
        return False
    return any(first <= PROBE_ID < first + count for first, _, count in _own_id_map())


def _is_outside_root() -> bool:
    """Tell whether our id 0 is also 0 outside, as far as can be seen."""
    return any(first == 0 and outside == 0 for first, outside, _ in _own_id_map())


def _own_id_map() -> list[tuple[int, int, int]]:
    with open("/proc/self/uid_map", encoding="ascii") as file:
        rows = [tuple(int(number) for number in line.split()) for line in file]
    return [(row[0], row[1], row[2]) for row in rows]


def _idmapped() -> str:
    """Make an id-mapped mount of the interpreter's folder; empty when that works."""
    if not owns_ids():
        return "needs root"
    from ..user_namespaces import open_idmapped

    def attempt() -> None:
        for fd in open_idmapped([os.path.dirname(os.path.realpath(sys.executable))], PROBE_ID).values():
            os.close(fd)

    answer = _outcome(attempt)
    return "" if answer == "ok" else answer


def _can_switch_identity() -> bool:
    return os.geteuid() == 0 and not _in_child(lambda: os.setresuid(PROBE_ID, PROBE_ID, PROBE_ID))


def _processes() -> str:
    """Become a subreaper, and open a descriptor of a process, as every parent of guests does."""
    answer = _outcome(lambda: prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0))
    if answer != "ok":
        return f"no child subreaper: {answer}"
    is_available, answer = _pidfd()
    return "" if is_available else f"pidfd_open: {answer}"


def _cgroup() -> dict[str, Any]:
    """Find a place for control groups and make one there; without one, `folders` is empty."""
    cgroups = _cgroup_v2() or _cgroup_v1()
    if not cgroups:
        return {"version": 0, "folders": {}, "reason": "no control group that this user may make groups in"}
    name = f"cloche-probe-{os.getpid()}-{os.urandom(4).hex()}"
    for folder in dict.fromkeys(cgroups["folders"].values()):
        answer = _outcome(functools.partial(_make_and_remove, f"{folder}/{name}"))
        if answer != "ok":
            return {"version": 0, "folders": {}, "reason": answer}
    return cgroups


def _make_and_remove(folder: str) -> None:
    os.mkdir(folder)
    os.rmdir(folder)


def _own_groups() -> dict[str, str]:
    """Return this process's path per version 1 controller, and under the empty name that of version 2."""
    with open("/proc/self/cgroup", encoding="utf-8") as file:
        rows = [line.rstrip("\n").split(":", 2) for line in file]
    return {name: path for _, names, path in rows for name in names.split(",")}


def _mounted(kind: str) -> dict[str, str]:
    """Return where control groups of `kind` are mounted: by controller for version 1, under "" for version 2."""
    mount_points = {}
    with open("/proc/self/mounts", encoding="utf-8") as file:
        lines = file.read().splitlines()
    for line in lines:
        _, mount_point, fstype, options, *_ = line.split(" ")
        if fstype == kind:
            names = [option for option in options.split(",") if option in CONTROLLERS] if kind == "cgroup" else [""]
            mount_points.update(dict.fromkeys(names, mount_point))
    return mount_points


def memory_stat() -> str:
    """Return the file with the memory statistics of our own control group, empty for none.

    In a container without a namespace of control groups, its own group is mounted where the root's would be.
    """
    own = _own_groups()
    for controller, kind in (("memory", "cgroup"), ("", "cgroup2")):
        base = _mounted(kind).get(controller)
        if base is not None and controller in own:
            candidates = (f"{base}{own[controller].rstrip('/')}", base)
            folder = next((candidate for candidate in candidates if os.path.isfile(f"{candidate}/memory.stat")), None)
            if folder is not None:
                return f"{folder}/memory.stat"
    return ""


def _cgroup_v1() -> dict[str, Any] | None:
    mount_points, own = _mounted("cgroup"), _own_groups()
    folders = {}
    for controller in CONTROLLERS:
        if controller not in mount_points or controller not in own:
            return None
        base = mount_points[controller]
        folder = base + own[controller].rstrip("/")
        folder = folder if os.path.isdir(folder) else base
        if not os.access(folder, os.W_OK):
            return None
        folders[controller] = folder
    return {"version": 1, "folders": folders, "reason": ""}


def _cgroup_v2() -> dict[str, Any] | None:
    """Return the nearest group above us that can have child groups with all three controllers."""
    mount_point, path = _mounted("cgroup2").get(""), _own_groups().get("")
    if mount_point is None or path is None:
        return None
    folder = mount_point + path.rstrip("/")
    while len(folder) >= len(mount_point):
        if _delegates(folder):
            return {"version": 2, "folders": dict.fromkeys(CONTROLLERS, folder), "reason": ""}
        folder = os.path.dirname(folder)
    return None


def _delegates(folder: str) -> bool:
    try:
        with open(f"{folder}/cgroup.subtree_control", encoding="ascii") as file:
            enabled = file.read().split()
    except OSError:
        return False
    return (
        set(CONTROLLERS) <= set(enabled) and os.access(folder, os.W_OK) and os.access(f"{folder}/cgroup.procs", os.W_OK)
    )


def _outcome(attempt: Callable[[], object]) -> str:
    try:
        attempt()
    except OSError as error:
        return str(error)
    return "ok"


def _in_child(attempt: Callable[[], object]) -> str:
    """Attempt something irrevocable in a child; empty when it works."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(writing, _outcome(attempt).encode()[:4000])
        os._exit(0)
    os.close(writing)
    answer = os.read(reading, 4096).decode()
    os.waitpid(pid, 0)
    os.close(reading)
    return "" if answer == "ok" else answer or "the attempt was killed"


def run_probe(executable: str) -> Mapping[str, Any]:
    """Run the probe process and return its findings; the caller's side. Raises OSError when it cannot run."""
    from .launch import run_probe_process

    findings: Mapping[str, Any] = marshal.loads(run_probe_process(executable, PROBE_TIMEOUT_S))
    return findings


if TYPE_CHECKING:
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


def main_of_survey() -> None:
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
    """Make one namespace, in a new user namespace as the jail does."""
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
        os.write(writing, _outcome(attempt).encode()[:4000])
        os._exit(0)
    os.close(writing)
    output = os.read(reading, 4096).decode()
    os.close(reading)
    os.waitpid(pid, 0)
    return "" if output == "ok" else output or "the attempt was killed"


def _own_proc() -> Finding:
    from ..steps import perform_calls
    from .mounts import mount

    calls = [
        mount("none", "/", "", MS_REC | MS_PRIVATE),
        mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC),
    ]
    return _answer(_in_namespaces(CLONE_NEWNS | CLONE_NEWPID, lambda: perform_calls(calls)))


def _detached_mounts() -> Finding:
    """Copy a mount, make it read-only and attach it: the calls that the jail's root is built from."""
    from ..steps import perform_calls
    from .mounts import STAGE, Bind, mount, move_mount

    system = Bind("/usr", "usr")
    calls = [
        mount("none", "/", "", MS_REC | MS_PRIVATE),
        *system.opening(),
        move_mount(system.register, STAGE),
    ]
    return _answer(_in_namespaces(CLONE_NEWNS, lambda: perform_calls(calls)))


def _whole_jail() -> Finding:
    return _answer(_namespaces())


def _survey_idmapped() -> Finding:
    return _answer(_idmapped())


def _survey_seccomp() -> Finding:
    return _answer(_seccomp())


def _seccomp_listener() -> Finding:
    """Install a filter with a listener, as the fork of a live session will need."""

    def attempt() -> None:
        prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        program = (1).to_bytes(8, "little") + address_of(RET_ALLOW)
        call("seccomp", SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_NEW_LISTENER, program)

    return _answer(_in_child(attempt))


def _survey_landlock() -> Finding:
    """Let Landlock refuse a file in a child, and check that it does."""
    from .privileges import CREATE_RULESET_VERSION, abi, restrict

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
        return False, _outcome(lambda: call("landlock_create_ruleset", 0, 0, CREATE_RULESET_VERSION))
    return _answer(_in_child(attempt), f"version {version}")


def _landlock_scopes() -> Finding:
    """Signal the parent from inside a Landlock domain; with scopes that is refused."""
    from .privileges import abi, restrict

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
    return _answer(_in_child(attempt), "signals and abstract sockets stay inside")


def _no_new_privileges() -> Finding:
    return _answer(_in_child(lambda: prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)))


def _subreaper() -> Finding:
    return _answer(_in_child(lambda: prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)))


def _close_range() -> Finding:
    return _answer(_in_child(lambda: close_range(4000)))


def _pidfd() -> Finding:
    answer = _outcome(lambda: os.close(os.pidfd_open(os.getpid())))
    return _answer("" if answer == "ok" else answer)


def _proc_children() -> Finding:
    """Find our own child in /proc: trees are read like this without a process namespace."""
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


def _children_memory() -> Finding:
    """Open the memory of our own child: at level confined, this reads the address that a guest connects to."""
    pid = os.fork()
    if pid == 0:
        os.read(os.pipe()[0], 1)
    try:
        os.close(os.open(f"/proc/{pid}/mem", os.O_RDONLY | os.O_CLOEXEC))
    except OSError as error:
        return False, str(error)
    finally:
        os.kill(pid, SIGKILL)
        os.waitpid(pid, 0)
    return True, ""


def _outside_id() -> Finding:
    """Become an unused id, as root does for every sandbox."""
    if os.geteuid() != 0:
        return (
            False,
            f"an ordinary user (uid {os.geteuid()}) takes none themself; a range in /etc/subuid gives one (identity)",
        )
    return _answer(_in_child(lambda: os.setresuid(PROBE_ID, PROBE_ID, PROBE_ID)), f"from {PROBE_ID}")


def _cgroup_version() -> Finding:
    cgroups = _cgroup()
    return bool(cgroups["version"]), f"version {cgroups['version']}" if cgroups["version"] else cgroups["reason"]


def _controllers() -> dict[str, Finding]:
    """Make a group per controller, write its limit, remove it."""
    from ..cgroups import FILES, Cgroup

    cgroups = _cgroup()
    if not cgroups["version"]:
        return {f"{name} controller": (False, cgroups["reason"]) for name in CONTROLLERS}
    version, answers = cgroups["version"], {}
    for name in CONTROLLERS:
        folder = f"{cgroups['folders'][name]}/cloche-probe-{os.getpid()}-{name}"
        group = Cgroup(version, {name: folder})
        answer = _outcome(lambda group=group: group.create(memory_bytes=1 << 28, pids=64, cpus=0.5))  # type: ignore[misc]
        group.remove()
        fact = f"{FILES[version][name][0][0]} is writable"
        answers[f"{name} controller"] = _answer("" if answer == "ok" else answer, fact)
    return answers


def _clone_into_cgroup() -> Finding:
    """Clone a child into a group of version 2."""
    cgroups = _cgroup_v2()
    if cgroups is None:
        return False, "needs a delegated control group of version 2"
    folder = f"{cgroups['folders']['pids']}/cloche-probe-{os.getpid()}-born"
    os.mkdir(folder)
    try:
        return _answer(_clone_into(folder))
    finally:
        os.rmdir(folder)


def _clone_into(folder: str) -> str:
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


def _survey_oom_group() -> Finding:
    """Tell whether an out-of-memory kill ends one process, and not all in the caller's group."""
    mount_point, own = _mounted("cgroup2").get(""), _own_groups().get("", "")
    folder = killed_together(mount_point, own) if mount_point is not None else ""
    return _answer(f"memory.oom.group is 1 in {folder}: the kernel kills all in it, the caller too" if folder else "")


def killed_together(mount_point: str, own: str) -> str:
    """Return the outermost folder on the way to our own group of version 2 that is killed as one; empty for none."""
    folders, folder = [mount_point], mount_point
    for name in filter(None, own.split("/")):
        folder = f"{folder}/{name}"
        folders.append(folder)
    return next((folder for folder in folders if _says_one(f"{folder}/memory.oom.group")), "")


def _says_one(path: str) -> bool:
    try:
        with open(path, encoding="ascii") as file:
            return file.read().strip() == "1"
    except OSError:
        return False  # that of the root, say, or of another namespace


ATTEMPTS: dict[str, Callable[[], Finding]] = {
    "own /proc": _own_proc,
    "detached mounts": _detached_mounts,
    "all namespaces together": _whole_jail,
    "id-mapped mounts": _survey_idmapped,
    "outside id": _outside_id,
    "no new privileges": _no_new_privileges,
    "seccomp filter": _survey_seccomp,
    "seccomp listener": _seccomp_listener,
    "landlock": _survey_landlock,
    "landlock scopes": _landlock_scopes,
    "control groups": _cgroup_version,
    "birth in a group": _clone_into_cgroup,
    "one process at an OOM": _survey_oom_group,
    "close_range": _close_range,
    "pidfd": _pidfd,
    "children in /proc": _proc_children,
    "children's memory": _children_memory,
    "child subreaper": _subreaper,
}
