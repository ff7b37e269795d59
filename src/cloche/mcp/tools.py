"""The tools of the catalog over the protocol: names, schemas, hints, running a call, answers, progress, cancellation.

A client gets text and figures for the model, and the same as structured data. While a call runs, its progress is
reported; cancelling a call ends its run.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any

import anyio
from mcp.server.auth.middleware.auth_context import get_access_token
from mcp.server.mcpserver import Context, Resolve
from mcp.server.mcpserver.exceptions import ToolError
from mcp.server.mcpserver.resolve import build_resolver_plans, resolve_arguments
from mcp.server.mcpserver.tools import Tool as OfferedTool
from mcp.server.mcpserver.utilities.func_metadata import ArgModelBase, FuncMetadata
from mcp.shared.exceptions import MCPError
from mcp_types import CallToolResult, ContentBlock, ImageContent, InputRequiredResult, TextContent, ToolAnnotations
from mcp_types.version import is_version_at_least

from cloche.agent import catalog
from cloche.agent.answers import MOST_CHARS, Answer, clip, value_text
from cloche.agent.toolbox import Toolbox
from cloche.core.errors import ClocheError, InvalidRequest
from cloche.core.escape import utf8_safe
from cloche.core.record import dataclass, field
from cloche.core.result import Result

from . import approvals
from .approvals import Asking, Spent
from .sessions import Sessions
from .table import CLOSE_SESSION, OPEN_SESSION

MOST_DEPTH = 64  # what takes messages apart stops at some depth
TICK_S = 1.0
STATELESS_VERSION = "2026-07-28"
OWN_SESSION = "cloche.session"  # where a connection keeps the handle of its own session


def result_of(answer: Answer, *, runs_code: bool) -> CallToolResult:
    """Return an answer as the protocol has it; a call that did not come to run anything has text alone."""
    content: list[ContentBlock] = [TextContent(type="text", text=answer.text)]
    content += [ImageContent(type="image", data=image.base64, mime_type=image.mime) for image in answer.images]
    structured: dict[str, Any] | None = None
    if answer.result is not None:
        structured = _ran(answer, answer.result)
    elif not runs_code and not answer.is_error:
        structured = {"text": answer.text}
    return CallToolResult(content=content, structured_content=structured, is_error=answer.is_error)


def text_result(text: str, *, is_error: bool) -> CallToolResult:
    """Return plain text as the protocol has it."""
    shown_text = utf8_safe(clip(text))
    structured = None if is_error else {"text": shown_text}
    return CallToolResult(
        content=[TextContent(type="text", text=shown_text)], structured_content=structured, is_error=is_error
    )


def _ran(answer: Answer, result: Result) -> dict[str, Any]:
    """Return the data of a run, as `table.RAN` describes it."""
    value, value_is_repr = _value(result)
    return {
        "text": answer.text,
        "status": str(result.status),
        "exit_code": result.exit_code,
        "stdout": utf8_safe(clip(result.stdout)),
        "stderr": utf8_safe(clip(result.stderr)),
        "value": value,
        "value_is_repr": value_is_repr,
        "duration_s": result.duration,
        "state": answer.state,
        "truncated": result.truncated,
        "figures": len(answer.images),
        "backend": str(result.meta.get("backend", "")),
        "level": result.meta.get("level"),
    }


def _value(result: Result) -> tuple[Any, bool]:
    """Return a value that every client can read and that is not long or deep, else its text; and whether it is that."""
    try:
        encoded = json.dumps(result.value, allow_nan=False, ensure_ascii=False)
        if len(encoded.encode()) <= MOST_CHARS and _is_shallow(result.value, MOST_DEPTH):
            return json.loads(encoded), result.value_is_repr
    except (ValueError, TypeError, RecursionError):  # half of a character pair is a ValueError, too
        pass
    return utf8_safe(clip(value_text(result))), True


def _is_shallow(value: object, depth: int) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return depth > 0 and all(_is_shallow(item, depth - 1) for item in inner)


def opened_result(handle: str) -> CallToolResult:
    """Return the answer for an opened session."""
    text = f"Opened session {handle}"
    content: list[ContentBlock] = [TextContent(type="text", text=text)]
    return CallToolResult(content=content, structured_content={"text": text, "session": handle})


async def run_to_end(toolbox: Toolbox, name: str, arguments: Mapping[str, Any], context: Context[Any, Any]) -> Answer:
    """Call a tool and report progress: the seconds so far, of its time-out.

    The call is a separate task, cancelled once and awaited: its clean-up is not cancelled again.
    """
    started = time.monotonic()
    total = _most_seconds(toolbox, arguments)
    calling = asyncio.ensure_future(toolbox.call(name, arguments))
    try:
        while True:
            seconds = time.monotonic() - started
            if total is None or seconds < total:  # a call that waits for its turn may take longer
                await _report(context, seconds, total)
            finished, _ = await asyncio.wait({calling}, timeout=TICK_S)
            if finished:
                return calling.result()
    finally:
        if not calling.done():
            calling.cancel()
            with anyio.CancelScope(shield=True):
                await asyncio.wait({calling})


def _most_seconds(toolbox: Toolbox, arguments: Mapping[str, Any]) -> float | None:
    timeout = arguments.get("timeout", toolbox.limits.timeout_s)
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not timeout > 0:
        return None
    return float(min(timeout, toolbox.limits.timeout_s))


async def _report(context: Context[Any, Any], seconds: float, total: float | None) -> None:
    with suppress(anyio.ClosedResourceError, anyio.BrokenResourceError):  # nobody listens: the call goes on
        await context.report_progress(
            seconds, total, f"running for {seconds:.0f} s" if seconds >= TICK_S else "started"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolboxTarget:
    """Hold the toolbox that a call goes to, and whether its workspace is kept afterwards."""

    toolbox: Toolbox
    is_kept: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """Hold the state that a server's calls share.

    With `asks_client` the client's user approves; `is_single_client` says that all calls come from one client.
    """

    sessions: Sessions
    spent: Spent
    asks_client: bool
    patience_s: float
    is_single_client: bool
    home: dict[str, Any] = field(default_factory=dict)
    opening: asyncio.Lock = field(default_factory=asyncio.Lock)


class CatalogTool(OfferedTool):
    """Offer one tool of the catalog. Its arguments are checked by the catalog's own rules, not made to fit."""

    tool_name: str
    runs_code: bool

    async def run(self, arguments: dict[str, Any], context: Context[Any, Any], convert_result: bool = False) -> Any:  # noqa: ANN401, ARG002
        """Ask for approval, then run the call; errors become the answer to the model."""
        serving: Serving = context.request_context.lifespan_context
        values = dict(arguments)
        handle = values.pop("session", "")
        try:
            async with workspace(serving, context, handle) as target:
                self._check_kept(target, values)
                if not target.is_kept and "restart" in self.parameters["properties"]:
                    self._take_restart(values)
                return await self._approve_and_run(serving, target, values, context)
        except ClocheError as error:
            return text_result(f"{type(error).__name__}: {error}", is_error=True)

    def _check_kept(self, target: ToolboxTarget, values: Mapping[str, Any]) -> None:
        """Refuse what makes no sense in a workspace that is gone after the call."""
        path = values.get("path", ".")
        if target.is_kept or self.runs_code or not isinstance(path, str) or target.toolbox.has_root(path):
            return
        raise InvalidRequest(
            f"{self.tool_name}: this protocol keeps nothing between calls by itself; open a session with open_session "
            "and pass its handle as `session`, to this tool and to those that run code"
        )

    def _take_restart(self, values: dict[str, Any]) -> None:
        """Remove `restart`, which has no meaning where no interpreter is kept."""
        restart = values.pop("restart", None)
        if not isinstance(restart, bool | None):
            raise InvalidRequest(f"{self.tool_name}: restart must be of type boolean, not {type(restart).__name__}")

    async def _approve_and_run(
        self, serving: Serving, target: ToolboxTarget, values: dict[str, Any], context: Context[Any, Any]
    ) -> CallToolResult | InputRequiredResult:
        toolbox = target.toolbox
        request = toolbox.would_ask(self.tool_name, values) if serving.asks_client else None
        approvals.begin(Asking(request=request, who=approvals.user_of(context), is_kept=target.is_kept))
        if request is not None:
            unanswered = await self._ask(serving, toolbox, values, context)
            if unanswered is not None:
                return unanswered
        answer = await run_to_end(toolbox, self.tool_name, values, context)
        return result_of(answer, runs_code=self.runs_code)

    async def _ask(
        self, serving: Serving, toolbox: Toolbox, values: dict[str, Any], context: Context[Any, Any]
    ) -> InputRequiredResult | None:
        """Have the client's user answer; return the client's next step, in revisions that work that way."""
        try:
            if context.request_state is not None and not serving.spent.spend():
                raise ToolError("this approval was already used; call again without it")
            with anyio.fail_after(serving.patience_s):
                resolved = await resolve_arguments(self.resolved_params, self.resolver_plans, {}, context)
        except TimeoutError:
            approvals.take_refusal(f"no answer within {serving.patience_s:g} s", by="time-out")
        except ToolError as error:  # an answer that is none
            approvals.take_refusal(str(error), by=approvals.user_of(context))
        except MCPError:
            approvals.take_refusal("the client cannot ask", by="default")
            await toolbox.call(self.tool_name, values)  # refused by its gate, which tells whoever listens to it
            raise
        else:
            if isinstance(resolved, InputRequiredResult):
                return resolved
            approvals.take_answers(resolved["approval"], resolved["confirmation"])
        return None


def offered(tool: catalog.Tool, row: Mapping[str, Any]) -> CatalogTool:
    """Return a tool of the catalog as its row of `table` describes it."""
    questions = {"approval": (Resolve(approvals.ask), True), "confirmation": (Resolve(approvals.confirm), True)}
    return CatalogTool(
        **_described(row),
        fn=_never,
        is_async=True,
        context_kwarg=None,
        resolved_params=questions,
        resolver_plans=build_resolver_plans(questions, set()),
        tool_name=tool.name,
        runs_code=tool.runs_code,
    )


def _described(row: Mapping[str, Any], arg_model: type[ArgModelBase] = ArgModelBase) -> dict[str, Any]:
    """Return the fields of a tool that a client is told."""
    return {
        "name": row["name"], "title": row["title"], "description": row["description"],
        "parameters": row["inputSchema"], "annotations": ToolAnnotations.model_validate(row["annotations"]),
        "fn_metadata": FuncMetadata(arg_model=arg_model, output_schema=row["outputSchema"]),
    }  # fmt: skip


async def _never() -> None:
    """Stand where the protocol package wants a function; CatalogTool.run does the work."""
    raise AssertionError("CatalogTool.run does the work")


@asynccontextmanager
async def workspace(serving: Serving, context: Context[Any, Any], handle: object) -> AsyncIterator[ToolboxTarget]:
    """Give the place that a call goes to. Raises InvalidRequest."""
    if not isinstance(handle, str):
        raise InvalidRequest(f"session must be of type string, not {type(handle).__name__}")
    sessions, owner = serving.sessions, owner_of()
    session = handle or await _own_session(serving, context, owner)
    async with sessions.use(session, owner) if session else sessions.passing(owner) as toolbox:
        yield ToolboxTarget(toolbox=toolbox, is_kept=bool(session))


def owner_of() -> str | None:
    """Name whose token a request came with, None where there are no tokens."""
    token = get_access_token()
    return None if token is None else token.client_id


async def _own_session(serving: Serving, context: Context[Any, Any], owner: str | None) -> str:
    """Return the handle of the session that goes with a connection, empty where every request stands alone."""
    if serving.is_single_client:
        return (await _once(serving, serving.home, owner))[0]
    version = context.protocol_version
    if version is None or is_version_at_least(version, STATELESS_VERSION):
        return ""
    connection = context.session._connection  # the one way to what ends with a connection
    handle, is_new = await _once(serving, connection.state, owner)
    if is_new:
        connection.exit_stack.push_async_callback(serving.sessions.forget, handle)
    return handle


async def _once(serving: Serving, state: dict[str, Any], owner: str | None) -> tuple[str, bool]:
    """Return the handle that a state holds, of a session that is opened for it the first time; and whether it was."""
    async with serving.opening:
        is_new = OWN_SESSION not in state
        if is_new:
            state[OWN_SESSION] = await serving.sessions.open(owner, idles=False)
    return str(state[OWN_SESSION]), is_new


async def open_session(context: Context[Any, Any]) -> CallToolResult:
    """Open a session, and return its handle."""
    serving: Serving = context.request_context.lifespan_context
    try:
        handle = await serving.sessions.open(owner_of())
    except ClocheError as error:
        return text_result(f"{type(error).__name__}: {error}", is_error=True)
    return opened_result(handle)


async def close_session(session: str, context: Context[Any, Any]) -> CallToolResult:
    """Close a session."""
    serving: Serving = context.request_context.lifespan_context
    try:
        await serving.sessions.close(session, owner_of())
    except ClocheError as error:
        return text_result(f"{type(error).__name__}: {error}", is_error=True)
    return text_result("The session is closed.", is_error=False)


def session_tools() -> list[OfferedTool]:
    """Return the tools that open and close sessions."""
    return [_session_tool(open_session, OPEN_SESSION), _session_tool(close_session, CLOSE_SESSION)]


def _session_tool(function: Callable[..., Any], row: Mapping[str, Any]) -> OfferedTool:
    tool = OfferedTool.from_function(function, structured_output=False)
    return tool.model_copy(update=_described(row, tool.fn_metadata.arg_model))
