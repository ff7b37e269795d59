"""Names of files in frames: all bytes are preserved, and any reader of JSON can read them.

A name that is UTF-8 travels as text. Any other one travels as `{"hex": DIGITS}`, because JSON readers do not agree on
another form. In memory it is text with surrogate escapes for bytes that are no UTF-8, as `os.fsdecode` returns it.
"""

from __future__ import annotations

import os

MOST_NAME_BYTES = 1 << 14  # several times the kernel's limit


def pack(name: bytes) -> str | dict[str, str]:
    """Return a name in the form for a frame."""
    try:
        return name.decode("utf-8")
    except UnicodeDecodeError:
        return {"hex": name.hex()}


def unpack(value: object) -> bytes:
    """Return a name from its form in a frame. Raises ValueError for an invalid one."""
    name = b"\0"
    if isinstance(value, str):
        name = value.encode("utf-8")
    elif isinstance(value, dict):
        digits = value.get("hex")
        name = bytes.fromhex(digits) if isinstance(digits, str) and len(digits) <= 2 * MOST_NAME_BYTES else name
    if b"\0" in name or len(name) > MOST_NAME_BYTES:
        raise ValueError("a malformed name")
    return name


def pack_text(name: str) -> str | dict[str, str]:
    """Return a name from memory in the form for a frame, for any file-system encoding of this host.

    Raises ValueError for surrogates that stand for no byte.
    """
    return pack(name.encode("utf-8", "surrogateescape"))


def unpack_text(value: object) -> str:
    """Return a name in its form in memory. Raises ValueError for an invalid one."""
    return unpack(value).decode("utf-8", "surrogateescape")


def pack_path(path: str) -> str | dict[str, str]:
    """Return a path that was read here in the form for a frame."""
    return pack(os.fsencode(path))


def unpack_path(value: object) -> str:
    """Return a path that can be used here. Raises ValueError for an invalid one."""
    return os.fsdecode(unpack(value))
