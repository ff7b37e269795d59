"""Records for the helper, made from policy, limits and request: the parts of a jail, and the programs in it. No I/O.

A `Spec` describes the jail of one sandbox with its limits, a `Run` one program: its commands, files, environment and
toolchain. A session is a run too: `build_session_program` chooses its interpreter and the command that starts it.
"""

from __future__ import annotations

import functools
import os
import sys
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from cloche.core.changes import CHANGES, HostFolder
from cloche.core.enforcement import Level
from cloche.core.errors import BackendUnavailable
from cloche.core.languages import Language, language_named, render, render_env, render_generated
from cloche.core.limits import MIB, Limits
from cloche.core.policy import Policy
from cloche.core.record import dataclass, field
from cloche.core.request import InputFile, Request, source_of
from cloche.hostfs import may_search_all
from cloche.jail.guest import ANSWERS, LINK
from cloche.jail.messages import Run, Spec
from cloche.jail.setup.privileges import IOCTLS_SINCE, SCOPED_SINCE, drop_all
from cloche.jail.setup.privileges import amounts as ucounts
from cloche.jail.setup.probe import memory_stat
from cloche.jail.setup.seccomp import answered_calls, build_filter
from cloche.jail.steps import private_register
from cloche.jail.user_namespaces import LOCK_FOLDERS
from cloche.jail.work_folder import STARTUP

from .. import layout
from ..call_languages import load_calls
from ..certificates import files_and_variables, variables_here
from ..garbage_collection import group_name, new_folder
from ..host import Host
from ..network import NAME_SERVER_ADDRESS, network_key, network_rules, served_ports
from ..session_languages import (
    LOCAL_DRIVERS,
    ONCE,
    Codec,
    Driver,
    Interrupt,
    JsonCodec,
    check_toolchain,
    check_variables,
    session_language,
)
from ..toolchain import (
    Toolchain,
    engine_version,
    find_toolchain,
    has_customization,
    package_managers,
    python_toolchain,
    root_variables,
    sets_interpreter_variables,
    user_site,
)
from .networks import authority_rows

# The range of outside ids: above the ranges of distributions and systemd, below 2^31.
OUTSIDE_IDS = (1_900_000_000, 100_000)
NOFILE = 1024
FOLDER_INODES = 1_000_000  # that a guest may create in a view of a host folder
KIND = "local"  # of control groups
# An ordinary user's range of at least this size is split: its upper half is for sandboxes with several users.
LEAST_FOR_USERS = 16_384
# One byte, not 0: with 0 the kernel still pipes the core dump of a crashed guest to the host's handler (core(5)).
NO_CORE = 1
# Limits that the kernel counts per user: two message queues of the default size, and as many signals and timers as a
# large program has. All processes of a guest share them, because they have one id. Limits set before the namespace was
# created would become limits of the namespace, but the kernel compares those with everything that the namespace's owner
# uses, in all namespaces: guests would starve each other.
PER_USER = (("memlock", 64 * 1024), ("msgqueue", 204_800), ("sigpending", 1024))
# Without a control group, RLIMIT_DATA must not be reached before the sampled sum of the tree: otherwise a program sees
# MemoryError, and the run is not reported as out of memory. V8 (deno) reserves 512 MiB for code at once, writable but
# untouched, which counts only against RLIMIT_DATA.
DATA_HEADROOM_BYTES = 576 * MIB
# The reaper is a process, too, but not the guest's.
REAPERS = 1
# Where RLIMIT_NPROC counts the user's tasks: the helper, and threads of the caller that start after the count. With
# too few, fork(2) would fail in the guest below its own limit, without a visible reason.
COMING_TASKS = 8
_counted = (-1, -1, 0)  # uid, second of the clock, number of tasks
MOST_JAILS = 64
LAYER_MANIFEST = "layer.json"  # in the folder of a layer that is not empty
# In the folder of a layer of npm packages; shown above a guest's workspace, where Node searches for it.
MODULES = "node_modules"
_JAILS: dict[Hashable, tuple[Host, Spec]] = {}
_FILTERS: dict[tuple[object, ...], bytes] = {}

# A script up to this size is sent with the orders, besides being written: the guest need not read the file.
SHORT_BYTES = 2048
_environments: dict[tuple[GuestPaths, str], Mapping[str, str]] = {}
MOST_ENVIRONMENTS = 64

# Below level jail /etc/gitconfig is the host's, and git fails if it exists and cannot be read.
NO_HOST_SETTINGS: Mapping[str, str] = {"GIT_CONFIG_NOSYSTEM": "1"}
# The guest's id may have no name in the host's passwd: Python's getpass reads these variables first.
NAMES: Mapping[str, str] = {"USER": "sandbox", "LOGNAME": "sandbox"}
FOR_EVER_S = 1e9  # the time-out of a session's run
_ONE_THREAD: Mapping[str, str] = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")


@dataclass(frozen=True, slots=True, kw_only=True)
class GuestPaths:
    """Name folders as the guest sees them. With `is_confined`, `startup` holds replacements for /dev/shm."""

    workspace: str = "/workspace"
    tmp: str = "/tmp"
    folder: str = ""
    startup: str = layout.STARTUP_FOLDER
    is_confined: bool = False


INSIDE = GuestPaths()


def choose_guest_paths(level: Level) -> GuestPaths:
    """Return the fixed paths of level jail, or the paths in a new folder of the host below that level."""
    if level is Level.JAIL:
        return INSIDE
    return guest_paths_below(new_folder(), level)


def guest_paths_below(folder: str, level: Level) -> GuestPaths:
    """Return the guest's paths in a folder of the host."""
    return GuestPaths(
        workspace=f"{folder}/workspace", tmp=f"{folder}/tmp", folder=folder, startup=f"{folder}/{STARTUP}",
        is_confined=level is Level.CONFINED,
    )  # fmt: skip


def build_spec(level: Level, policy: Policy, limits: Limits, host: Host, guest_paths: GuestPaths) -> Spec:
    """Return the helper's orders for one sandbox, without those that depend on the program (`Run`)."""
    if level is not Level.JAIL:
        return _new_spec(level, policy, limits, host, guest_paths)
    key = (policy.user, policy.writable_paths, limits, guest_paths, network_key(policy), modules_of(policy.layers))
    jail = _JAILS.get(key)
    if jail is None or jail[0] is not host:
        if len(_JAILS) >= MOST_JAILS:
            _JAILS.clear()
        jail = _JAILS[key] = (host, _new_spec(level, policy, limits, host, guest_paths))
    spec = jail[1].copy()  # a shallow copy: fields are replaced, never mutated
    spec.origin = jail[1]
    spec.cgroup = _cgroup(limits, host)
    return spec


def _new_spec(level: Level, policy: Policy, limits: Limits, host: Host, guest_paths: GuestPaths) -> Spec:
    user, uid = layout.USERS.get(policy.user, layout.USERS[None])
    ids = _outside_ids(level, host)
    spec = Spec(
        level=str(level),
        inside_id=uid,
        outside=ids[:2] if ids[1] else None,
        ids=ids,
        is_shown=level is Level.JAIL and host.ids is not None,
        workspace=guest_paths.workspace,
        tmp=guest_paths.tmp,
        folder=guest_paths.folder,
        disk_bytes=limits.disk_bytes,
        inodes=limits.inodes,
        rlimits=_rlimits(level, limits, host),
        cgroup=_cgroup(limits, host),
        accounting="" if level is Level.NONE else "cgroup" if host.cgroup_version else "tree",
        memory_bytes=limits.memory_bytes,
        pids=limits.pids,
        cpu_affinity=0 if host.cgroup_version or level is Level.NONE else max(1, round(limits.cpus)),
    )
    spec.modules = modules_of(policy.layers)
    if level is not Level.JAIL:
        spec.memory_stat = _memory_stat() if spec.accounting == "tree" else ""
        spec.startup = layout.startup_files(has_stand_ins=level is Level.CONFINED)
    if level is Level.JAIL:
        spec.mounts = _mounts(user, uid, limits, policy)
        spec.masked = list(layout.masked_proc())
        spec.ucounts = ucounts(is_forkable=False)
        spec.prefork_ucounts = ucounts(is_forkable=False, is_prefork=True)
    if level in (Level.JAIL, Level.CONFINED):
        spec.network = {"ports": list(served_ports(policy))} if network_rules(policy) is not None else None
        is_counted, kernel_options = bool(host.cgroup_version), {"one_uid": False, "network": False}
        if level is Level.CONFINED:
            kernel_options = {"one_uid": not host.owns_ids, "network": spec.network is not None}
            spec.answered = answered_calls(os.uname().machine, counted=is_counted, **kernel_options)
        is_confined, version = level is Level.CONFINED, host.landlock_abi
        spec.seccomp = filter_for(confined=is_confined, counted=is_counted, landlock=version, **kernel_options)
        spec.prefork_filter = filter_for(confined=False, counted=bool(host.cgroup_version), prefork=True)
        spec.landlock = _landlock(level, guest_paths, policy) if host.landlock_abi else None
        spec.landlock_abi = host.landlock_abi
    if level is Level.CONFINED and host.landlock_abi >= SCOPED_SINCE:
        spec.scope_abi = host.landlock_abi
    return spec


@functools.cache
def _memory_stat() -> str:
    return memory_stat()


def move(spec: Spec, folder: str) -> Spec:
    """Return a copy of a spec below level jail, with its paths moved to `folder`."""
    moved, old_length = spec.copy(), len(spec.folder)
    moved.move(folder)
    if spec.landlock is not None:
        moved.landlock = [
            (folder + path[old_length:] if path.startswith(f"{spec.folder}/") else path, kind)
            for path, kind in spec.landlock
        ]
    return moved


def _outside_ids(level: Level, host: Host) -> tuple[int, int, tuple[str, ...]]:
    """Return first id and number of outside ids to claim from, and folders for their locks; zeros without a range."""
    if host.owns_ids and level in (Level.JAIL, Level.CONFINED):
        return (*OUTSIDE_IDS, LOCK_FOLDERS)
    if host.ids is not None and level is Level.JAIL:
        count = host.ids.count
        return (host.ids.first, count if count < LEAST_FOR_USERS else count // 2, host.ids.lock_folders)
    return (0, 0, ())


def show_toolchain(
    run: Run, spec: Spec, paths: Sequence[str], host: Host, policy: Policy, *, is_single: bool = False
) -> None:
    """Show one run the folders and files of a toolchain and the package layers. With `is_single`, installers are
    hidden.
    """
    toolchain, paths = paths, (*paths, *policy.layers) if policy.layers else paths
    if policy.toolchains and spec.level == "jail":
        paths = (
            *paths,
            *(path for path in policy.toolchains if not any(layout.is_below(path, shown_path) for shown_path in paths)),
        )
        run.covered = list(policy.toolchains_hidden)
    if spec.level == "jail":
        run.binds = list(paths)
        if not policy.package_managers or (is_single and policy.package_managers == "live"):
            run.replaced = list(package_managers(tuple(toolchain)))
        if host.owns_ids and not host.idmapped:
            run.private = [path for path in paths if layout.needs_private_mount(path)]
    elif spec.level == "confined":
        run.readable = [(path, "read") for path in paths]
        closed = closed_folder(paths) if host.owns_ids else ""
        if closed and not may_search_all():
            raise BackendUnavailable(closed_to_guests(closed))
        run.keep_read_search = bool(closed)


def closed_folder(paths: Sequence[str]) -> str:
    """Return the first folder above one of `paths` that other users may not search; empty if there is none."""
    return next(filter(None, map(layout.closed_to_others, paths)), "")


def closed_to_guests(folder: str) -> str:
    """Return the message for a root without CAP_DAC_READ_SEARCH whose guest, another user, cannot search a folder."""
    return (
        f"{folder} is not accessible to the sandbox's user, but the interpreter lies in it; root without the "
        "capability "
        f"DAC_READ_SEARCH cannot grant access. To fix it: chmod o+x {folder}, or install that elsewhere (below /opt "
        "or /usr; packages of sandboxes go where XDG_DATA_HOME says, for example /var/lib); a container may be started "
        "with --cap-add DAC_READ_SEARCH"
    )


def show_folder(run: Run, spec: Spec, folder: HostFolder, host: Host) -> None:
    """Show a live sandbox a folder of the host copy-on-write, and others read-only.

    For root, their files appear as the guest's own. Raises BackendUnavailable without id-mapped mounts.
    """
    mount_point = folder.at.lstrip("/")
    links = [("symlink", folder.at, "workspace")] if mount_point != "workspace" else []
    rows = [_overlay(run, spec, view, host, number) for number, view in enumerate((folder, *folder.read_only))]
    if folder.git is not None:
        rows.insert(1, _overlay(run, spec, folder.git, host, 0, is_inner=True))
    texts = [("text", "etc/gitconfig", folder.git_config)] if folder.git_config else []
    spec.mounts = [*spec.mounts, *texts, *rows, *links]


def _overlay(
    run: Run, spec: Spec, folder: HostFolder, host: Host, number: int, *, is_inner: bool = False
) -> layout.Row:
    """Return the row of an overlay mount. Only number 0, and an inner folder in it, is writable."""
    register, source = "", folder.opened_as or folder.path
    if host.owns_ids:
        if host.idmapped:
            raise BackendUnavailable(f"workspace: this host does not support id-mapped mounts: {host.idmapped}")
        run.private = [*run.private, source]
        run.owners = {**run.owners, source: folder.owner}
        register = private_register(source)
    overlay = {
        "number": number, "changes": "" if number else CHANGES[1:] + "/.git" * is_inner, "is_inner": is_inner,
        "size_bytes": folder.disk_bytes, "inodes": FOLDER_INODES, "mode": folder.mode, "owner": spec.inside_id,
        "folders": folder.masked_folders, "masked": folder.hidden, "register": register,
        "inner": ".git" if folder.git is not None else "",
    }  # fmt: skip
    return ("overlay", source, folder.at.lstrip("/"), overlay)


def make_forkable(spec: Spec, host: Host) -> None:
    """Let a session be cloned: its seccomp filter permits the one clone call that the reaper answers.

    A clone's /workspace is another file system than the one that the Landlock rules would name, and a Landlock domain
    can only be restricted further (landlock(7)). So Landlock permits writes everywhere, and the mounts decide: all
    others are read-only.
    """
    spec.seccomp = filter_for(confined=False, counted=bool(host.cgroup_version), forkable=True)
    spec.ucounts = ucounts(is_forkable=True)
    if spec.landlock is not None:
        devices = [rule for rule in spec.landlock if rule[1] == "device"]
        spec.landlock = [("/", "write"), *devices]


def filter_for(*, confined: bool, counted: bool = True, landlock: int = IOCTLS_SINCE, **kind: bool) -> bytes:
    """Return the assembled seccomp filter for this machine, cached per process; see `build_filter`."""
    machine = os.uname().machine
    key = (machine, confined, counted, landlock, *kind.items())
    if key not in _FILTERS:
        _FILTERS[key] = build_filter(machine, confined=confined, counted=counted, landlock=landlock, **kind)
    return _FILTERS[key]


def _mounts(user: str, uid: int, limits: Limits, policy: Policy) -> list[layout.Row]:
    has_network = network_rules(policy) is not None
    name_server = NAME_SERVER_ADDRESS if has_network else layout.NO_NAME_SERVER
    authorities = files_and_variables()[0] if has_network else ()
    memory = [("tmpfs", mount_point, limits.tmp_bytes, limits.inodes, "1777") for mount_point in ("dev/shm", "tmp")]
    modules = modules_of(policy.layers)
    links = [("symlink", modules, MODULES)] if modules else []
    startup = ("text", f"{layout.STARTUP_FOLDER[1:]}/{layout.STARTUP_FILE}", layout.startup_text())
    shown = [startup, *authorities, *authority_rows(policy), *links]
    return [*layout.system_rows(), *layout.etc_rows(user, uid, name_server), *shown, *memory]


def _landlock(level: Level, guest_paths: GuestPaths, policy: Policy) -> list[tuple[str, str]]:
    writable = [guest_paths.workspace, *([guest_paths.tmp] if "/tmp" in policy.writable_paths else [])]
    rules = [(path, "write") for path in writable]
    rules += [(f"/dev/{name}", "device") for name in layout.DEVICES]
    if level is Level.JAIL:
        return [("/", "read"), ("/dev/shm", "write"), *rules]
    shown = [*layout.SYSTEM_FOLDERS, *layout.etc_shown(), "/etc/passwd", "/etc/group", "/etc/nsswitch.conf"]
    shown.append("/etc/debian_version")  # pip works without this file, but not if reading it is refused
    own = [
        f"/proc/{name}"
        for name in ("self", "cpuinfo", "meminfo", "stat", "version", "filesystems", "uptime", "loadavg")
    ]
    authorities = variables_here().values() if network_rules(policy) is not None else ()
    names = dict.fromkeys((*shown, *own, guest_paths.startup, *authorities))
    return [*((path, "read") for path in names), *rules]


def _rlimits(level: Level, limits: Limits, host: Host) -> list[tuple[str, int]]:
    rows = [("core", NO_CORE), ("nofile", NOFILE)]
    if level is Level.NONE:
        return rows
    rows += [*PER_USER, ("fsize", limits.disk_bytes)]
    if not host.cgroup_version:
        rows.append(("data", limits.memory_bytes + DATA_HEADROOM_BYTES))
        rows.append(("nproc", limits.pids + REAPERS + _tasks_of_user(level, host)))
    return rows


def _tasks_of_user(level: Level, host: Host) -> int:
    """Count the tasks that RLIMIT_NPROC counts besides the guest's: all of the user's, if the guest has that user's id.

    At level `confined` the number matters only if the guest's filter has no listener (see `jail/task_count.py`), and a
    guest built ahead has an older count in any case. So one count serves for a second.
    """
    if level is Level.JAIL or (level is Level.CONFINED and host.owns_ids):
        return 0
    return _count_tasks(host.uid, int(time.monotonic()) if level is Level.CONFINED else -1) + COMING_TASKS


def _count_tasks(uid: int, second: int) -> int:
    """Count a user's processes and threads, once per `second` of the clock; a negative `second` counts anew."""
    global _counted
    if second >= 0 and _counted[:2] == (uid, second):
        return _counted[2]
    total = 0
    for name in os.listdir("/proc"):
        try:
            if name.isdigit() and os.stat(f"/proc/{name}").st_uid == uid:
                total += len(os.listdir(f"/proc/{name}/task"))
        except OSError:
            continue  # it ended during the count
    _counted = uid, second, total
    return total


def _cgroup(limits: Limits, host: Host) -> dict[str, Any] | None:
    if not host.cgroup_version:
        return None
    name = group_name(KIND)
    # Pages of a tmpfs are charged as memory (cgroup v2: memory.stat, shmem).
    stored = limits.disk_bytes + 2 * limits.tmp_bytes
    return {
        "version": host.cgroup_version,
        "folders": {controller: f"{folder}/{name}" for controller, folder in host.cgroup_folders.items()},
        "amounts": {"memory_bytes": limits.memory_bytes + stored, "pids": limits.pids + REAPERS, "cpus": limits.cpus},
    }


def guest_environment(
    guest_paths: GuestPaths, requested: Mapping[str, str], toolchain: Mapping[str, str]
) -> dict[str, str]:
    """Return the guest's whole environment: a fixed minimum, then the toolchain's variables, then the request's."""
    minimum = layout.guest_variables(guest_paths.workspace, guest_paths.tmp)
    settings = {} if not guest_paths.folder else {**NO_HOST_SETTINGS, **(NAMES if guest_paths.is_confined else {})}
    variables = {"PATH": layout.search_path(), **minimum, **settings, **toolchain, **requested}
    return layout.with_startup(variables, guest_paths.startup)


def has_range(host: Host) -> bool:
    """Tell whether this host has enough ids for several users of one sandbox."""
    return host.owns_ids or (host.ids is not None and host.ids.count >= LEAST_FOR_USERS)


def with_toolchains(env: Mapping[str, str], policy: Policy, requested: Mapping[str, str]) -> dict[str, str]:
    """Add the folders of the policy's toolchains to PATH, unless the request sets PATH.

    They come before the system's programs of the same name, as on the caller's own PATH: cargo calls the rustc beside
    it.
    """
    if not policy.toolchains_path:
        return dict(env)
    search_path = os.pathsep.join((*policy.toolchains_path, layout.SYSTEM_PATH))
    path = {} if "PATH" in requested else {"PATH": env["PATH"].replace(layout.SYSTEM_PATH, search_path, 1)}
    return {**root_variables(policy.toolchains), **env, **path}


def with_layers(env: Mapping[str, str], layers: Sequence[str]) -> dict[str, str]:
    """Add the package layers to an environment; layers that are still empty are skipped."""
    filled = _filled(layers)
    return layout.with_layers(env, filled, sites_of(filled))


def sites_of(layers: Sequence[str]) -> list[str]:
    """Return the folders of layers from which Python imports. Layers of npm packages have no such folder."""
    return layout.sites_of([layer for layer in layers if not _has_modules(layer)])


def modules_of(layers: Sequence[str]) -> str:
    """Return the `node_modules` folder of the last layer that has one, since it can be mounted in one place only;
    else empty.
    """
    return next((f"{layer}/{MODULES}" for layer in reversed(layers) if _has_modules(layer)), "")


def _has_modules(layer: str) -> bool:
    return os.path.isdir(f"{layer}/{MODULES}")


def _filled(layers: Sequence[str]) -> list[str]:
    return [layer for layer in layers if os.path.exists(f"{layer}/{LAYER_MANIFEST}")]


def unfilled_layers(layers: Sequence[str]) -> list[str]:
    """Return the files whose creation changes the outcome of `with_layers` for these layers."""
    filled = _filled(layers)
    return [f"{layer}/{LAYER_MANIFEST}" for layer in layers if layer not in filled]


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalProgram:
    """Hold a run for the helper, its toolchain, and the content of input files by path."""

    run: Run
    toolchain: Toolchain | None
    language: Language | None
    inputs: Mapping[str, bytes] = field(default_factory=dict)

    @property
    def has_value(self) -> bool:
        return self.run.python is not None

    def paths(self) -> tuple[str, ...]:
        """Return the paths to show besides the system's own trees: always the interpreter, then the toolchain."""
        mine = self.toolchain.binds if self.toolchain else ()
        if mine is python_toolchain().binds:
            return mine
        return tuple(dict.fromkeys((*python_toolchain().binds, *mine)))

    def runtime(self) -> str:
        """Name the engine with its version."""
        if self.toolchain is None:
            return "command"
        if self.has_value:
            return _python_runtime()
        return engine_version(self.toolchain) or self.toolchain.engine.name


@functools.cache
def _python_runtime() -> str:
    if sys.implementation.name == "cpython":
        return f"CPython {sys.version.split()[0]}"
    import platform

    return f"{platform.python_implementation()} {platform.python_version()}"


def build_program(
    request: Request,
    guest_paths: GuestPaths,
    timeout_s: float,
    number: int = 0,
    layers: Sequence[str] = (),
    *,
    calls: bool = False,
) -> LocalProgram:
    """Return the program of a request. Raises InvalidRequest, or BackendUnavailable for a missing toolchain.

    A `number` distinguishes programs that run at the same time in the same workspace. Packages of `layers` are
    importable. One that `calls` functions of its caller loads the file for that first.
    """
    program = _build_program(request, guest_paths, timeout_s, number, has_modules=bool(modules_of(layers)))
    if calls and program.language is not None and program.toolchain is not None:
        load_calls(program.run, program.language.name, program.toolchain.engine)
    if layers:
        program.run.env = with_layers(program.run.env, layers)
        if program.run.python is not None:
            program.run.python["layers"] = sites_of(_filled(layers))
    return program


def _build_program(
    request: Request, guest_paths: GuestPaths, timeout_s: float, number: int, *, has_modules: bool
) -> LocalProgram:
    if request.code is None:
        run = Run(commands=[list(request.argv)], env=guest_environment(guest_paths, request.env, {}))
        return _finished(run, request.files, timeout_s, None, None)
    language = language_named(request.language)
    toolchain = python_toolchain() if language.name == "python" else find_toolchain(language)
    stem, dot, suffix = language.file_name.rpartition(".")
    mark = f"-{number}" if number else ""
    path, files = source_of(request, language=language.name, file_name=f"{stem}{mark}{dot}{suffix}")
    source = f"{guest_paths.workspace}/{path}"
    build = f"{guest_paths.tmp}/.cloche-build{mark}"  # outside of virtual environments
    engine = toolchain.engine.for_modules() if has_modules else toolchain.engine
    env = {**_environment(toolchain, guest_paths, source, build), **request.env}
    run = Run(env=layout.with_startup(env, guest_paths.startup))
    if language.name == "python" and not sets_interpreter_variables(request.env):
        run.python = {"path": source, "argv": list(request.argv), "extra_paths": list(user_site())}
        run.python["customizes"] = has_customization()
        if guest_paths.is_confined:
            run.python["stand_ins"] = guest_paths.startup
        if files[-1].path == path and len(files[-1].data) <= SHORT_BYTES:
            run.python["source"] = files[-1].data
    else:
        run.commands = [list(argv) for argv in render(engine, toolchain.programs, source, build, request.argv)]
        run.folders, run.generated = [build], dict(render_generated(engine, source, build))
    return _finished(run, files, timeout_s, toolchain, language)


def _environment(toolchain: Toolchain, guest_paths: GuestPaths, source: str, build: str) -> Mapping[str, str]:
    """Return a program's variables without the request's; cached for Python, whose toolchain never changes."""
    key = (guest_paths, source)
    variables = _environments.get(key) if toolchain is python_toolchain() else None
    if variables is None:
        env = {**render_env(toolchain.engine, source, build), **toolchain.env}
        variables = guest_environment(guest_paths, {}, env)
        if toolchain is python_toolchain():
            if len(_environments) >= MOST_ENVIRONMENTS:
                _environments.clear()
            _environments[key] = variables
    return variables


def _finished(
    run: Run,
    files: tuple[InputFile, ...],
    timeout_s: float,
    toolchain: Toolchain | None,
    language: Language | None,
) -> LocalProgram:
    run.files, run.timeout_s = [(file.path, file.mode, file.data) for file in files], timeout_s
    contents = {file.path: file.data for file in files}
    return LocalProgram(run=run, toolchain=toolchain, language=language, inputs=contents)


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalSessionProgram:
    """Hold the run of a session, and how to talk to its interpreter."""

    run: Run
    language: Language
    toolchain: Toolchain
    new_codec: Callable[[], Codec]
    interrupt: Interrupt = ONCE
    is_forkable: bool = False

    def paths(self) -> tuple[str, ...]:
        """Return the paths to show besides the system's own trees."""
        return tuple(dict.fromkeys((*python_toolchain().binds, *self.toolchain.binds)))

    def why_no_forks(self) -> str:
        """Return the reason why the interpreter can never be cloned; empty if it may be."""
        name = self.language.name
        return "" if self.is_forkable else f"a {name} session has no checkpoints and no forks; Python's have"


def build_session_program(
    name: str, env: Mapping[str, str], guest_paths: GuestPaths, layers: Sequence[str] = (), *, calls: bool = False
) -> LocalSessionProgram:
    """Return the program of a session; see `build_program`. Raises BackendUnavailable for a language without any."""
    language, driver = session_language(name, LOCAL_DRIVERS)
    program = _python(language, env, guest_paths) if driver is None else _driven(language, env, guest_paths, driver)
    if calls and program.toolchain is not None:
        load_calls(program.run, language.name, program.toolchain.engine)
    if layers:
        program.run.env = with_layers(program.run.env, layers)
        if program.run.python is not None:  # all layers: packages may be added later
            program.run.python["layers"] = sites_of(layers)
    return program


def _python(language: Language, env: Mapping[str, str], guest_paths: GuestPaths) -> LocalSessionProgram:
    check_variables(env)
    # fork(2) copies only the calling thread, so libraries are told not to start threads.
    run = Run(env=guest_environment(guest_paths, env, _ONE_THREAD), timeout_s=FOR_EVER_S, is_session=True)
    run.python = {
        "path": f"{guest_paths.workspace}/cell",
        "home": guest_paths.workspace,
        "argv": [],
        "extra_paths": list(user_site()),
        "customizes": has_customization(),
        # A clone starts with full capabilities in its new user namespace (user_namespaces(7)).
        "capabilities": drop_all(),
        **({"stand_ins": guest_paths.startup} if guest_paths.is_confined else {}),
    }
    return LocalSessionProgram(
        run=run, language=language, toolchain=python_toolchain(), new_codec=JsonCodec, is_forkable=True
    )


def _driven(language: Language, env: Mapping[str, str], guest_paths: GuestPaths, driver: Driver) -> LocalSessionProgram:
    """Return a session whose interpreter runs a driver, which is written into its /tmp."""
    toolchain = find_toolchain(language)
    check_toolchain(language, driver, toolchain)
    folder = f"{guest_paths.tmp}/.cloche"
    path = f"{folder}/{driver.file_name}"
    run = Run(env=guest_environment(guest_paths, env, toolchain.env), timeout_s=FOR_EVER_S, is_session=True)
    run.commands = [driver.command(toolchain.programs[driver.program], path, LINK, ANSWERS)]
    run.folders, run.generated = [folder], {path: driver.text()}
    return LocalSessionProgram(
        run=run, language=language, toolchain=toolchain, new_codec=driver.new_codec, interrupt=driver.interrupt
    )
