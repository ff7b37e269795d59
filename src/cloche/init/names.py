"""Names of files in frames: any bytes come through exactly, and any reader of JSON can read them.

A name that is UTF-8 travels as text. Any other one travels as `{"hex": DIGITS}`, for JSON has no way to say it that all
readers take. In memory it is text in which each byte that is no UTF-8 is half of a character, as `os.fsdecode` has it.
"""

from __future__ import annotations

import os

MOST_NAME_BYTES = 1 << 14  # several times what the kernel takes


def pack(name: bytes) -> str | dict[str, str]:
    """Return what stands for a name in a frame."""
    try:
        return name.decode("utf-8")
    except UnicodeDecodeError:
        return {"hex": name.hex()}


def unpack(value: object) -> bytes:
    """Return the name that something stands for. Raises ValueError for what is none."""
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
    """Return what stands in a frame for a name as it is in memory, whatever the encoding of this host's files is.

    Raises ValueError for halves of characters that stand for no byte.
    """
    return pack(name.encode("utf-8", "surrogateescape"))


def unpack_text(value: object) -> str:
    """Return a name as it is in memory. Raises ValueError for what is none."""
    return unpack(value).decode("utf-8", "surrogateescape")


def pack_path(path: str) -> str | dict[str, str]:
    """Return what stands in a frame for a path that was read here."""
    return pack(os.fsencode(path))


def unpack_path(value: object) -> str:
    """Return a path that can be used here. Raises ValueError for what is none."""
    return os.fsdecode(unpack(value))
