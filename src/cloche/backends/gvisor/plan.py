"""Settings of a gVisor container (a pure decision): mounts, bundle, limits, arguments of runsc, and the program.

The root is the host's own system, read-only, made from the same rows as the native jail's. It is built in a tmpfs in
the shim's mount namespace, so no file of a container is ever a file of the host. A container shows the same toolchains
as the native jail. `find_runsc` finds runsc.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import platform
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from cloche.core.languages import Engine as LanguageEngine
from cloche.core.languages import Language, language_named
from cloche.core.limits import MIB, Limits
from cloche.core.policy import Policy
from cloche.core.record import dataclass
from cloche.core.request import Request
from cloche.jail.setup.mounts import chdir, from_rows, mount
from cloche.jail.setup.seccomp import profile
from cloche.jail.steps import EEXIST, make
from cloche.jail.syscalls import AT_FDCWD, MS_NODEV, MS_NOEXEC, MS_NOSUID, MS_PRIVATE, MS_REC

from .. import layout
from ..certificates import files_and_variables
from ..containers.container import ARGUMENTS
from ..containers.program import (
    ENVIRONMENT,
    GVISOR_THREADS,
    REAPER_BYTES,
    REAPERS,
    ULIMITS,
    Program,
    SessionProgram,
    program_of,
    session_of,
)
from ..layout import SYSTEM_PATH, USERS, is_below
from ..network import NAME_SERVER_ADDRESS, network_rules
from ..session_languages import check_toolchain, session_language
from ..toolchain import (
    Toolchain,
    all_shown,
    engine_version,
    find_toolchain,
    has_customization,
    python_toolchain,
    user_site,
)

if TYPE_CHECKING:
    from cloche.core.network import NetworkRules
    from cloche.jail.steps import Call

log = logging.getLogger("cloche.gvisor")
RUNSC = "runsc"
PATH_VARIABLE, NONE = "CLOCHE_RUNSC", "none"
# gVisor's platforms, which intercept system calls, the fastest first; kvm needs a device and is not used.
PLATFORMS = ("systrap", "ptrace")
ASK_S = 10.0
INSTALL = (
    'Install gVisor\'s runsc: "sudo apt-get install runsc", or as https://gvisor.dev/docs/user_guide/install says; '
    "docker is not needed."
)

# The bundle.
TASKS_EACH = 8  # maximum number of host tasks that gVisor has per guest thread, on any platform
# Memory of gVisor itself.
SENTRY_BYTES = 64 * MIB
BUNDLE_BYTES = 64 * MIB  # for bundles, and the state of runsc
# Folders that a shim may mount over. The first that exists and contains no shown path is used.
BUNDLE_FOLDERS = ("/dev/shm", "/mnt", "/media", "/srv", "/opt")
FOLDERS = ("proc", "sys", "dev", "tmp", "workspace")
_DEVICE_LINKS = tuple(("symlink", points_to, target) for points_to, target in layout.DEVICE_LINKS)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunscEngine:
    """A runsc and its platform."""

    path: str
    version: str
    platform: str
    is_rootless: bool

    def argv(self, *, is_served: bool = False) -> list[str]:
        """Return the program and its global options.

        With `is_served`, gVisor uses the network stack of the network namespace that it runs in, which has only
        loopback.
        """
        return [
            self.path,
            f"--platform={self.platform}",
            f"--network={'host' if is_served else 'none'}",
            "--ignore-cgroups",
            "--oci-seccomp",
            *(["--rootless"] if self.is_rootless else []),
        ]


def find_runsc() -> str:
    """Return the path of runsc: the value of CLOCHE_RUNSC, else the one on PATH; "" if not found."""
    named = os.environ.get(PATH_VARIABLE, "")
    path = None if named == NONE else shutil.which(named or RUNSC)
    return os.path.realpath(path) if path else ""


def why_no_runsc() -> str:
    """Return why `find_runsc` found nothing."""
    named = os.environ.get(PATH_VARIABLE, "")
    if not named:
        return "there is no program runsc on PATH"
    return f"{PATH_VARIABLE} is {named!r}, " + (
        "so there is no program runsc" if named == NONE else "no program to run"
    )


@functools.cache
def version_of(path: str, age: int) -> str:  # noqa: ARG001 - part of the cache's key
    """Return the version that runsc prints, "" if it prints none. `age` is only part of the cache's key."""
    try:
        answer = subprocess.run(
            [path, "--version"], capture_output=True, stdin=subprocess.DEVNULL, timeout=ASK_S, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        log.debug("%s does not say its version: %s", path, error)
        return ""
    first = answer.stdout.decode("utf-8", "replace").splitlines()[:1]
    return first[0].removeprefix("runsc version ").strip() if first else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostView:
    """The parts of the host that a container shows: the interpreter of the first process, and paths besides the
    system.
    """

    python: str
    binds: tuple[str, ...]

    @property
    def id(self) -> str:
        """Return the identity of these contents."""
        return "\0".join((self.python, *self.binds))

    @property
    def name(self) -> str:
        """Return the name for messages."""
        return "this host's own system"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunscPlan:
    """Settings of one container and its namespaces."""

    engine: RunscEngine
    shown: HostView
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
    homes: tuple[str, ...] = ()  # additional writable folders, which share the workspace's size limit
    rules: NetworkRules | None = None  # set if the network is served
    rows: tuple[layout.Row, ...] = ()  # of further files

    @property
    def uid(self) -> int:
        """Return the guest's id as the guest sees it.

        An ordinary user can map a single id, and runsc requires it to be 0 in its user namespace, because files created
        under any other id could not be mapped.
        """
        return 0 if self.engine.is_rootless else dict(USERS.values())[self.user]

    @property
    def top(self) -> str:
        """Return the folder that holds all containers of a shim."""
        return bundle_folder(self.shown.binds)

    def folder(self, number: int) -> str:
        """Return the folder where container `number` of a shim is built."""
        return f"{self.top}/{number}"

    def open_calls(self) -> list[Call]:
        """Return the system calls that a shim makes first: mounts of the bundle folder, of a new /proc, and of the
        workspace.
        """
        owner = f"mode=0700,uid={self.uid},gid={self.uid}"
        workspace = f"size={self.disk_bytes},nr_inodes={self.inodes},{'mode=0755' if self.homes else owner}"
        return [
            mount("none", "/", "", MS_REC | MS_PRIVATE),
            mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC),
            mount("tmpfs", self.top, "tmpfs", MS_NOSUID | MS_NODEV, f"size={BUNDLE_BYTES},mode=0755"),
            chdir(self.top),
            *(_folder(name) for name in ("workspace", "state")),
            mount("tmpfs", "workspace", "tmpfs", MS_NOSUID | MS_NODEV, workspace),
            *(call for path in self._writable() for call in self._owned_folder(self._place_of(path))),
        ]

    def _writable(self) -> tuple[str, ...]:
        """Return the workspace and the homes if they share one file system; () if the workspace has its own."""
        return ("/workspace", *self.homes) if self.homes else ()

    def _place_of(self, path: str) -> str:
        return f"workspace/{path[1:].replace('/', '-')}" if self.homes else "workspace"

    def _owned_folder(self, folder: str) -> list[Call]:
        name = os.fsencode(folder)
        return [_folder(folder), make("fchownat", AT_FDCWD, name, self.uid, self.uid, 0)]

    def start_calls(self, number: int) -> list[Call]:
        """Return the system calls that build one container: its root, and the bundle's config.json."""
        folder = self.folder(number)
        rows = [row for row in layout.system_rows() if row[0] != "device" and row not in _DEVICE_LINKS]
        if self.rules is not None:
            rows += [*layout.etc_rows(self.user, self.uid, NAME_SERVER_ADDRESS), *files_and_variables()[0]]
        else:
            rows += layout.etc_rows(self.user, self.uid)
        rows += [*(("bind", path, path[1:]) for path in self.shown.binds), *self.rows]
        shown: list[Any] = from_rows(rows)
        return [
            chdir(self.top),
            _folder(str(number)),
            mount("tmpfs", folder, "tmpfs", MS_NOSUID | MS_NODEV, f"size={BUNDLE_BYTES},mode=0755"),
            chdir(folder),
            *_calls(from_rows([("text", "config.json", json.dumps(self.config(number)))])),
            _folder("root"),
            chdir(f"{folder}/root"),
            *(_folder(name) for name in FOLDERS),
            *(_folder(name) for path in self.homes for name in _folders_to(path)),
            *_calls(shown),
            chdir("/"),
        ]

    def argv(self, number: int) -> list[str]:
        """Return the arguments that start container `number`."""
        return [
            *self.engine.argv(is_served=self.rules is not None),
            f"--root={self.top}/state",
            "run",
            f"--bundle={self.folder(number)}",
            f"cloche-{number}",
        ]

    def config(self, number: int) -> dict[str, Any]:
        """Return the bundle's config.json, as the OCI runtime specification defines it."""
        return {
            "ociVersion": "1.0.2",
            "process": self._process(),
            "root": {"path": f"{self.folder(number)}/root", "readonly": True},
            "hostname": "sandbox",
            "mounts": [_mount(*row) for row in (*self._mounts(), *self._inner_mounts(number))],
            "linux": {
                "namespaces": [{"type": kind} for kind in self._namespaces()],
                "seccomp": _seccomp(),
            },
        }

    def _namespaces(self) -> tuple[str, ...]:
        """Return the namespaces that runsc makes. A served network namespace exists before runsc starts."""
        return ("pid", "ipc", "uts", "mount", *(() if self.rules is not None else ("network",)))

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
                {"type": f"RLIMIT_{name.upper()}", "soft": limit, "hard": limit} for name, limit in rlimits.items()
            ],
        }

    def _mounts(self) -> list[tuple[str, str, str, list[str]]]:
        sized = ["nosuid", "nodev", f"size={self.tmp_bytes}", f"nr_inodes={self.inodes}", "mode=1777"]
        return [
            ("/proc", "proc", "proc", ["nosuid", "noexec", "nodev"]),
            ("/dev", "tmpfs", "tmpfs", ["nosuid", "size=65536k", "mode=755"]),
            ("/dev/shm", "tmpfs", "tmpfs", [*sized, "noexec"]),
            ("/tmp", "tmpfs", "tmpfs", [*sized, "rw" if self.is_tmp_writable else "ro"]),
            *(
                (path, "bind", f"{self.top}/{self._place_of(path)}", ["bind", "rw", "nosuid", "nodev"])
                for path in ("/workspace", *self.homes)
            ),
        ]

    def _inner_mounts(self, number: int) -> list[tuple[str, str, str, list[str]]]:
        """Return mounts that show again those paths that `_mounts` covers, such as an environment in /tmp."""
        empty = (*(target for target, kind, *_ in self._mounts() if kind == "tmpfs"), *self.homes)
        covers = tuple(f"{target}/" for target in empty)
        inner = [path for path in self.shown.binds if path.startswith(covers)]
        return [
            (path, "bind", f"{self.folder(number)}/root{path}", ["bind", "ro", "nosuid", "nodev"]) for path in inner
        ]

    def amounts(self) -> dict[str, float]:
        """Return the limits of the control group around gVisor."""
        return {"memory_bytes": self.memory_bytes, "pids": self.pids, "cpus": self.cpus}


def plan_container(policy: Policy, limits: Limits, *, engine: RunscEngine, shown: HostView) -> RunscPlan:
    """Return the plan of one container.

    gVisor does not distinguish a program's memory from its files in tmpfs, so the memory limit includes both.
    """
    stored = 2 * limits.tmp_bytes + REAPER_BYTES
    return RunscPlan(
        engine=engine,
        rules=network_rules(policy),
        shown=shown,
        user=USERS.get(policy.user, USERS[None])[0],
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
def bundle_folder(binds: Sequence[str]) -> str:
    """Return an existing folder to mount over that contains none of the paths to show."""
    for folder in BUNDLE_FOLDERS:
        if os.path.isdir(folder) and not any(layout.is_below(path, folder) for path in binds):
            return folder
    return "/var"


def _folders_to(path: str) -> list[str]:
    """Return all folders from the root down to `path`, and `path` itself."""
    names = path.strip("/").split("/")
    return ["/".join(names[: index + 1]) for index in range(len(names))]


def _folder(name: str) -> Call:
    return make("mkdirat", AT_FDCWD, os.fsencode(name), 0o755, excuse=(EEXIST,))


def _calls(mounts: Sequence[Any]) -> list[Call]:
    """Return the system calls of `mounts`; a bind mount's are preceded by opening its source."""
    return [call for shown in mounts for call in (*getattr(shown, "opening", list)(), *shown.calls())]


def _mount(target: str, kind: str, source: str, options: Sequence[str]) -> dict[str, Any]:
    return {"destination": target, "type": kind, "source": source, "options": list(options)}


def _seccomp() -> Mapping[str, Any]:
    """Return the containers' seccomp profile in the OCI specification's terms.

    gVisor answers every refusal with EPERM and ignores the rule's errno. The C library treats only ENOSYS as "not
    implemented", so `clone3`, which should get ENOSYS, is left to gVisor's own kernel. So is setting SO_LINGER, which
    the filter elsewhere pretends to do: a lingering socket is inside gVisor and cannot delay a close outside. gVisor
    calls `select` by another name, and refuses system calls that it does not know by name.
    """
    docker_profile = profile()
    # The first process reads others' marks (`containers.inside.live`): prlimit64 without a new limit only reads.
    select = {"names": ["pselect"], "args": []}
    question = {"names": ["prlimit64"], "args": [{"index": 2, "value": 0, "valueTwo": 0, "op": "SCMP_CMP_EQ"}]}
    rules = [*docker_profile["syscalls"], select, question]
    return {
        "defaultAction": docker_profile["defaultAction"],
        "architectures": [row["architecture"] for row in docker_profile["archMap"]],
        "syscalls": [{**_without_answer(rule), "action": "SCMP_ACT_ALLOW"} for rule in rules],
    }


def _without_answer(rule: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in rule.items() if name != "errnoRet"}


def plain_rootfs() -> HostView:
    """Return the paths that every container shows."""
    return _shown(())


def rootfs_for(request: Request | None, layers: Sequence[str] = ()) -> HostView:
    """Return the paths that the container of a request shows. Raises BackendUnavailable for a missing toolchain."""
    toolchain = _toolchain(request) if request is not None else None
    return _shown((*(toolchain.binds if toolchain is not None else ()), *layers))


def session_rootfs(name: str, layers: Sequence[str] = ()) -> HostView:
    """Return the paths that the container of a session shows.

    Raises BackendUnavailable for a language without sessions.
    """
    language, driver = session_language(name)
    return _shown((*(find_toolchain(language).binds if driver is not None else ()), *layers))


def live_rootfs(layers: Sequence[str] = ()) -> HostView:
    """Return the paths that a container for any language shows: every toolchain of this host."""
    return _shown((*all_shown(), *layers))


def _shown(binds: tuple[str, ...]) -> HostView:
    python = python_toolchain()
    all_binds = sorted({*python.binds, *user_site(), *binds})
    outermost = [
        path
        for path in all_binds
        if not any(path != other_path and is_below(path, other_path) for other_path in all_binds)
    ]
    return HostView(python=python.programs["python3"], binds=tuple(outermost))


def _toolchain(request: Request) -> Toolchain | None:
    if request.code is None:
        return None
    language = language_named(request.language)
    return python_toolchain() if language.name == "python" else find_toolchain(language)


@dataclass(frozen=True, slots=True)
class _ToolchainImage:
    """Adapter that presents a toolchain of this host as an image; see containers.program.Equipment."""

    toolchain: Toolchain

    @property
    def programs(self) -> Mapping[str, str]:
        return self.toolchain.programs

    def engine(self, language: Language) -> LanguageEngine:  # noqa: ARG002 - it was found for this language
        return self.toolchain.engine

    def version(self, engine: LanguageEngine) -> str:  # noqa: ARG002 - it has one only
        if self.toolchain is python_toolchain():
            return f"{platform.python_implementation()} {platform.python_version()}"
        return engine_version(self.toolchain)


def build_program(request: Request, number: int = 0) -> Program:
    """Return the program of a request. Raises InvalidRequest, or BackendUnavailable for a missing toolchain."""
    toolchain = _toolchain(request)
    return program_of(
        request,
        _ToolchainImage(toolchain or python_toolchain()),
        variables_of(toolchain),
        has_interpreter=True,
        extra_paths=user_site(),
        customizes=has_customization(),
        number=number,
    )


def build_session_program(name: str, env: Mapping[str, str]) -> SessionProgram:
    """Return the program of a session. Raises InvalidRequest, or BackendUnavailable if the host lacks the language."""
    language, driver = session_language(name)
    toolchain = find_toolchain(language) if driver is not None else python_toolchain()
    if driver is not None:
        check_toolchain(language, driver, toolchain)
    return session_of(
        language,
        driver,
        _ToolchainImage(toolchain),
        variables_of(toolchain),
        env,
        extra_paths=user_site(),
        customizes=has_customization(),
    )


def variables_of(toolchain: Toolchain | None) -> dict[str, str]:
    """Return PATH and the variables of a toolchain."""
    return {"PATH": layout.search_path(), **(toolchain.env if toolchain is not None else {})}
