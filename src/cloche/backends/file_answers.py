"""What operations on files answer, read at the caller's end. A guest may have written it: it is bounded and checked."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any

from cloche.core.errors import (
    SandboxDirectoryError,
    SandboxFileError,
    SandboxFileExists,
    SandboxFileNotFound,
    SandboxFileRefused,
    SandboxFileTooLarge,
    SandboxNotDirectoryError,
)
from cloche.core.guest_json import finite, refuse_constant
from cloche.core.processes import FileChange, FileInfo, FilePart
from cloche.init.names import unpack_text

from .init_link import read_guest_object
from .live_streams import ByteStream

MOST_ENTRIES = 100_000
MOST_NAME = 256  # characters of an account's
MOST_LINE_BYTES = 1 << 17  # some paths of 4096 bytes, metadata, and the other fields
FILE_ERRORS: dict[str, type[SandboxFileError]] = {
    "not_found": SandboxFileNotFound, "too_large": SandboxFileTooLarge, "exists": SandboxFileExists,
    "not_empty": SandboxFileExists, "is_directory": SandboxDirectoryError, "permission": SandboxFileRefused,
    "not_regular": SandboxFileRefused, "loop": SandboxFileRefused,
    "not_directory": SandboxNotDirectoryError,
}  # fmt: skip
REMEDIES = {"full": "the sandbox's disk is full; remove files, or open one with a larger limit (disk=)"}
_LINE = json.JSONDecoder(parse_constant=refuse_constant, parse_float=finite)
CHANGES = ("created", "changed", "written", "attributes", "removed", "moved", "lost", "over")


def late(path: str, seconds: float) -> SandboxFileError:
    """Return the error of an operation that took too long."""
    return SandboxFileError(f"{path}: not finished within {seconds:g} s", path=path, kind="timeout")


def no_sense(path: str, error: Exception | str) -> SandboxFileError:
    """Return the error of an answer that cannot be read."""
    return SandboxFileError(f"{path}: the answer is invalid: {error}", path=path, kind="other")


def skipped(answer: Mapping[str, Any]) -> int:
    """Return how many entries were left out."""
    count = answer.get("skipped")
    return count if isinstance(count, int) else 0


def path_of(answer: Mapping[str, Any], path: str, key: str = "path") -> str:
    """Return the absolute path in an answer."""
    try:
        return unpack_text(answer[key])
    except (KeyError, ValueError) as error:
        raise no_sense(path, error) from error


def paths_of(answer: Mapping[str, Any], count: int) -> list[str]:
    """Return the absolute paths in an answer, which must have so many."""
    try:
        paths = [unpack_text(path) for path in answer["paths"]]
        if len(paths) != count:
            raise ValueError(f"{len(paths)} paths")
    except (KeyError, TypeError, ValueError) as error:
        raise no_sense("/", error) from error
    return paths


def read_answer(data: bytes, path: str) -> dict[str, Any]:
    """Return the object that an operation ended with."""
    try:
        return read_guest_object(data)
    except ValueError as error:
        raise no_sense(path, error) from error


def file_error(refused: Mapping[str, Any], path: str) -> SandboxFileError:
    """Return the error that an operation ended with."""
    kind = str(refused.get("kind"))[:40]
    try:
        where = unpack_text(refused.get("path")) or path
    except ValueError:
        where = path
    message = REMEDIES.get(kind, str(refused.get("message"))[:1000])
    return FILE_ERRORS.get(kind, SandboxFileError)(f"{where}: {message}", path=where, kind=kind)


def file_info(row: Mapping[str, Any], path: str, folder: str | None = None) -> FileInfo:
    """Return the facts of one file, by default at the row's path. Raises SandboxFileError for an invalid row."""
    try:
        name = unpack_text(row["name"])
        return FileInfo(
            name=name,
            type=_file_type(row["type"]) or "other",
            size=int(row["size"]),
            mode=int(row["mode"]) & 0o7777,
            mtime=float(row["mtime"]),
            uid=int(row["uid"]),
            gid=int(row["gid"]),
            target=unpack_text(row.get("target", "")),
            leads_to=_file_type(row.get("leads_to")),
            owner=str(row.get("owner", ""))[:MOST_NAME],
            group=str(row.get("group", ""))[:MOST_NAME],
            path=unpack_text(row.get("path", "")) if folder is None else f"{folder}/{name}",
            real=unpack_text(row.get("real", "")),
            target_mode=int(row.get("target_mode", 0)) & 0o7777,
            metadata=_texts(row.get("metadata") or {}),
        )
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise no_sense(path, error) from error


def _texts(value: Mapping[str, Any]) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        raise ValueError("metadata are not texts")
    return value


def file_part(row: Mapping[str, Any], path: str) -> FilePart:
    """Return the facts of a part that is read. Raises SandboxFileError for an invalid line."""
    try:
        count = row["count"]
        return FilePart(
            path=unpack_text(row["path"]), size=int(row["size"]), mtime=float(row["mtime"]), offset=int(row["offset"]),
            count=None if count is None else int(count),
        )  # fmt: skip
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise no_sense(path, error) from error


def _file_type(value: object) -> Any:  # noqa: ANN401 - one of FileType, or None
    return value if value in ("file", "directory", "link", "other") else None


def file_change(line: Mapping[str, Any], path: str) -> FileChange:
    """Return one change of a watch. Raises SandboxFileError for an invalid line."""
    try:
        kind = line["event"]
        if kind not in CHANGES:
            raise ValueError(f"no change {str(kind)[:40]!r}")
        return FileChange(
            kind=kind,
            path=unpack_text(line["path"]),
            target=unpack_text(line.get("target", "")),
            is_directory=line.get("type") == "directory",
            entry=None if line.get("entry") is None else file_info(line["entry"], path),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise no_sense(path, error) from error


def read_rows(data: bytes, path: str) -> Iterator[FileInfo]:
    """Yield the entries of the folder at an absolute path, one JSON object a line.

    Raises SandboxFileError for an invalid line or too many.
    """
    lines, folder = data.split(b"\n", MOST_ENTRIES + 1), path.rstrip("/")
    if len(lines) > MOST_ENTRIES + 1:
        raise no_sense(path, f"more than {MOST_ENTRIES} rows")
    for line in lines:
        if line:
            yield file_info(read_object(line, path), path, folder)


def read_object(line: bytes, path: str) -> dict[str, Any]:
    """Parse one line here: lines are short enough not to delay the event loop."""
    if len(line) > MOST_LINE_BYTES:
        raise no_sense(path, f"a line of {len(line)} bytes")
    try:
        row = _LINE.decode(line.decode())
    except (ValueError, RecursionError) as error:
        raise no_sense(path, error) from error
    if not isinstance(row, dict):
        raise no_sense(path, "a line holds no object")
    return row


async def read_lines(stream: ByteStream, path: str) -> AsyncIterator[dict[str, Any]]:
    """Yield the object on each line of the content."""
    remainder = b""
    while data := await stream.read():
        *lines, remainder = (remainder + data).split(b"\n")
        if len(remainder) > MOST_LINE_BYTES:
            raise no_sense(path, "a line that does not end")
        for line in lines:
            yield read_object(line, path)
