"""`/api/sandboxes`: open sandboxes that live, list, look, pause and end them; run in them; ports and network."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Annotated, Any, Self

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
from cloche.records.tables import LiveSandbox

from ..auth import Reader, Runner, TheService
from ..bodies import JsonRoute
from ..exec_options import Amount, InFile, OptionFields, WireModel, Word, read_files, read_input
from ..identities import Caller
from ..problems import RESPONSES
from ..sandbox_use import RESULT_OR_EVENTS, Reading, Running, Use, answer_call
from ..service import Service
from ..workspaces import opened_workspace
from .code import allowed_options

router = APIRouter(prefix="/api/sandboxes", tags=["sandboxes"], route_class=JsonRoute)
LIFETIME_S, MOST_LIFETIME_S = 3_600.0, 24 * 3_600.0  # below scope admin
MOST_LABELS = 32
MOST_ROWS = 256  # of traffic, of each kind
_LABEL = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._/-]{0,62})")

Label = Annotated[str, StringConstraints(pattern=rf"^{_LABEL.pattern}$")]
LabelValue = Annotated[str, StringConstraints(max_length=256)]


class WorkspaceFolder(WireModel):
    """A folder of the host below the operator's roots, of which a sandbox gets a copy-on-write view."""

    path: Annotated[str, StringConstraints(min_length=1, max_length=4096)]
    disk: Amount | None = None
    hide: list[Word] = Field(default_factory=list, max_length=1_000)


class NewSandbox(OptionFields):
    """A sandbox to open. It ends after `lifetime`, or after `idle` without a process and a call."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"labels": {"task": "7"}, "lifetime": "30m", "idle": "5m", "timeout": "20s"}]}
    )

    name: Word | None = None
    labels: dict[Label, LabelValue] = Field(default_factory=dict, max_length=MOST_LABELS)
    lifetime: Amount | None = None
    idle: Amount | None = None
    files: list[InFile] = Field(default_factory=list)
    workspace: WorkspaceFolder | None = None


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
            raise ValueError("shell, cwd and user are for commands; leave code out, or these")
        if self.code is None and (not self.argv) == (self.shell is None):
            raise ValueError("give code, or argv, or shell")
        if self.shell is not None and (self.files or self.collect is not None):
            raise ValueError("files and collect are for code and argv; write and read files at /files")
        if (self.files or self.collect is not None) and (self.cwd is not None or self.user is not None):
            raise ValueError("files and collect go with neither cwd nor user; write and read files at /files")
        if self.stdin is not None and self.stdin_base64 is not None:
            raise ValueError("give stdin or stdinBase64, not both")
        return self


class NetworkRules(WireModel):
    """Rules for hosts, as `networkAllow` and `networkDeny` have them."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"rules": ["files.example.org"]}]})

    rules: list[Word] = Field(min_length=1, max_length=256)


@router.post("", status_code=201, responses=RESPONSES)
async def create(asked: NewSandbox, caller: Runner, service: TheService, response: Response) -> dict[str, Any]:
    """Open a sandbox. Below scope admin its limits, network, users and time are bounded as those of runs are."""
    facts = await open_sandbox(asked, caller, service)
    response.headers["Location"] = f"/api/sandboxes/{facts.id}"
    return facts.as_dict()


async def open_sandbox(asked: NewSandbox, caller: Caller, service: Service) -> records.SandboxFacts:
    """Open one, checked against what this caller may. Raises PolicyDenied, InvalidRequest, Refused, AuditFailed."""
    options = await allowed_options(service, caller, asked.options())
    lifetime_s, idle_s = _times(asked, caller)
    document = {
        "name": None if asked.name is None else check_name(asked.name), "labels": asked.labels,
        "lifetime": lifetime_s, "idle": idle_s,
    }  # fmt: skip
    create = partial(
        service.sandboxes.create, project=caller.project, api_key=caller.key_id, lifetime_s=lifetime_s, idle_s=idle_s,
        document=document, files=await read_files(asked.files),
    )  # fmt: skip
    folder = asked.workspace
    if folder is None:
        return await create(options=options)
    holding = opened_workspace(service.options.roots, folder.path, writes=False)
    at, _ = await asyncio.to_thread(holding.__enter__)
    try:
        # By the descriptor: what has the name by now may be another folder.
        given = {"workspace": f"/proc/self/fd/{at}", "workspace_disk": folder.disk, "workspace_hide": folder.hide}
        return await create(options={**options, **given})
    finally:
        holding.__exit__(None, None, None)


def _times(asked: NewSandbox, caller: Caller) -> tuple[float, float | None]:
    """Return lifetime and idle time in seconds. Raises PolicyDenied for a longer life than a caller may give."""
    lifetime_s = LIFETIME_S if asked.lifetime is None else parse_duration(asked.lifetime, name="lifetime")
    if lifetime_s > MOST_LIFETIME_S and not caller.has("admin"):
        raise PolicyDenied(f"lifetime: {lifetime_s:g} s is more than {MOST_LIFETIME_S:g} s; ask for less, or an admin")
    return lifetime_s, None if asked.idle is None else parse_duration(asked.idle, name="idle")


@router.get("", responses=RESPONSES)
async def sandboxes(
    caller: Reader,
    service: TheService,
    label: Annotated[list[str] | None, Query(max_length=8, description="key=value; each must be met")] = None,
    state: Annotated[list[str] | None, Query(max_length=4)] = None,
    name: Annotated[str | None, Query(max_length=64)] = None,
    limit: Annotated[int, Query(ge=1, le=200)] = 50,
    cursor: Annotated[str | None, Query(max_length=64)] = None,
) -> dict[str, Any]:
    """List sandboxes, the newest first; those that ended within the last hour among them."""
    where = records.conditions(_labels(label or ()), _states(state or ()), name)
    await service.sandboxes.compare()
    return await service.read(
        lambda session: list_page(
            session, LiveSandbox, project=caller.project, show=lambda row: records.facts(row).as_dict(), limit=limit,
            cursor=cursor, where=where,
        )
    )  # fmt: skip


def _labels(words: list[str] | tuple[str, ...]) -> dict[str, str]:
    found = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or _LABEL.fullmatch(key) is None:
            raise InvalidRequest("label: write it as key=value")
        found[key] = value
    return found


def _states(words: list[str] | tuple[str, ...]) -> list[str]:
    unknown = set(words) - set(records.STATES)
    if unknown:
        raise InvalidRequest(f"state: use some of {', '.join(records.STATES)}")
    return list(words)


@router.get("/{sandbox_id}", responses=RESPONSES)
async def look(sandbox_id: str, caller: Reader, service: TheService) -> dict[str, Any]:
    """Return one sandbox: its state, labels, limits, and the seconds that it has left."""
    return await service.sandboxes.describe(sandbox_id, caller.project)


@router.delete("/{sandbox_id}", responses=RESPONSES)
async def end(sandbox_id: str, caller: Runner, service: TheService) -> dict[str, Any]:
    """End a sandbox with all that is in it; answered when nothing of it is left."""
    return (await service.sandboxes.end(sandbox_id, caller.project)).as_dict()


@router.post("/{sandbox_id}/pause", responses=RESPONSES)
async def pause(use: Running) -> dict[str, Any]:
    """Stop all its processes, and the clocks of their time-outs; its lifetime goes on."""
    await use.sandbox.pause()
    await use.service.sandboxes.note(use.held.id, records.PAUSED)
    return {"id": use.held.id, "state": records.PAUSED}


@router.post("/{sandbox_id}/resume", responses=RESPONSES)
async def resume(use: Running) -> dict[str, Any]:
    """Let its processes go on."""
    await use.sandbox.resume()
    await use.service.sandboxes.note(use.held.id, records.RUNNING)
    return {"id": use.held.id, "state": records.RUNNING}


async def allowed_timeout(use: Use, asked: Amount | None) -> Amount | None:
    """Return a time-out that a caller gives, which is no longer than that of a run. Raises PolicyDenied."""
    if asked is not None:
        await allowed_options(use.service, use.caller, {"timeout": asked})
    return asked


@router.post("/{sandbox_id}/exec", responses={**RESPONSES, **RESULT_OR_EVENTS})
async def execute(request: Request, use: Running, asked: SandboxExec, stream: bool = False) -> Response:
    """Run code or a command to its end, and answer with the whole result.

    With `?stream=1` the answer is server-sent events: first `call` with an id, at last `result` or `error`. A client
    that goes away ends what it asked for.
    """
    return await answer_call(request, use, await exec_work(use, asked), stream=stream)


async def exec_work(use: Use, asked: SandboxExec) -> Callable[[Sink], Awaitable[Result]]:
    """Return what runs code or a command. Raises PolicyDenied, InvalidRequest."""
    timeout, stdin = await allowed_timeout(use, asked.timeout), await read_input(asked.stdin, asked.stdin_base64)
    files = await read_files(asked.files)

    async def work(sink: Sink) -> Result:
        if asked.code is None and asked.collect is None and files is None:
            return await use.sandbox.exec(
                asked.argv or None, shell=asked.shell, stdin=stdin, cwd=asked.cwd, env=asked.env, user=asked.user,
                timeout=timeout, on_event=sink,
            )  # fmt: skip
        return await use.sandbox.run(
            asked.code, language=asked.language, argv=asked.argv, stdin=stdin, env=asked.env, files=files,
            timeout=timeout, collect=asked.collect, on_event=sink,
        )  # fmt: skip

    return work


@router.get("/{sandbox_id}/exec", responses=RESPONSES)
async def calls(use: Reading) -> dict[str, Any]:
    """List what this worker runs in it to the end, by id."""
    return {"items": [{"id": one} for one in use.held.calls], "nextCursor": None}


@router.delete("/{sandbox_id}/exec/{call_id}", responses=RESPONSES)
async def cancel(call_id: str, use: Running) -> dict[str, Any]:
    """End a command, or code, with all that it started; a cell of a session is interrupted."""
    live = use.held.call(call_id)
    live.cancel()
    return {"id": live.id, "status": "cancelled"}


@router.get("/{sandbox_id}/ports", responses=RESPONSES)
async def ports(use: Reading) -> dict[str, Any]:
    """List the TCP ports on which anything listens inside; a web socket to `…/ports/{port}` leads to one."""
    found = await use.sandbox.ports()
    return {"items": [{"port": one.port, "address": one.address} for one in found], "nextCursor": None}


@router.get("/{sandbox_id}/network", responses=RESPONSES)
async def network(use: Reading) -> dict[str, Any]:
    """Return what it may reach, and what it reached or was refused: the last rows."""
    mode = use.sandbox.policy.network
    if mode not in ("allowlist", "open"):
        return {"mode": mode, "allow": [], "deny": [], "traffic": []}
    rules = use.sandbox.network.rules.as_wire()
    return {"mode": mode, "allow": list(rules["allow"]), "deny": list(rules["deny"]), "traffic": await _traffic(use)}


async def _traffic(use: Use) -> list[dict[str, Any]]:
    """Return the last rows of each kind."""
    rows = await use.sandbox.network.traffic()
    shown = [row for kind in (True, False) for row in [row for row in rows if row["is_allowed"] is kind][-MOST_ROWS:]]
    return [{camel(name): value for name, value in row.items()} for row in shown]


@router.post("/{sandbox_id}/network/allow", responses=RESPONSES)
async def allow(use: Running, asked: NetworkRules) -> dict[str, Any]:
    """Allow further hosts, no more than the settings or their ceilings do. What others add meanwhile holds as well."""
    try:
        await allowed_options(use.service, use.caller, {"network": "allowlist", "network_allow": asked.rules})
    except PolicyDenied as error:
        raise PolicyDenied(str(error).replace("networkAllow: ", "rules: ", 1)) from None
    await use.sandbox.network.allow(*asked.rules)
    return await network(use)


@router.post("/{sandbox_id}/network/deny", responses=RESPONSES)
async def deny(use: Running, asked: NetworkRules) -> dict[str, Any]:
    """Deny hosts; their connections are closed. What others add meanwhile holds as well."""
    await use.sandbox.network.deny(*asked.rules)
    return await network(use)
