"""One name in a workspace snapshot: a file with its hash, a link, or the reason why it was skipped.

Paths are the file system's bytes, relative, separated by `/`. In a document a path is text, or `pathBase64` if it is
not UTF-8. Documents are untrusted and checked before use.
"""

from __future__ import annotations

import base64
import binascii
import os
import re
from collections.abc import Mapping
from typing import Any

from cloche.core.errors import InvalidRequest
from cloche.core.escape import escape_name
from cloche.core.record import dataclass

from .blobs import IS_SHA256

EXCLUDED_NAMES = frozenset({b".git", b"node_modules", b"__pycache__", b".DS_Store"})
RESTORE_MANIFEST = ".cloche-ws-restore.json"  # written at the top of a restored workspace
MOST_PATH_BYTES = 4096
PERMISSIONS = 0o777
_SKIPPED = "skipped:"
_IS_MODE = re.compile(r"[0-7]{4}").fullmatch
_IS_REASON = re.compile(r"[a-z0-9:-]{1,80}").fullmatch
_FIELDS = frozenset({"path", "pathBase64", "link", "linkBase64", "size", "mode", "sha256"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One name: a file has `size`, `mode` and `sha256`, a link has `link`, anything else the reason `skipped`."""

    path: bytes
    size: int | None = None
    mode: int | None = None
    sha256: str | None = None
    link: bytes | None = None
    skipped: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return it in the format of a document."""
        if self.link is not None:
            return {**named(self.path), **named(self.link, "link")}
        size = {} if self.size is None else {"size": self.size}
        if self.skipped is not None:
            return {**named(self.path), **size, "sha256": f"{_SKIPPED}{self.skipped}"}
        return {**named(self.path), **size, "mode": f"{self.mode:04o}", "sha256": self.sha256}


def named(path: bytes, key: str = "path") -> dict[str, str]:
    """Return a path under its key, or in base64 under `…Base64`."""
    try:
        return {key: path.decode("utf-8")}
    except UnicodeDecodeError:
        return {f"{key}Base64": base64.b64encode(path).decode("ascii")}


def listed(path: bytes) -> str | dict[str, str]:
    """Return a path as an item of a list: its text, or an object with `pathBase64`."""
    return named(path).get("path") or named(path)


def path_of(item: object) -> bytes:
    """Return the path of an item of a list. Raises InvalidRequest."""
    return _bytes_of(item if isinstance(item, Mapping) else {"path": item}, "path")


def shown(path: bytes) -> str:
    """Return a path for a message."""
    return escape_name(path.decode("utf-8", "backslashreplace"))


def is_excluded(path: bytes) -> bool:
    """Tell whether snapshots leave a path out and restorations leave it alone."""
    return path == os.fsencode(RESTORE_MANIFEST) or not EXCLUDED_NAMES.isdisjoint(path.split(b"/"))


def entries_of(files: object) -> list[Entry]:
    """Return the entries of a document's `files`. Raises InvalidRequest for invalid ones, and for unsafe paths."""
    if not isinstance(files, list):
        raise InvalidRequest("files: give a list")
    entries = [_entry_of(item) for item in files]
    if len({entry.path for entry in entries}) != len(entries):
        raise InvalidRequest("files: a path is given twice")
    return entries


def _entry_of(item: object) -> Entry:
    if not isinstance(item, Mapping) or not item.keys() <= _FIELDS:
        raise InvalidRequest(f"files: each is an object with some of {', '.join(sorted(_FIELDS))}")
    path = check_path(_bytes_of(item, "path"))
    if "link" in item or "linkBase64" in item:
        return Entry(path=path, link=_link_of(item, path))
    size, mode, sha256 = item.get("size"), item.get("mode"), item.get("sha256")
    if isinstance(sha256, str) and sha256.startswith(_SKIPPED) and _IS_REASON(sha256[len(_SKIPPED) :]):
        return Entry(path=path, size=size if _is_size(size) else None, skipped=sha256[len(_SKIPPED) :])
    if not _is_size(size) or not isinstance(mode, str) or not _IS_MODE(mode):
        raise InvalidRequest(f"files: {shown(path)} has no size, or no mode of four octal digits")
    if not isinstance(sha256, str) or not IS_SHA256(sha256):
        raise InvalidRequest(f"files: {shown(path)} has no SHA-256")
    return Entry(path=path, size=size, mode=int(mode, 8), sha256=sha256)


def check_path(path: bytes) -> bytes:
    """Return a path whose names stay below a folder. Raises InvalidRequest for any other."""
    names = path.split(b"/")
    if b"\0" in path or len(path) > MOST_PATH_BYTES or not {b"", b".", b".."}.isdisjoint(names):
        raise InvalidRequest(f"files: {shown(path[:200])} is not a relative path below the folder")
    return path


def _link_of(item: Mapping[str, Any], path: bytes) -> bytes:
    link = _bytes_of(item, "link")
    if not link or b"\0" in link or len(link) > MOST_PATH_BYTES:
        raise InvalidRequest(f"files: {shown(path)} is a link without a valid target")
    return link


def _bytes_of(item: Mapping[str, Any], key: str) -> bytes:
    text, packed = item.get(key), item.get(f"{key}Base64")
    try:
        if isinstance(text, str) and packed is None:
            return text.encode("utf-8")
        if isinstance(packed, str) and text is None:
            return base64.b64decode(packed, validate=True)
    except (UnicodeEncodeError, binascii.Error):
        pass  # raised below
    raise InvalidRequest(f"files: each has {key} (text) or {key}Base64, and only one of them")


def _is_size(size: object) -> bool:
    return isinstance(size, int) and not isinstance(size, bool) and size >= 0
