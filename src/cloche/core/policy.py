"""The rules of a run, and the tables that they are chosen from: presets, backends, tiers, placements.

- `Policy`: the hosts and folders a run may reach, and the controls that must hold.
- `PRESETS`: named bundles of limits and policy (S9; Cloche chooses what the source leaves open).
- `BACKEND_ROWS`: one row per backend name. `TIERS`: tiers of trust, with the backends that each allows (M4, M5a).
- `PLACEMENTS`: where an agent's actions run: in the sandbox, or in the agent's own workspace process (M3, seven rows).
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal, get_args

from .enforcement import Control, Level, NetworkMode
from .errors import InvalidRequest
from .limits import MIB
from .record import dataclass, field, replace

if TYPE_CHECKING:
    from .changes import HomeFolder, HostFolder
    from .network import NetworkRules
    from .secrets import HeldSecrets, SecretSet

ScreenMode = Literal["off", "warn", "block"]
OnNetwork = Literal["refuse", "ask"]
Fallback = Literal["none", "process"]
ContainerRuntime = Literal["runc"]
PackageManagers = bool | Literal["live"]

# C's seven, the default allowlist; C# joins where a policy or `code.execute` names it.
DEFAULT_LANGUAGES: tuple[str, ...] = ("python", "javascript", "typescript", "bash", "ruby", "go", "rust")
MOST_LOCK_CHARS = 256 << 10  # of the text of a lock file that is sent


class LockText(str):
    """Be the text of a lock file, where the path of one is usual."""

    __slots__ = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Say which hosts and folders a run may reach, and which controls must hold.

    `require_level` and `require_controls` refuse anything less; `best_effort` names controls that may be absent.
    `level` asks for one level exactly (`process` only ever this way); None takes the backend's strongest. `warm` lets a
    run start in a sandbox that was made ready ahead, and `preload` names modules that are already loaded there. Without
    `package_managers`, programs that install packages are not shown, as far as the backend can do that; with "live",
    the default, they are shown to all but throwaway runs.

    `network_allow` lists the hosts that mode `allowlist` may reach; empty allows none. `network_deny` wins over it and
    over mode `open`, which reaches any public host on the ports 80, 443 and `network_ports`. `on_network` decides about
    unlisted hosts: `ask` asks the approver. Mode `bridge` is docker's own, without any rules.

    A provider's statement about its own sandboxes is `claimed`: with `accept_claimed` it meets the requirements, with
    `accept_claimed_level`, which a tier sets, it meets the level. `users` lets a live sandbox have several users,
    root inside among them. `account` is the name of its ordinary account, whose home is `/home/ACCOUNT`, where its
    commands start. `toolchains` are folders of the host shown read-only at their own paths, `toolchains_hidden`
    the hidden paths below them, `toolchains_path` those on PATH; only Cloche sets them. `layers` are folders of the
    host with packages, shown read-only: `site` is importable, `bin` is on PATH; only Cloche sets them. `host_folder` is
    the folder that a live sandbox is shown copy-on-write, `home` the one that is its home folder, for writing; only
    Cloche sets them. `host_ports` are ports of this host's 127.0.0.1 that a live sandbox reaches at its own; only
    Cloche sets them. `why` is what `cloche-why` inside knows, as JSON; only Cloche sets it. `packages_lock` is the text
    of a lock file, for a backend that installs packages itself; only Cloche sets it. `digests` are those of the
    packages that a sandbox needs, for a backend that chooses among machines; only Cloche sets it. `secrets` are those
    that the egress process puts into requests; only Cloche sets them. `runtime` names the only container
    runtime allowed: docker's own, at level `jail` (C3). `fallback` says where `trusted` code, the operator's own and
    never a model's, may run if the chosen backend is missing: the local backend, then with `process` a child process
    (S12).
    """

    network: NetworkMode = "off"
    network_allow: tuple[str, ...] = ()
    network_deny: tuple[str, ...] = ()
    network_ports: tuple[int, ...] = ()
    host_ports: tuple[int, ...] = ()
    on_network: OnNetwork = "refuse"
    read_only_root: bool = True
    writable_paths: tuple[str, ...] = ("/workspace", "/tmp", "/dev/shm")
    user: str | None = None
    users: bool = False
    account: str | None = None
    seccomp: bool = True
    drop_capabilities: bool = True
    languages: tuple[str, ...] = DEFAULT_LANGUAGES
    packages: tuple[str, ...] | Literal["auto"] = ()
    toolchains: tuple[str, ...] = ()
    toolchains_hidden: tuple[str, ...] = ()
    toolchains_path: tuple[str, ...] = ()
    layers: tuple[str, ...] = ()
    host_folder: HostFolder | None = None
    home: HomeFolder | None = None
    why: str = ""
    screen: ScreenMode = "off"
    level: Level | None = None
    runtime: ContainerRuntime | None = None
    require_level: Level | None = None
    require_controls: tuple[Control, ...] = ()
    best_effort: tuple[Control, ...] = ()
    accept_claimed: bool = False
    accept_claimed_level: bool = False
    trusted: bool = False
    fallback: Fallback = "none"
    warm: bool = True
    preload: tuple[str, ...] = ()
    package_managers: PackageManagers = "live"
    packages_lock: str = ""
    digests: tuple[str, ...] = ()
    secrets: SecretSet | HeldSecrets | None = None

    def __post_init__(self) -> None:
        if self.screen not in get_args(ScreenMode):
            raise InvalidRequest(f"screen: {self.screen!r} is unknown; use one of {', '.join(get_args(ScreenMode))}")
        if self.fallback not in get_args(Fallback):
            raise InvalidRequest(f"fallback: {self.fallback!r} is unknown; use one of {', '.join(get_args(Fallback))}")
        if self.runtime not in (None, *get_args(ContainerRuntime)):
            raise InvalidRequest(f"runtime: {self.runtime!r} is unknown; use {', '.join(get_args(ContainerRuntime))}")
        if self.network not in get_args(NetworkMode):
            raise InvalidRequest(f"network: {self.network!r} is unknown; use one of {', '.join(get_args(NetworkMode))}")
        if self.on_network not in get_args(OnNetwork):
            raise InvalidRequest(f"on_network: {self.on_network!r} is unknown; use {' or '.join(get_args(OnNetwork))}")
        for name in _LISTS:
            object.__setattr__(self, name, _as_tuple(getattr(self, name), name=name))
        if self.packages != "auto":
            object.__setattr__(self, "packages", _as_tuple(self.packages, name="packages"))
        for path in self.writable_paths:
            if path not in ("/workspace", "/tmp", "/dev/shm"):
                raise InvalidRequest(
                    f"writable_paths: {path!r} cannot be writable; only /workspace, /tmp and /dev/shm can"
                )
        if "/workspace" not in self.writable_paths or "/dev/shm" not in self.writable_paths:
            raise InvalidRequest("writable_paths: /workspace and /dev/shm always are; only /tmp can be left out")
        if self.account is not None and self.user is not None:
            raise InvalidRequest(f"account: {self.account!r} conflicts with user {self.user!r}; leave one out")
        if self.network_allow or self.network_deny or self.network_ports:
            self.network_rules()

    def network_rules(self) -> NetworkRules:
        """Return the rules of the network. Raises InvalidRequest for a wrong one."""
        from .network import NetworkRules  # only where there are rules: every run makes a policy

        return NetworkRules.parse(
            mode=self.network, allow=self.network_allow, deny=self.network_deny, ports=self.network_ports,
            host_ports=self.host_ports,
        )  # fmt: skip

    def with_changes(self, **changes: Any) -> Policy:  # noqa: ANN401  # checked by __post_init__
        """Return a copy; a change of None is no change."""
        return replace(self, **{name: value for name, value in changes.items() if value is not None})


_LISTS = (
    "network_allow", "network_deny", "network_ports", "host_ports", "writable_paths", "languages", "require_controls",
    "best_effort", "preload", "toolchains", "toolchains_hidden", "toolchains_path", "layers", "digests",
)  # fmt: skip


def _as_tuple(values: object, *, name: str) -> tuple[Any, ...]:
    """Freeze a sequence; a bare string would otherwise be taken apart letter by letter."""
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise InvalidRequest(f"{name}: {values!r} must be a list")
    return tuple(values)


def parse_network(value: object, *, name: str) -> NetworkMode:
    """Read a network setting: a boolean (`true` and `on` are `open`), or the name of a mode."""
    modes: dict[object, NetworkMode] = {
        False: "off", True: "open", "false": "off", "true": "open", "off": "off", "none": "off",
        "open": "open", "on": "open", "allowlist": "allowlist", "bridge": "bridge",
    }  # fmt: skip
    text = value.strip().lower() if isinstance(value, str) else value
    if not isinstance(text, bool | str) or text not in modes:
        raise InvalidRequest(f"{name}: {value!r} is not a network setting; use {', '.join(get_args(NetworkMode))}")
    return modes[text]


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """Bundle changes to the default limits and policy under one name.

    Every preset sets its network, so that choosing one undoes a wider setting from before.
    """

    name: str
    summary: str
    limits: Mapping[str, Any] = field(default_factory=dict)
    policy: Mapping[str, Any] = field(default_factory=dict)


_STANDARD = {"memory_bytes": 512 * MIB, "cpus": 1.0, "pids": 256, "timeout_s": 300.0}

PRESETS: Mapping[str, Preset] = {
    preset.name: preset
    for preset in (
        Preset(
            name="standard",
            summary="room for real work, no network",
            limits=_STANDARD,
            policy={"network": "off"},
        ),
        Preset(
            name="minimal",
            summary="small and short, no network",
            limits={"memory_bytes": 128 * MIB, "cpus": 0.25, "pids": 64, "timeout_s": 30.0},
            policy={"network": "off"},
        ),
        Preset(
            name="locked-down",
            summary="user nobody, seccomp profile, no network",
            limits={"memory_bytes": 256 * MIB, "cpus": 0.5, "pids": 64, "timeout_s": 60.0},
            policy={"network": "off", "user": "nobody", "seccomp": True},
        ),
        Preset(
            name="network-open",
            summary="standard with outbound network to any public host, on ports 80 and 443",
            limits=_STANDARD,
            policy={"network": "open"},
        ),
        Preset(
            name="network-allowlist",
            summary="standard with outbound network to the hosts of an explicit allowlist",
            limits=_STANDARD,
            policy={"network": "allowlist"},
        ),
    )
}


def preset_named(name: str) -> Preset:
    """Return the preset called `name`, or raise InvalidRequest naming the known ones."""
    try:
        return PRESETS[name.strip().lower()]
    except (KeyError, AttributeError):
        raise InvalidRequest(f"unknown preset {name!r}; known presets: {', '.join(PRESETS)}") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier:
    """Say where a tier's code runs.

    `runs_code` is false where no run_code tool exists; `least_level` is what any backend must reach;
    `backends` are the names that a configuration may choose, the first being the tier's default.
    """

    number: int
    summary: str
    runs_code: bool
    backends: tuple[str, ...]
    least_level: Level


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendRow:
    """Describe one backend's name, except for its code, which `execution.registry` alone imports.

    `provider` is "module:attribute", called without arguments; `auto` has none, a choice among the others. `level` is
    the one level that this name stands for. `alternative` is a second provider, used where the first is not available
    and the caller names no image. `takes_image` says whether an image can be chosen, `queries_service` whether a daemon
    or a machine must answer before the backend counts as available. `isolates`: tiers 3 and 4 may choose it.
    `is_remote` backends send the code elsewhere, so only their name chooses them; those of `is_fleet` to the operator's
    own nodes, so a service opens live sandboxes there. `strength` orders the names between
    which an untrusted file may move, upwards only; None for remote ones. `auto_max_level` is the highest level that it
    can give to `auto`; without it `auto` never takes it. `auto_level` is the level that `auto` then asks for, where the
    backend has several. `needs_linux`: it runs code on this machine by features of Linux.
    """

    summary: str
    provider: str | None = None
    alternative: str | None = None
    level: Level | None = None
    takes_image: bool = False
    queries_service: bool = False
    isolates: bool = True
    is_remote: bool = False
    is_fleet: bool = False
    needs_linux: bool = True
    strength: int | None = None
    auto_max_level: Level | None = None
    auto_level: Level | None = None


_LOCAL = "cloche.backends.local:LocalBackend"
_DOCKER = "cloche.backends.docker:DockerBackend"
# One row per backend: adding one is a row here and its own module. Of what `auto` may take, the fastest stands first.
BACKEND_ROWS: Mapping[str, BackendRow] = {
    "local": BackendRow(
        summary="native Linux jail, nothing to set up", provider=_LOCAL, strength=2, auto_max_level=Level.JAIL
    ),
    "auto": BackendRow(
        summary="the strongest backend here that meets the policy, or the fastest", queries_service=True
    ),
    "subprocess": BackendRow(
        summary="child process with limits, no isolation",
        provider=_LOCAL,
        level=Level.PROCESS,
        isolates=False,
        strength=1,
    ),
    "none": BackendRow(
        summary="the host itself; a child process with limits",
        provider=_LOCAL,
        level=Level.PROCESS,
        isolates=False,
        strength=0,
    ),
    "docker": BackendRow(
        summary="throwaway container",
        provider=_DOCKER,
        needs_linux=False,
        takes_image=True,
        queries_service=True,
        strength=3,
        auto_max_level=Level.JAIL,
        auto_level=Level.JAIL,
    ),
    "gvisor": BackendRow(
        summary="gVisor: containers of docker on it, or runsc by itself",
        provider=_DOCKER,
        alternative="cloche.backends.gvisor:RunscBackend",
        level=Level.GVISOR,
        takes_image=True,
        queries_service=True,
        strength=4,
        auto_max_level=Level.GVISOR,
        auto_level=Level.GVISOR,
    ),
    "firecracker": BackendRow(
        summary="throwaway virtual machine on Firecracker",
        provider="cloche.backends.microvm:FirecrackerBackend",
        queries_service=True,
        strength=5,
        auto_max_level=Level.VM,
        auto_level=Level.VM,
    ),
    "microvm": BackendRow(
        summary="throwaway virtual machine on QEMU",
        provider="cloche.backends.microvm:MicroVMBackend",
        queries_service=True,
        strength=5,
        auto_max_level=Level.VM,
        auto_level=Level.VM,
    ),
    "microsandbox": BackendRow(
        summary="machine of microsandbox",
        provider="cloche.backends.microsandbox:MicrosandboxBackend",
        takes_image=True,
        queries_service=True,
        strength=5,
    ),
    "e2b": BackendRow(
        summary="machine of the E2B cloud",
        provider="cloche.backends.e2b:E2BBackend",
        is_remote=True,
        needs_linux=False,
    ),
    "daytona": BackendRow(
        summary="sandbox of the Daytona cloud",
        provider="cloche.backends.daytona:DaytonaBackend",
        is_remote=True,
        needs_linux=False,
    ),
    "cloche": BackendRow(
        summary="another machine's cloche serve",
        provider="cloche.backends.cloche:ClocheBackend",
        takes_image=True,
        is_remote=True,
        needs_linux=False,
    ),
    "kubernetes": BackendRow(
        summary="pods of a Kubernetes cluster",
        provider="cloche.backends.cloche.kubernetes:KubernetesBackend",
        takes_image=True,
        is_remote=True,
        is_fleet=True,
    ),
    "ray": BackendRow(
        summary="nodes of a Ray cluster",
        provider="cloche.backends.cloche.ray:RayBackend",
        takes_image=True,
        is_remote=True,
        is_fleet=True,
    ),
}
_ISOLATING_BACKENDS = (*(name for name, row in BACKEND_ROWS.items() if row.isolates and name != "auto"), "auto")
# Names that stand for the host itself: what a model or anybody unknown wrote does not run there.
HOST_BACKENDS = tuple(
    name for name, row in BACKEND_ROWS.items() if row.level is not None and row.level < Level.CONFINED
)

TIERS: Mapping[int, Tier] = {
    1: Tier(number=1, summary="no code runs", runs_code=False, backends=("none",), least_level=Level.NONE),
    2: Tier(number=2, summary="no code runs", runs_code=False, backends=("none",), least_level=Level.NONE),
    3: Tier(
        number=3,
        summary="code runs in a jail or stronger",
        runs_code=True,
        backends=_ISOLATING_BACKENDS,
        least_level=Level.JAIL,
    ),
    4: Tier(
        number=4,
        summary="code runs on the host; a second sandbox only when asked for",
        runs_code=True,
        backends=("none", "subprocess", *_ISOLATING_BACKENDS),
        least_level=Level.NONE,
    ),
}


BACKENDS: tuple[str, ...] = tuple(
    dict.fromkeys(("local", *(name for tier in TIERS.values() for name in tier.backends)))
)


def tier_numbered(number: int) -> Tier:
    """Return tier `number`, or raise InvalidRequest naming the known ones."""
    try:
        return TIERS[number]
    except KeyError:
        raise InvalidRequest(f"unknown tier {number!r}; known tiers: {', '.join(map(str, TIERS))}") from None


def parse_tier(value: object, *, name: str) -> int:
    """Return a tier's number, from a number or its digits."""
    by_text = {str(number): number for number in TIERS}
    number = None if isinstance(value, bool | float) else by_text.get(str(value).strip())
    if number is None:
        raise InvalidRequest(f"{name}: unknown tier {value!r}; known tiers: {', '.join(by_text)}")
    return number


def parse_backend(value: object, *, name: str) -> str:
    """Return a backend's name in lower case, or raise InvalidRequest listing the known ones."""
    text = value.strip().lower() if isinstance(value, str) else ""
    if text not in BACKENDS:
        raise InvalidRequest(f"{name}: unknown backend {value!r}; known backends: {', '.join(BACKENDS)}")
    return text


def check_backend(tier: Tier, backend: str, *, tier_origin: str = "", backend_origin: str = "") -> None:
    """Raise InvalidRequest when `backend` is outside the tier's list; the origins say who chose the two."""
    if backend not in tier.backends:
        who_tier = f" ({tier_origin})" if tier_origin else ""
        who_backend = f" ({backend_origin})" if backend_origin else ""
        allowed = ", ".join(tier.backends)
        raise InvalidRequest(
            f"tier {tier.number}{who_tier} does not allow backend {backend!r}{who_backend}; it allows: {allowed}"
        )


class Place(enum.StrEnum):
    """Say where something runs."""

    SANDBOX = "sandbox"
    WORKSPACE = "workspace"


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Say where one kind of action runs, and why."""

    action: str
    place: Place
    why: str


def _row(action: str, placement: Place, why: str) -> tuple[str, Placement]:
    return action, Placement(action=action, place=placement, why=why)


PLACEMENTS: Mapping[str, Placement] = dict(
    (
        _row("generated_code", Place.SANDBOX, "no one has reviewed code that a model has just written"),
        _row("package_install", Place.SANDBOX, "a package's set-up code is a stranger's"),
        _row("outside_write", Place.SANDBOX, "a write outside /memory and /configs could change the agent itself"),
        _row("skill_loading", Place.WORKSPACE, "SKILL.md is only read"),
        _row("tool_function", Place.WORKSPACE, "a tool's own function is the agent builder's code"),
        _row("peer_call", Place.WORKSPACE, "peers are known endpoints"),
        _row("platform_call", Place.WORKSPACE, "heartbeat and registry are known endpoints"),
    )
)


def placement(action: str) -> Placement:
    """Return where an action runs: one of the keys of PLACEMENTS. Raises InvalidRequest for any other."""
    try:
        return PLACEMENTS[action]
    except (KeyError, TypeError):
        raise InvalidRequest(f"unknown action {action!r}; known actions: {', '.join(PLACEMENTS)}") from None
