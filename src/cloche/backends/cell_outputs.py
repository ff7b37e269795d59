"""The final outputs of one cell of a session: updates replace, `clear_output` removes, as in a notebook.

The guest controls every value here. Replaced and removed outputs still count against the bounds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cloche.core.events import Cleared, Displayed, Sink, discard
from cloche.core.frames import MAX_OUTPUTS, read_output
from cloche.core.record import dataclass, field, replace
from cloche.core.result import Output, as_on_screen

MAX_SHOWN_BYTES = 32 << 20  # of one cell
MAX_CLEARS = 10_000  # by one cell


@dataclass(frozen=True, slots=True, kw_only=True)
class Printed:
    """Hold the kept output of one cell."""

    stdout: bytes = b""
    stderr: bytes = b""
    is_truncated: bool = False


@dataclass(slots=True)
class CellOutputs:
    """Collect the displayed outputs of one cell; replaced and removed ones still count against the bounds."""

    sink: Sink = discard
    outputs: list[Output] = field(default_factory=list)
    shown_bytes: int = 0
    is_cut: bool = False
    display_ids: list[object] = field(default_factory=list)  # of each output, where the interpreter named one
    shown: int = 0
    clears: int = 0
    is_clear_due: bool = False
    printed: tuple[int, int] = (0, 0)
    cleared: tuple[int, int] = (0, 0)  # bytes of each stream that were printed before the last removal

    def add(self, frame: Mapping[str, Any]) -> None:
        """Add an output while there is room; an update replaces the outputs with its display id."""
        if self.is_cut:
            return
        output = read_output(frame)
        if output is None:
            return
        self.shown += 1
        self.shown_bytes += sum(len(mime) + len(content) for mime, content in output.data.items())
        if self.shown_bytes > MAX_SHOWN_BYTES or self.shown > MAX_OUTPUTS:
            self.is_cut = True
            return
        self.clear_if_due()
        display_id = frame.get("place")
        is_update = frame.get("update") is True and type(display_id) is int
        indexes = (
            [index for index, known_id in enumerate(self.display_ids) if known_id == display_id] if is_update else []
        )
        for position in indexes:
            self.outputs[position] = output
            self.sink(Displayed(output=output, replaces=position))
        if not indexes:
            self.outputs.append(output)
            self.display_ids.append(display_id if type(display_id) is int else None)
            self.sink(Displayed(output=output, is_value=frame.get("is_value") is True))

    def clear(self, frame: Mapping[str, Any]) -> None:
        """Remove all outputs so far; with `wait`, remove them only when the next output arrives."""
        self.clears += 1
        if self.clears > MAX_CLEARS:
            self.is_cut = True
            return
        printed = _sizes(frame.get("printed"))
        if self.is_clear_due and printed != self.printed:  # an earlier clear waited for this output
            self.clear_if_due()
        self.is_clear_due, self.printed = True, printed
        if frame.get("wait") is not True:
            self.clear_if_due()

    def clear_if_due(self) -> None:
        """Carry out a pending removal."""
        if not self.is_clear_due:
            return
        self.is_clear_due, self.cleared = False, self.printed
        if self.outputs:
            self.outputs.clear()
            self.display_ids.clear()
            self.sink(Cleared())

    def left_of(self, printed: Printed, frame: Mapping[str, Any]) -> Printed:
        """Return the remaining text of a cell, as a terminal would show it at last; call it once, after the cell's end.

        `frame` is the cell's answer. The interpreter counts the bytes that it prints itself, but not the output of its
        commands, nor output dropped before a cell. So text that may have been printed after `clear_output` is never
        removed.
        """
        if self.is_clear_due and (len(printed.stdout) > self.printed[0] or len(printed.stderr) > self.printed[1]):
            self.clear_if_due()
        streams, counted = (printed.stdout, printed.stderr), _sizes(frame.get("printed"))
        outputs = [
            text if printed.is_truncated else text[max(0, min(cleared, len(text) - (size - cleared))) :]
            for text, cleared, size in zip(streams, self.cleared, counted, strict=True)
        ]
        return replace(printed, stdout=_on_screen(outputs[0]), stderr=_on_screen(outputs[1]))


def _on_screen(data: bytes) -> bytes:
    if b"\r" not in data and b"\x1b" not in data:
        return data
    return as_on_screen(data.decode("utf-8", "surrogateescape")).encode("utf-8", "surrogateescape")


def _sizes(sizes: object) -> tuple[int, int]:
    """Return an interpreter's byte counts of both streams; zeros for anything else."""
    if isinstance(sizes, list) and len(sizes) == 2 and all(type(size) is int and size >= 0 for size in sizes):
        return sizes[0], sizes[1]
    return 0, 0
