"""JSON that costs its parser much more than its bytes."""

from __future__ import annotations

from collections.abc import Callable

SHAPES: dict[str, Callable[[], bytes]] = {
    "keys": lambda: b"{" + b",".join(b'"k%d":0' % n for n in range(200_000)) + b"}",
    "the same key": lambda: b'{"a":0' + b',"a":0' * 200_000 + b"}",
    "items": lambda: b"[" + b"0," * 1_000_000 + b"0]",
    "empty lists": lambda: b"[" + b"[]," * 400_000 + b"[]]",
    "objects": lambda: b"[" + b"{}," * 400_000 + b"{}]",
    "deep": lambda: b"[" * 1_000_000,
    "strings without commas": lambda: b'""' * 500_000,
    "escapes": lambda: b'{"code":"' + rb"\n" * 2_000_000 + b'"}',
    "text of another plane that is too long": lambda: '{"code":"\U0001f600'.encode() + b"a" * (9 << 20),
    "an escape in text that is too long": lambda: rb'{"code":"\n' + b"a" * (9 << 20),
}
