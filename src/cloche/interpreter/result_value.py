"""Send the caller the value of a script's last expression, and the displays of it and of the script's figures.

One pipe carries it: a byte for the kind (`J` for JSON, `R` for a repr), and UTF-8 text. With displays, the byte is `F`,
and frames as a session sends them follow, with the value in the last one.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

MAX_SHOWN, MAX_SHOWN_BYTES = 500, 30 << 20  # outputs of one script or cell; the caller refuses all for one too many
MAX_CLEARS = 10_000  # of one cell's outputs, by clear_output
MAX_PARTS = 24_000  # of them together: lists, objects and members; the caller reads that twice, and a value
FEW_PARTS = 32  # that the caller may count in any frame, since it does not look whether they stand in texts
FRAME_PARTS = 8  # around a bundle and its metadata
MAX_VALUE_BYTES = 60_000  # fits in a pipe without a reader (pipe(7): 65,536 bytes), so a value never blocks the guest
_LOOKS = (
    "_repr_html_", "_repr_mimebundle_", "_repr_svg_", "_repr_png_", "_repr_jpeg_", "_repr_pdf_", "_repr_markdown_",
    "_repr_latex_", "_repr_json_", "_repr_javascript_", "_ipython_display_",
)  # fmt: skip


def send(fd: int, pipe: int, value: Any, archive: Any, watch: Any) -> None:
    """Send a value other than None, and the displays; the script may have closed the pipe.

    `pipe` is the inode of the pipe: the script may have opened another file under its number. `archive` finds our own
    modules, which the script's do not see; `watch` has the displays of libraries, if any.
    """
    text = as_json(value, 0)
    has_look = text is None and any(hasattr(type(value), name) for name in _LOOKS)
    data = _value(value, text)
    if has_look or _has_figures() or watch.display is not None:
        data = _with_looks(value, has_look, data, archive, watch)
    try:
        if data and os.fstat(fd).st_ino == pipe:
            view = memoryview(data)
            while view:
                view = view[os.write(fd, view) :]
            os.close(fd)
    except OSError:
        pass  # the script has closed it; then it has no value


def _value(value: Any, text: str | None) -> bytes:
    """Return a value as it is sent: as JSON if that is exact and small enough, else as a repr."""
    if value is None:
        return b""
    data = b"J" + text.encode() if text is not None else b""
    if data and len(data) <= MAX_VALUE_BYTES:
        return data
    try:
        return b"R" + repr(value).encode("utf-8", "backslashreplace")[:MAX_VALUE_BYTES]
    except Exception as error:
        return b"R" + f"<{type(value).__name__} whose repr failed: {type(error).__name__}>".encode()


def _has_figures() -> bool:
    pyplot = sys.modules.get("matplotlib.pyplot")
    try:
        return pyplot is not None and bool(pyplot.get_fignums())
    except Exception:
        return False  # the script's own module of that name


def _with_looks(value: Any, has_look: bool, data: bytes, archive: Any, watch: Any) -> bytes:
    """Return the frames of all displays, and of the value."""
    import json

    bodies: list[bytes] = []
    rich = load("rich", archive)
    room = Room()

    def show(content: dict[str, Any], about: dict[str, Any]) -> None:
        body = json.dumps({"op": "display", "data": rich.as_text(content), "metadata": about}).encode()
        if room.takes(len(body), len(content) + rich.parts_of(about)):
            bodies.append(body)

    look = rich.bundle(value) if has_look and not rich.shows_itself(value) else None
    if watch.display is not None:
        watch.display.flush_figures()
        for content, about, _ in watch.shown.outputs:
            show(content, about)
    for error in rich.flush(lambda _, content, about: show(content, about)):
        rich.report(error)
    if look is not None:
        show(*look)
    frame = {"op": "value", "text": data.decode("utf-8", "replace"), "is_cut": room.is_cut}
    bodies.append(json.dumps(frame).encode())
    return b"F" + b"".join(len(body).to_bytes(4, "big") + body for body in bodies)


class Room:
    """Count the outputs of one script or cell, and accept no more than the caller keeps."""

    def __init__(self) -> None:
        self.left, self.left_bytes, self.left_parts, self.is_cut = MAX_SHOWN, MAX_SHOWN_BYTES, MAX_PARTS, False

    def is_half_left(self) -> bool:
        """Tell whether there is room for an output that may be replaced soon, and then for as much again."""
        bounds = (self.left, MAX_SHOWN), (self.left_bytes, MAX_SHOWN_BYTES), (self.left_parts, MAX_PARTS)
        return all(remaining > bound // 2 for remaining, bound in bounds)

    def takes(self, size: int, items: int) -> bool:
        """Tell whether an output of so many bytes and parts is still to be sent; once one is not, no other is."""
        items = max(items + FRAME_PARTS, FEW_PARTS)
        self.is_cut = self.is_cut or not self.left or size > self.left_bytes or items > self.left_parts
        if not self.is_cut:
            self.left -= 1
            self.left_bytes -= size
            self.left_parts -= items
        return not self.is_cut


def load(name: str, archive: Any) -> Any:
    """Load one of our modules, and leave no trace of it among the script's."""
    name = f"interpreter.{name}"  # as it is called in a jail
    hidden = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] == "interpreter"}
    sys.meta_path.insert(0, archive)
    try:
        __import__(name)
        return sys.modules[name]
    finally:
        sys.meta_path.remove(archive)
        for name in [name for name in sys.modules if name.partition(".")[0] == "interpreter"]:
            del sys.modules[name]
        sys.modules.update(hidden)


def as_json(value: Any, depth: int) -> str | None:
    """Write plain values as JSON, None for anything else. Importing `json` would cost a cold run milliseconds."""
    kind = type(value)
    if value is None or kind is bool:
        return {None: "null", True: "true", False: "false"}[value]
    if (kind is int and abs(value) < 1 << 53) or (kind is float and value - value == 0):
        return repr(value)
    if kind is str:
        return _quoted(value) if value.isascii() or _is_whole(value) else None
    if depth > 20:
        return None
    if kind is list:
        texts = [as_json(item, depth + 1) for item in value]
        return None if None in texts else f"[{','.join(texts)}]"  # type: ignore[arg-type]
    if kind is dict and all(type(key) is str for key in value):
        pairs = [(as_json(key, depth + 1), as_json(item, depth + 1)) for key, item in value.items()]
        return None if any(None in pair for pair in pairs) else "{" + ",".join(f"{k}:{v}" for k, v in pairs) + "}"
    return None


def _is_whole(text: str) -> bool:
    """Tell whether a text has no lone surrogate, which JSON can write and UTF-8 cannot encode."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _quoted(text: str) -> str:
    import _json

    return str(_json.encode_basestring_ascii(text))
