"""Sandboxes: what a caller may ask for, and the work in one: code, ports, network, pausing."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field, StringConstraints, model_validator

from cloche.core.errors import InvalidRequest, PolicyDenied
from cloche.core.events import Sink
from cloche.core.letter_case import camel
from cloche.core.limits import parse_duration
from cloche.core.result import Result
from cloche.keeper.life import ENDS
from cloche.keeper.registry import check_name

from .callers import Caller
from .exec_options import Amount, InFile, OptionFields, WireModel, Word, read_files, read_input
from .held import Terms
from .uses import Use

LIFETIME_S, MOST_LIFETIME_S = 3_600.0, 24 * 3_600.0  # below scope admin
LEAST_LEASE_S = 1.0
MOST_LABELS = 32
MOST_ROWS = 256  # of traffic, of each kind
STARTING, RUNNING, PAUSED, ENDED = STATES = ("starting", "running", "paused", "ended")
_LABEL = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._/-]{0,62})")

Label = Annotated[str, StringConstraints(pattern=rf"^{_LABEL.pattern}$")]
AtEnd = Literal["end", "pause", "pause-files"]
LabelValue = Annotated[str, StringConstraints(max_length=256)]


class WorkspaceFolder(WireModel):
    """A host folder below the operator's roots. The sandbox gets a copy-on-write view of it."""

    path: Annotated[str, StringConstraints(min_length=1, max_length=4096)]
    disk: Amount | None = None
    hide: list[Word] = Field(default_factory=list, max_length=1_000)


class NewSandbox(OptionFields):
    """A sandbox to open. It ends after `lifetime`, or after `idle` without processes and calls.

    With `atEnd` `pause` it is paused after `lifetime`, with `pause-files` without its processes.

    With `lease` it ends also when it has not been used for so long, and with the service's process: no keeper holds it.
    With `onNetwork` `ask`, a client decides about hosts that no rule names: see `…/network/questions`. With `snapshot`,
    an id or a name, it begins with the files of that snapshot.
    """

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"labels": {"task": "7"}, "lifetime": "30m", "idle": "5m", "timeout": "20s"}]}
    )

    name: Word | None = None
    labels: dict[Label, LabelValue] = Field(default_factory=dict, max_length=MOST_LABELS)
    lifetime: Amount | None = None
    idle: Amount | None = None
    lease: Amount | None = None
    files: list[InFile] = Field(default_factory=list)
    workspace: WorkspaceFolder | None = None
    snapshot: Word | None = None
    on_network: Literal["ask", "refuse"] | None = None
    at_end: AtEnd | None = None


class Pause(WireModel):
    """How to pause or resume a sandbox: without `memory`, its processes end, and it goes on with its files."""

    memory: bool = True


class Lifetime(WireModel):
    """The time that a sandbox has left from now on, and what happens then. With `onlyExtends` a later end stays."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"lifetime": "10m", "atEnd": "pause"}]})

    lifetime: Amount | None = None
    at_end: AtEnd | None = None
    only_extends: bool = False


class SandboxExec(WireModel):
    """What to run to its end: `code` in a language, a command `argv`, or a line of `shell`."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"shell": "ls | wc -l"}, {"code": "print(1)"}]})

    code: str | None = None
    language: Word = "python"
    argv: list[str] = Field(default_factory=list, max_length=10_000)
    shell: str | None = None
    stdin: str | None = None
    stdin_base64: str | None = None
    env: dict[Word, str] | None = None
    files: list[InFile] = Field(default_factory=list)
    cwd: Annotated[str, StringConstraints(max_length=4096)] | None = None
    user: Word | None = None
    timeout: Amount | None = None
    collect: list[Word] | None = Field(default=None, max_length=64)

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        if self.code is not None and (self.shell is not None or self.cwd is not None or self.user is not None):
            raise ValueError("shell, cwd and user are for commands; leave out code, or leave out these")
        if self.code is None and (not self.argv) == (self.shell is None):
            raise ValueError("give code, or argv, or shell")
        if self.shell is not None and (self.files or self.collect is not None):
            raise ValueError("files and collect are for code and argv; write and read files at /files")
        if (self.files or self.collect is not None) and (self.cwd is not None or self.user is not None):
            raise ValueError("files and collect cannot be combined with cwd or user; write and read files at /files")
        if self.stdin is not None and self.stdin_base64 is not None:
            raise ValueError("give stdin or stdinBase64, not both")
        return self


class NetworkRules(WireModel):
    """Rules for hosts, in the format of `networkAllow` and `networkDeny`."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"rules": ["files.example.org"]}]})

    rules: list[Word] = Field(min_length=1, max_length=256)


class NewRules(WireModel):
    """All rules of a network: its mode, and the hosts that are allowed and denied."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"mode": "allowlist", "allow": ["files.example.org"]}]})

    mode: Literal["allowlist", "open"] = "allowlist"
    allow: list[Word] = Field(default_factory=list, max_length=256)
    deny: list[Word] = Field(default_factory=list, max_length=256)
    headers: dict[Word, dict[Word, str]] = Field(default_factory=dict, max_length=64)


def terms_of(body: NewSandbox, caller: Caller) -> Terms:
    """Return the times of a sandbox. Raises PolicyDenied for a lifetime beyond the caller's permission."""
    lifetime_s = LIFETIME_S if body.lifetime is None else _lifetime_s(body.lifetime, caller)
    lease_s = None if body.lease is None else parse_duration(body.lease, name="lease")
    if lease_s is not None and lease_s < LEAST_LEASE_S:  # it is looked at as often
        raise InvalidRequest(f"lease: {lease_s:g} s is too short; give at least {LEAST_LEASE_S:g} s")
    return Terms(
        lifetime_s=lifetime_s,
        idle_s=None if body.idle is None else parse_duration(body.idle, name="idle"),
        lease_s=lease_s,
        at_end=body.at_end or ENDS,
    )


def _lifetime_s(lifetime: Amount, caller: Caller) -> float:
    """Return seconds that the caller may ask for. Raises InvalidRequest, PolicyDenied."""
    lifetime_s = parse_duration(lifetime, name="lifetime")
    if lifetime_s > MOST_LIFETIME_S and not caller.has("admin"):
        raise PolicyDenied(
            f"lifetime: {lifetime_s:g} s is more than {MOST_LIFETIME_S:g} s; ask for less, or ask an admin"
        )
    return lifetime_s


def document_of(body: NewSandbox, terms: Terms) -> dict[str, Any]:
    """Return the part of a new sandbox's facts that its caller chose. Raises InvalidRequest for a wrong name."""
    return {
        "name": None if body.name is None else check_name(body.name), "labels": body.labels,
        "lifetime": terms.lifetime_s, "idle": terms.idle_s, "lease": terms.lease_s,
        "atEnd": terms.at_end,
    }  # fmt: skip


def read_labels(texts: list[str] | tuple[str, ...]) -> dict[str, str]:
    """Return the labels that `key=value` texts name. Raises InvalidRequest."""
    labels = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or _LABEL.fullmatch(key) is None:
            raise InvalidRequest("label: write it as key=value")
        labels[key] = value
    return labels


def read_states(texts: list[str] | tuple[str, ...]) -> list[str]:
    """Return states, each of which is one. Raises InvalidRequest."""
    unknown = set(texts) - set(STATES)
    if unknown:
        raise InvalidRequest(f"state: use some of {', '.join(STATES)}")
    return list(texts)


async def pause(use: Use, body: Pause | None = None) -> dict[str, Any]:
    """Stop all processes, the clocks of their time-outs and that of the lifetime."""
    return await _change(use, "pause", memory=body is None or body.memory)


async def resume(use: Use, body: Pause | None = None) -> dict[str, Any]:
    """Resume its processes and its clocks."""
    return await _change(use, "resume", memory=body is None or body.memory)


async def set_lifetime(use: Use, body: Lifetime) -> dict[str, Any]:
    """Set the remaining time, and what happens at its end. Raises InvalidRequest, PolicyDenied."""
    order: dict[str, Any] = {} if body.at_end is None else {"at_end": body.at_end}
    if body.lifetime is not None:
        order["left_s"] = _lifetime_s(body.lifetime, use.caller)
    return await _change(use, "lifetime", only_extends=body.only_extends, **order)


async def _change(use: Use, op: str, **order: Any) -> dict[str, Any]:  # noqa: ANN401 - JSON
    info = await use.service.sandboxes.change(use.held, op, **order)
    state = PAUSED if info.get("is_paused") else RUNNING
    return {"id": use.held.id, "state": state, "secondsLeft": info.get("left_s"), "atEnd": info.get("at_end")}


async def allowed_timeout(use: Use, requested: Amount | None) -> Amount | None:
    """Return a caller's time-out, which must not exceed that of a run. Raises PolicyDenied."""
    if requested is not None:
        await use.service.allowed_options(use.caller, {"timeout": requested})
    return requested


async def exec_work(use: Use, body: SandboxExec) -> Callable[[Sink], Awaitable[Result]]:
    """Return a function that runs code or a command. Raises PolicyDenied, InvalidRequest."""
    timeout, stdin = await allowed_timeout(use, body.timeout), await read_input(body.stdin, body.stdin_base64)
    files = await read_files(body.files)

    async def work(sink: Sink) -> Result:
        if body.code is None and body.collect is None and files is None:
            return await use.sandbox.exec(
                body.argv or None, shell=body.shell, stdin=stdin, cwd=body.cwd, env=body.env, user=body.user,
                timeout=timeout, on_event=sink,
            )  # fmt: skip
        return await use.sandbox.run(
            body.code, language=body.language, argv=body.argv, stdin=stdin, env=body.env, files=files,
            timeout=timeout, collect=body.collect, on_event=sink,
        )  # fmt: skip

    return work


async def ports(use: Use) -> dict[str, Any]:
    """List the TCP ports with a listener inside."""
    ports = await use.sandbox.ports()
    return {"items": [{"port": port.port, "address": port.address} for port in ports], "nextCursor": None}


async def network(use: Use) -> dict[str, Any]:
    """Return the network rules, and the last allowed and refused connections."""
    mode = use.sandbox.policy.network
    if mode not in ("allowlist", "open"):
        return {"mode": mode, "allow": [], "deny": [], "traffic": []}
    rules = use.sandbox.network.rules.as_wire()
    return {
        "mode": rules["mode"],
        "allow": list(rules["allow"]),
        "deny": list(rules["deny"]),
        "traffic": await _traffic(use),
    }


async def _traffic(use: Use) -> list[dict[str, Any]]:
    rows = await use.sandbox.network.traffic()
    shown = [row for kind in (True, False) for row in [row for row in rows if row["is_allowed"] is kind][-MOST_ROWS:]]
    return [{camel(name): value for name, value in row.items()} for row in shown]


async def allow(use: Use, body: NetworkRules) -> dict[str, Any]:
    """Allow more hosts, within the settings or their ceilings. Rules that other clients add meanwhile are kept."""
    try:
        await use.service.allowed_options(use.caller, {"network": "allowlist", "network_allow": body.rules})
    except PolicyDenied as error:
        raise PolicyDenied(str(error).replace("networkAllow: ", "rules: ", 1)) from None
    await use.sandbox.network.allow(*body.rules)
    return await network(use)


async def deny(use: Use, body: NetworkRules) -> dict[str, Any]:
    """Deny hosts, and close their connections. Rules that other clients add meanwhile are kept."""
    await use.sandbox.network.deny(*body.rules)
    return await network(use)


async def replace_rules(use: Use, body: NewRules) -> dict[str, Any]:
    """Replace all rules of a network, within the settings or their ceilings, and close what they do not allow."""
    own = {"network": body.mode, "network_allow": body.allow, "network_deny": body.deny}
    allowed = await use.service.allowed_options(use.caller, own)
    await use.sandbox.network.replace(
        mode=body.mode, allow=body.allow, deny=allowed["network_deny"], headers=body.headers
    )
    return await network(use)
