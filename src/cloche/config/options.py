"""The keywords that configure a sandbox, for all functions that accept them; `keys` has their readers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Literal, TypedDict

from cloche.core.enforcement import Level
from cloche.core.policy import Fallback, OnNetwork, PackageManagers, ScreenMode
from cloche.core.protocols import Backend

if TYPE_CHECKING:
    from cloche.core.secrets import Capture, Secret

Prefer = Literal["strongest", "fastest"]


class SandboxOptions(TypedDict, total=False):
    """The keywords that `run`, `arun`, `Sandbox`, `AsyncSandbox` and `get_sandbox` take; None means "not given".

    - timeout: seconds of wall clock, or text such as "30s" or "500ms".
    - memory, disk, output_limit: bytes, or text such as "256m". `output_limit` bytes are kept per stream.
    - cpus: CPUs, for example 0.5. pids: how many processes and threads may exist at once.
    - network: "off", "allowlist", "open" or "bridge" (False and True are off and open; a list of hosts, an allowlist).
    - network_allow: the hosts that "allowlist" may reach: "example.org", "*.example.org:8443", "db:5432@10.0.0.0/8";
      with methods and paths: "api.example.org/GET:/repos/*". Given without `network`, they are an allowlist.
      network_deny: hosts and networks that are never reached.
    - network_ports: ports that "open" has beside 80 and 443. on_network: "ask" lets an approver decide about others.
    - preset: a name of `cloche presets`. tier: 1 to 4. config: a configuration file.
    - backend: a name of `cloche backends`, or an object that implements `cloche.core.protocols.Backend`.
    - runtime: "runc" requires docker's own runtime, never gVisor's; "runsc" is gvisor; others are names for `backend`.
    - prefer: "strongest" or "fastest": what `auto` chooses among the available backends that meet the policy.
    - fallback: "process" runs `trusted` code in the local jail, or else as a child process, if the chosen backend is
      missing; "none". trusted: this code is the operator's own, never written by a model.
    - image: the container image, for backends that use images.
    - require: a level, names of controls, or both ("jail,memory"); less is an error.
    - accept_claimed: accept a remote provider's claims about its isolation for `require`.
    - best_effort: names of controls that may be absent. level: exactly this level.
    - packages: installed before the run: names with versions; "auto" takes them from the program's header and imports.
    - locked: install exactly the versions in `cloche.lock`, or in the lock file of this path; it must exist.
    - package_managers: whether programs that install packages (pip, npm, apt, uv) are shown: true, false, or "live",
      the default: to all but throwaway runs.
    - toolchains: folders of this host with programs ("~/.cargo", "~/.rustup"), shown read-only at their own paths,
      without credentials, and on PATH.
    - languages: the languages that may run; csharp is not among the default ones.
    - secrets: secrets by name that the egress process puts into requests, `{"API_KEY": cloche.Secret(hosts=[...])}`; a
      program has a placeholder of each in its environment.
    - users: give a live sandbox several users, including root inside; they are not isolated from each other.
    - account: the name of a live sandbox's ordinary account, instead of `sandbox`: its home is `/home/ACCOUNT`, where
      its commands start.
    - warm: start in a sandbox that was prepared in advance, if there is one; false starts a new one.
    - preload: modules that are already loaded when the code starts ("numpy", "pandas").
    - audit: true writes an audit log, a path writes it in that folder; false writes none.
    - screen: a check of Python's syntax tree before a run: "off", "warn" or "block", the default at level `process`.
    """

    timeout: float | str | None
    memory: int | str | None
    cpus: float | str | None
    pids: int | None
    disk: int | str | None
    output_limit: int | str | None
    network: bool | str | None
    network_allow: Sequence[str] | None
    network_deny: Sequence[str] | None
    network_ports: Sequence[int] | None
    on_network: OnNetwork | None
    preset: str | None
    tier: int | None
    backend: str | Backend | None
    runtime: str | None
    image: str | None
    require: str | Sequence[str] | None
    best_effort: str | Sequence[str] | None
    accept_claimed: bool | None
    packages: Sequence[str] | Literal["auto"] | None
    locked: bool | str | PathLike[str] | None
    package_managers: PackageManagers | None
    toolchains: Sequence[str] | None
    languages: Sequence[str] | None
    screen: ScreenMode | None
    secrets: Mapping[str, Secret | Capture] | Sequence[str] | None
    users: bool | None
    account: str | None
    warm: bool | None
    preload: Sequence[str] | None
    level: Level | str | None
    prefer: Prefer | None
    fallback: Fallback | None
    trusted: bool | None
    audit: bool | str | PathLike[str] | None
    config: str | PathLike[str] | None
