"""What a guest tells of its value and of what it shows, read: bounded, checked for its shape, and no more believed."""

from __future__ import annotations

import binascii
import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .decoding import TooMuch, as_text, decode
from .frames import FrameReader
from .result import Output
from .units import KIB, MIB

MAX_SHOWN = 500  # outputs of one run or cell
MAX_MIMES = 100  # of one output
MAX_METADATA_BYTES = 64 * KIB  # of one output, roughly as JSON
MAX_VALUE_BYTES = 65_536
MAX_TOLD_BYTES = 32 * MIB  # value and figures together


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """Hold what a one-shot guest told: its value, and what it showed.

    `is_cut` says that it showed more than is kept; `refused` why nothing of it is kept, where it was too much.
    """

    value: Any = None
    is_repr: bool = False
    outputs: tuple[Output, ...] = ()
    is_cut: bool = False
    refused: str = ""

    def notes(self) -> dict[str, Any]:
        """Return what a result's `meta` says of it."""
        cut = {"outputs_cut": True} if self.is_cut else {}
        return {**cut, "refused": self.refused} if self.refused else cut


class ToldReader:
    """Read what a one-shot guest tells, piece by piece as it comes: too much, or malformed, and nothing is kept."""

    def __init__(self) -> None:
        self._frames: FrameReader | None = None
        self._value = bytearray()
        self._outputs: list[Output] = []
        self._size = 0
        self._is_cut = self._is_broken = False
        self.refused = ""

    def feed(self, data: bytes) -> None:
        """Take what came next."""
        if self._is_broken:
            return
        try:
            self._take(data)
        except ValueError as error:
            self.refused = str(error) if isinstance(error, TooMuch) else ""
            self._is_broken = True
            self._value.clear()
            self._outputs.clear()
            self._frames = None

    def _take(self, data: bytes) -> None:
        if not self._size and data[:1] == b"F":
            self._frames, self._size, data = FrameReader(), 1, data[1:]
        self._size += len(data)
        if self._size > MAX_TOLD_BYTES:
            raise TooMuch(f"value and figures have more than {MAX_TOLD_BYTES} bytes")
        if self._frames is None:
            self._value += data
        for frame in self._frames.feed(data) if self._frames is not None else ():
            self._take_frame(frame)
        if len(self._value) > MAX_VALUE_BYTES:
            raise TooMuch(f"the value has more than {MAX_VALUE_BYTES} bytes")

    def _take_frame(self, frame: dict[str, Any]) -> None:
        text = frame.get("text")
        self._value = bytearray(text.encode() if isinstance(text, str) else b"")  # it stands in the last one
        self._is_cut = self._is_cut or frame.get("is_cut") is True
        output = read_output(frame)
        if output is not None and len(self._outputs) < MAX_SHOWN:
            self._outputs.append(output)
        elif output is not None:
            self._is_cut = True

    def told(self) -> Told:
        """Return what was told in all; nothing where that was malformed."""
        if self._is_broken:
            return Told(refused=self.refused)
        value, is_repr = _value(bytes(self._value))
        return Told(value=value, is_repr=is_repr, outputs=tuple(self._outputs), is_cut=self._is_cut)


def _value(data: bytes) -> tuple[Any, bool]:
    """Return a value, and whether it is a repr: what calls itself JSON and is none is taken for one."""
    kind, text = data[:1], data[1:]
    if kind == b"J":
        with contextlib.suppress(ValueError):
            return decode(as_text(text))[0], False
    return (text.decode("utf-8", "replace"), True) if kind in (b"R", b"J") else (None, False)


def read_output(frame: Mapping[str, Any]) -> Output | None:
    """Read a MIME bundle: texts, with binary content as base64. None for what is no bundle."""
    data, metadata = frame.get("data"), frame.get("metadata")
    if not isinstance(data, dict) or len(data) > MAX_MIMES:
        return None
    content = {mime: _decoded(mime, value) for mime, value in data.items() if isinstance(value, str)}
    return Output(data=content, metadata=_bounded(metadata)) if content else None


def _bounded(metadata: object) -> dict[str, Any]:
    """Return an output's metadata, nothing where they are none or more than any output needs."""
    if not isinstance(metadata, dict) or not metadata:
        return {}
    return metadata if is_small(metadata, MAX_METADATA_BYTES) else {}


def is_small(value: object, most: int) -> bool:
    """Tell whether a value has at most about so many bytes as JSON, without writing it."""
    left: list[object] = [value]
    while left and most >= 0:
        one = left.pop()
        most -= len(one) if isinstance(one, str) else 2
        if isinstance(one, dict):
            left += one
            left += one.values()
        elif isinstance(one, list):
            left += one
    return most >= 0


def _decoded(mime: str, value: str) -> str | bytes:
    if mime.startswith("text/") or mime.endswith(("xml", "json", "javascript")):
        return value
    with contextlib.suppress(ValueError):
        return binascii.a2b_base64(value, strict_mode=True)  # of the text itself, not of a copy in bytes
    return value
