"""The tools of one agent: check the arguments, ask for approval, run, answer. The sandbox's workspace lasts.

    async with Toolbox(approve=auto("high")) as tools:
        answer = await tools.call("run_code", {"code": "print(6 * 7)"})
        print(answer.text)

The sandbox is the operator's: it takes the keywords of `cloche.Sandbox`. A model's arguments are checked against the
tool's table and can only ask for less (a shorter time-out). Decisions go to the audit log, each call to a span.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager, nullcontext
from functools import partial
from os import PathLike
from types import TracebackType
from typing import Any, Self, Unpack

from cloche.audit.log import Audit, acting
from cloche.audit.recording import Execution, is_traced, recorded
from cloche.blocking import calls
from cloche.config.options import SandboxOptions
from cloche.core.enforcement import Level
from cloche.core.errors import (
    ApprovalDenied,
    AuditFailed,
    ClocheError,
    InvalidRequest,
    OutcomeUnknown,
    SandboxFileError,
    StartFailed,
)
from cloche.core.escape import utf8_safe
from cloche.core.limits import MIB, Limits
from cloche.core.policy import DEFAULT_LANGUAGES, Policy
from cloche.core.record import asdict, replace
from cloche.execution.registry import capabilities_of
from cloche.execution.sandbox import AsyncSandbox
from cloche.execution.tools import ToolsArgument
from cloche.functions.tool import ToolLimits, read_tools, stubs

from .answers import MOST_CHARS, Answer, CallResult, SaveOutput, answer_of, clip, python_text
from .approval import ON_HOST, PATIENCE_S, ApprovalEvent, ApprovalRequest, Approver, Gate, Risk, deny, record_decision
from .catalog import (
    Tool,
    ToolAction,
    describe_on_host,
    describe_with_functions,
    describe_with_interpreters,
    describe_with_languages,
    describe_with_network,
    describe_with_package_managers,
    describe_with_secrets,
    level_of,
    read_arguments,
    risk_of,
    settings_of,
    tier_of,
    tool_named,
    tools_of,
    with_tier,
)
from .host import Roots, run_on_host
from .host_folder import ShownDiffs
from .interpreters import Interpreters, Room, Share
from .network_grants import HostGate

log = logging.getLogger("cloche.agent")
MOST_READ_BYTES = 4 * MIB
OUTPUTS = "tool-outputs"  # the folder of the workspace for outputs that are too long for an answer
WORKSPACE = "/workspace"
ENDINGS, ENDING_S = 3, 0.2  # rounds in which what was left running is ended, as it may go on forking
_ENDED = "[What earlier calls left running took every process there may be, and was ended.]"
_LOST = "The sandbox is gone with all files; the next call begins in a new one."


def audit_failure_text(error: AuditFailed) -> str:
    """Return the text for the model; the path of the log is for the operator alone, and is logged."""
    log.critical("%s", error)
    return "AuditFailed: the operator's audit log cannot be written, so nothing was run. Tell the operator."


@contextmanager
def traced_call(tool: Tool, call: str) -> Iterator[Callable[[str], None]]:
    """Trace a call where spans are collected; yields a function that records the kind of its error."""
    if not is_traced():
        yield lambda _: None
        return
    from cloche.audit.telemetry import tool_span

    with tool_span(tool.name, tool.description, call) as failed:
        yield failed


class Toolbox:
    """Call the tools of a tier.

    `approve` decides about HIGH and CRITICAL calls, and is waited for `patience_s` seconds; without it they are denied.
    `roots` maps `/memory` and `/configs` to host folders that the file tools may use, instead of those that are
    configured. `on_event` hears of approvals; with `audit=True` they are recorded, and so is what runs. With
    `interpreters` these go on between calls, where the sandbox can keep them: True keeps them for this toolbox alone,
    `room.share_of(owner)` in a `Room` that several share. `live` and `collect` are those of `AsyncSandbox` and its
    `run`: results have all files that changed, unless other patterns are given. With `workspace`, as there, there are
    the tools show_changes and commit_changes, whose approver is shown the diff. `tools` are functions of the caller, as
    of `cloche.run`, that programs import from `cloche_host`; the descriptions of the tools that run code have their
    stubs, and `approve` decides about risky calls.
    Raises InvalidRequest for settings that do not fit, as `AsyncSandbox` does.
    """

    def __init__(
        self,
        *,
        approve: Approver = deny,
        patience_s: float = PATIENCE_S,
        roots: Mapping[str, str | PathLike[str]] | None = None,
        on_event: Callable[[ApprovalEvent], None] = lambda _: None,
        interpreters: bool | Share = False,
        live: bool | None = None,
        collect: Sequence[str] = ("**",),
        workspace: str | PathLike[str] | None = None,
        workspace_disk: int | str | None = None,
        workspace_hide: Sequence[str] | None = None,
        tools: ToolsArgument | None = None,
        tool_limits: ToolLimits | None = None,
        **options: Unpack[SandboxOptions],
    ):
        self.tier = tier_of(options)
        self.tools = tools_of(self.tier)
        self._gate = Gate(approve, patience_s=patience_s, on_event=self._on_approval_event)
        self._on_event = on_event
        self._roots = Roots.configured(settings_of(options)) if roots is None else Roots(roots)
        given: dict[str, Any] = {"live": live, "workspace_disk": workspace_disk, "workspace_hide": workspace_hide}
        if tools is not None:
            given |= {"tools": read_tools(tools, tool_limits), "approve": approve}
        make = partial(AsyncSandbox, workspace=workspace, **given)
        self._sandbox = make(**with_tier(options, self.tier))
        if self._sandbox.policy.languages == DEFAULT_LANGUAGES:  # nobody chose: `code.execute` brings its own
            options["languages"] = (*DEFAULT_LANGUAGES, "csharp")
            self._sandbox = make(**with_tier(options, self.tier))
        if self._sandbox.policy.trusted:
            raise InvalidRequest("trusted: code that a model wrote is never the operator's own; leave it out for tools")
        # Other backends use an image's programs, and other levels cannot hide files.
        name = self._sandbox.backend
        can_hide = name == "local" and capabilities_of(name, level=self.policy.level).level is Level.JAIL
        if can_hide and self.policy.package_managers is not True:
            self._sandbox.hide_package_managers()
        if self.policy.package_managers or not can_hide:
            self.tools = tuple(map(describe_with_package_managers, self.tools))
        languages = self._sandbox.languages
        self.tools = tuple(describe_with_languages(tool, languages) for tool in self.tools)
        if self.policy.network in ("allowlist", "open"):
            hosts = self.policy.network_allow
            self.tools = tuple(describe_with_network(tool, self.policy.network, hosts) for tool in self.tools)
        if self._hosts_of_secrets:
            self.tools = tuple(describe_with_secrets(tool, self._hosts_of_secrets) for tool in self.tools)
        self._diffs = ShownDiffs("" if workspace is None else os.path.abspath(workspace))
        self._host_gate: HostGate | None = None
        if self.policy.on_network == "ask":
            request = partial(ApprovalRequest.of_host, policy=self.policy, runs_on=self._sandbox.backend)
            self._host_gate = HostGate(self._gate, self._diffs.folder or os.curdir, request, self._on_approval_event)
        self.tools += self._diffs.tools
        self._given_level = level_of(options.get("backend"))
        if self._is_on_host:
            self.tools = tuple(map(describe_on_host, self.tools))
        if tools is not None:
            text = stubs(given["tools"])
            self.tools = tuple(describe_with_functions(tool, text) for tool in self.tools)
        self._collect = tuple(collect)
        self._interpreters = self._kept_interpreters(interpreters)
        self._stack = AsyncExitStack()
        self._opening, self._editing = asyncio.Lock(), asyncio.Lock()
        self._running: set[asyncio.Task[Answer]] = set()
        self._is_open = self._has_sandbox = self._is_lost = self._is_blocking = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._calls = 0

    def _kept_interpreters(self, kept: bool | Share) -> Interpreters | None:
        """Return the interpreters that keep state, and adapt the tools' descriptions; None on the host."""
        if kept is False:
            return None
        if kept is not True and not isinstance(kept, Share):
            raise InvalidRequest(f"interpreters: {kept!r} keeps none; give True, or room.share_of(owner)")
        languages = () if self._is_on_host else self._sandbox.session_languages
        self.tools = tuple(describe_with_interpreters(tool, languages) for tool in self.tools)
        share = kept if isinstance(kept, Share) else Room().share_of(None)
        return Interpreters(share, languages, self._collect) if languages else None

    async def __aenter__(self) -> Self:
        if self._is_open:
            raise InvalidRequest("this toolbox is already open; make another one")
        self._is_open, self._loop = True, asyncio.get_running_loop()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_open, self._has_sandbox, self._loop = False, False, None
        running = tuple(self._running)
        for call in running:
            call.cancel()
        try:
            if running:
                await asyncio.wait(running)
        finally:
            if self._interpreters is not None:
                self._interpreters.forget()
            await self._stack.__aexit__(kind, error, trace)

    def __enter__(self) -> Self:
        """Open it for blocking calls."""
        calls.call(self.__aenter__)
        self._is_blocking = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_blocking = False
        calls.call(lambda: self.__aexit__(kind, error, trace))

    def call_and_wait(self, name: str, arguments: Mapping[str, Any] | None = None) -> Answer:
        """Do what `call` does, from code that is not async; from any thread but that of the toolbox's own loop.

        Raises InvalidRequest there, where waiting would be for ever.
        """
        loop = self._loop
        if loop is None:
            raise InvalidRequest("this toolbox is not open; use it in a `with` or an `async with` block")
        if self._is_blocking:
            return calls.call(lambda: self._call(name, arguments))
        if asyncio._get_running_loop() is loop:
            raise InvalidRequest(
                "this toolbox was opened in the event loop that runs here; use `await tools.call(...)`"
            )
        calling = asyncio.run_coroutine_threadsafe(self._call(name, arguments), loop)
        try:
            return calling.result()
        except BaseException:
            calling.cancel()
            raise

    @property
    def limits(self) -> Limits:
        """Return the most that a call may use."""
        return self._sandbox.limits

    @property
    def policy(self) -> Policy:
        """Return the rules that hold for code that runs in the sandbox."""
        return self._sandbox.policy

    @property
    def audit(self) -> Audit | None:
        """Return the log of decisions and runs, None where it is off."""
        return self._sandbox.audit

    def _on_approval_event(self, event: ApprovalEvent) -> None:
        record_decision(self.audit, event)
        self._on_event(event)

    def risk(self, name: str) -> Risk:
        """Return the risk of a tool here. Raises InvalidRequest for one that this tier does not have."""
        return self._risk(tool_named(name, self.tier, self.tools))

    def has_root(self, path: str) -> bool:
        """Tell whether a path is below a folder of the host that the file tools may use."""
        return self._roots.has(path)

    def would_ask(self, name: str, arguments: Mapping[str, Any] | None = None) -> ApprovalRequest | None:
        """Return the approver's request for this call, None if it needs no approval: for servers that ask first.

        Raises InvalidRequest for a call that is refused before an approval.
        """
        return self._gate.would_ask(self._request(*self._read(name, arguments)))

    def _read(self, name: str, arguments: Mapping[str, Any] | None) -> tuple[Tool, dict[str, Any]]:
        tool = tool_named(name, self.tier, self.tools)
        return tool, read_arguments(tool, {} if arguments is None else arguments)

    def _request(self, tool: Tool, read: Mapping[str, Any]) -> ApprovalRequest:
        if tool.action is ToolAction.COMMIT:
            return self._diffs.request(tool, read)
        # A copy, so that an approver cannot change what will run.
        return ApprovalRequest(tool=tool.name, risk=self._risk(tool), arguments=dict(read), rules=self._rules(tool))

    def _risk(self, tool: Tool) -> Risk:
        return risk_of(tool, is_on_host=self._is_on_host)

    @property
    def _is_on_host(self) -> bool:
        """Tell whether tools run code on the host itself, by the requested or the actual level."""
        asked_level = self._sandbox.policy.level
        level = self._given_level if asked_level is None else asked_level
        return level is not None and level < Level.CONFINED

    async def call(self, name: str, arguments: Mapping[str, Any] | None = None) -> Answer:
        """Call a tool with a model's arguments; every failure is an answer for the model.

        Raises InvalidRequest when the toolbox is not open.
        """
        if not self._is_open:
            raise InvalidRequest("this toolbox is not open; use it in a `with` or an `async with` block")
        loop = self._loop
        if loop is None or asyncio.get_running_loop() is loop:
            return await self._call(name, arguments)
        if self._is_blocking:
            return await self._call_from_other_loop(name, arguments)
        # What it holds belongs to the loop that it was opened in.
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._call(name, arguments), loop))

    async def _call_from_other_loop(self, name: str, arguments: Mapping[str, Any] | None) -> Answer:
        """Call from another event loop than the one it was opened in; cancelling the caller cancels the call."""
        started_calls: list[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]]] = []
        is_given_up = False

        async def work() -> Answer:
            task = asyncio.current_task()
            if is_given_up or task is None:
                raise asyncio.CancelledError
            started_calls.append((asyncio.get_running_loop(), task))
            return await self._call(name, arguments)

        try:
            return await asyncio.to_thread(calls.call, work)
        except asyncio.CancelledError:
            is_given_up = True
            for loop, task in started_calls:
                loop.call_soon_threadsafe(task.cancel)
            raise

    async def _call(self, name: str, arguments: Mapping[str, Any] | None) -> Answer:
        """Make a call in a new task, which is cancelled when the toolbox closes."""
        if not self._is_open:
            raise InvalidRequest("this toolbox is not open; use it in a `with` or an `async with` block")
        call = asyncio.ensure_future(self._answer_call(name, arguments))
        self._running.add(call)
        call.add_done_callback(self._running.discard)
        try:
            return await call
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            was_closed = self._loop is not asyncio.get_running_loop()
            if not was_closed or (caller is not None and caller.cancelling()):
                raise
            return Answer(text="The call was ended: the toolbox was closed.", is_error=True)

    async def _answer_call(self, name: str, arguments: Mapping[str, Any] | None) -> Answer:
        try:
            answer = await self._approve_and_run(name, arguments)
        except AuditFailed as error:
            answer = Answer(text=audit_failure_text(error), is_error=True)
        except OutcomeUnknown as error:
            self._is_lost = self._has_sandbox
            answer = Answer(text=clip(f"OutcomeUnknown: {error}. {_LOST}"), is_error=True)
        except ClocheError as error:
            answer = Answer(text=clip(f"{type(error).__name__}: {error}"), is_error=True)
        except Exception as error:
            log.exception("a tool failed")  # the message may name what is the host's, so the model gets the kind alone
            answer = Answer(text=f"InternalError: the tool failed with {type(error).__name__}.", is_error=True)
        return replace(answer, text=utf8_safe(answer.text))

    async def _approve_and_run(self, name: str, arguments: Mapping[str, Any] | None) -> Answer:
        tool, read = self._read(name, arguments)
        call = secrets.token_hex(8)
        with traced_call(tool, call) as failed, acting(tool=tool.name, call=call):
            decision = await self._gate.approve(self._request(tool, read))
            with acting(approved_by=decision.by) if decision else nullcontext():
                answer = await self._act(tool, read)
            if answer.is_error:
                failed(str(answer.result.status) if answer.result else "error")
            return answer

    async def _act(self, tool: Tool, read: Mapping[str, Any]) -> Answer:
        """Run a tool; if processes of earlier calls take up the limit of processes, end them first.

        Files are read and written by a process inside, too, which such processes may stop.
        """
        act = partial(_ACTIONS[tool.action], self, tool, read)
        limit_s = self.limits.timeout_s if tool.action in _OF_FILES else None
        try:
            async with asyncio.timeout(limit_s):
                try:
                    return await act()
                except (StartFailed, SandboxFileError) as error:
                    if "pids" not in (getattr(error, "step", ""), getattr(error, "kind", "")):
                        raise
                    await self._end_leftovers()
                    answer = await act()
                    return replace(answer, text=f"{_ENDED}\n{answer.text}")
        except TimeoutError:
            if limit_s is None:  # it is none of ours
                raise
            path = read.get("path", "")
            raise SandboxFileError(f"{path}: not done in {limit_s:g} s", path=path, kind="timeout") from None

    async def _end_leftovers(self) -> None:
        """End what calls that have ended left running, and wait until something can be started again, for a while."""
        for _ in range(ENDINGS):
            for process in await self._sandbox.processes():
                if process.exit_code is not None:
                    await (await self._sandbox.process(process.id)).kill()
            await asyncio.sleep(ENDING_S)

    async def run_code(
        self,
        code: str,
        language: str = "python",
        timeout: float = 30,  # noqa: ASYNC109
        *,
        restart: bool = False,
    ) -> dict[str, Any]:
        """Run code, and return `output` (the text for a model), stdout, stderr, value, status and exit_code.

        With `interpreters` there is `state`, too, and `restart=True` begins with a new interpreter.
        """
        more = {"restart": True} if restart else {}
        answer = await self.call("run_code", {"code": code, "language": language, "timeout": timeout, **more})
        fields: dict[str, Any] = {"output": answer.text, "is_error": answer.is_error}
        if answer.result is not None:
            all_fields = answer.result.as_dict()
            fields |= {name: all_fields[name] for name in ("stdout", "stderr", "value", "status", "exit_code", "files")}
        if self._interpreters is not None:
            fields["state"] = answer.state
        return fields

    async def run_python_code(self, code: str, timeout: float = 30, *, restart: bool = False) -> str:  # noqa: ASYNC109
        """Run Python, and return its output, or `Error (exit_code=N):` and its standard error.

        With `interpreters` a note about the interpreter comes first; `restart=True` begins with a new one.
        """
        more = {"restart": True} if restart else {}
        answer = await self.call("run_python_code", {"code": code, "timeout": timeout, **more})
        result = answer.result
        if result is None:
            return answer.text
        note = f"{answer.note}\n" if answer.note else ""
        limits = self.limits.with_changes(timeout_s=self._timeout_s({"timeout": timeout}))
        return note + python_text(result, limits, most_s=self.limits.timeout_s)

    def _rules(self, tool: Tool) -> dict[str, Any]:
        """Return the rules of the call, for the approver and for the fingerprint of an approval."""
        limits = self._sandbox.limits.as_dict()
        if tool.action is ToolAction.HOST:
            return {"runs_on": ON_HOST, "limits": {"timeout_s": limits["timeout_s"]}}
        if self._is_on_host:  # a network that is off, say, would be no more than a word there
            return {"runs_on": ON_HOST, "backend": self._sandbox.backend, "limits": limits}
        policy = asdict(self._sandbox.policy)
        del policy["layers"]  # where packages lie; which ones they may be is another rule
        del policy["host_folder"]  # what is said of that is in `workspace`
        del policy["secrets"]
        return {
            "runs_on": self._sandbox.backend,
            "policy": policy,
            "limits": limits,
            **({"secrets": self._hosts_of_secrets} if self._hosts_of_secrets else {}),
            **({"workspace": self._diffs.folder} if self._diffs.folder else {}),
            **({"interpreter": "goes on between calls"} if "restart" in tool.properties else {}),
        }

    @property
    def _hosts_of_secrets(self) -> Mapping[str, Sequence[str]]:
        secrets = self._sandbox.policy.secrets
        return {} if secrets is None else secrets.hosts_by_name

    async def _opened(self) -> AsyncSandbox:
        """Open the sandbox with the first call that needs it, and another one where it was lost."""
        async with self._opening:
            if self._is_lost:
                self._has_sandbox = self._is_lost = False
                if self._interpreters is not None:
                    self._interpreters.forget()
                await self._stack.aclose()
            if not self._has_sandbox:
                self._sandbox.ask_about_packages(self._approve_packages)
                await self._stack.enter_async_context(self._sandbox)
                self._has_sandbox = True
                if self._host_gate is not None and self._sandbox.is_live:
                    self._sandbox.network.ask(self._host_gate.approve)
        return self._sandbox

    async def _approve_packages(self, names: Sequence[str]) -> bool:
        """Ask the approver about packages that the operator's list has not."""
        request = ApprovalRequest(
            tool="packages", risk=Risk.HIGH, arguments={"packages": list(names)},
            rules={"policy": {"packages": tuple(names)}},
        )  # fmt: skip
        try:
            await self._gate.approve(request)
        except ApprovalDenied:
            return False
        return True

    async def _run(self, tool: Tool, read: Mapping[str, Any]) -> Answer:
        sandbox, timeout_s = await self._opened(), self._timeout_s(read)
        is_shell = tool.action is ToolAction.SHELL
        code = read["command"] if is_shell else read["code"]
        language = "bash" if is_shell else read.get("language", tool.languages[0])
        if self._interpreters is None:
            result = await sandbox.run(code, language=language, timeout=timeout_s, collect=self._collect)
            ran = CallResult(result=result)
        else:
            ran = await self._interpreters.run(
                sandbox, code, language, timeout_s=timeout_s, is_kept=not is_shell, restart=read.get("restart", False)
            )
        limits = self.limits.with_changes(timeout_s=timeout_s)
        return await answer_of(ran, limits, self._output_saver(), most_s=self.limits.timeout_s)

    async def _run_on_host(self, _: Tool, read: Mapping[str, Any]) -> Answer:
        limits = self.limits.with_changes(timeout_s=self._timeout_s(read))
        running = partial(run_on_host, read["shell"], read["command"], limits)
        execution = Execution(kind="host", backend="host", language=read["shell"], code=read["command"], limits=limits)
        result = await recorded(running, self.audit, execution)
        return await answer_of(CallResult(result=result), limits, _save_nothing, most_s=self.limits.timeout_s)

    def _timeout_s(self, read: Mapping[str, Any]) -> float:
        """Return a run's time-out: the requested one, at most the operator's."""
        return float(min(read["timeout"], self.limits.timeout_s))

    def _output_saver(self) -> SaveOutput:
        """Return the function that saves one call's output in the workspace if it is too long for an answer."""
        self._calls += 1
        number = self._calls

        async def save(stream: str, text: str) -> str:
            if len(text) <= MOST_CHARS:
                return ""
            path = f"{OUTPUTS}/{number}.{stream}.txt"
            try:
                await self._sandbox.write_file(path, text)
            except ClocheError:  # a full workspace, say: then there is no full text
                return ""
            return path

        return save

    async def _read_file(self, tool: Tool, read: Mapping[str, Any]) -> Answer:
        text = await self._text(tool, read["path"])
        if not text:
            return Answer(text="The file is empty.")
        lines = text.splitlines(keepends=True)
        part = lines[read["offset"] : read["offset"] + read["lines"]]
        shown = clip("".join(part), where=read["path"])
        if not part:
            return Answer(text=f"There is no line {read['offset']}: the file has {len(lines)} lines.")
        if not shown.strip():
            shown = "Nothing but blanks."
        if len(part) < len(lines):
            shown += f"\n[lines {read['offset']} to {read['offset'] + len(part) - 1} of {len(lines)}]"
        return Answer(text=shown)

    async def _list_files(self, tool: Tool, read: Mapping[str, Any]) -> Answer:
        path = read["path"]
        if self._roots.has(path):
            paths = await asyncio.to_thread(self._roots.list_files, path)
        else:
            paths = await (await self._opened()).list_files(_inside(tool, path))
        return Answer(text=clip("\n".join(paths)) if paths else "There are no files.")

    async def _write_file(self, tool: Tool, read: Mapping[str, Any]) -> Answer:
        async with self._editing:
            await self._put(tool, read["path"], read["content"])
        return Answer(text=f"Wrote {len(read['content'])} characters to {read['path']}.")

    async def _edit_file(self, tool: Tool, read: Mapping[str, Any]) -> Answer:
        path, old = read["path"], read["old"]
        async with self._editing:  # two edits at once would lose one
            text = await self._text(tool, path)
            count = text.count(old) if old else 0
            if count != 1:
                problem = "is empty" if not old else "is not there" if not count else f"is there {count} times"
                raise InvalidRequest(f"edit_file: the passage {problem} in {path}; give one that is there exactly once")
            await self._put(tool, path, text.replace(old, read["new"]))
        return Answer(text=f"Replaced one passage of {path}.")

    async def _show_or_commit(self, tool: Tool, read: Mapping[str, Any]) -> Answer:
        return Answer(text=await self._diffs.act(await self._opened(), tool, read))

    async def _text(self, tool: Tool, path: str) -> str:
        if self._roots.has(path):
            data = await asyncio.to_thread(self._roots.read, path, max_bytes=MOST_READ_BYTES)
        else:
            data = await (await self._opened()).read_file(_inside(tool, path), max_bytes=MOST_READ_BYTES)
        try:
            return data.decode()
        except UnicodeDecodeError:
            raise SandboxFileError(f"{path} is not text; read it with code", path=path) from None

    async def _put(self, tool: Tool, path: str, text: str) -> None:
        try:
            data = text.encode()
        except UnicodeEncodeError:
            raise InvalidRequest(
                f"{tool.name}: the text has half of a character pair, which no file can hold"
            ) from None
        if self._roots.has(path):
            if len(data) > MOST_READ_BYTES:
                raise InvalidRequest(f"{tool.name}: {path} takes at most {MOST_READ_BYTES // MIB} MiB")
            await asyncio.to_thread(self._roots.write, path, data)
        else:
            await (await self._opened()).write_file(_inside(tool, path), data)


def _inside(tool: Tool, path: str) -> str:
    """Return a path relative to the workspace. Raises InvalidRequest for any other absolute one."""
    if path == WORKSPACE or path.startswith(f"{WORKSPACE}/"):
        path = path[len(WORKSPACE) :].lstrip("/") or "."
    try:
        path.encode()
    except UnicodeEncodeError:
        raise InvalidRequest(f"{tool.name}: {path!r} is not a name that a file can have") from None
    if path.startswith("/"):
        raise InvalidRequest(f"{tool.name}: {path} is not in the workspace; give a path relative to it")
    return path


async def _save_nothing(_: str, __: str) -> str:
    """Save nothing: what runs on the host has no workspace."""
    return ""


_OF_FILES = frozenset({ToolAction.READ, ToolAction.LIST, ToolAction.WRITE, ToolAction.EDIT})
_ACTIONS: Mapping[ToolAction, Callable[[Toolbox, Tool, Mapping[str, Any]], Awaitable[Answer]]] = {
    ToolAction.RUN: Toolbox._run,
    ToolAction.SHELL: Toolbox._run,
    ToolAction.HOST: Toolbox._run_on_host,
    ToolAction.READ: Toolbox._read_file,
    ToolAction.LIST: Toolbox._list_files,
    ToolAction.WRITE: Toolbox._write_file,
    ToolAction.EDIT: Toolbox._edit_file,
    ToolAction.DIFF: Toolbox._show_or_commit,
    ToolAction.COMMIT: Toolbox._show_or_commit,
}
