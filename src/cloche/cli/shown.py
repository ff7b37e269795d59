"""What a session's cells show: output as it comes, values as text, images and HTML as files.

All of it is the guest's word. On a terminal nothing of it is obeyed, see `terminal`; the names of files are ours.
"""

from __future__ import annotations

import json
import os

from cloche.core.errors import ClocheError
from cloche.core.events import Displayed, Event, OutputChunk, Stream
from cloche.core.result import Output, Result, Status
from cloche.core.units import format_size

from .exits import say
from .run import NOTES
from .terminal import Writer

# What is worth a file, and how such a file is called; everything else is shown as text.
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


class Shown:
    """Show one cell after the other; `out` is the folder for images and HTML."""

    def __init__(self, out: str | None = None) -> None:
        self._streams: dict[Stream, Writer] = {"stdout": Writer(1), "stderr": Writer(2, is_red=True)}
        self._out = out
        self._number = self._displayed = 0
        self._is_line_open = False
        self._is_screen = os.isatty(1) and os.isatty(2)  # both streams are on one

    def begin(self, number: int) -> None:
        """Begin with the cell of this number."""
        self._number, self._displayed = number, 0

    def take(self, event: Event) -> None:
        """Show what a cell has just printed or displayed."""
        if isinstance(event, OutputChunk) and event.data:
            self._streams[event.stream].write(event.data)
            if event.stream == "stdout" or self._is_screen:
                self._is_line_open = not event.data.endswith(b"\n")
        elif isinstance(event, Displayed):
            self._displayed += 1
            self._show(event.output)

    def conclude(self, result: Result, *, label: str = "") -> None:
        """Show the cell's value, after `label`, and say what there is to be said about its end."""
        for output in result.outputs[self._displayed :]:
            self._show(output, label)
        if not result.outputs and result.value is not None and result.meta.get("runtime") != "python":
            self._show(Output(data={"text/plain": _in_words(result)}), label)
        self.end()
        for warning in result.meta.get("screen", ()):
            say(f"screen: {warning}")
        note = NOTES.get(result.status or Status.OK)
        is_lost = result.meta.get("state") == "lost"
        if note is not None and (is_lost or result.status is not Status.SIGNALED):
            say(f"{result.status}: {note} ({result.duration:.2f} s)")
        if is_lost:
            say("the interpreter has ended, and its state is lost")

    def end(self) -> None:
        """Write what is left of characters that never ended, and end the line where people read it."""
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
                self._keep(mime, content)
            elif text is None:
                say(f"{mime} ({_size(content)}) was shown, which a terminal cannot show")

    def _keep(self, mime: str, content: str | bytes) -> None:
        """Save content that needs more than a terminal, and say where; or say how to get it."""
        about = f"{mime} ({_size(content)})"
        if self._out is None:
            say(f"{about} was shown; start with --out DIR to have it as a file")
            return
        try:
            path = self._write_file(self._out, SUFFIXES[mime], _as_bytes(content))
        except OSError as error:
            say(f"{about} cannot be saved in {self._out}: {error.strerror}")
        else:
            say(f"{about} is in {path}")

    def _write_file(self, folder: str, suffix: str, data: bytes) -> str:
        """Write a file that was not there before; files of the same name may have come out of the workspace."""
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


def _in_words(result: Result) -> str:
    """Return the value of an interpreter that shows none itself; Python's does, unless it was told to be silent."""
    return str(result.value) if result.value_is_repr else json.dumps(result.value, ensure_ascii=False)


def _as_bytes(content: str | bytes) -> bytes:
    return content if isinstance(content, bytes) else content.encode("utf-8", "replace")


def _size(content: str | bytes) -> str:
    return format_size(len(_as_bytes(content)))
