"""What a cell prints, displays and ends with, as the lines of E2B's code interpreter: JSON objects with a `type`."""

from __future__ import annotations

import base64
import codecs
import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from cloche.core.events import Cleared, Displayed, Event, OutputChunk
from cloche.core.limits import format_size
from cloche.core.result import Output, Result, Status

Line = dict[str, Any]
KEEPALIVE: Line = {"type": "keepalive"}
END: Line = {"type": "end_of_execution"}
_TEXTS: Mapping[str, str] = {
    "text/plain": "text", "text/html": "html", "text/markdown": "markdown", "image/svg+xml": "svg",
    "image/png": "png", "image/jpeg": "jpeg", "application/pdf": "pdf", "text/latex": "latex",
    "application/javascript": "javascript",
}  # fmt: skip
MOST_JSON = 1 << 20  # characters of an output that are read as JSON, on the event loop; more stays text in `extra`
_DATA: Mapping[str, str] = {
    "application/json": "json", "application/vnd.cloche.columns+json": "data",
    "application/vnd.cloche.chart+json": "chart",
}  # fmt: skip


def encode_line(line: Line) -> bytes:
    """Return a line as bytes. Numbers that JSON lacks, such as NaN, are null: no client could read the line."""
    try:
        text = json.dumps(line, allow_nan=False, check_circular=False)
    except ValueError:
        text = json.dumps(json.loads(json.dumps(line), parse_constant=lambda _: None))
    return text.encode() + b"\n"


def result_line(output: Output, *, is_value: bool) -> Line:
    """Return the line of a displayed output, or of the cell's value."""
    line: Line = {"type": "result", "is_main_result": is_value, "extra": {}}
    left = MOST_JSON
    for mime, content in output.data.items():
        text = content if isinstance(content, str) else base64.b64encode(content).decode()
        left -= len(text) if mime.endswith("json") else 0
        if left < 0 and mime.endswith("json"):
            line["extra"][mime] = text
        elif mime in _DATA:
            line |= {_DATA[mime]: value} if (value := _read(text)) is not None else {}
        elif mime in _TEXTS:
            line[_TEXTS[mime]] = _unquoted(text) if mime == "text/plain" else text
        else:
            line["extra"][mime] = _read(text) if mime.endswith("json") else text
    return line


def _read(text: str) -> Any:  # noqa: ANN401 - JSON
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _unquoted(text: str) -> str:
    """Return a text without the quotes of a string's repr."""
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"" else text


def error_line(name: str, value: str, traceback: str = "") -> Line:
    """Return the line of an error."""
    return {"type": "error", "name": name, "value": value, "traceback": traceback}


def end_lines(result: Result, language: str) -> list[Line]:
    """Return the line of the error that a cell ended with, if it did."""
    error = result.meta.get("error") or {}
    if result.meta.get("state") == "lost":
        return [error_line("ContextRestarting", f"Context was restarted: {_why_lost(result)}")]
    if result.status is Status.OUTPUT_LIMIT:
        most = format_size(64 << 20)
        return [error_line("OutputLimit", f"the cell was interrupted: it printed more than {most}")]
    if result.timed_out:
        return [error_line("TimeoutError", f"the cell was interrupted after {result.duration:.0f} s, its time limit")]
    if error and language != "bash":
        return [error_line(str(error.get("name", "")), str(error.get("message", "")), str(error.get("traceback", "")))]
    if result.exit_code:
        name = "KeyboardInterrupt" if error else "" if language == "bash" else "Exit"
        return [error_line(name, str(result.exit_code))]
    return []


def _why_lost(result: Result) -> str:
    if result.status is Status.OUT_OF_MEMORY:
        return "it ran out of the sandbox's memory; its variables are lost"
    return f"its interpreter ended ({result.status}, exit code {result.exit_code}); its variables are lost"


class CellLines:
    """Collect the lines of one cell. Texts are decoded across pieces, so no character is cut."""

    def __init__(self) -> None:
        make = codecs.getincrementaldecoder("utf-8")
        self._decoders = {"stdout": make("replace"), "stderr": make("replace")}
        self._texts: dict[str, list[str]] = {}
        self._size = 0
        self._lines: list[Line] = []
        self.displayed = 0  # outputs that the cell has
        self.is_lost = False  # the interpreter, with its cell

    @property
    def text_size(self) -> int:
        """Return the number of characters that no line has yet."""
        return self._size

    @property
    def has_any(self) -> bool:
        """Tell whether there is something to send."""
        return bool(self._lines or self._texts)

    def take(self, event: Event) -> bool:
        """Take an event; tell whether it made a line that is sent at once. Text and the number may wait for more."""
        if isinstance(event, OutputChunk):
            text = self._decoders[event.stream].decode(event.data)
            if text:
                self._texts.setdefault(event.stream, []).append(text)
                self._size += len(text)
        elif isinstance(event, Displayed) and event.replaces is None:
            self.displayed += 1
            self.add(result_line(event.output, is_value=event.is_value))
            return True
        elif isinstance(event, Cleared):
            self.displayed = 0
        return False

    def add(self, line: Line) -> None:
        """Add a line, after the texts so far."""
        self._end_texts()
        self._lines.append(line)

    def end(self, result: Result, language: str) -> None:
        """Add what a cell's result says beyond its events."""
        self.is_lost = result.meta.get("state") == "lost"
        for name, decoder in self._decoders.items():
            if rest := decoder.decode(b"", True):
                self._texts.setdefault(name, []).append(rest)
        for output in result.outputs[self.displayed :]:
            self.add(result_line(output, is_value=True))
        if result.meta.get("outputs_cut"):
            self._texts.setdefault("stderr", []).append("cloche: further outputs of this cell are left out\n")
        for line in end_lines(result, language):
            self.add(line)

    def _end_texts(self) -> None:
        timestamp = datetime.now(UTC).isoformat()
        for stream, texts in self._texts.items():
            self._lines.append({"type": stream, "text": "".join(texts), "timestamp": timestamp})
        self._texts, self._size = {}, 0

    def take_all(self) -> bytes:
        """Return all lines so far as bytes."""
        self._end_texts()
        lines, self._lines = self._lines, []
        return b"".join(encode_line(line) for line in lines)
