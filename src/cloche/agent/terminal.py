"""Ask whoever sits at the terminal: the code in colours, the rules that will hold, what changed since last time."""

from __future__ import annotations

import asyncio
import sys
from typing import IO, TYPE_CHECKING

from .approval import ApprovalRequest, Decision
from .risk import Risk

if TYPE_CHECKING:
    from rich.console import Console

YES, ALWAYS = ("y", "yes"), ("a", "always")


class AskTerminal:
    """Be an approver that prints to `output` and reads a line of `answers`, by default the process's own streams.

    Anything but `y` (or `a`, which remembers a HIGH call) is a no, as is an end of input, and input that is no
    terminal unless it was passed.
    """

    def __init__(self, *, answers: IO[str] | None = None, output: IO[str] | None = None):
        self._answers, self._output = answers, output
        self._turn = asyncio.Lock()

    async def __call__(self, request: ApprovalRequest) -> Decision:
        """Ask; one at a time."""
        async with self._turn:
            return await asyncio.to_thread(self._ask, request)

    def _ask(self, request: ApprovalRequest) -> Decision:
        answers = self._answers or sys.stdin
        if self._answers is None and not answers.isatty():
            return Decision(is_approved=False, by="terminal", reason="there is no terminal to ask at")
        self._show(request)
        word = answers.readline().strip().lower()
        is_high = request.risk is Risk.HIGH
        return Decision(
            is_approved=word in YES or (is_high and word in ALWAYS),
            by="terminal",
            is_remembered=is_high and word in ALWAYS,
        )

    def _show(self, request: ApprovalRequest) -> None:
        from rich.console import Console
        from rich.markup import escape
        from rich.syntax import Syntax

        console = Console(file=self._output or sys.stderr)
        asks = "Confirm once more" if request.is_confirmation else "Approve"
        console.print(
            f"[bold]{asks} {escape(request.tool)}[/bold] ({request.risk}, on {request.rules.get('runs_on')})?"
        )
        for name, value in request.arguments.items():
            if name in ("code", "command"):
                language = str(request.arguments.get("language", "bash" if name == "command" else "python"))
                console.print(Syntax(_plain(str(value)), language, word_wrap=True))
            else:
                console.print(f"{name}: {_plain(str(value))}", markup=False)
        self._show_rules(console, request)
        if request.changes:
            console.print(Syntax(_plain(request.changes), "diff", word_wrap=True))
        remember = ", a: yes and remember" if request.risk is Risk.HIGH else ""
        console.print(f"[y: yes{remember}, anything else: no] ", end="", markup=False)

    def _show_rules(self, console: Console, request: ApprovalRequest) -> None:
        policy, limits = request.rules.get("policy", {}), request.rules.get("limits", {})
        if policy:
            told = f"network {policy['network']}, {limits['timeout_s']:g} s, {limits['memory_bytes'] >> 20} MiB"
            console.print(f"rules: {told}", markup=False)


def _plain(text: str) -> str:
    """Return text without what a terminal would obey: what is approved must be what is seen."""
    return "".join(char if char in "\n\t" or char.isprintable() else f"\\x{ord(char):02x}" for char in text)
