"""Measure, by trying, what this host lets the caller enforce.

The trying happens in a process of its own: it makes the namespaces, builds a root, mounts /proc, asks for
Landlock and seccomp, and makes and removes a control group. Nothing is inferred from a version or a file that says
so, because containers, distributions and hardening all answer differently from what they announce.
"""

from __future__ import annotations

import functools
import marshal
import os
import sys

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
        **look(),
    }
    sys.stdout.buffer.write(marshal.dumps(findings))
    sys.stdout.flush()
    os._exit(0)


def look() -> dict[str, Any]:
    """Find out what takes no process of its own: it is the caller's, too, where the rest was tried before."""
    return {
        "cgroup": _cgroup(),
        "uid": os.geteuid(),
        "owns_ids": owns_ids(),
        "lists_children": os.path.exists("/proc/self/task/" + str(os.getpid()) + "/children"),
    }


def _landlock() -> int:
    from .landlock import abi

    return abi()


def _seccomp() -> str:
    """Install a filter that allows everything and could ask, in a child; empty when that works."""
    from .notify import install
    from .syscalls import PR_SET_NO_NEW_PRIVS, prctl

    program = (0x7FFF0000_00_00_0006).to_bytes(8, "little")

    def attempt() -> None:
        prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        install(program)

    return _in_child(attempt)


def _namespaces() -> str:
    """Enter all namespaces and build a root with a bind and a /proc in it; empty when that works."""
    from . import identity
    from .calls import perform_calls
    from .enter import switch_identity
    from .mounts import Bind, Proc, stage_root
    from .syscalls import clone
    from .watch import ALL_NAMESPACES

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
    report, tell = os.pipe()
    try:
        pid = clone(ALL_NAMESPACES)
    except OSError as error:
        return str(error.strerror)
    if pid == 0:
        os.read(ready, 1)
        os.write(tell, _outcome(build).encode()[:4000])
        os._exit(0)
    os.close(tell)
    try:
        outside = PROBE_ID if can_map else os.geteuid()
        gid = outside if can_map else os.getegid()
        identity.write_maps(pid, inside_id=1000, outside_uid=outside, outside_gid=gid, privileged=can_map)
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
    """Tell whether our id 0 is 0 further out as well, as far as can be seen."""
    return any(first == 0 and outside == 0 for first, outside, _ in _own_id_map())


def _own_id_map() -> list[tuple[int, int, int]]:
    with open("/proc/self/uid_map", encoding="ascii") as file:
        rows = [tuple(int(word) for word in line.split()) for line in file]
    return [(row[0], row[1], row[2]) for row in rows]


def _idmapped() -> str:
    """Make an id-mapped mount of the interpreter's folder; empty when that works."""
    if not owns_ids():
        return "needs root"
    from .idmapped import open_idmapped

    def attempt() -> None:
        for fd in open_idmapped([os.path.dirname(os.path.realpath(sys.executable))], PROBE_ID).values():
            os.close(fd)

    answer = _outcome(attempt)
    return "" if answer == "ok" else answer


def _can_switch_identity() -> bool:
    return os.geteuid() == 0 and not _in_child(lambda: os.setresuid(PROBE_ID, PROBE_ID, PROBE_ID))


def _cgroup() -> dict[str, Any]:
    """Find a place for control groups and make one there; `folders` is empty when there is none."""
    found = _cgroup_v2() or _cgroup_v1()
    if not found:
        return {"version": 0, "folders": {}, "reason": "no control group that this user may make groups in"}
    name = f"cloche-probe-{os.getpid()}-{os.urandom(4).hex()}"
    for folder in dict.fromkeys(found["folders"].values()):
        answer = _outcome(functools.partial(_make_and_remove, f"{folder}/{name}"))
        if answer != "ok":
            return {"version": 0, "folders": {}, "reason": answer}
    return found


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
    places = {}
    with open("/proc/self/mounts", encoding="utf-8") as file:
        lines = file.read().splitlines()
    for line in lines:
        _, place, fstype, options, *_ = line.split(" ")
        if fstype == kind:
            names = [word for word in options.split(",") if word in CONTROLLERS] if kind == "cgroup" else [""]
            places.update(dict.fromkeys(names, place))
    return places


def _cgroup_v1() -> dict[str, Any] | None:
    places, own = _mounted("cgroup"), _own_groups()
    folders = {}
    for controller in CONTROLLERS:
        if controller not in places or controller not in own:
            return None
        base = places[controller]
        folder = base + own[controller].rstrip("/")
        folder = folder if os.path.isdir(folder) else base
        if not os.access(folder, os.W_OK):
            return None
        folders[controller] = folder
    return {"version": 1, "folders": folders, "reason": ""}


def _cgroup_v2() -> dict[str, Any] | None:
    """Take the nearest group above us that may have children of ours with all three controllers."""
    place, path = _mounted("cgroup2").get(""), _own_groups().get("")
    if place is None or path is None:
        return None
    folder = place + path.rstrip("/")
    while len(folder) >= len(place):
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
