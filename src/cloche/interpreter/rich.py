"""Rich results: a value in each of its formats, `display`, and the figures of matplotlib.

A bundle is a dict of MIME type to content: bytes for pictures and the like, text for everything else, JSON as text;
`as_text` makes it valid JSON. Formatting a value runs its own code, so its exceptions are printed and the other formats
go on.

Figures of matplotlib are drawn as in notebooks, sent when a cell ends or shows them, then closed. Nothing here imports
matplotlib. Figures are found in pyplot's own table, so they do not depend on the backend that a program chose; only
`pyplot.show`, which would warn that there is no window, is replaced.
"""

from __future__ import annotations

import os
import sys
import time

from .pretty import bounded, report, text_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from typing import Any

MAX_DEPTH = 100  # of metadata; the caller reads no frame that is twice as deep
TOO_DEEP = 1 << 30


def as_text(data: dict[str, Any]) -> dict[str, Any]:
    """Return a bundle that JSON can hold: bytes become base64, as notebooks have it."""
    if not any(isinstance(content, bytes) for content in data.values()):
        return data
    import base64

    return {
        mime: base64.b64encode(content).decode("ascii") if isinstance(content, bytes) else content
        for mime, content in data.items()
    }


def parts_of(value: Any) -> int:
    """Return of how many lists, objects and members JSON is, or `TOO_DEEP`: the caller reads only so many."""
    level, items = [value], 0
    for _ in range(MAX_DEPTH):
        level = [node for node in level if isinstance(node, (dict, list))]
        if not level:
            return items
        items += sum(1 + len(node) for node in level)
        level = [inner for node in level for inner in (node.values() if isinstance(node, dict) else node)]
    return TOO_DEEP


if TYPE_CHECKING:
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
    """The settings of `%config InlineBackend`."""

    __slots__ = ("add_data", "closes", "formats", "print_options", "rc")

    def __init__(self) -> None:
        self.formats: tuple[str, ...] = ("png",)
        self.print_options: dict[str, Any] = {"bbox_inches": "tight"}
        self.closes = True
        self.rc: dict[str, Any] = {}  # for matplotlib, once it is loaded
        self.add_data: Callable[[Any, dict[str, Any]], None] | None = None  # of a value to its bundle


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
        picture = _draw_figure(figure, kind, scale)
        pictures[mime] = picture.decode() if kind == "svg" else picture
        if scale != 1 and kind == "png":
            width, height = (
                int.from_bytes(picture[offset : offset + 4], "big") for offset in (16, 20)
            )  # of the first chunk
            metadata[mime] = {"width": width // scale, "height": height // scale}
    return pictures, metadata


def _draw_figure(figure: Any, kind: str, scale: int) -> bytes:
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


def flush(send: Send) -> list[Exception]:
    """Draw and send each figure that pyplot has open, in the order of their numbers, and close all.

    Returns why figures could not be drawn. One that was shown by name in this cell, and looks the same still, is not
    sent again.
    """
    if not _shown and "matplotlib._pylab_helpers" not in sys.modules:
        return []
    errors: list[Exception] = []
    pyplot = sys.modules.get("matplotlib.pyplot")
    managers: Any = getattr(getattr(sys.modules.get("matplotlib._pylab_helpers"), "Gcf", None), "figs", None) or {}
    try:
        for number in sorted(managers):
            try:
                _send_one(managers[number].canvas.figure, send)
            except Exception as error:
                errors.append(error)
    finally:
        if OPTIONS.closes:
            _shown.clear()
        if OPTIONS.closes and managers and pyplot is not None:
            pyplot.close("all")
    return errors


def _send_one(figure: Any, send: Send) -> None:
    pictures, metadata = _draw_all(figure)
    if pictures and _shown.get(id(figure)) != _hashes(pictures):
        _shown[id(figure)] = _hashes(pictures)
        send(figure, pictures, metadata)


def choose_backend(matplotlib: Any) -> None:
    """Choose the backend that draws without a screen, unless the program chose one: looking for others takes long.

    Settings that were made before matplotlib was loaded are applied now.
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


if TYPE_CHECKING:
    Content = str | bytes
    Bundle = dict[str, Content]
    Metadata = dict[str, Any]
    Emit = Callable[[dict[str, Any], dict[str, Any], str | None, bool], None]
    Entry = tuple[Bundle, Metadata, str | None]

MAX_BUNDLE_BYTES = 8 << 20  # as it is sent: bytes as base64, text with its escapes
MAX_METADATA_BYTES, MAX_METADATA_PARTS = 64 << 10, 1000
MAX_DIGITS = 4300  # of an integer there, whatever this interpreter prints
MAX_MIMES = 100
REPLACE_S = 0.1
ESCAPE_BYTES = 9  # that an escape counts for: many take longer to read than their size says; and a repr has some, too
_MIB = 1 << 20
_METHODS = (
    ("_repr_html_", "text/html"),
    ("_repr_markdown_", "text/markdown"),
    ("_repr_latex_", "text/latex"),
    ("_repr_json_", "application/json"),
    ("_repr_javascript_", "application/javascript"),
    ("_repr_svg_", "image/svg+xml"),
    ("_repr_png_", "image/png"),
    ("_repr_jpeg_", "image/jpeg"),
    ("_repr_pdf_", "application/pdf"),
)
# Nobody has this attribute; whoever has it all the same answers to any name, and means nothing by it.
# The name is IPython's, because libraries with such a `__getattr__` know it.
_CANARY = "_ipython_canary_method_should_not_exist_"
_BINARY = ("image/", "audio/", "video/")
_OTHER_BINARY = ("application/pdf", "application/octet-stream")


def bundle(
    value: object, include: Collection[str] | None = None, exclude: Collection[str] | None = None
) -> tuple[Bundle, Metadata]:
    """Return a value in every format it offers, always with `text/plain` unless that is filtered, and their metadata.

    `include` and `exclude` are MIME types. No ordinary exception of the value's own code gets out; KeyboardInterrupt
    and SystemExit do.
    """
    is_included = _filter(include, exclude)
    data: dict[str, Any] = {}
    metadata: Metadata = {}
    if _is_askable(value):
        _ask_for_all(value, include, exclude, data, metadata)
        for name, mime in _METHODS:
            is_second_picture = mime == "image/jpeg" and "image/png" in data
            if mime not in data and is_included(mime) and not is_second_picture:
                _ask_for_one(value, name, mime, data, metadata)
    if is_figure(value):
        _draw(value, data, metadata)
    if "text/plain" not in data and is_included("text/plain"):
        data["text/plain"] = text_of(value)
    if OPTIONS.add_data is not None:
        OPTIONS.add_data(value, data)
    return _cleaned({mime: data[mime] for mime in data if is_included(mime)}, metadata)


def shows_itself(value: object) -> bool:
    """Let a value that has `_ipython_display_` display itself; tell whether it did."""
    show = _method(value, "_ipython_display_") if _is_askable(value) else None
    if show is None:
        return False
    try:
        show()
    except NotImplementedError:  # by custom, how an object says that it does not show itself after all
        return False
    except Exception as error:
        report(error)
    return True


def _filter(include: Collection[str] | None, exclude: Collection[str] | None) -> Callable[[str], bool]:
    only = {include} if isinstance(include, str) else include
    never = {exclude} if isinstance(exclude, str) else exclude or ()
    return lambda mime: (only is None or mime in only) and mime not in never


def _is_askable(value: object) -> bool:
    """Tell whether a value's format methods are meaningful: a class has its instances' methods, a mock has any name."""
    if isinstance(value, type):
        return False
    try:
        return getattr(value, _CANARY, None) is None
    except Exception:
        return False  # a value that fails at a nonsense name does not answer every name


def _method(value: object, name: str) -> Callable[..., Any] | None:
    try:
        attribute = getattr(value, name, None)
    except Exception:
        return None  # a property that fails is a method that is not there
    return attribute if callable(attribute) else None


def _call(method: Callable[..., Any], **options: Any) -> Any:
    """Return the result of one of a value's format methods, or None when it fails."""
    try:
        return method(**options)
    except NotImplementedError:  # by custom, how an object says that it has not this format
        return None
    except Exception as error:
        report(error)
        return None


def _ask_for_all(
    value: object,
    include: Collection[str] | None,
    exclude: Collection[str] | None,
    data: dict[str, Any],
    metadata: Metadata,
) -> None:
    method = _method(value, "_repr_mimebundle_")
    answer = _call(method, include=include, exclude=exclude) if method else None
    formatted, about = answer if isinstance(answer, tuple) and len(answer) == 2 else (answer, None)
    if isinstance(formatted, dict):
        data.update(formatted)
    if isinstance(about, dict):
        metadata.update(about)


def _ask_for_one(value: object, name: str, mime: str, data: dict[str, Any], metadata: Metadata) -> None:
    method = _method(value, name)
    answer = _call(method) if method else None
    if isinstance(answer, tuple) and len(answer) == 2:
        answer, about = answer
        if about:
            metadata[mime] = about
    if answer is not None:
        data[mime] = answer


def _draw(figure: Any, data: dict[str, Any], metadata: Metadata) -> None:
    """Add a figure's pictures, unless it offers some itself."""
    try:
        pictures, about = render(figure)
    except Exception as error:
        report(error)
        return
    for mime, picture in pictures.items():
        if mime not in data:
            data[mime] = picture
            metadata.update({mime: about[mime]} if mime in about else {})


def _cleaned(data: dict[Any, Any], metadata: dict[Any, Any]) -> tuple[Bundle, Metadata]:
    """Return only allowed content of a bundle, within its size."""
    clean: Bundle = {}
    for mime, content in data.items():
        try:
            if isinstance(mime, str) and content is not None:
                clean[mime] = _content(mime, content)
        except Exception as error:
            report(error)
    if "text/plain" in clean:
        clean["text/plain"] = bounded(_text(clean))
    _drop_what_is_too_large(clean)
    return clean, _plain_metadata(metadata)


def _content(mime: str, content: Any) -> Content:
    """Return content as bytes where its type is binary, as text that UTF-8 can hold where it is not."""
    is_binary = mime in _OTHER_BINARY or (mime.startswith(_BINARY) and mime != "image/svg+xml")
    if isinstance(content, str):
        if is_binary:
            import binascii

            return binascii.a2b_base64(content)
        text = str.__str__(content)
        return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()
    if isinstance(content, (bytes, bytearray, memoryview)):
        return bytes(content) if is_binary else bytes(content).decode("utf-8", "replace")
    import json

    return json.dumps(content)


def _drop_what_is_too_large(data: Bundle) -> None:
    """Leave out the largest contents until the others are within bounds, and note it in the text."""
    for mime in [mime_type for mime_type in data if mime_type != "text/plain"][MAX_MIMES - 1 :]:
        del data[mime]
    sizes = {mime: len(mime) + _size(content) for mime, content in data.items() if mime != "text/plain"}
    room = MAX_BUNDLE_BYTES - _size(data.get("text/plain", ""))
    while sum(sizes.values()) > room:
        mime = max(sizes, key=sizes.__getitem__)
        note = (
            f"[{mime} left out: {sizes.pop(mime) / _MIB:.1f} MiB, with at most {MAX_BUNDLE_BYTES // _MIB} MiB a result]"
        )
        del data[mime]
        data["text/plain"] = f"{_text(data)}\n{note}".lstrip("\n")


def _text(data: Bundle) -> str:
    text = data.get("text/plain", "")
    return text if isinstance(text, str) else ""  # it is no binary type, so it always is


def _size(content: Content) -> int:
    if isinstance(content, bytes):
        return (len(content) + 2) // 3 * 4
    import _json

    encoded = _json.encode_basestring_ascii(content)
    return max(len(encoded), ESCAPE_BYTES * encoded.count("\\"))


def _plain_metadata(metadata: dict[Any, Any]) -> Metadata:
    """Return metadata as JSON can hold it, or none if that fails or the caller would not read it."""
    if not metadata:
        return {}
    import json

    try:
        text = json.dumps(metadata, allow_nan=False)
        plain: Metadata = json.loads(text, parse_int=_integer) if len(text) <= MAX_METADATA_BYTES else {}
    except (TypeError, ValueError, RecursionError):
        return {}
    return plain if parts_of(plain) <= MAX_METADATA_PARTS else {}


def _integer(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError("too many digits")
    return int(digits)


class Shown:
    """Keep the displayed outputs: an update replaces all of its id, `clear_output` removes all."""

    def __init__(self) -> None:
        self.outputs: list[Entry] = []
        self._is_clear_due = False

    def emit(self, data: Bundle, metadata: Metadata, display_id: str | None, is_update: bool) -> None:
        """Take one bundle."""
        if self._is_clear_due:
            self.clear(wait=False)
        entry = data, metadata, display_id
        indices = [index for index, output in enumerate(self.outputs) if output[2] == display_id] if is_update else []
        for place_index in indices:
            self.outputs[place_index] = entry
        if not indices:
            self.outputs.append(entry)

    def clear(self, wait: bool) -> None:
        """Remove all, or wait for the next bundle with it."""
        self._is_clear_due = wait
        if not wait:
            self.outputs.clear()


class DisplayHandle:
    """The result of `display(..., display_id=True)`: a place whose content can be changed."""

    def __init__(self, display: Display, display_id: str) -> None:
        self._display, self.display_id = display, display_id

    def __repr__(self) -> str:
        return f"<DisplayHandle display_id={self.display_id}>"

    def display(self, value: object, **options: Any) -> None:
        """Show a value here, a second time when there is one already."""
        self._display.display(value, **{**options, "display_id": self.display_id})

    def update(self, value: object, **options: Any) -> None:
        """Replace the output shown here."""
        self._display.update_display(value, **{**options, "display_id": self.display_id})


class Display:
    """`display` of one session: `emit` takes each bundle, with its display id and whether it is an update.

    Output that replaces other output (an update, and all that follows `clear_output`) is sent at most every `REPLACE_S`
    seconds, and only while `has_room`; else it waits for the next of its kind, or for the end of the cell, and only the
    last one for each place is sent. So a loop with a thousand updates sends few of them, and always the last.
    """

    def __init__(
        self,
        emit: Emit,
        clear: Callable[[bool], None] = lambda _: None,
        has_room: Callable[[], bool] = lambda: True,
    ) -> None:
        self.emit, self.clear, self._has_room = emit, clear, has_room
        self.shell: Any = None  # what `get_ipython()` returns, where there is such a thing
        self._updates: dict[str, Entry] = {}  # those that wait
        self._held: list[Entry] = []  # waiting since the last clear_output
        self._is_holding = False
        self._last_s = 0.0  # when something was replaced
        self._ids = 0

    @property
    def figure_formats(self) -> tuple[str, ...]:
        """The formats of figures; any of `FORMATS`."""
        return OPTIONS.formats

    @figure_formats.setter
    def figure_formats(self, formats: Collection[str]) -> None:
        set_formats(formats)

    def display(
        self,
        *objects: Any,
        raw: bool = False,
        metadata: Metadata | None = None,
        include: Collection[str] | None = None,
        exclude: Collection[str] | None = None,
        display_id: Any = None,
        update: bool = False,
        **ignored: Any,
    ) -> DisplayHandle | None:
        """Show objects, each in every format it offers; with `raw`, dicts of MIME type to content as they are."""
        del ignored
        handle = None if display_id is None else self.handle(display_id)
        where = handle.display_id if handle is not None else None
        for value in objects:
            if raw and not isinstance(value, dict):
                raise TypeError(f"display(raw=True) takes dicts of MIME type to content, not {type(value).__name__}")
            if raw:
                self._send(*_cleaned(value, metadata or {}), where, is_update=update)
            elif not shows_itself(value):
                data, about = bundle(value, include, exclude)
                self._send(data, {**about, **_plain_metadata(metadata or {})}, where, is_update=update)
        return None if update else handle

    def handle(self, display_id: object = None) -> DisplayHandle:
        """Return a place to display things at, a new one unless it is given."""
        if display_id is None or display_id is True:
            self._ids += 1
            display_id = f"display-{self._ids}"
        return DisplayHandle(self, str(display_id))

    def _send(self, data: Bundle, metadata: Metadata, display_id: str | None, *, is_update: bool = False) -> None:
        if not data:
            return
        if is_update and display_id is not None:
            self._updates.pop(display_id, None)
            if self._held or not self._is_due():
                self._updates[display_id] = data, metadata, display_id
                return
        elif self._is_holding:
            self._held.append((data, metadata, display_id))
            return
        self.emit(data, metadata, display_id, is_update)

    def _is_due(self) -> bool:
        """Tell whether a replacement is due, and note it."""
        now = time.monotonic()
        if now - self._last_s < REPLACE_S or not self._has_room():
            return False
        self._last_s = now
        return True

    def publish_display_data(self, data: dict[str, Any], metadata: Metadata | None = None, **options: Any) -> None:
        """Show a ready bundle."""
        transient = options.get("transient") or {}
        self.display(
            data,
            raw=True,
            metadata=metadata,
            update=bool(options.get("update")),
            display_id=transient.get("display_id"),
        )

    def update_display(self, value: Any, *, display_id: object, **options: Any) -> None:
        """Replace the output shown at a place."""
        self.display(value, **{**options, "display_id": display_id, "update": True})

    def clear_output(self, wait: bool = False) -> None:
        """Remove this cell's output so far; with `wait`, when the next output comes."""
        self._updates.clear()
        self._held.clear()
        self._is_holding = not self._is_due()
        self.clear(bool(wait))

    def show_figures(self) -> None:
        """Send all open figures that were not sent as they are, and close them. Raises why one cannot be drawn."""
        errors = flush(self.emit_figure)
        for error in errors[1:]:
            report(error)
        if errors:
            raise errors[0]

    def emit_figure(self, figure: Any, pictures: dict[str, Any], metadata: Metadata) -> None:
        """Send one figure that is drawn already."""
        data = {"text/plain": text_of(figure), **pictures}
        if OPTIONS.add_data is not None:
            OPTIONS.add_data(figure, data)
        self._send(*_cleaned(data, metadata), None)

    def flush_figures(self) -> None:
        """Finish a cell: call the functions registered for it, send pending outputs and open figures."""
        if self.shell is not None:
            self.shell.events.trigger("post_execute")
        held, updates = self._held, self._updates
        self._held, self._updates, self._is_holding = [], {}, False
        for entry in held:
            self.emit(*entry, False)
        for entry in updates.values():
            self.emit(*entry, True)
        for error in flush(self.emit_figure):
            report(error)
