"""The cells of a session: prints their output, and decides whether typed text is a complete cell.

Output (text as it arrives, values, images and HTML as files) is hostile: it is escaped on a terminal, and file names
are chosen here. For Python the compiler decides whether a cell is complete. For JavaScript and Bash open quotes,
brackets and backslashes are counted. Both only read text that the user typed; nothing is run.
"""

from __future__ import annotations

import ast
import codeop
import json
import os
import re
import warnings

from cloche.core.errors import ClocheError
from cloche.core.events import Cleared, Displayed, Event, OutputChunk, Stream
from cloche.core.limits import format_size
from cloche.core.result import Output, Result, Status

from .output import GuestWriter, say
from .run import NOTES, say_network

# Types that are saved as files, with their suffixes; everything else is shown as text.
SUFFIXES = {
    "image/png": ".png",
    "image/jpeg": ".jpg",
    "image/gif": ".gif",
    "image/webp": ".webp",
    "image/svg+xml": ".svg",
    "text/html": ".html",
    "application/pdf": ".pdf",
}
TEXTS = ("text/plain", "text/markdown", "text/latex")
MOST_NAMES = 10_000
PAIRS = {")": "(", "]": "[", "}": "{", "fi": "if", "esac": "case", "done": "do"}
# Skipped tokens (comments, closed quotes), tokens that are open up to the end of the text, and brackets.
TOKENS = {
    "bash": re.compile(
        r"""(?<!\S)\#[^\n]* | '[^']*' | "(?:\\.|[^"\\])*" | \\. | (?P<open>['"]|\\\Z)
        | (?P<bracket>[][(){}] | (?<![^\s;&|(]) (?:if|fi|case|esac|do|done) (?![^\s;&|)]))""",
        re.VERBOSE | re.DOTALL,
    ),
    "javascript": re.compile(
        r"""//[^\n]* | /\*.*?\*/ | '(?:\\.|[^'\\\n])*' | "(?:\\.|[^"\\\n])*" | `(?:\\.|[^`\\])*` | \\.
        | (?P<open>`|/\*|\\\Z) | (?P<bracket>[][(){}])""",
        re.VERBOSE | re.DOTALL,
    ),
}


class CellPrinter:
    """Print the output of cells; `out` is the folder for images and HTML."""

    def __init__(self, out: str | None = None) -> None:
        self._streams: dict[Stream, GuestWriter] = {"stdout": GuestWriter(1), "stderr": GuestWriter(2, is_red=True)}
        self._out = out
        self._number = self._displayed = 0
        self._replaced: set[int] = set()
        self._is_line_open = False
        self._is_screen = os.isatty(1) and os.isatty(2)  # both streams are on a terminal

    def begin(self, number: int) -> None:
        """Start the cell of this number."""
        self._number, self._displayed = number, 0
        self._replaced = set()

    def take(self, event: Event) -> None:
        """Print an event of a running cell."""
        if isinstance(event, OutputChunk) and event.data:
            self._streams[event.stream].write(event.data)
            if event.stream == "stdout" or self._is_screen:
                self._is_line_open = not event.data.endswith(b"\n")
        elif isinstance(event, Displayed) and event.replaces is not None:
            self._replaced.add(event.replaces)  # shown at the end, since printed output cannot be replaced
        elif isinstance(event, Displayed):
            self._displayed += 1
            self._show(event.output)
        elif isinstance(event, Cleared):
            self._displayed = 0
            self._replaced.clear()

    def conclude(self, result: Result, *, label: str = "") -> None:
        """Print the cell's value after `label`, and a note on its status if it did not end well."""
        for number, output in enumerate(result.outputs):
            if number >= self._displayed or number in self._replaced:
                self._show(output, label if number >= self._displayed else "")
        if not result.outputs and result.value is not None and result.meta.get("runtime") != "python":
            self._show(Output(data={"text/plain": _value_as_text(result)}), label)
        self.end()
        for warning in result.meta.get("screen", ()):
            say(f"screen: {warning}")
        note = NOTES.get(str(result.status))
        is_lost = result.meta.get("state") == "lost"
        if note is not None and (is_lost or result.status is not Status.SIGNALED):
            say(f"{result.status}: {note} ({result.duration:.2f} s)")
        if is_lost:
            say("the interpreter has ended, and its state is lost")
        say_network(result)

    def end(self) -> None:
        """Write incomplete characters, and end the line if both streams are on one terminal."""
        for writer in self._streams.values():
            writer.finish()
        if self._is_screen:
            self._end_line()

    def _end_line(self) -> None:
        if self._is_line_open:
            self._streams["stdout"].write(b"\n")
        self._is_line_open = False

    def _show(self, output: Output, label: str = "") -> None:
        self._end_line()
        text = next((output.data[mime] for mime in TEXTS if mime in output.data), None)
        if isinstance(text, str):
            between = "\n" if label and "\n" in text else ""
            self._streams["stdout"].write(f"{label}{between}{text}\n".encode("utf-8", "replace"))
        for mime, content in output.data.items():
            if mime in SUFFIXES:
                self._save(mime, content)
            elif text is None:
                say(f"{mime} ({_size(content)}) cannot be shown on a terminal")

    def _save(self, mime: str, content: str | bytes) -> None:
        """Save content that a terminal cannot show, and print its path; without `out`, print how to get it."""
        about = f"{mime} ({_size(content)})"
        if self._out is None:
            say(f"{about} cannot be shown on a terminal; start with --out DIR to save it")
            return
        try:
            path = self._write_file(self._out, SUFFIXES[mime], _as_bytes(content))
        except OSError as error:
            say(f"{about} cannot be saved in {self._out}: {error.strerror}")
        else:
            say(f"{about} is in {path}")

    def _write_file(self, folder: str, suffix: str, data: bytes) -> str:
        """Write a new file; the workspace may have brought files of the same name."""
        os.makedirs(folder, exist_ok=True)
        for number in range(1, MOST_NAMES):
            path = os.path.join(folder, f"cell-{self._number}{f'-{number}' if number > 1 else ''}{suffix}")
            try:
                with open(path, "xb") as file:
                    file.write(data)
            except FileExistsError:
                continue
            return path
        raise ClocheError(f"{folder}: too many files that are called cell-{self._number}")


def _value_as_text(result: Result) -> str:
    """Return the value as text, for interpreters that do not display it themselves (Python's does)."""
    return str(result.value) if result.value_is_repr else json.dumps(result.value, ensure_ascii=False)


def _as_bytes(content: str | bytes) -> bytes:
    return content if isinstance(content, bytes) else content.encode("utf-8", "replace")


def _size(content: str | bytes) -> str:
    return format_size(len(_as_bytes(content)))


def goes_on(text: str, language: str) -> bool:
    """Return whether a cell that begins with `text` continues; a blank line ends it, except inside a quote."""
    if language == "python":
        return _python_goes_on(text)
    return language in TOKENS and _text_goes_on(text, language)


def _python_goes_on(text: str) -> bool:
    *before, last = text.split("\n")
    if not last.strip():
        return bool(before) and _is_cut_off(text)
    if text.startswith("%%") or _is_cut_off(text):
        return True
    return bool(before) and last[0] in " \t" and _ends_in_block(text)


def _ends_in_block(text: str) -> bool:
    """Return whether the last statement has a body."""
    try:
        statement = ast.parse(text).body[-1]
        return hasattr(statement, "body") or hasattr(statement, "cases")
    except (SyntaxError, ValueError, MemoryError, RecursionError):  # for example a line of another language
        heads = [line for line in text.split("\n") if line[:1].strip()]
        return bool(heads) and heads[-1].rstrip().endswith(":")


def _is_cut_off(text: str) -> bool:
    """Return whether the compiler's only complaint about a text is that it ends too early."""
    compiler = codeop.CommandCompiler()
    compiler.compiler.flags |= ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return compiler(text, "<input>", "exec") is None
    except (SyntaxError, ValueError, OverflowError, MemoryError, RecursionError):
        return False  # the interpreter will report the error


def _text_goes_on(text: str, language: str) -> bool:
    """Return whether a quote, a comment, a bracket or the last line is open."""
    is_blank = not text.rpartition("\n")[2].strip()
    stack = [""]
    for token in TOKENS[language].finditer(text):
        bracket = token["bracket"]
        if token["open"]:
            return True
        if bracket in PAIRS.values():
            stack.append(bracket)
        elif bracket and stack[-1] == PAIRS[bracket]:
            stack.pop()
    return len(stack) > 1 and not is_blank
