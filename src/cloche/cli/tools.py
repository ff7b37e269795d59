"""`cloche tools`, `cloche approvals` and `cloche container`: an agent's tools, requests that wait for a decision, and
the `docker run` of an agent's own container.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from cloche.core.errors import InvalidRequest
from cloche.core.escape import escape, escape_line

from .app import root
from .options import Decorator, argument, flag, json_option, option, sandbox_options
from .output import guarded, say, show

if TYPE_CHECKING:
    from cloche.agent.answers import Answer
    from cloche.agent.approval import ApprovalRequest, Approver, Decision, Risk
    from cloche.agent.catalog import Tool
    from cloche.agent.queue import ApprovalQueue, QueueEntry
    from cloche.config.options import SandboxOptions

EXIT_TOOL_FAILED = 1
TIER_ON_HOST = 4
POLL_S = 0.2
MOST_CALL_CHARS = 60  # characters of a call, in the table
_STATES = {"approved": "let through", "denied": "not run", "expired": "no answer in time: not run"}
_TIER = "Tier of trust, 1 to 4. Default: 3."
ToolListing = list[dict[str, Any]]


@root.group("tools", help="List an agent's tools, or call one.", no_args_is_help=False, invoke_without_command=True)
@option("--tier", metavar="N", type=int, help=_TIER)
@option(
    "--format", "form", metavar="FORM", default="table", show_default=False,
    help="table, json, openai, openai-strict, openai-responses or anthropic.",
)  # fmt: skip
@click.pass_context
def tools(context: click.Context, tier: int | None, form: str) -> None:
    """List the tools of a tier with their risks, or export them for a provider's `tools=`."""
    if context.invoked_subcommand is None:
        context.exit(guarded(lambda: list_tools(tier, form), as_json=form != "table"))


approvals = root.group("approvals", help="List calls that wait for approval, and decide on them.")(lambda: None)


def _as_plain(tools: tuple[Tool, ...], tier: int) -> ToolListing:
    return [
        {
            "name": tool.name, "wire_name": tool.wire_name, "risk": str(_risk(tool, tier)), "tiers": list(tool.tiers),
            "description": tool.description, "schema": tool.schema,
        }
        for tool in tools
    ]  # fmt: skip


def _as_openai(tools: tuple[Tool, ...], _: int) -> ToolListing:
    from cloche.agent.exports import openai_tools

    return openai_tools(tools)


def _as_openai_strict(tools: tuple[Tool, ...], _: int) -> ToolListing:
    from cloche.agent.exports import openai_tools

    return openai_tools(tools, is_strict=True)


def _as_openai_responses(tools: tuple[Tool, ...], _: int) -> ToolListing:
    from cloche.agent.exports import openai_response_tools

    return openai_response_tools(tools)


def _as_anthropic(tools: tuple[Tool, ...], _: int) -> ToolListing:
    from cloche.agent.exports import anthropic_tools

    return anthropic_tools(tools)


FORMATS: Mapping[str, Callable[[tuple[Tool, ...], int], ToolListing]] = {
    "json": _as_plain,
    "openai": _as_openai,
    "openai-strict": _as_openai_strict,
    "openai-responses": _as_openai_responses,
    "anthropic": _as_anthropic,
}


def list_tools(tier: int | None, form: str) -> int:
    """Print the tools of a tier (default 3), as a table or in one of FORMATS."""
    from cloche.agent.catalog import DEFAULT_TIER
    from cloche.agent.toolbox import Toolbox

    number = DEFAULT_TIER if tier is None else tier
    tools = Toolbox(tier=number).tools
    if form == "table":
        rows = [
            {
                "tool": tool.name,
                "risk": str(_risk(tool, number)),
                "tiers": ", ".join(map(str, tool.tiers)),
                "arguments": ", ".join(f"[{n}]" if "default" in s else n for n, s in tool.properties.items()),
                "does": tool.description.partition(". ")[0].rstrip(".") + ".",
            }
            for tool in tools
        ]
        show(rows, as_json=False)
        return 0
    if form not in FORMATS:
        raise InvalidRequest(f"--format: {form!r} is unknown; use one of table, {', '.join(FORMATS)}")
    print(json.dumps(FORMATS[form](tools, number), indent=2))
    return 0


def call_tool(
    name: str,
    arguments: str,
    *,
    approve: str,
    queue: str | None,
    patience_s: float | None,
    out: str | None,
    options: SandboxOptions,
) -> int:
    """Call one tool as a model would, and print the model's answer text. Return 1 if it is an error."""
    import asyncio

    from cloche.agent.approval import PATIENCE_S, check_patience

    patience = PATIENCE_S if patience_s is None else check_patience(patience_s)
    answer = asyncio.run(_called(name, _read(arguments), _approver(approve, queue, patience), patience, options))
    print(escape(answer.text) if sys.stdout.isatty() else answer.text)
    _keep_images(answer, out)
    return EXIT_TOOL_FAILED if answer.is_error else 0


async def _called(
    name: str,
    arguments: Any,  # noqa: ANN401 - the tool checks it
    approve: Approver,
    patience_s: float,
    options: SandboxOptions,
) -> Answer:
    from cloche.agent.toolbox import Toolbox

    async with Toolbox(approve=approve, patience_s=patience_s, **options) as tools:
        return await tools.call(name, arguments)


def _read(arguments: str) -> object:
    try:
        return json.loads(sys.stdin.read() if arguments == "-" else arguments)
    except ValueError as error:
        raise InvalidRequest(f'the arguments are not JSON: {error}; for example \'{{"code": "1 + 1"}}\'') from None


def _approver(approve: str, queue: str | None, patience_s: float) -> Approver:
    mode, _, risk = approve.partition(":")
    if mode == "terminal":
        from cloche.agent.terminal import AskTerminal

        return AskTerminal()
    if mode == "queue":
        from cloche.agent.queue import ApprovalQueue

        say("approvals wait in the queue: cloche approvals list")
        return ApprovalQueue(queue, patience_s=patience_s)
    if mode == "auto":
        from cloche.agent.approval import auto

        return auto(risk or "high")
    if mode == "deny":
        return _deny
    raise InvalidRequest(f"--approve: {approve!r} is unknown; use one of terminal, queue, auto:high, deny")


async def _deny(_: ApprovalRequest) -> Decision:
    """Say no, and that it is the command line that does."""
    from cloche.agent.approval import Decision

    return Decision(is_approved=False, by="cli", reason="the command line says --approve deny")


def _keep_images(answer: Answer, out: str | None) -> None:
    import base64
    from pathlib import Path

    from cloche.hostfs import open_in_place_of

    if out is None:
        if answer.images:
            say(f"figures: {len(answer.images)}; --out DIR keeps them")
        return
    try:
        Path(out).mkdir(parents=True, exist_ok=True)
        for number, image in enumerate(answer.images, 1):
            name = f"figure-{number}.{image.mime.partition('/')[2]}"
            open_in_place_of(out, name, base64.b64decode(image.base64)).close()
            say(f"wrote {Path(out, name)}")
    except OSError as error:
        raise InvalidRequest(f"--out {out}: the figures cannot be written: {error.strerror}") from error


def _risk(tool: Tool, tier: int) -> Risk:
    from cloche.agent.catalog import risk_of

    return risk_of(tool, is_on_host=tier == TIER_ON_HOST)


def list_approvals(queue: str | None, *, is_all: bool, as_json: bool) -> int:
    """List the waiting requests, or all stored ones, the oldest first."""
    with _opened(queue) as approvals:
        entries = approvals.entries() if is_all else approvals.waiting()
    if as_json:
        print(json.dumps([_as_dict(entry) for entry in entries], indent=2, default=str))
    elif entries:
        show([_row(entry) for entry in entries], as_json=False)
    else:
        print("nothing is kept" if is_all else "nothing waits")
    return 0


def show_approval(queue: str | None, number: int, *, as_json: bool) -> int:
    """Show one request: the call, the rules that apply, the changes since the last one."""
    with _opened(queue) as approvals:
        entry = approvals.entry(number)
    if as_json:
        print(json.dumps(_as_dict(entry), indent=2, default=str))
        return 0
    from rich.console import Console

    from cloche.agent.terminal import show_request

    request = entry.request
    console = Console(emoji=False, width=None if sys.stdout.isatty() else 200)
    asks = "Confirm it once more" if request.is_confirmation else "Approve it"
    where = escape(str(request.rules.get("runs_on")))
    console.print(f"{entry.number}: {escape(request.tool)} ({request.risk}, on {where})", style="bold", markup=False)
    show_request(request, console)
    if entry.state == "waiting":
        listing = f"{asks}? It waits {_time_left(entry)} longer: cloche approvals approve {number}, or deny {number}"
    else:
        listing = f"{entry.state}: {_STATES[entry.state]}{_decided(entry)}"
    console.print(listing, markup=False, highlight=False)
    return 0


def decide(queue: str | None, number: int, *, is_approved: bool, reason: str = "", **kinds: bool) -> int:
    """Approve or deny a waiting request, and print which one it was. `kinds` are further fields of a Decision."""
    from cloche.agent.approval import Decision, Risk

    decision = Decision(is_approved=is_approved, by=_by(), reason=reason, **kinds)
    is_remembered = decision.is_remembered
    with _opened(queue) as approvals:
        request = approvals.entry(number).request
        if is_remembered and request.risk is not Risk.HIGH:
            raise InvalidRequest(f"approval {number} is {request.risk}: only high calls can be remembered")
        _check_kinds(number, request, decision)
        approvals.decide(number, decision, is_confirming=request.is_confirmation)
    verb = "approved" if is_approved else "denied"
    remembered = "; the same call is not asked for again" if is_remembered else ""
    print(f"{verb} {number}: {escape(request.tool)} ({request.risk}){remembered}")
    if is_approved and request.risk is Risk.CRITICAL and not request.is_confirmation:
        print("it is critical, and will be asked for once more")
    return 0


def _check_kinds(number: int, request: ApprovalRequest, decision: Decision) -> None:
    """Raise InvalidRequest for a kind of yes that the request cannot have."""
    from cloche.agent.terminal import choices

    fields = {field for field, *_ in choices(request)}
    if decision.is_once and "is_once" not in fields:
        raise InvalidRequest(f"approval {number}: --once is for hosts of a sandbox with a name")
    if decision.is_for_folder and "is_for_folder" not in fields:
        raise InvalidRequest(f"approval {number}: --folder is for hosts of a sandbox with a folder of the host")


def watch(queue: str | None) -> int:
    """Ask on the terminal about each call as it arrives, until Ctrl-C."""
    import asyncio

    if not sys.stdin.isatty():
        raise InvalidRequest("watch needs a terminal; without one use list, show, approve and deny")
    with _opened(queue) as approvals:
        say("asking about each call that waits; Ctrl-C ends")
        asyncio.run(_ask_about_each(approvals))
    return 0


async def _ask_about_each(queue: ApprovalQueue) -> None:
    import asyncio

    from cloche.agent.terminal import AskTerminal
    from cloche.core.record import replace

    ask = AskTerminal()
    asked_about: set[tuple[int, bool]] = set()
    while sys.stdin.isatty():  # after a lost SIGHUP the terminal is gone, and no answer can come
        waiting = queue.waiting()
        new = (entry for entry in waiting if (entry.number, entry.request.is_confirmation) not in asked_about)
        entry = next(new, None)
        if entry is None:
            await asyncio.sleep(POLL_S)
            continue
        asked_about.add((entry.number, entry.request.is_confirmation))
        try:
            decision = await asyncio.wait_for(ask(entry.request), max(0.0, entry.expires_at - time.time()))
            is_confirming = entry.request.is_confirmation
            queue.decide(entry.number, replace(decision, by=_by()), is_confirming=is_confirming)
        except TimeoutError:
            print(f"\n{entry.number}: it has expired, and is not run")
        except InvalidRequest as error:  # another client has decided, or the requester is gone
            print(escape_line(str(error)))


@contextmanager
def _opened(queue: str | None) -> Iterator[ApprovalQueue]:
    import sqlite3

    from cloche.agent.queue import ApprovalQueue
    from cloche.agent.queue_file import default_path

    named = queue or os.environ.get("CLOCHE_APPROVALS")
    if named and not os.path.exists(named):
        raise InvalidRequest(f"there is no queue {named}; the process that asks for approvals makes it")
    try:
        yield ApprovalQueue(queue)
    except sqlite3.Error as error:
        raise InvalidRequest(f"{named or default_path()} cannot be used as a queue of approvals: {error}") from error


def _row(entry: QueueEntry) -> dict[str, Any]:
    request = entry.request
    text = escape_line(request.call)
    return {
        "number": entry.number,
        "tool": escape(request.tool),
        "risk": f"{request.risk}, to confirm" if request.is_confirmation else str(request.risk),
        "runs on": escape(str(request.rules.get("runs_on", ""))),
        "asked": time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(entry.asked_at)),
        "state": f"waits {_time_left(entry)}" if entry.state == "waiting" else f"{entry.state}{_decided(entry)}",
        "asks for": text if len(text) <= MOST_CALL_CHARS else f"{text[: MOST_CALL_CHARS - 1]}…",
    }


def _time_left(entry: QueueEntry) -> str:
    return f"{max(0, round(entry.expires_at - time.time()))} s"


def _decided(entry: QueueEntry) -> str:
    if entry.decision is None:
        return ""
    reason = f": {escape(str(entry.decision.reason))}" if entry.decision.reason else ""
    return f" by {escape(str(entry.decision.by))}{reason}"


def _as_dict(entry: QueueEntry) -> dict[str, Any]:
    from cloche.agent.queue import as_dict
    from cloche.agent.terminal import describe_rules

    request, decision = entry.request, entry.decision
    return {
        "number": entry.number, "state": entry.state, "asked_at": entry.asked_at, "expires_at": entry.expires_at,
        "tool": request.tool, "risk": str(request.risk), "arguments": dict(request.arguments),
        "rules": dict(request.rules), "rules_in_words": describe_rules(request), "changes": request.changes,
        "is_confirmation": request.is_confirmation, "fingerprint": request.fingerprint,
        "decision": None if decision is None else as_dict(decision), "asked_by": entry.asked_by,
        "decided_at": entry.decided_at, "decided_from": entry.decided_from,
    }  # fmt: skip


def _by() -> str:
    import getpass

    try:
        return f"{getpass.getuser()} (command line)"
    except (KeyError, OSError):  # a user without a name
        return f"user {os.geteuid()} (command line)"


def _queue() -> Decorator:
    """Give a command --queue."""
    text = "The queue. Default: $CLOCHE_APPROVALS, else one in your state folder."
    return option("--queue", metavar="FILE", help=text)


def _number() -> Decorator:
    """Give a command its NUMBER."""
    return argument("number", type=int, metavar="NUMBER", help="The number, from `cloche approvals list`.")


def _reason() -> Decorator:
    """Give a command --reason."""
    text = "The reason for the requester, including the model."
    return option("--reason", metavar="TEXT", default="", show_default=False, help=text)


@tools.command("call")
@argument("name", metavar="TOOL", help="A tool, as `cloche tools` lists them.")
@argument("arguments", metavar="JSON", default="{}", help="Its arguments; - is stdin.")
@option("--approve", metavar="WHO", default="terminal", help="terminal, queue, auto:high (or low, medium), deny.")
@_queue()
@option("--patience", metavar="SECONDS", type=float, help="How long to wait for a decision.")
@sandbox_options(
    "tier", "backend", "config", "timeout", help={"tier": _TIER, "timeout": "The upper limit of the call's time-out."}
)
@option("--out", metavar="DIR", help="Write figures to DIR.")
def _call(
    name: str,
    arguments: str,
    approve: str,
    queue: str | None,
    patience: float | None,
    options: SandboxOptions,
    out: str | None,
) -> int:
    """Call one tool as a model would, and print its answer.

    TOOL is a name from `cloche tools`, JSON its arguments as a model passes them, or - for stdin. The exit code is 1 if
    the answer is an error.
    """
    return call_tool(name, arguments, approve=approve, queue=queue, patience_s=patience, out=out, options=options)


@approvals.command("list")
@flag("--all", "is_all", help="Also list decided and expired calls.")
@_queue()
@json_option()
def _list(is_all: bool, queue: str | None, as_json: bool) -> int:
    """List the calls that wait for a decision, the oldest first."""
    return list_approvals(queue, is_all=is_all, as_json=as_json)


@approvals.command("show")
@_number()
@_queue()
@json_option()
def _show(number: int, queue: str | None, as_json: bool) -> int:
    """Show one call: its code, the rules, the changes."""
    return show_approval(queue, number, as_json=as_json)


@approvals.command("watch")
@_queue()
def _watch(queue: str | None) -> int:
    """Ask on this terminal about each call as it arrives, until Ctrl-C."""
    return watch(queue)


@approvals.command("approve")
@_number()
@flag("--remember", "is_remembered", help="Do not ask again for the same high call under the same rules.")
@flag("--once", "is_once", help="Of a host: only for the connections that wait.")
@flag("--folder", "is_for_folder", help="Of a host: always, in the sandbox's folder (cloche network grants).")
@_reason()
@_queue()
def _approve(number: int, reason: str, queue: str | None, **kinds: bool) -> int:
    """Approve a call; a critical one must be confirmed once more. A host is allowed for its sandbox."""
    return decide(queue, number, is_approved=True, reason=reason, **kinds)


@approvals.command("deny")
@_number()
@_reason()
@_queue()
def _refuse(number: int, reason: str, queue: str | None) -> int:
    """Deny a call."""
    return decide(queue, number, is_approved=False, reason=reason)


@root.command("container", no_args_is_help=True)
@argument("folder", metavar="DIR", help="The host folder for its /workspace.")
@argument(
    "words", nargs=-1, required=True, metavar="IMAGE",
    help="The image, then -- and the command. Default: the image's own.",
)  # fmt: skip
@option(
    "--env", metavar="K[=V]", multiple=True,
    help="A variable; K alone takes its value from docker's environment. Repeatable.",
)  # fmt: skip
@option("--user", metavar="UID[:GID]", help="The user that it runs as. Default: the folder's owner.")
@option("--name", metavar="NAME", default="", show_default=False, help="The container's name.")
@flag("--tty", "-t", help="Give it a terminal.")
@sandbox_options(
    "runtime", "require", "preset", "config", "memory", "cpus", "pids", "network",
    help={"runtime": "runc, or gvisor (runsc). Default: the daemon's own.", "network": "off or bridge."},
)  # fmt: skip
@json_option()
def _container(
    folder: str,
    words: tuple[str, ...],
    env: tuple[str, ...],
    user: str | None,
    name: str,
    tty: bool,
    options: SandboxOptions,
    as_json: bool,
) -> int:
    """Print a docker run command for an agent's own container.

    The container is hardened like the container of a run, except that its folder is yours: DIR. Nothing is started.
    """
    import shlex

    from cloche.agent.container import container_arguments

    image, *command = words
    arguments = container_arguments(
        folder, image, command, env=_variables(env), user=_ids(user), name=name, has_terminal=tty, **options
    )
    line = shlex.join(arguments)
    if not as_json and escape(line) != line:
        raise InvalidRequest("a name has control characters; --json prints the list")
    print(json.dumps(arguments) if as_json else line)
    return 0


def _variables(pairs: Sequence[str]) -> dict[str, str | None]:
    """Split K=V; a bare K has its value where docker is called."""
    split = (pair.partition("=") for pair in pairs)
    return {name: value if equals else None for name, equals, value in split}


def _ids(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    user, _, group = text.partition(":")
    if not (user.isdecimal() and user.isascii()) or not (group or user).isdecimal():
        raise InvalidRequest(f"--user {text}: give numbers, as UID or UID:GID")
    return int(user), int(group or user)
