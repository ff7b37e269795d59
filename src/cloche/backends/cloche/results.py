"""Results of the wire as `Result`. Each field is checked and bounded: the service and the guest determine it."""

from __future__ import annotations

import base64
import binascii
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from cloche.core.enforcement import Control, Enforcement, Level, Measure, State
from cloche.core.errors import InvalidRequest, OutcomeUnknown
from cloche.core.limits import Limits
from cloche.core.remote import RemoteAccount
from cloche.core.request import workspace_path
from cloche.core.result import FileRecord, Output, Result, SaveFiles, Status, Usage

from ..archive import MAX_FILES, MAX_PATH_CHARS, ByteRange, Spool, keep
from ..remote.claims import claimed, claimed_controls, claimed_enforcement
from ..remote.failures import scrub

MOST_OUTPUTS = 10_000
MOST_TEXT = 500
_DIGITS = frozenset("0123456789abcdef")
_ESCAPE = re.compile(r"\\u(dc[89a-f][0-9a-f])")


class ResultReader:
    """Read the results of one account."""

    def __init__(self, account: RemoteAccount, limits: Limits):
        self._account, self._limits = account, limits

    def wrong(self) -> OutcomeUnknown:
        """Return the error for an invalid result of code that was sent."""
        return OutcomeUnknown(
            f"backend {self._account.provider!r}: the answer of {self._account.host} does not follow the protocol: "
            "it is not a result. The code may or may not have run; check before you repeat it."
        )

    def read(
        self,
        answer: Mapping[str, Any],
        *,
        sandbox: str = "",
        files: tuple[FileRecord, ...] = (),
        save: SaveFiles | None = None,
    ) -> Result:
        """Return a result. Raises OutcomeUnknown for an invalid one."""
        try:
            return self._read(answer, sandbox, files, save)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise self.wrong() from error

    def _read(
        self, answer: Mapping[str, Any], sandbox: str, files: tuple[FileRecord, ...], save: SaveFiles | None
    ) -> Result:
        status, exit_code = Status(answer["status"]), answer["exitCode"]
        if type(exit_code) is not int or not -1 <= exit_code <= 255:
            raise ValueError
        stdout, stderr = self._stream(answer, "stdout"), self._stream(answer, "stderr")
        meta = answer.get("meta")
        meta = dict(meta) if isinstance(meta, dict) else {}
        duration = _number(answer.get("duration"))
        return Result(
            stdout[0], stderr[0], exit_code, duration,
            truncated=answer.get("truncated") is True,
            timed_out=status is Status.TIMEOUT,
            status=status,
            value=answer.get("value"),
            value_is_repr=answer.get("valueIsRepr") is True,
            outputs=read_outputs(answer.get("outputs")),
            files=files,
            usage=_usage(answer.get("usage"), duration),
            enforcement=self.enforcement(answer, meta),
            stdout_bytes=stdout[1],
            stderr_bytes=stderr[1],
            save_files=save,
            meta=self.meta(meta, sandbox or str(answer.get("id"))[:64]),
        )  # fmt: skip

    def _stream(self, answer: Mapping[str, Any], name: str) -> tuple[str, bytes]:
        text, encoded = answer[name], answer.get(f"{name}Base64")
        if not isinstance(text, str):
            raise TypeError
        if isinstance(encoded, str):
            data = binascii.a2b_base64(encoded)
            return data.decode("utf-8", "replace"), data
        return text, text.encode("utf-8", "replace")

    def meta(self, reported: Mapping[str, Any], sandbox: str) -> dict[str, Any]:
        """Return a result's meta: the service's own, and where the code ran."""
        remote = {**self._account.as_dict(), "sandbox": sandbox}
        if isinstance(reported.get("backend"), str):
            remote["backend"] = scrub(reported["backend"], self._account)
        meta = {**reported, "backend": self._account.provider, "level_source": "claimed", "remote": remote}
        if "network" in meta:
            rows = meta["network"]
            meta["network"] = [row for row in rows if _is_traffic(row)] if isinstance(rows, list) else []
        return meta

    def enforcement(self, answer: Mapping[str, Any], meta: Mapping[str, Any]) -> Enforcement:
        """Return the enforcement that the service reports; its `enforced` becomes `claimed`."""
        rows = answer.get("enforcement")
        enforcement = _read_enforcement_once(self._account, rows, meta.get("level", answer.get("level")))
        hits = answer.get("hits")
        if isinstance(hits, dict):
            counts = {name: count for name, count in hits.items() if name in _HITS and type(count) is int and count > 0}
            if counts:
                return Enforcement(
                    level=enforcement.level,
                    controls=enforcement.controls,
                    hits=counts,
                    level_source=enforcement.level_source,
                )
        return enforcement


def _is_traffic(row: object) -> bool:
    kinds = {"host": str, "port": int, "why": str, "connections": int, "is_allowed": bool}
    return isinstance(row, dict) and all(type(row.get(name)) is kind for name, kind in kinds.items())


_HITS = frozenset({*map(str, Status), "network"})


_last: list[tuple[RemoteAccount, object, object, Enforcement]] = []


def _read_enforcement_once(account: RemoteAccount, rows: object, level: object) -> Enforcement:
    """Return the reported enforcement. The last one is cached, because it rarely changes between runs."""
    if _last and _last[0][:3] == (account, rows, level):
        return _last[0][3]
    enforcement = read_enforcement(account, rows, level)
    _last[:] = [(account, rows, level, enforcement)]
    return enforcement


def read_enforcement(account: RemoteAccount, rows: object, level: object) -> Enforcement:
    """Return the reported enforcement, row by row."""
    changes: dict[Control, Measure] = {}
    by = account.host
    for control in Control:
        row = rows.get(str(control)) if isinstance(rows, dict) else None
        row = row if isinstance(row, dict) else {}
        texts = {name: str(row.get(name, ""))[:MOST_TEXT] for name in ("state", "mechanism", "reason")}
        if texts["state"] in ("enforced", "claimed"):
            measure = claimed(by, texts["reason"])
            changes[control] = Measure(
                state=measure.state,
                mechanism=f"{measure.mechanism}: {scrub(texts['mechanism'])}",
                reason=measure.reason,
            )
        else:
            state = State.PARTIAL if texts["state"] == "partial" else State.ABSENT
            changes[control] = Measure(
                state=state, mechanism=scrub(texts["mechanism"]), reason=f"says {by}: {scrub(texts['reason'])}"
            )
    for control in (Control.TIME, Control.OUTPUT):  # also enforced on this side
        if changes[control].state is State.CLAIMED:
            del changes[control]
    try:
        parsed_level = Level.parse(str(level)[:40])
    except InvalidRequest:
        parsed_level = Level.NONE
    return claimed_enforcement(parsed_level, claimed_controls(by, changes))


def read_outputs(rows: object) -> tuple[Output, ...]:
    """Return rich outputs; binary content is in base64. Raises ValueError."""
    if not isinstance(rows, list) or len(rows) > MOST_OUTPUTS:
        if rows in (None, []):
            return ()
        raise ValueError
    return tuple(map(read_output, rows))


def read_output(row: Any) -> Output:  # noqa: ANN401 - any JSON
    """Return one rich output."""
    data = {str(mime): _content(str(mime), text) for mime, text in row["data"].items() if isinstance(text, str)}
    metadata = row.get("metadata")
    return Output(data=data, metadata=metadata if isinstance(metadata, dict) else {})


def _content(mime: str, text: str) -> str | bytes:
    if mime.startswith("text/") or mime.endswith(("xml", "json", "javascript")):
        return text
    try:
        return base64.b64decode(text, validate=True)
    except ValueError:
        return text


def _usage(reported: object, wall_s: float) -> Usage:
    row = reported if isinstance(reported, dict) else {}
    count = {name: row.get(name) for name in ("cpuUserS", "cpuSystemS", "peakMemoryBytes", "processes")}
    numbers = {name: _number(value) for name, value in count.items() if value is not None}
    return Usage(
        wall_s=_number(row.get("wallS", wall_s)),
        cpu_user_s=numbers.get("cpuUserS"),
        cpu_system_s=numbers.get("cpuSystemS"),
        peak_memory_bytes=int(numbers["peakMemoryBytes"]) if "peakMemoryBytes" in numbers else None,
        processes=int(numbers["processes"]) if "processes" in numbers else None,
    )


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        return 0.0
    return float(value)


def read_records(rows: object) -> tuple[FileRecord, ...]:
    """Return the files of a result: paths below the workspace, at most `MAX_FILES`. Raises ValueError."""
    if not isinstance(rows, list) or len(rows) > MAX_FILES:
        raise ValueError
    records: dict[str, FileRecord] = {}
    for row in rows:
        path, size, digest = row["path"], row["size"], row["sha256"]
        path = unescaped(path)
        if workspace_path(path) != path or type(size) is not int or size < 0:
            raise ValueError
        if len(digest) != 64 or set(digest) - _DIGITS:
            raise ValueError
        records[path] = FileRecord(path=path, size=size, sha256=digest)
    if sum(map(len, records)) > MAX_PATH_CHARS:
        raise ValueError
    return tuple(records.values())


def unescaped(path: str) -> str:
    """Return a path as the guest wrote it; bytes that are not UTF-8 were sent as escapes."""
    return _ESCAPE.sub(lambda match: chr(int(match[1], 16)), path)


def files_saver(spool: Spool, records: Sequence[FileRecord]) -> SaveFiles | None:
    """Return the function that saves files whose contents are consecutive in `spool`.

    Raises ValueError if they are not.
    """
    ranges, offset = {}, 0
    for record in records:
        ranges[record.path] = ByteRange(offset=offset, size=record.size, sha256=record.sha256)
        offset += record.size
    if offset != spool.size:
        raise ValueError("the received files are not those of the result")
    return keep(spool, ranges, tuple(records))
