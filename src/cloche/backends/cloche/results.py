"""Results of the wire as `Result`: each field is checked and bounded, since others say them, and a guest among them."""

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
    """Read results of one account."""

    def __init__(self, account: RemoteAccount, limits: Limits):
        self._account, self._limits = account, limits

    def wrong(self) -> OutcomeUnknown:
        """Return the error for what is no result, of code that was sent."""
        return OutcomeUnknown(
            f"backend 'cloche': the answer of {self._account.host} is not what the protocol says: what came is no "
            "result. The code may or may not have run; do not repeat it blindly."
        )

    def read(
        self,
        said: Mapping[str, Any],
        *,
        sandbox: str = "",
        files: tuple[FileRecord, ...] = (),
        save: SaveFiles | None = None,
    ) -> Result:
        """Return a result. Raises OutcomeUnknown for what is none."""
        try:
            return self._read(said, sandbox, files, save)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise self.wrong() from error

    def _read(
        self, said: Mapping[str, Any], sandbox: str, files: tuple[FileRecord, ...], save: SaveFiles | None
    ) -> Result:
        status, exit_code = Status(said["status"]), said["exitCode"]
        if type(exit_code) is not int or not -1 <= exit_code <= 255:
            raise ValueError
        stdout, stderr = self._stream(said, "stdout"), self._stream(said, "stderr")
        meta = said.get("meta")
        meta = dict(meta) if isinstance(meta, dict) else {}
        duration = _number(said.get("duration"))
        return Result(
            stdout[0], stderr[0], exit_code, duration,
            truncated=said.get("truncated") is True,
            timed_out=status is Status.TIMEOUT,
            status=status,
            value=said.get("value"),
            value_is_repr=said.get("valueIsRepr") is True,
            outputs=read_outputs(said.get("outputs")),
            files=files,
            usage=_usage(said.get("usage"), duration),
            enforcement=self.enforcement(said, meta),
            stdout_bytes=stdout[1],
            stderr_bytes=stderr[1],
            save_files=save,
            meta=self.meta(meta, sandbox or str(said.get("id"))[:64]),
        )  # fmt: skip

    def _stream(self, said: Mapping[str, Any], name: str) -> tuple[str, bytes]:
        text, encoded = said[name], said.get(f"{name}Base64")
        if not isinstance(text, str):
            raise TypeError
        if isinstance(encoded, str):
            data = binascii.a2b_base64(encoded)
            return data.decode("utf-8", "replace"), data
        return text, text.encode("utf-8", "replace")

    def meta(self, said: Mapping[str, Any], sandbox: str) -> dict[str, Any]:
        """Return a result's meta: the service's own, and where it ran."""
        remote = {**self._account.as_dict(), "sandbox": sandbox}
        if isinstance(said.get("backend"), str):
            remote["backend"] = scrub(said["backend"], self._account)
        meta = {**said, "backend": "cloche", "level_source": "claimed", "remote": remote}
        if "network" in meta:
            rows = meta["network"]
            meta["network"] = [row for row in rows if _is_traffic(row)] if isinstance(rows, list) else []
        return meta

    def enforcement(self, said: Mapping[str, Any], meta: Mapping[str, Any]) -> Enforcement:
        """Return what the service says of its own sandbox: claimed, where it says enforced."""
        rows = said.get("enforcement")
        found = _read_enforcement_once(self._account, rows, meta.get("level", said.get("level")))
        hits = said.get("hits")
        if isinstance(hits, dict):
            told = {name: count for name, count in hits.items() if name in _HITS and type(count) is int and count > 0}
            if told:
                return Enforcement(
                    level=found.level, controls=found.controls, hits=told, level_source=found.level_source
                )
        return found


def _is_traffic(row: object) -> bool:
    kinds = {"host": str, "port": int, "why": str, "connections": int, "is_allowed": bool}
    return isinstance(row, dict) and all(type(row.get(name)) is kind for name, kind in kinds.items())


_HITS = frozenset({*map(str, Status), "network"})


_last: list[tuple[RemoteAccount, object, object, Enforcement]] = []


def _read_enforcement_once(account: RemoteAccount, rows: object, level: object) -> Enforcement:
    """Return what a service says to enforce; from one run to the next that hardly ever changes."""
    if _last and _last[0][:3] == (account, rows, level):
        return _last[0][3]
    found = read_enforcement(account, rows, level)
    _last[:] = [(account, rows, level, found)]
    return found


def read_enforcement(account: RemoteAccount, rows: object, level: object) -> Enforcement:
    """Return what a service says to enforce, row by row."""
    changes: dict[Control, Measure] = {}
    by = account.host
    for control in Control:
        row = rows.get(str(control)) if isinstance(rows, dict) else None
        row = row if isinstance(row, dict) else {}
        said = {name: str(row.get(name, ""))[:MOST_TEXT] for name in ("state", "mechanism", "reason")}
        if said["state"] in ("enforced", "claimed"):
            measure = claimed(by, said["reason"])
            changes[control] = Measure(
                state=measure.state, mechanism=f"{measure.mechanism}: {scrub(said['mechanism'])}", reason=measure.reason
            )
        else:
            state = State.PARTIAL if said["state"] == "partial" else State.ABSENT
            changes[control] = Measure(
                state=state, mechanism=scrub(said["mechanism"]), reason=f"says {by}: {scrub(said['reason'])}"
            )
    for control in (Control.TIME, Control.OUTPUT):  # which are kept from here as well
        if changes[control].state is State.CLAIMED:
            del changes[control]
    try:
        found = Level.parse(str(level)[:40])
    except InvalidRequest:
        found = Level.NONE
    return claimed_enforcement(found, claimed_controls(by, changes))


def read_outputs(rows: object) -> tuple[Output, ...]:
    """Return rich outputs; what is no text is in base64. Raises ValueError."""
    if not isinstance(rows, list) or len(rows) > MOST_OUTPUTS:
        if rows in (None, []):
            return ()
        raise ValueError
    return tuple(map(read_output, rows))


def read_output(row: Any) -> Output:  # noqa: ANN401 - any JSON
    """Return one."""
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


def _usage(said: object, wall_s: float) -> Usage:
    row = said if isinstance(said, dict) else {}
    count = {name: row.get(name) for name in ("cpuUserS", "cpuSystemS", "peakMemoryBytes", "processes")}
    known = {name: _number(value) for name, value in count.items() if value is not None}
    return Usage(
        wall_s=_number(row.get("wallS", wall_s)),
        cpu_user_s=known.get("cpuUserS"),
        cpu_system_s=known.get("cpuSystemS"),
        peak_memory_bytes=int(known["peakMemoryBytes"]) if "peakMemoryBytes" in known else None,
        processes=int(known["processes"]) if "processes" in known else None,
    )


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        return 0.0
    return float(value)


def read_records(rows: object) -> tuple[FileRecord, ...]:
    """Return the files of a result: paths below the workspace, no more than a result has. Raises ValueError."""
    if not isinstance(rows, list) or len(rows) > MAX_FILES:
        raise ValueError
    found: dict[str, FileRecord] = {}
    for row in rows:
        path, size, digest = row["path"], row["size"], row["sha256"]
        path = unescaped(path)
        if workspace_path(path) != path or type(size) is not int or size < 0:
            raise ValueError
        if len(digest) != 64 or set(digest) - _DIGITS:
            raise ValueError
        found[path] = FileRecord(path=path, size=size, sha256=digest)
    if sum(map(len, found)) > MAX_PATH_CHARS:
        raise ValueError
    return tuple(found.values())


def unescaped(path: str) -> str:
    """Return a path as the guest has it; a byte that is no UTF-8 was written as an escape."""
    return _ESCAPE.sub(lambda found: chr(int(found[1], 16)), path)


def kept(spool: Spool, records: Sequence[FileRecord]) -> SaveFiles | None:
    """Return what saves files whose contents came one after the other. Raises ValueError where they did not."""
    ranges, at = {}, 0
    for record in records:
        ranges[record.path] = ByteRange(offset=at, size=record.size, sha256=record.sha256)
        at += record.size
    if at != spool.size:
        raise ValueError("the files that came are not those of the result")
    return keep(spool, ranges, tuple(records))
