"""The rules of a run: what it may reach and what must hold."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from .errors import InvalidRequest
from .levels import Control, Level

ScreenMode = Literal["off", "warn", "block"]
NetworkMode = Literal["off", "allowlist", "open"]
Fallback = Literal["none", "process"]
ContainerRuntime = Literal["runc"]

# C's seven, the default allowlist; C# joins where a policy or `code.execute` names it.
DEFAULT_LANGUAGES: tuple[str, ...] = ("python", "javascript", "typescript", "bash", "ruby", "go", "rust")


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Say what a run may reach and what must hold.

    `require_level` and `require_controls` refuse anything less; `best_effort` names controls that may be
    absent. `level` asks for one level exactly (`process` only ever this way); None takes the strongest the
    backend has. `warm` lets a run start in a sandbox that was made ready ahead, and `preload` names modules that are
    already loaded there. Without `package_managers`, programs that install packages are not shown, as far as the
    backend can do that. `network_allow` lists the hosts that mode `allowlist` may reach: empty means none.
    `runtime` names the one container runtime that will do: docker's own, at level `jail` (C3).
    `fallback` says what may run `trusted` code, which is the operator's own and never a model's, where the backend that
    was chosen is missing: the local backend, then with `process` a child process (S12).
    """

    network: NetworkMode = "off"
    network_allow: tuple[str, ...] = ()
    read_only_root: bool = True
    writable_paths: tuple[str, ...] = ("/workspace", "/tmp")
    user: str | None = None
    seccomp: bool = True
    drop_capabilities: bool = True
    languages: tuple[str, ...] = DEFAULT_LANGUAGES
    packages: tuple[str, ...] | Literal["auto"] = ()
    screen: ScreenMode = "off"
    level: Level | None = None
    runtime: ContainerRuntime | None = None
    require_level: Level | None = None
    require_controls: tuple[Control, ...] = ()
    best_effort: tuple[Control, ...] = ()
    trusted: bool = False
    fallback: Fallback = "none"
    warm: bool = True
    preload: tuple[str, ...] = ()
    package_managers: bool = True

    def __post_init__(self) -> None:
        if self.screen not in get_args(ScreenMode):
            raise InvalidRequest(f"screen: {self.screen!r} is unknown; use one of {', '.join(get_args(ScreenMode))}")
        if self.fallback not in get_args(Fallback):
            raise InvalidRequest(f"fallback: {self.fallback!r} is unknown; use one of {', '.join(get_args(Fallback))}")
        if self.runtime not in (None, *get_args(ContainerRuntime)):
            raise InvalidRequest(f"runtime: {self.runtime!r} is unknown; use {', '.join(get_args(ContainerRuntime))}")
        if self.network not in get_args(NetworkMode):
            raise InvalidRequest(f"network: {self.network!r} is unknown; use one of {', '.join(get_args(NetworkMode))}")
        for name in ("network_allow", "writable_paths", "languages", "require_controls", "best_effort", "preload"):
            object.__setattr__(self, name, _as_tuple(getattr(self, name), name=name))
        if self.packages != "auto":
            object.__setattr__(self, "packages", _as_tuple(self.packages, name="packages"))
        for path in self.writable_paths:
            if path not in ("/workspace", "/tmp", "/dev/shm"):
                raise InvalidRequest(
                    f"writable_paths: {path!r} cannot be writable; only /workspace, /tmp and /dev/shm can"
                )

    def with_changes(self, **changes: Any) -> Policy:  # noqa: ANN401  # checked by __post_init__
        """Return a copy; a change of None is no change."""
        return replace(self, **{name: value for name, value in changes.items() if value is not None})


def _as_tuple(values: object, *, name: str) -> tuple[Any, ...]:
    """Freeze a sequence; a bare string would otherwise be taken apart letter by letter."""
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise InvalidRequest(f"{name}: {values!r} must be a list")
    return tuple(values)


def parse_network(value: object, *, name: str) -> NetworkMode:
    """Read a network setting: a boolean (`true` is `open`), or the name of a mode."""
    by_word: dict[object, NetworkMode] = {
        False: "off", True: "open", "false": "off", "true": "open", "off": "off", "none": "off",
        "open": "open", "bridge": "open", "on": "open", "allowlist": "allowlist",
    }  # fmt: skip
    word = value.strip().lower() if isinstance(value, str) else value
    if not isinstance(word, bool | str) or word not in by_word:
        raise InvalidRequest(f"{name}: {value!r} is not a network setting; use off, allowlist or open")
    return by_word[word]
