"""`cloche tools`: the table of an agent's tools, for people, for programs, and as providers want to be told of it."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from cloche.agent.answering import Answer
from cloche.agent.approval import PATIENCE_S, ApprovalRequest, Approver, Decision, auto, check_patience
from cloche.agent.catalog import Tool, risk_of
from cloche.agent.exports import anthropic_tools, openai_response_tools, openai_tools
from cloche.agent.risk import Risk
from cloche.agent.tiers import DEFAULT_TIER
from cloche.agent.toolbox import Toolbox
from cloche.core.errors import InvalidRequest
from cloche.core.plain import plain
from cloche.hostfs import open_in_place_of
from cloche.runtime.options import SandboxOptions

from .exits import say
from .tables import show

EXIT_TOOL_FAILED = 1
HOST_TIER = 4
Told = list[dict[str, Any]]


def _as_plain(tools: tuple[Tool, ...], tier: int) -> Told:
    return [
        {
            "name": tool.name, "wire_name": tool.wire_name, "risk": str(_risk(tool, tier)), "tiers": list(tool.tiers),
            "description": tool.description, "schema": tool.schema,
        }
        for tool in tools
    ]  # fmt: skip


FORMATS: Mapping[str, Callable[[tuple[Tool, ...], int], Told]] = {
    "json": _as_plain,
    "openai": lambda tools, _: openai_tools(tools),
    "openai-strict": lambda tools, _: openai_tools(tools, is_strict=True),
    "openai-responses": lambda tools, _: openai_response_tools(tools),
    "anthropic": lambda tools, _: anthropic_tools(tools),
}


def list_tools(tier: int | None, form: str) -> int:
    """Print the tools of a tier, by default 3, as a table or in one of FORMATS."""
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
    """Call one tool as a model would, and print what the model would be told. Return 1 when that is an error."""
    patience = PATIENCE_S if patience_s is None else check_patience(patience_s)
    answer = asyncio.run(_called(name, _read(arguments), _approver(approve, queue, patience), patience, options))
    print(plain(answer.text) if sys.stdout.isatty() else answer.text)
    _keep_images(answer, out)
    return EXIT_TOOL_FAILED if answer.is_error else 0


async def _called(
    name: str,
    arguments: Any,  # noqa: ANN401 - the tool checks it
    approve: Approver,
    patience_s: float,
    options: SandboxOptions,
) -> Answer:
    async with Toolbox(approve=approve, patience_s=patience_s, **options) as tools:
        return await tools.call(name, arguments)


def _read(arguments: str) -> object:
    try:
        return json.loads(sys.stdin.read() if arguments == "-" else arguments)
    except ValueError as error:
        raise InvalidRequest(f'the arguments are not JSON: {error}; for example \'{{"code": "1 + 1"}}\'') from None


def _approver(approve: str, queue: str | None, patience_s: float) -> Approver:
    word, _, risk = approve.partition(":")
    if word == "terminal":
        from cloche.agent.terminal import AskTerminal

        return AskTerminal()
    if word == "queue":
        from cloche.agent.queue import ApprovalQueue

        say("approvals wait in the queue: cloche approvals list")
        return ApprovalQueue(queue, patience_s=patience_s)
    if word == "auto":
        return auto(risk or "high")
    if word == "deny":
        return _deny
    raise InvalidRequest(f"--approve: {approve!r} is unknown; use one of terminal, queue, auto:high, deny")


async def _deny(_: ApprovalRequest) -> Decision:
    """Say no, and that it is the command line that does."""
    return Decision(is_approved=False, by="cli", reason="the command line says --approve deny")


def _keep_images(answer: Answer, out: str | None) -> None:
    import base64

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
    return risk_of(tool, is_on_host=tier == HOST_TIER)
