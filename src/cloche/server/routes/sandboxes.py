"""`/api/sandboxes`: open, list, inspect, pause and end sandboxes; run code in them; ports and network."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Annotated, Any, Literal, Self

from fastapi import APIRouter, Query, Request, Response
from pydantic import ConfigDict, Field, StringConstraints, model_validator

from cloche.core.errors import InvalidRequest, PolicyDenied
from cloche.core.events import Sink
from cloche.core.limits import parse_duration
from cloche.core.result import Result
from cloche.keeper.registry import check_name
from cloche.records import sandboxes as records
from cloche.records.lists import list_page
from cloche.records.results import camel
from cloche.records.tables import StoredSandbox

from ..auth import Reader, Runner, TheService
from ..bodies import JsonRoute
from ..exec_options import Amount, InFile, OptionFields, WireModel, Word, read_files, read_input
from ..held import Terms
from ..identities import Caller
from ..problems import RESPONSES
from ..sandbox_use import RESULT_OR_EVENTS, Reading, Running, Use, answer_call
from ..service import Service
from ..workspaces import opened_workspace
from .code import allowed_options

router = APIRouter(prefix="/api/sandboxes", tags=["sandboxes"], route_class=JsonRoute)
LIFETIME_S, MOST_LIFETIME_S = 3_600.0, 24 * 3_600.0  # below scope admin
LEAST_LEASE_S = 1.0
MOST_LABELS = 32
MOST_ROWS = 256  # of traffic, of each kind
_LABEL = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._/-]{0,62})")

Label = Annotated[str, StringConstraints(pattern=rf"^{_LABEL.pattern}$")]
LabelValue = Annotated[str, StringConstraints(max_length=256)]


class WorkspaceFolder(WireModel):
    """A host folder below the operator's roots. The sandbox gets a copy-on-write view of it."""

    path: Annotated[str, StringConstraints(min_length=1, max_length=4096)]
    disk: Amount | None = None
    hide: list[Word] = Field(default_factory=list, max_length=1_000)


class NewSandbox(OptionFields):
    """A sandbox to open. It ends after `lifetime`, or after `idle` without processes and calls.

    With `lease` it ends also when it has not been used for so long, and with the service's process: no keeper holds it.
    With `onNetwork` `ask`, a client decides about hosts that no rule names: see `…/network/questions`.
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
    on_network: Literal["ask", "refuse"] | None = None


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


@router.post("", status_code=201, responses=RESPONSES)
async def create(body: NewSandbox, caller: Runner, service: TheService, response: Response) -> dict[str, Any]:
    """Open a sandbox. Below scope admin its limits, network, users and time are bounded as for runs."""
    facts = await open_sandbox(body, caller, service)
    response.headers["Location"] = f"/api/sandboxes/{facts.id}"
    return facts.as_dict()


async def open_sandbox(body: NewSandbox, caller: Caller, service: Service) -> records.SandboxFacts:
    """Open a sandbox, if the caller may. Raises PolicyDenied, InvalidRequest, Refused, AuditFailed."""
    options = await allowed_options(service, caller, body.options())
    terms = _times(body, caller)
    document = {
        "name": None if body.name is None else check_name(body.name), "labels": body.labels,
        "lifetime": terms.lifetime_s, "idle": terms.idle_s, "lease": terms.lease_s,
    }  # fmt: skip
    create = partial(
        service.sandboxes.create, project=caller.project, api_key=caller.key_id, terms=terms, document=document,
        files=await read_files(body.files),
    )  # fmt: skip
    folder = body.workspace
    if folder is None:
        return await create(options=options)
    holding = opened_workspace(service.options.roots, folder.path, writes=False)
    descriptor, _ = await asyncio.to_thread(holding.__enter__)
    try:
        # By the descriptor, since another folder may have the path by now.
        workspace_options = {
            "workspace": f"/proc/self/fd/{descriptor}",
            "workspace_disk": folder.disk,
            "workspace_hide": folder.hide,
        }
        return await create(options={**options, **workspace_options})
    finally:
        holding.__exit__(None, None, None)


def _times(body: NewSandbox, caller: Caller) -> Terms:
    """Return the times of a sandbox. Raises PolicyDenied for a lifetime beyond the caller's permission."""
    lifetime_s = LIFETIME_S if body.lifetime is None else parse_duration(body.lifetime, name="lifetime")
    if lifetime_s > MOST_LIFETIME_S and not caller.has("admin"):
        raise PolicyDenied(
            f"lifetime: {lifetime_s:g} s is more than {MOST_LIFETIME_S:g} s; ask for less, or ask an admin"
        )
    lease_s = None if body.lease is None else parse_duration(body.lease, name="lease")
    if lease_s is not None and lease_s < LEAST_LEASE_S:  # it is looked at as often
        raise InvalidRequest(f"lease: {lease_s:g} s is too short; give at least {LEAST_LEASE_S:g} s")
    return Terms(
        lifetime_s=lifetime_s,
        idle_s=None if body.idle is None else parse_duration(body.idle, name="idle"),
        lease_s=lease_s,
    )


@router.get("", responses=RESPONSES)
async def sandboxes(
    caller: Reader,
    service: TheService,
    label: Annotated[list[str] | None, Query(max_length=8, description="key=value; a sandbox must match each")] = None,
    state: Annotated[list[str] | None, Query(max_length=4)] = None,
    name: Annotated[str | None, Query(max_length=64)] = None,
    limit: Annotated[int, Query(ge=1, le=200)] = 50,
    cursor: Annotated[str | None, Query(max_length=64)] = None,
) -> dict[str, Any]:
    """List sandboxes, the newest first, including those that ended within the last hour."""
    where = records.conditions(_labels(label or ()), _states(state or ()), name)
    await service.sandboxes.compare()
    return await service.read(
        lambda session: list_page(
            session, StoredSandbox, project=caller.project, show=lambda row: records.facts(row).as_dict(), limit=limit,
            cursor=cursor, where=where,
        )
    )  # fmt: skip


def _labels(texts: list[str] | tuple[str, ...]) -> dict[str, str]:
    labels = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or _LABEL.fullmatch(key) is None:
            raise InvalidRequest("label: write it as key=value")
        labels[key] = value
    return labels


def _states(texts: list[str] | tuple[str, ...]) -> list[str]:
    unknown = set(texts) - set(records.STATES)
    if unknown:
        raise InvalidRequest(f"state: use some of {', '.join(records.STATES)}")
    return list(texts)


@router.get("/{sandbox_id}", responses=RESPONSES)
async def look(sandbox_id: str, caller: Reader, service: TheService) -> dict[str, Any]:
    """Return one sandbox: its state, labels, limits, and remaining seconds."""
    return await service.sandboxes.describe(sandbox_id, caller.project)


@router.delete("/{sandbox_id}", responses=RESPONSES)
async def end(sandbox_id: str, caller: Runner, service: TheService) -> dict[str, Any]:
    """End a sandbox and everything in it. The answer comes when nothing of it is left."""
    return (await service.sandboxes.end(sandbox_id, caller.project)).as_dict()


@router.post("/{sandbox_id}/pause", responses=RESPONSES)
async def pause(use: Running) -> dict[str, Any]:
    """Stop all processes and the clocks of their time-outs. The lifetime continues."""
    await use.sandbox.pause()
    await use.service.sandboxes.note(use.held.id, records.PAUSED)
    return {"id": use.held.id, "state": records.PAUSED}


@router.post("/{sandbox_id}/resume", responses=RESPONSES)
async def resume(use: Running) -> dict[str, Any]:
    """Resume its processes."""
    await use.sandbox.resume()
    await use.service.sandboxes.note(use.held.id, records.RUNNING)
    return {"id": use.held.id, "state": records.RUNNING}


async def allowed_timeout(use: Use, requested: Amount | None) -> Amount | None:
    """Return a caller's time-out, which must not exceed that of a run. Raises PolicyDenied."""
    if requested is not None:
        await allowed_options(use.service, use.caller, {"timeout": requested})
    return requested


@router.post("/{sandbox_id}/exec", responses={**RESPONSES, **RESULT_OR_EVENTS})
async def execute(request: Request, use: Running, body: SandboxExec, stream: bool = False) -> Response:
    """Run code or a command to its end, and answer with the whole result.

    With `?stream=1` the answer is server-sent events: first `call` with an id, finally `result` or `error`. A
    disconnect cancels the call.
    """
    return await answer_call(request, use, await exec_work(use, body), stream=stream)


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


@router.get("/{sandbox_id}/exec", responses=RESPONSES)
async def calls(use: Reading) -> dict[str, Any]:
    """List the calls that this worker runs in the sandbox, by id."""
    return {"items": [{"id": call_id} for call_id in use.held.calls], "nextCursor": None}


@router.delete("/{sandbox_id}/exec/{call_id}", responses=RESPONSES)
async def cancel(call_id: str, use: Running) -> dict[str, Any]:
    """End a command or code with all that it started; a session's cell is interrupted."""
    live = use.held.call(call_id)
    live.cancel()
    return {"id": live.id, "status": "cancelled"}


@router.get("/{sandbox_id}/ports", responses=RESPONSES)
async def ports(use: Reading) -> dict[str, Any]:
    """List the TCP ports with a listener inside. A web socket to `…/ports/{port}` connects to one."""
    ports = await use.sandbox.ports()
    return {"items": [{"port": port.port, "address": port.address} for port in ports], "nextCursor": None}


@router.get("/{sandbox_id}/network", responses=RESPONSES)
async def network(use: Reading) -> dict[str, Any]:
    """Return the network rules, and the last allowed and refused connections."""
    mode = use.sandbox.policy.network
    if mode not in ("allowlist", "open"):
        return {"mode": mode, "allow": [], "deny": [], "traffic": []}
    rules = use.sandbox.network.rules.as_wire()
    return {"mode": mode, "allow": list(rules["allow"]), "deny": list(rules["deny"]), "traffic": await _traffic(use)}


async def _traffic(use: Use) -> list[dict[str, Any]]:
    rows = await use.sandbox.network.traffic()
    shown = [row for kind in (True, False) for row in [row for row in rows if row["is_allowed"] is kind][-MOST_ROWS:]]
    return [{camel(name): value for name, value in row.items()} for row in shown]


@router.post("/{sandbox_id}/network/allow", responses=RESPONSES)
async def allow(use: Running, body: NetworkRules) -> dict[str, Any]:
    """Allow more hosts, within the settings or their ceilings. Rules that other clients add meanwhile are kept."""
    try:
        await allowed_options(use.service, use.caller, {"network": "allowlist", "network_allow": body.rules})
    except PolicyDenied as error:
        raise PolicyDenied(str(error).replace("networkAllow: ", "rules: ", 1)) from None
    await use.sandbox.network.allow(*body.rules)
    return await network(use)


@router.post("/{sandbox_id}/network/deny", responses=RESPONSES)
async def deny(use: Running, body: NetworkRules) -> dict[str, Any]:
    """Deny hosts, and close their connections. Rules that other clients add meanwhile are kept."""
    await use.sandbox.network.deny(*body.rules)
    return await network(use)
