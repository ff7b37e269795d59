"""The service's own log on standard error: one JSON object a line, or plain lines on a terminal.

Only `cloche serve` configures it. Messages are bounded and have no control characters. An unexpected error is logged
with its type and frames, without its text, which may quote a guest's code or a row.

A thread formats and writes the lines, so that a slow reader of standard error does not delay requests. The queue of
lines is bounded; lines beyond it are dropped, and their number is logged.
"""

from __future__ import annotations

import json
import logging
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable, MutableMapping
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, TextIO

import structlog

from cloche.core.errors import ClocheError
from cloche.core.escape import escape_name

ACCESS = "cloche.access"
MOST_CHARACTERS = 4_096
MOST_WAITING, END_S = 10_000, 2.0
MOST_AT_ONCE, PAUSE_S = 256, 0.02
Fields = MutableMapping[str, Any]
_access = logging.getLogger(ACCESS)
_SHARED: list[Any] = [
    structlog.stdlib.add_log_level, structlog.stdlib.add_logger_name,
    structlog.processors.TimeStamper(fmt="iso", utc=True, key="time"),
]  # fmt: skip


def configure_log() -> None:
    """Log warnings and each request to standard error. Replaces any previous configuration of `logging`."""
    handler = LaterHandler(sys.stderr)
    handler.setFormatter(make_formatter(is_plain=sys.stderr.isatty()))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger(ACCESS).setLevel(logging.INFO)
    structlog.configure(
        processors=[*_SHARED, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(), wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )  # fmt: skip


class AccessRecord(logging.LogRecord):
    """The record of a request: fields and a time. It skips the caller's frame, which `LogRecord` takes long to find."""

    def __init__(self, event: str, fields: dict[str, Any]):  # does not call the base class
        self.name, self.levelno, self.levelname, self.msg, self.args = ACCESS, logging.INFO, "INFO", event, ()
        self.fields, self.created = fields, time.time()
        self.exc_info = self.exc_text = self.stack_info = None

    def as_fields(self) -> Fields:
        """Return all fields of its line."""
        moment = datetime.fromtimestamp(self.created, UTC).isoformat().replace("+00:00", "Z")
        return {**self.fields, "time": moment, "level": "info", "logger": ACCESS, "event": self.msg}


def log_access(event: str, **fields: Any) -> None:  # noqa: ANN401 - JSON
    """Log a request, or a call of the wire."""
    if _access.isEnabledFor(logging.INFO):
        _access.handle(AccessRecord(event, fields))


class LaterHandler(logging.Handler):
    """Write records in a thread, in order. `close` waits up to `END_S` for the queued ones."""

    def __init__(self, stream: TextIO, *, max_waiting: int = MOST_WAITING):
        super().__init__()
        self._stream = stream
        self._waiting: queue.Queue[logging.LogRecord | None] = queue.Queue(max_waiting)
        self._left_out = 0
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._write, name="cloche-log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        """Queue a record; drop it when the queue is full."""
        try:
            self._waiting.put_nowait(record)
        except queue.Full:
            self._left_out += 1

    def close(self) -> None:
        """Write the queued records, for up to `END_S`."""
        self._is_closing.set()
        try:
            self._waiting.put(None, timeout=END_S)
        except queue.Full:
            pass  # stderr is not read: the queued lines are lost
        else:
            self._thread.join(END_S)
        super().close()

    def _write(self) -> None:
        """Write all queued records at once, then pause: each write takes a turn of the GIL from the event loop."""
        is_last = False
        while not is_last:
            records = [self._waiting.get()]
            with suppress(queue.Empty):
                while len(records) < MOST_AT_ONCE:
                    records.append(self._waiting.get_nowait())
            is_last = None in records
            lines = [line for record in records if record is not None for line in self._lines(record)]
            try:
                self._stream.write("".join(lines))
                self._stream.flush()
            except Exception:  # such as a full disk: reported with the next successful lines
                self._left_out += len(lines)
            else:
                self._tell_left_out()
            self._is_closing.wait(PAUSE_S)

    def _lines(self, record: logging.LogRecord) -> list[str]:
        try:
            return [f"{self.format(record)}\n"]
        except Exception:  # an invalid record
            self._left_out += 1
            return []

    def _tell_left_out(self) -> None:
        if self._left_out and self._waiting.empty():
            count, self._left_out = self._left_out, 0
            text = "%d lines were left out: too many waited, or they could not be written"
            self.emit(logging.LogRecord("cloche.service", logging.WARNING, __file__, 0, text, (count,), None))


class _Formatter(structlog.stdlib.ProcessorFormatter):
    """Format records; those of requests skip structlog's processors."""

    def __init__(self, render: Callable[[object, str, Fields], str]):
        processors: list[Any] = [structlog.stdlib.ProcessorFormatter.remove_processors_meta, _explain, render]
        super().__init__(foreign_pre_chain=_SHARED, processors=processors)
        self._render = render

    def format(self, record: logging.LogRecord) -> str:
        if isinstance(record, AccessRecord):
            return self._render(None, "", record.as_fields())
        return super().format(record)


def make_formatter(*, is_plain: bool) -> logging.Formatter:
    """Return a formatter of plain lines or of JSON."""
    return _Formatter(_as_line if is_plain else _as_json)


def _explain(_: object, __: str, fields: Fields) -> Fields:
    """Replace a traceback by the types and frames of the error and its causes."""
    exc_info = fields.pop("exc_info", None)
    error = exc_info[1] if isinstance(exc_info, tuple) else exc_info if isinstance(exc_info, BaseException) else None
    if error is not None:
        fields["error"] = [_shown(link) for link in _chain(error)]
    return fields


def _chain(error: BaseException) -> list[BaseException]:
    chain: list[BaseException] = []
    following: BaseException | None = error
    while following is not None and following not in chain and len(chain) < 8:
        chain.append(following)
        following = following.__cause__ or following.__context__
    return chain


def _shown(error: BaseException) -> dict[str, Any]:
    frames = traceback.extract_tb(error.__traceback__)[-12:]
    shown: dict[str, Any] = {"type": type(error).__qualname__}
    if isinstance(error, ClocheError):
        shown["message"] = str(error)[:MOST_CHARACTERS]
    return {**shown, "at": [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames]}


def _as_json(_: object, __: str, fields: Fields) -> str:
    """Return one line of ASCII JSON; other characters are escaped."""
    text = json.dumps(_ordered(fields), default=str, ensure_ascii=True, separators=(",", ":"))
    return text.replace("\x7f", "\\u007f")


def _as_line(_: object, __: str, fields: Fields) -> str:
    ordered = _ordered(fields)
    head = " ".join(str(ordered.pop(name, "")) for name in ("time", "level", "logger", "event"))
    return escape_name(" ".join([head, *(f"{name}={value}" for name, value in ordered.items() if value is not None)]))


def _ordered(fields: Fields) -> dict[str, Any]:
    first = {name: fields.get(name) for name in ("time", "level", "logger", "event")}
    other_fields = {name: value for name, value in fields.items() if name not in first}
    return {name: _bounded(value) for name, value in {**first, **other_fields}.items()}


def _bounded(value: Any) -> Any:  # noqa: ANN401 - whatever is logged
    if isinstance(value, str) and len(value) > MOST_CHARACTERS:
        return f"{value[:MOST_CHARACTERS]} ({len(value) - MOST_CHARACTERS} more characters)"
    return value
