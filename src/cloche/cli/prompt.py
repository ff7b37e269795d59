"""The prompt of `cloche session`: read a cell, run it, show it; Ctrl-C interrupts, and words with a colon do the rest.

Theory of operation: cells run in the library's background loop, and this thread waits. Ctrl-C then is a signal handler
that asks for an interrupt in a thread of its own, because the waiting thread may hold what that needs. A second one
soon after raises KeyboardInterrupt here, which ends the run as it does for any blocking call: with everything killed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

from cloche.core.errors import ClocheError
from cloche.core.plain import plain_line
from cloche.core.result import Result
from cloche.sync import Session

from .exits import say
from .shown import Shown
from .unfinished import goes_on

log = logging.getLogger("cloche.cli")
SOON_S = 1.0
MOST_LINES_KEPT = 10_000
KILLED = b"\ncloche: the second Ctrl-C ends the session\n"


@dataclass(slots=True, kw_only=True)
class Branch:
    """Hold one session of the family: the first one, or a fork; `count` is how many cells its interpreter has run.

    `checkpoints` are the counts at each, oldest first. `origin` is the number of the branch that it was forked from.
    """

    session: Session
    count: int = 0
    checkpoints: dict[str, int] = field(default_factory=dict)
    origin: int | None = None


class Prompt:
    """Converse with a person at a terminal. `branches` holds every session by its number, `at` the present one's."""

    def __init__(self, session: Session, shown: Shown, *, out: str | None = None) -> None:
        self.branches = {0: Branch(session=session)}
        self.at = 0
        self._shown, self._out = shown, out
        self._last = 0
        self._is_left = False

    @property
    def branch(self) -> Branch:
        """Return the present session and what is known of it."""
        return self.branches[self.at]

    def adopt(self, session: Session) -> int:
        """Take in a fork of the present session and return its number."""
        self._last += 1
        self.branches[self._last] = Branch(session=session, count=self.branch.count, origin=self.at)
        return self._last

    def leave(self) -> None:
        """End the conversation after this word."""
        self._is_left = True

    def converse(self) -> int:
        """Read and run until the person leaves; return the exit code."""
        session = self.branch.session
        _be_lenient(sys.stdin)
        print(
            f"{plain_line(session.runtime)} in a sandbox. :help lists what this prompt knows, Ctrl-D leaves.",
            flush=True,
        )
        with line_editing(session.language):
            while not self._is_left:
                try:
                    self._take(self._read())
                except EOFError:
                    print(flush=True)
                    break
                except KeyboardInterrupt:
                    print(flush=True)
                except ClocheError as error:
                    say(str(error))
                    self._say_how_to_go_on()
        return 0

    def _read(self) -> str:
        """Read one cell, as many lines as it takes. Raises EOFError when there are no more."""
        fork = f"[fork {self.at}] " if self.at else ""
        label = f"{fork}In [{self.branch.count + 1}]: "
        text = input(label)
        while not is_word(text) and goes_on(text, self.branch.session.language):
            text += "\n" + input("...: ".rjust(len(label)))
        return text

    def _take(self, text: str) -> None:
        if is_word(text):
            from .words import obey

            obey(self, text)
        elif text.strip():
            self._run(text)

    def _run(self, code: str) -> None:
        branch, shown = self.branch, self._shown
        number = branch.count + 1
        shown.begin(number)
        try:
            with Interrupts(branch.session):
                result = branch.session.run(code, on_event=shown.take, out=self._out)
        except KeyboardInterrupt:
            shown.end()
            self._say_how_to_go_on()
            return
        branch.count = number
        shown.conclude(result, label=f"Out[{number}]: ")
        if is_lost(result):
            self._say_how_to_go_on()

    def _say_how_to_go_on(self) -> None:
        if self.branch.session.is_alive:
            return
        names = " ".join(self.branch.checkpoints)
        back = f", :rollback goes back to a checkpoint ({names})" if names else ""
        say(f"this session has ended; :restart begins anew{back}")


def is_word(text: str) -> bool:
    """Tell whether a text is for the prompt: a colon and a letter. A shell's own `:` is followed by a blank."""
    return text[:1] == ":" and text[1:2].isalpha()


def is_lost(result: Result) -> bool:
    """Tell whether the interpreter ended with this cell."""
    return bool(result.meta.get("state") == "lost")


class Interrupts:
    """Turn Ctrl-C into an interrupt of the cell that runs; a second one soon after is a KeyboardInterrupt here."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._last: float | None = None
        self._is_over = False
        self._before: Any = None

    def __enter__(self) -> Self:
        self._before = signal.signal(signal.SIGINT, self._interrupt)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _interrupt(self, _number: int, _frame: FrameType | None) -> None:
        if self._is_over:
            return
        now = time.monotonic()
        if self._last is not None and now - self._last < SOON_S:
            self._is_over = True
            os.write(2, KILLED)  # whoever prints at this moment is not disturbed
            raise KeyboardInterrupt
        self._last = now
        threading.Thread(target=self._ask, daemon=True).start()

    def _ask(self) -> None:
        try:
            self._session.interrupt()
        except ClocheError as error:
            log.debug("there was nothing to interrupt: %s", error)


def _be_lenient(stream: Any) -> None:  # noqa: ANN401 - whatever stands for stdin
    """Let bytes that are no text arrive as they are, as in a file that is piped in."""
    with contextlib.suppress(AttributeError):
        stream.reconfigure(errors="surrogateescape")


@contextlib.contextmanager
def line_editing(language: str) -> Iterator[None]:
    """Edit lines with readline, and remember them in a file of the user's state; without either, do without."""
    try:
        import readline

        from platformdirs import user_state_path
    except ImportError:
        yield
        return
    file = user_state_path("cloche") / f"history-{language}"
    readline.parse_and_bind("tab: tab-insert")
    readline.set_history_length(MOST_LINES_KEPT)
    try:
        readline.read_history_file(file)
    except OSError as error:
        log.debug("earlier lines cannot be read: %s", error)
    known = readline.get_current_history_length()
    try:
        yield
    finally:
        try:
            _make_private(file)
            readline.append_history_file(readline.get_current_history_length() - known, file)
        except OSError as error:
            log.debug("the lines cannot be kept: %s", error)


def _make_private(file: Path) -> None:
    """Create a file that only this user may read, with its folders."""
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    os.close(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
