"""The keywords that say how a sandbox is made; the same everywhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any, Literal, TypedDict

from cloche.core.levels import Level
from cloche.core.policy import Fallback, ScreenMode
from cloche.core.protocols import Backend

from .config_keys import Prefer


class SandboxOptions(TypedDict, total=False):
    """Name every keyword that `run`, `arun`, `Sandbox`, `AsyncSandbox` and `get_sandbox` take; None means
    "not given".

    - timeout: seconds of wall clock, or text such as "30s" or "500ms".
    - memory, disk, output_limit: bytes, or text such as "256m". `output_limit` is what is kept per stream.
    - cpus: CPUs, for example 0.5. pids: how many processes and threads may exist at once.
    - network: "off", "allowlist" or "open" (False and True are off and open).
    - network_allow: the hosts that "allowlist" may reach.
    - preset: a name of `cloche presets`. tier: 1 to 4. config: a configuration file.
    - backend: a name of `cloche backends`, or an object that implements `cloche.core.protocols.Backend`.
    - runtime: "runc" demands docker's own runtime, never gVisor's; else another word for `backend`.
    - prefer: "strongest" or "fastest": let `auto` choose among the backends that are here and meet the policy.
    - fallback: "process" lets `trusted` code run in the local jail, else as a child process, where the backend that was
      chosen is missing; "none". trusted: this code is the operator's own, never a model's.
    - image: the container image, for backends that use images.
    - require: a level, names of controls, or both ("jail,memory"); less is an error, never a fallback.
    - best_effort: names of controls that may be absent. level: ask for exactly one level.
    - packages: what to install first; "auto" resolves imports.
    - languages: the names that may be run; csharp is not among the default ones.
    - warm: start in a sandbox that was made ready ahead, where there is one; false starts everything afresh.
    - preload: modules that are already loaded when the code starts ("numpy", "pandas").
    - audit: true writes an audit log, and a path does so in that folder; false does not.
    - screen: the look at Python's syntax tree before a run: "off", "warn" or "block", which level `process` has by
      itself.
    """

    timeout: float | str | None
    memory: int | str | None
    cpus: float | str | None
    pids: int | None
    disk: int | str | None
    output_limit: int | str | None
    network: bool | str | None
    network_allow: Sequence[str] | None
    preset: str | None
    tier: int | None
    backend: str | Backend | None
    runtime: str | None
    image: str | None
    require: str | Sequence[str] | None
    best_effort: str | Sequence[str]
    packages: Sequence[str] | Literal["auto"] | None
    languages: Sequence[str] | None
    screen: ScreenMode | None
    warm: bool | None
    preload: Sequence[str] | None
    level: Level | str | None
    prefer: Prefer | None
    fallback: Fallback | None
    trusted: bool | None
    audit: bool | str | PathLike[str] | None
    config: str | PathLike[str] | None


def given(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the caller really gave, or raise TypeError for a keyword that does not exist."""
    known = SandboxOptions.__annotations__
    for name in options:
        if name not in known:
            raise TypeError(f"unexpected keyword {name!r}; known: {', '.join(sorted(known))}")
    return {name: value for name, value in options.items() if value is not None and value != ()}
