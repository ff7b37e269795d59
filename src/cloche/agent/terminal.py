"""An approver that asks at the terminal: it shows the code, the rules that will hold, and what changed since last time.

Control characters and characters that cannot be seen are shown as escapes, and named in a warning. The rules are
written out in words.
"""

from __future__ import annotations

import asyncio
import select
import sys
import termios
import threading
from collections.abc import Mapping
from typing import IO, TYPE_CHECKING, Any

from cloche.blocking.calls import in_own_thread
from cloche.core.escape import escape, is_visible

from .approval import ON_HOST, ApprovalRequest, Decision, Risk

if TYPE_CHECKING:
    from rich.console import Console

MANY_LINES, COLUMNS = 30, 80  # from here on some of the code may have left the screen
YES, ALWAYS, IN_FOLDER, ONCE = ("y", "yes"), ("a", "always"), ("f", "folder"), ("o", "once")
POLL_S = 0.05


# Lists of a policy that whoever approves a call should see, with the words before them.
_NAMED = (
    ("network_allow", "to"), ("network_deny", "never to"), ("network_ports", "also on port"), ("packages", "packages"),
    ("best_effort", "not required:"),
)  # fmt: skip


def describe_rules(request: ApprovalRequest) -> str:
    """Return the rules of a call in words, and that there is no sandbox where that is so."""
    policy, limits = _mapping(request.rules.get("policy")), _mapping(request.rules.get("limits"))
    phrases = [f"network {policy['network']}"] if "network" in policy else []
    for name, words in _NAMED:
        if named := policy.get(name):
            phrases.append(f"{words} {named if isinstance(named, str) else ', '.join(map(str, named))}")
    if request.rules.get("runs_on") == ON_HOST:
        phrases.append("no sandbox: all of the host's files and network")
    if isinstance(limits.get("timeout_s"), int | float):
        phrases.append(f"at most {limits['timeout_s']:g} s")
    if isinstance(limits.get("memory_bytes"), int):
        phrases.append(f"{limits['memory_bytes'] >> 20} MiB of memory")
    if isinstance(interpreter := request.rules.get("interpreter"), str):
        phrases.append(f"an interpreter that {interpreter}")
    if isinstance(folder := request.rules.get("writes_to"), str):
        phrases.append(f"writes to {folder}")
    if isinstance(dangers := request.rules.get("dangers"), list | tuple):
        phrases.append(f"dangerous: {'; '.join(map(str, dangers))}")
    return ", ".join(phrases)


def changes_told(request: ApprovalRequest) -> list[str]:
    """Return a line for each change to a folder of the host, those that are dangerous with the reasons."""
    changes = request.rules.get("changes")
    return [str(row) for row in changes] if isinstance(changes, list | tuple) else []


def what_changes_are(request: ApprovalRequest) -> str:
    """Name the subject of a request's diff."""
    return "what is written" if "writes_to" in request.rules else "changes since the last call"


def where_it_runs(request: ApprovalRequest) -> str:
    """Name the place that a call acts on."""
    return str(request.rules.get("runs_on", request.rules.get("writes_to")))


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def warnings_about(text: str) -> str:
    """Return warnings, a line each: code that is longer than a screen, invisible characters."""
    warnings = ""
    lines = text.split("\n")
    rows = sum(1 + len(line.expandtabs()) // COLUMNS for line in lines)
    if rows > MANY_LINES:  # many blanks push code off the screen, too
        warnings += f"{len(lines)} lines, {len(text)} characters: scroll up for all of it\n"
    hidden = sorted({char for char in text if not is_visible(char)})
    if hidden:
        named = ", ".join(f"U+{ord(char):04X}" for char in hidden[:10])
        warnings += f"careful: what cannot be seen is shown as an escape above: {named}\n"
    return warnings


class AskTerminal:
    """Be an approver that prints to `output` and reads a line of `answers`, by default the process's own streams.

    Anything but `y` (or `a`, which remembers a HIGH call, or `f`, which allows a host for a folder) is a no, as is an
    end of input, and input that is no terminal unless it was passed. Of a host of a sandbox with a name, `o` is a yes
    for the connections that wait.
    """

    def __init__(self, *, answers: IO[str] | None = None, output: IO[str] | None = None):
        self._answers, self._output = answers, output
        self._lock = threading.Lock()  # toolboxes in several loops may share a terminal

    async def __call__(self, request: ApprovalRequest) -> Decision:
        """Ask; one at a time."""
        while not self._lock.acquire(blocking=False):  # noqa: ASYNC110 - no event is shared by loops
            await asyncio.sleep(POLL_S)
        try:
            return await self._ask(request)
        finally:
            self._lock.release()

    async def _ask(self, request: ApprovalRequest) -> Decision:
        answers = self._answers or sys.stdin
        if self._answers is None and not answers.isatty():
            return Decision(is_approved=False, by="terminal", reason="there is no terminal to ask at")
        if answers.isatty():
            termios.tcflush(answers.fileno(), termios.TCIFLUSH)  # what was typed before the question is no answer
        await in_own_thread(self._show, request)
        answer = (await _line(answers)).strip().lower()
        kinds = {choice for choice, words, _ in choices(request) if answer in words}
        return Decision(
            is_approved=answer in YES or bool(kinds), by="terminal", is_remembered="is_remembered" in kinds,
            is_for_folder="is_for_folder" in kinds, is_once="is_once" in kinds,
        )  # fmt: skip

    def _show(self, request: ApprovalRequest) -> None:
        from rich.console import Console

        console = Console(file=self._output or sys.stderr, emoji=False)
        asks = "Confirm once more" if request.is_confirmation else "Approve"
        where = escape(where_it_runs(request))
        console.print(f"{asks} {escape(request.tool)} ({request.risk}, on {where})?", style="bold", markup=False)
        show_request(request, console)
        yes = "yes, for this sandbox" if "sandbox" in request.arguments and request.tool == "network" else "yes"
        others = "".join(f", {words[0]}: {text}" for _, words, text in choices(request))
        console.print(f"[y: {yes}{others}, anything else: no] ", end="", markup=False)


def choices(request: ApprovalRequest) -> list[tuple[str, tuple[str, ...], str]]:
    """Return the further kinds of yes to a request: the field of a Decision, the answers, the text."""
    is_host, is_named = request.tool == "network", "sandbox" in request.arguments
    rows: list[tuple[str, tuple[str, ...], str]] = []
    if request.risk is Risk.HIGH and not (is_host and is_named):
        rows.append(("is_remembered", ALWAYS, "yes and remember"))
    if is_host and is_named:
        rows.append(("is_once", ONCE, "yes, once"))
    if is_host and "folder" in request.arguments:
        rows.append(("is_for_folder", IN_FOLDER, "yes, always in this folder"))
    return rows


def show_request(request: ApprovalRequest, console: Console) -> None:
    """Print a request, in colours where the console has them: the code, the rules, the changes.

    Control characters are printed as escapes, so that the terminal obeys none of them.
    """
    from rich.syntax import Syntax

    for name, value in request.arguments.items():
        if name in ("code", "command"):
            language = str(request.arguments.get("language", "bash" if name == "command" else "python"))
            # Numbered, so that no line of the code is taken for one of ours.
            console.print(Syntax(escape(str(value)), language, word_wrap=True, line_numbers=True))
            console.print(warnings_about(str(value)), style="bold", markup=False, end="")
        else:
            console.print(f"{escape(name)}: {escape(str(value))}", markup=False, highlight=False)
    if rules := describe_rules(request):
        console.print(f"rules: {escape(rules)}", markup=False, highlight=False)
    for row in changes_told(request):
        console.print(escape(row), markup=False, highlight=False)
    if request.changes:
        console.print(f"{what_changes_are(request)}:", style="bold", markup=False)
        console.print(Syntax(escape(request.changes), "diff", word_wrap=True))


async def _line(answers: IO[str]) -> str:
    """Read a line. At a terminal only complete lines are read: an abandoned question takes no input."""
    if not answers.isatty():
        return await in_own_thread(lambda stream: stream.readline(), answers)
    ready = select.poll()
    ready.register(answers.fileno(), select.POLLIN)
    while not ready.poll(0):  # noqa: ASYNC110 - a thread that waits could not be cancelled
        await asyncio.sleep(POLL_S)
    return answers.readline()
