"""The rows of `cloche batch`: an input line becomes a program, an outcome becomes a row of results, rows a summary.

Pure. A row of the input holds content only, never a path of the host: rows may come from a model.
"""

from __future__ import annotations

import base64
import binascii
import heapq
import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO

from cloche.core.batch import Outcome, Program, never_ran, read_program
from cloche.core.errors import AuditFailed, BackendUnavailable, ClocheError, InvalidRequest, PolicyDenied
from cloche.core.record import dataclass
from cloche.core.result import Result

MAX_ROW_BYTES = 128 << 20  # of a line: 50 MiB of standard input as base64, and files beside it
MOST_ROW_PARTS = 500_000  # values and names; each can take a hundred bytes of memory
MOST_MESSAGE_CHARS = 2_000
MOST_ID_CHARS = 1_000
LOST, START_FAILED, INVALID = "lost", "start_failed", "invalid"
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_RESULT_FIELDS = ("status", "exit_code", "stdout", "stderr", "duration", "truncated", "timed_out")
_BUCKETS_PER_E = 50  # of durations: each is 2 % wider than the one before
_SHORTEST_S = 1e-6
MOST_SLOWEST = 5
# Where some readers break lines, and what terminals take for commands; JSON leaves them as they are.
_ESCAPED = re.compile(r"[\x7f-\x9f\u2028\u2029]")


@dataclass(frozen=True, slots=True, kw_only=True)
class InputRow:
    """Hold one line of the input; `program` is None for a wrong one, and `why` is the reason."""

    index: int
    line: int
    program: Program | None = None
    id: str | int | None = None
    why: str = ""


def read_lines(file: BinaryIO) -> Iterator[tuple[int, bytes | None]]:
    """Yield number and content of each line that is not blank; None instead of one that is too long."""
    number = 0
    while line := file.readline(MAX_ROW_BYTES + 1):
        number += 1
        if len(line) > MAX_ROW_BYTES:
            while not line.endswith(b"\n") and (line := file.readline(1 << 20)):
                pass
            yield number, None
            continue
        if number == 1:
            line = line.removeprefix(_BYTE_ORDER_MARK)
        if line.strip():
            yield number, line


def read_row(data: bytes | None, *, index: int, line: int) -> InputRow:
    """Return the program of a line, or the reason why it has none."""
    if data is None:
        return InputRow(index=index, line=line, why=f"the line has more than {MAX_ROW_BYTES >> 20} MiB")
    if len(data) > MOST_ROW_PARTS and _has_too_many_parts(data):
        return InputRow(index=index, line=line, why=f"the line has more than {MOST_ROW_PARTS} values and names")
    try:
        value = json.loads(str(data.rstrip(b"\r\n"), "utf-8"))
    except UnicodeDecodeError as error:
        return InputRow(index=index, line=line, why=f"not UTF-8: {error.reason} at byte {error.start}")
    except json.JSONDecodeError as error:
        return InputRow(index=index, line=line, why=f"not JSON: {error.msg} at character {error.pos}")
    except (ValueError, RecursionError) as error:
        return InputRow(index=index, line=line, why=f"not JSON: {error}"[:MOST_MESSAGE_CHARS])
    if not isinstance(value, dict):
        return InputRow(index=index, line=line, why="not a JSON object")
    given = value.get("id")
    row_id = given if isinstance(given, str | int) and not isinstance(given, bool) else None
    if isinstance(row_id, str) and len(row_id) > MOST_ID_CHARS:
        return InputRow(index=index, line=line, why=f"id: it has more than {MOST_ID_CHARS} characters")
    try:
        program = read_program({key: _READERS.get(key, _as_it_is)(field) for key, field in value.items()})
    except InvalidRequest as error:
        return InputRow(index=index, line=line, id=row_id, why=str(error)[:MOST_MESSAGE_CHARS])
    return InputRow(index=index, line=line, id=row_id, program=program)


def _has_too_many_parts(data: bytes) -> bool:
    """Estimate the values and names of JSON by the signs outside of its strings, before it is parsed."""
    data = data.replace(rb"\\", b"").replace(rb"\"", b"")
    if data.count(b'"') > 2 * MOST_ROW_PARTS:
        return True
    outside = b"".join(data.split(b'"')[::2])
    return sum(outside.count(sign) for sign in (b",", b":", b"[", b"{")) > MOST_ROW_PARTS


def _as_it_is(value: object) -> object:
    return value


def _read_content(value: object, *, name: str) -> str | bytes:
    """Return text, or the bytes of {"base64": text}."""
    if isinstance(value, str):
        return _checked_text(value, name=name)
    if isinstance(value, dict) and list(value) == ["base64"] and isinstance(value["base64"], str):
        try:
            return base64.b64decode(value["base64"], validate=True)
        except (binascii.Error, ValueError) as error:
            raise InvalidRequest(f"{name}: {error}") from error
    raise InvalidRequest(f'{name}: give text, or {{"base64": "..."}}')


def _checked_text(text: str, *, name: str) -> str:
    """Refuse a lone surrogate, which JSON can have and no file."""
    try:
        text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"{name}: {error}") from error
    return text


def _read_stdin(value: object) -> str | bytes | None:
    return None if value is None else _read_content(value, name="stdin")


def _read_files(value: object) -> Mapping[str, str | bytes] | None:
    if value is None:
        return None
    if not isinstance(value, dict):
        raise InvalidRequest("files: give an object that maps names to content")
    return {
        _checked_text(name, name="files"): _read_content(content, name=f"files: {name[:80]!r}")
        for name, content in value.items()
    }


_READERS = {"stdin": _read_stdin, "files": _read_files}


def stops_the_batch(error: ClocheError) -> bool:
    """Tell whether nothing ran and each further program would fail in the same way."""
    return isinstance(error, BackendUnavailable | AuditFailed) and not never_ran(error)


def outcome_row(row: InputRow, outcome: Outcome, *, is_full: bool) -> dict[str, Any]:
    """Return the row of results for an outcome."""
    if isinstance(outcome, Result):
        fields = outcome.as_dict()
        if not is_full:
            fields = {name: fields[name] for name in _RESULT_FIELDS}
        return {**_head(row), **fields}
    if isinstance(outcome, InvalidRequest | PolicyDenied):
        return invalid_row(row, str(outcome))
    return error_row(row, START_FAILED if never_ran(outcome) else LOST, str(outcome))


def invalid_row(row: InputRow, why: str) -> dict[str, Any]:
    """Return the row of results for a program that cannot be run as it is written."""
    return {**_head(row), "status": INVALID, "error": INVALID, "message": why[:MOST_MESSAGE_CHARS]}


def error_row(row: InputRow, kind: str, why: str) -> dict[str, Any]:
    """Return the row of results for a program without a status: LOST or START_FAILED."""
    return {**_head(row), "error": kind, "message": why[:MOST_MESSAGE_CHARS]}


def _head(row: InputRow) -> dict[str, Any]:
    return {"index": row.index, "id": row.id, "line": row.line}


def encode_row(row: Mapping[str, Any]) -> bytes:
    """Return a row as a line of JSON, which begins with `begins_row`."""
    try:
        text = json.dumps(row, ensure_ascii=False, default=str)
        return (text if text.isascii() else _ESCAPED.sub(_escaped, text)).encode() + b"\n"
    except UnicodeEncodeError:  # a lone surrogate, which an id can have
        return json.dumps(row, default=str).encode() + b"\n"


def _escaped(match: re.Match[str]) -> str:
    return f"\\u{ord(match[0]):04x}"


def begins_row(index: int) -> bytes:
    """Return how the line of results of this index begins."""
    return b'{"index": %d,' % index


def most_row_bytes(output_bytes: int) -> int:
    """Return how long a row without `is_full` can be: each byte of output takes up to six in JSON."""
    return 2 * 6 * output_bytes + 6 * (MOST_MESSAGE_CHARS + MOST_ID_CHARS) + 1_000


class BatchSummary:
    """Count the rows of results. Its memory does not grow with their number."""

    def __init__(self) -> None:
        self.statuses: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()
        self._durations: Counter[int] = Counter()  # by bucket
        self._slowest: list[tuple[float, int, str]] = []  # a heap
        self.first_invalid: tuple[int, str] | None = None  # line and message

    @property
    def rows(self) -> int:
        """Return the number of rows."""
        return self.statuses.total() + sum(self.errors[kind] for kind in (LOST, START_FAILED))

    @property
    def is_complete(self) -> bool:
        """Tell whether each row has the status of a program that ran."""
        return not self.errors

    def add(self, row: Mapping[str, Any]) -> None:
        """Count a row."""
        if "status" in row:
            self.statuses[str(row["status"])] += 1
        if "error" in row:
            self.errors[str(row["error"])] += 1
        if row.get("error") == INVALID:
            invalid = (int(row["line"]), str(row["message"]))
            self.first_invalid = min(self.first_invalid or invalid, invalid)
        duration = row.get("duration")
        if not isinstance(duration, int | float):
            return
        self._durations[math.floor(math.log(max(duration, _SHORTEST_S)) * _BUCKETS_PER_E)] += 1
        name = f"line {row['line']}" if row.get("id") is None else f"{row['id']} (line {row['line']})"
        heapq.heappush(self._slowest, (float(duration), -int(row["index"]), name))
        if len(self._slowest) > MOST_SLOWEST:
            heapq.heappop(self._slowest)

    def quantile_s(self, part: float) -> float | None:
        """Return the duration that `part` of the programs did not exceed, to 2 %; None without programs."""
        rank = max(1, math.ceil(part * self._durations.total()))
        for bucket in sorted(self._durations):
            rank -= self._durations[bucket]
            if rank <= 0:
                return math.exp((bucket + 0.5) / _BUCKETS_PER_E)
        return None

    def as_dict(self) -> dict[str, Any]:
        """Return plain data, ready for JSON; durations in seconds."""
        return {
            "rows": self.rows,
            "statuses": _by_count(self.statuses),
            "errors": _by_count(self.errors),
            "p50": _rounded(self.quantile_s(0.5)),
            "p99": _rounded(self.quantile_s(0.99)),
            "slowest": [{"program": name, "duration": _rounded(s)} for s, _, name in sorted(self._slowest)[::-1]],
        }


def _by_count(counts: Mapping[str, int]) -> dict[str, int]:
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else float(f"{seconds:.3g}")
