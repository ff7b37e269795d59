"""Figures of matplotlib: drawn as in notebooks, sent when a cell ends or shows them, then closed.

Nothing here imports matplotlib. Figures are found in pyplot's own table, so it does not matter which backend a program
chose; only `pyplot.show`, which would warn that there is no window, is replaced.
"""

from __future__ import annotations

import os
import sys

from .pretty import report

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from typing import Any

    Send = Callable[[Any, dict[str, Any], dict[str, Any]], None]

# What each name means: MIME type, matplotlib's own name, and how many dots there are for one.
FORMATS = {
    "png": ("image/png", "png", 1),
    "retina": ("image/png", "png", 2),
    "png2x": ("image/png", "png", 2),
    "svg": ("image/svg+xml", "svg", 1),
    "jpeg": ("image/jpeg", "jpg", 1),
    "jpg": ("image/jpeg", "jpg", 1),
    "pdf": ("application/pdf", "pdf", 1),
}


class Options:
    """What `%config InlineBackend` sets."""

    __slots__ = ("closes", "formats", "print_options", "rc")

    def __init__(self) -> None:
        self.formats: tuple[str, ...] = ("png",)
        self.print_options: dict[str, Any] = {"bbox_inches": "tight"}
        self.closes = True
        self.rc: dict[str, Any] = {}  # for matplotlib, once it is loaded


OPTIONS = Options()
# Figures shown by name in this cell, with a hash of each picture: they are not sent once more, unless they changed.
_shown: dict[int, tuple[int, ...]] = {}


def set_formats(formats: Collection[str]) -> None:
    """Choose the formats of figures. Raises ValueError for one that is not known."""
    chosen = (formats,) if isinstance(formats, str) else tuple(dict.fromkeys(formats))
    unknown = [str(name) for name in chosen if name not in FORMATS]
    if unknown or not chosen:
        raise ValueError(f"unknown figure format {', '.join(unknown) or '(none)'}; known: {', '.join(FORMATS)}")
    OPTIONS.formats = chosen


def is_figure(value: object) -> bool:
    """Tell whether a value is a figure, which cannot be when matplotlib was never loaded."""
    kind = getattr(sys.modules.get("matplotlib.figure"), "Figure", None)
    return kind is not None and isinstance(value, kind)


def render(figure: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Draw a figure in the chosen formats; return pictures and metadata, nothing for one that is empty."""
    pictures, metadata = _draw_all(figure)
    _shown[id(figure)] = _hashes(pictures)
    return pictures, metadata


def _draw_all(figure: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    pictures: dict[str, Any] = {}
    metadata: dict[str, Any] = {}
    if all(child is figure.patch for child in figure.get_children()):
        return pictures, metadata
    for name in OPTIONS.formats:
        mime, kind, scale = FORMATS[name]
        picture = _draw(figure, kind, scale)
        pictures[mime] = picture.decode() if kind == "svg" else picture
        if scale != 1 and kind == "png":
            width, height = (int.from_bytes(picture[at : at + 4], "big") for at in (16, 20))  # of the first chunk
            metadata[mime] = {"width": width // scale, "height": height // scale}
    return pictures, metadata


def _draw(figure: Any, kind: str, scale: int) -> bytes:
    import io

    buffer = io.BytesIO()
    options = {
        "format": kind,
        "facecolor": figure.get_facecolor(),
        "edgecolor": figure.get_edgecolor(),
        "dpi": figure.dpi * scale,
        **OPTIONS.print_options,
    }
    figure.canvas.print_figure(buffer, **options)
    return buffer.getvalue()


def _hashes(pictures: dict[str, Any]) -> tuple[int, ...]:
    return tuple(hash(picture) for picture in pictures.values())


def flush(send: Send) -> None:
    """Draw and send each figure that pyplot has open, in the order of their numbers, and close all.

    One that cannot be drawn is reported as a traceback. One that was shown by name in this cell, and looks the same
    still, is not sent again.
    """
    if not _shown and "matplotlib._pylab_helpers" not in sys.modules:
        return
    pyplot = sys.modules.get("matplotlib.pyplot")
    managers: Any = getattr(getattr(sys.modules.get("matplotlib._pylab_helpers"), "Gcf", None), "figs", None) or {}
    try:
        for number in sorted(managers):
            _send_one(managers[number].canvas.figure, send)
    finally:
        if OPTIONS.closes:
            _shown.clear()
        if OPTIONS.closes and managers and pyplot is not None:
            pyplot.close("all")


def _send_one(figure: Any, send: Send) -> None:
    try:
        pictures, metadata = _draw_all(figure)
        if pictures and _shown.get(id(figure)) != _hashes(pictures):
            _shown[id(figure)] = _hashes(pictures)
            send(figure, pictures, metadata)
    except Exception as error:
        report(error)


def choose_backend(matplotlib: Any) -> None:
    """Choose the backend that draws without a screen, unless somebody chose one: looking for others takes long.

    Settings that were made before matplotlib was there are made now.
    """
    chosen = dict.__getitem__(matplotlib.rcParams, "backend")
    if not isinstance(chosen, str) and not os.environ.get("MPLBACKEND"):
        matplotlib.use("agg")
    matplotlib.rcParams.update(OPTIONS.rc)


def set_rc(values: dict[str, Any]) -> None:
    """Change matplotlib's settings, now or when it is loaded."""
    OPTIONS.rc.update(values)
    if "matplotlib" in sys.modules:
        sys.modules["matplotlib"].rcParams.update(values)


def replace_show(pyplot: Any, show_figures: Callable[[], None]) -> None:
    """Let `pyplot.show` send the open figures at that point."""

    def show(*args: object, **kwargs: object) -> None:
        """Display all open figures and close them."""
        del args, kwargs  # `block` means nothing where there is no window
        show_figures()

    pyplot.show = show
