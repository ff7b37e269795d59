"""What a container of gVisor is made of, decided purely: its bundle, and the mounts that must be there before.

The root is the host's own system, read-only, put together as the native jail's is: the same rows make both. It is made
below a tmpfs in the place's own mount namespace, so nothing of a container is ever a file of the host's.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cloche.core.limits import Limits
from cloche.core.policy import Policy
from cloche.core.units import MIB
from cloche.jail.calls import EEXIST, make
from cloche.jail.mounts import chdir, from_rows, mount
from cloche.jail.syscalls import (
    AT_FDCWD,
    MS_NODEV,
    MS_NOEXEC,
    MS_NOSUID,
    MS_PRIVATE,
    MS_REC,
)

from .. import layout
from ..containers.boot import ARGUMENTS
from ..containers.guest import ENVIRONMENT, GVISOR_THREADS, REAPER_BYTES, REAPERS, ULIMITS
from ..containers.seccomp import profile
from .engine import Engine

if TYPE_CHECKING:
    from cloche.jail.calls import Call

USERS = {None: ("sandbox", 1000), "nobody": ("nobody", 65534)}
SYSTEM_PATH = "/usr/local/bin:/usr/bin:/bin"
TASKS_EACH = 8  # at most, that gVisor has for each thread of the guest's, on any platform
# What gVisor itself holds besides the guest's memory.
SENTRY_BYTES = 64 * MIB
STAGE_BYTES = 64 * MIB  # for bundles, and what runsc writes down of its containers
# Folders that are covered in the place; the first that is here, and is above nothing that is shown.
STAGES = ("/dev/shm", "/mnt", "/media", "/srv", "/opt")
FOLDERS = ("proc", "sys", "dev", "tmp", "workspace")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """Say what a container shows of the host: the interpreter of our first process, and paths besides the system."""

    python: str
    binds: tuple[str, ...]

    @property
    def id(self) -> str:
        """Name exactly this one."""
        return "\0".join((self.python, *self.binds))

    @property
    def name(self) -> str:
        """Name it to people."""
        return "this host's own system"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Describe one container and the place that it is in."""

    engine: Engine
    shown: Shown
    user: str
    memory_bytes: int
    guest_bytes: int
    cpus: float
    pids: int
    guests: int
    disk_bytes: int
    inodes: int
    tmp_bytes: int
    is_tmp_writable: bool

    @property
    def uid(self) -> int:
        """Return the guest's id, as it sees it itself.

        An ordinary user has one id to give, and runsc wants it to be 0 in its user namespace: files that anybody else
        makes could not be given to them.
        """
        return 0 if self.engine.is_rootless else dict(USERS.values())[self.user]

    @property
    def stage(self) -> str:
        """Return the folder that holds everything of a place."""
        return stage_for(self.shown.binds)

    def folder(self, number: int) -> str:
        """Return where container `number` of a place is put together."""
        return f"{self.stage}/{number}"

    def open_calls(self) -> list[Call]:
        """Return what makes the place: a stage, a /proc of its own, the workspace."""
        workspace = f"size={self.disk_bytes},nr_inodes={self.inodes},mode=0700,uid={self.uid},gid={self.uid}"
        return [
            mount("none", "/", "", MS_REC | MS_PRIVATE),
            mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC),
            mount("tmpfs", self.stage, "tmpfs", MS_NOSUID | MS_NODEV, f"size={STAGE_BYTES},mode=0755"),
            chdir(self.stage),
            *(_folder(name) for name in ("workspace", "state")),
            mount("tmpfs", "workspace", "tmpfs", MS_NOSUID | MS_NODEV, workspace),
        ]

    def start_calls(self, number: int) -> list[Call]:
        """Return what puts one container together: a root, and the bundle's description of it."""
        folder = self.folder(number)
        rows = [row for row in layout.system_rows() if row[0] != "device" and row not in _DEVICE_LINKS]
        rows += layout.etc_rows(self.user, self.uid)
        rows += [("bind", path, path[1:]) for path in self.shown.binds]
        shown: list[Any] = from_rows(rows)
        return [
            chdir(self.stage),
            _folder(str(number)),
            mount("tmpfs", folder, "tmpfs", MS_NOSUID | MS_NODEV, f"size={STAGE_BYTES},mode=0755"),
            chdir(folder),
            *_calls(from_rows([("text", "config.json", json.dumps(self.config(number)))])),
            _folder("root"),
            chdir(f"{folder}/root"),
            *(_folder(name) for name in FOLDERS),
            *_calls(shown),
            chdir("/"),
        ]

    def words(self, number: int) -> list[str]:
        """Return the words that start container `number`."""
        return [
            *self.engine.words(),
            f"--root={self.stage}/state",
            "run",
            f"--bundle={self.folder(number)}",
            f"cloche-{number}",
        ]

    def config(self, number: int) -> dict[str, Any]:
        """Return the bundle's description, as the OCI runtime specification has it."""
        return {
            "ociVersion": "1.0.2",
            "process": self._process(),
            "root": {"path": f"{self.folder(number)}/root", "readonly": True},
            "hostname": "sandbox",
            "mounts": [_mount(*row) for row in (*self._mounts(), *self._inner_mounts(number))],
            "linux": {
                "namespaces": [{"type": kind} for kind in ("pid", "ipc", "uts", "mount", "network")],
                "seccomp": _seccomp(),
            },
        }

    def _process(self) -> dict[str, Any]:
        rlimits = {**ULIMITS, "nproc": self.guests + REAPERS}
        none: dict[str, list[str]] = {
            kind: [] for kind in ("bounding", "effective", "inheritable", "permitted", "ambient")
        }
        return {
            "terminal": False,
            "user": {"uid": self.uid, "gid": self.uid},
            "args": [self.shown.python, *ARGUMENTS],
            "env": [f"{name}={value}" for name, value in {"PATH": SYSTEM_PATH, **ENVIRONMENT}.items()],
            "cwd": "/",
            "capabilities": none,
            "noNewPrivileges": True,
            "rlimits": [
                {"type": f"RLIMIT_{name.upper()}", "soft": most, "hard": most} for name, most in rlimits.items()
            ],
        }

    def _mounts(self) -> list[tuple[str, str, str, list[str]]]:
        sized = ["nosuid", "nodev", f"size={self.tmp_bytes}", f"nr_inodes={self.inodes}", "mode=1777"]
        return [
            ("/proc", "proc", "proc", ["nosuid", "noexec", "nodev"]),
            ("/dev", "tmpfs", "tmpfs", ["nosuid", "size=65536k", "mode=755"]),
            ("/dev/shm", "tmpfs", "tmpfs", [*sized, "noexec"]),
            ("/tmp", "tmpfs", "tmpfs", [*sized, "rw" if self.is_tmp_writable else "ro"]),
            ("/workspace", "bind", f"{self.stage}/workspace", ["bind", "rw", "nosuid", "nodev"]),
        ]

    def _inner_mounts(self, number: int) -> list[tuple[str, str, str, list[str]]]:
        """Show once more what those above cover: an environment in /tmp, say."""
        covers = tuple(f"{target}/" for target, kind, *_ in self._mounts() if kind == "tmpfs")  # empty, so far
        inner = [path for path in self.shown.binds if path.startswith(covers)]
        return [
            (path, "bind", f"{self.folder(number)}/root{path}", ["bind", "ro", "nosuid", "nodev"]) for path in inner
        ]

    def amounts(self) -> dict[str, float]:
        """Return the amounts of the control group around gVisor."""
        return {"memory_bytes": self.memory_bytes, "pids": self.pids, "cpus": self.cpus}


def plan_container(policy: Policy, limits: Limits, *, engine: Engine, shown: Shown) -> Plan:
    """Return the plan of one container.

    gVisor does not tell what a program holds from its files in memory, so the cap leaves room for both.
    """
    stored = 2 * limits.tmp_bytes + REAPER_BYTES
    return Plan(
        engine=engine,
        shown=shown,
        user=USERS[policy.user if policy.user in USERS else None][0],
        guest_bytes=limits.memory_bytes + stored,
        memory_bytes=limits.memory_bytes + stored + limits.disk_bytes + SENTRY_BYTES,
        cpus=limits.cpus,
        guests=limits.pids,
        pids=(limits.pids + REAPERS) * TASKS_EACH + GVISOR_THREADS,
        disk_bytes=limits.disk_bytes,
        inodes=limits.inodes,
        tmp_bytes=limits.tmp_bytes,
        is_tmp_writable="/tmp" in policy.writable_paths,
    )


@functools.cache
def stage_for(binds: Sequence[str]) -> str:
    """Return the folder to cover: one that is here, and holds nothing that is to be shown."""
    for folder in STAGES:
        if os.path.isdir(folder) and not any(layout.is_below(path, folder) for path in binds):
            return folder
    return "/var"


_DEVICE_LINKS = tuple(("symlink", points_to, target) for points_to, target in layout.DEVICE_LINKS)


def _folder(name: str) -> Call:
    return make("mkdirat", AT_FDCWD, os.fsencode(name), 0o755, excuse=(EEXIST,))


def _calls(mounts: Sequence[Any]) -> list[Call]:
    """Return the calls that show each of `mounts`, those of a bind with its opening."""
    return [one for shown in mounts for one in (*getattr(shown, "opening", list)(), *shown.calls())]


def _mount(target: str, kind: str, source: str, options: Sequence[str]) -> dict[str, Any]:
    return {"destination": target, "type": kind, "source": source, "options": list(options)}


def _seccomp() -> Mapping[str, Any]:
    """Return the containers' profile in the words of the OCI specification.

    gVisor answers every refusal with EPERM, whatever a rule says, and the C library takes ENOSYS alone for "not there":
    so `clone3`, which would get that answer, is left to gVisor's own kernel. So is SO_LINGER, to which the filter would
    say yes: a socket that lingers is gVisor's own, and nobody outside can be made to close it.
    """
    found = profile()
    return {
        "defaultAction": found["defaultAction"],
        "architectures": [row["architecture"] for row in found["archMap"]],
        "syscalls": [{**_without_answer(rule), "action": "SCMP_ACT_ALLOW"} for rule in found["syscalls"]],
    }


def _without_answer(rule: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in rule.items() if name != "errnoRet"}
