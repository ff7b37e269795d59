"""Rich results: what a value looks like in each of the formats it offers, and `display`.

A bundle is a dict of MIME type to content: bytes for pictures and the like, text for everything else, JSON as text.
Asking a value runs its own code, so whatever that raises is printed and the other formats go on.
"""

from __future__ import annotations

from . import figures
from .pretty import bounded, report, text_of
from .text import parts_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from typing import Any

    Content = str | bytes
    Bundle = dict[str, Content]
    Metadata = dict[str, Any]
    Emit = Callable[[dict[str, Any], dict[str, Any]], None]

MAX_BUNDLE_BYTES = 8 << 20  # as it is told: bytes as base64, text with its escapes
MAX_METADATA_BYTES, MAX_METADATA_PARTS = 64 << 10, 1000
MAX_DIGITS = 4300  # of an integer there, whatever this interpreter prints
MAX_MIMES = 100
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
    wanted = _filter(include, exclude)
    data: dict[str, Any] = {}
    metadata: Metadata = {}
    if _is_askable(value):
        _ask_for_all(value, include, exclude, data, metadata)
        for name, mime in _METHODS:
            is_second_picture = mime == "image/jpeg" and "image/png" in data
            if mime not in data and wanted(mime) and not is_second_picture:
                _ask_for_one(value, name, mime, data, metadata)
    if figures.is_figure(value):
        _draw(value, data, metadata)
    if "text/plain" not in data and wanted("text/plain"):
        data["text/plain"] = text_of(value)
    return _cleaned({mime: data[mime] for mime in data if wanted(mime)}, metadata)


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
    """Tell whether a value's answers mean anything: a class has its instances' methods, a mock has any name."""
    if isinstance(value, type):
        return False
    try:
        return getattr(value, _CANARY, None) is None
    except Exception:
        return False  # who fails at being asked for a nonsense name does not answer every one


def _method(value: object, name: str) -> Callable[..., Any] | None:
    try:
        found = getattr(value, name, None)
    except Exception:
        return None  # a property that fails is a method that is not there
    return found if callable(found) else None


def _call(method: Callable[..., Any], **options: Any) -> Any:
    """Return what a value says of itself, or None when it fails."""
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
    found, about = answer if isinstance(answer, tuple) and len(answer) == 2 else (answer, None)
    if isinstance(found, dict):
        data.update(found)
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
        pictures, about = figures.render(figure)
    except Exception as error:
        report(error)
        return
    for mime, picture in pictures.items():
        if mime not in data:
            data[mime] = picture
            metadata.update({mime: about[mime]} if mime in about else {})


def _cleaned(data: dict[Any, Any], metadata: dict[Any, Any]) -> tuple[Bundle, Metadata]:
    """Return only what a bundle may hold, within its size."""
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
    """Leave out the largest parts until the rest is within bounds, and say so in the text."""
    for mime in [one for one in data if one != "text/plain"][MAX_MIMES - 1 :]:
        del data[mime]
    sizes = {mime: len(mime) + _size(content) for mime, content in data.items() if mime != "text/plain"}
    room = MAX_BUNDLE_BYTES - _size(data.get("text/plain", ""))
    while sum(sizes.values()) > room:
        mime = max(sizes, key=sizes.__getitem__)
        words = (
            f"[{mime} left out: {sizes.pop(mime) / _MIB:.1f} MiB, with at most {MAX_BUNDLE_BYTES // _MIB} MiB a result]"
        )
        del data[mime]
        data["text/plain"] = f"{_text(data)}\n{words}".lstrip("\n")


def _text(data: Bundle) -> str:
    text = data.get("text/plain", "")
    return text if isinstance(text, str) else ""  # it is no binary type, so it always is


def _size(content: Content) -> int:
    if isinstance(content, bytes):
        return (len(content) + 2) // 3 * 4
    import _json

    told = _json.encode_basestring_ascii(content)
    return max(len(told), ESCAPE_BYTES * told.count("\\"))


def _plain_metadata(metadata: dict[Any, Any]) -> Metadata:
    """Return metadata as JSON can hold it, and nothing when it cannot or the caller would not read it."""
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


class DisplayHandle:
    """What `display(..., display_id=True)` returns: a place whose content can be changed."""

    def __init__(self, display: Display, display_id: str) -> None:
        self._display, self.display_id = display, display_id

    def __repr__(self) -> str:
        return f"<DisplayHandle display_id={self.display_id}>"

    def display(self, value: object, **options: Any) -> None:
        """Show a value here, a second time when there is one already."""
        self._display.display(value, **{**options, "display_id": self.display_id})

    def update(self, value: object, **options: Any) -> None:
        """Replace what is shown here."""
        self._display.update_display(value, **{**options, "display_id": self.display_id})


class Display:
    """`display` of one session. `emit(data, metadata)` takes each bundle as it comes.

    What is sent cannot be taken back. So an update waits until the end of its cell, and only the last one of each
    place is sent; a progress bar shows its beginning and its end.
    """

    def __init__(self, emit: Emit) -> None:
        self.emit = emit
        self.shell: Any = None  # what `get_ipython()` returns, where there is such a thing
        self._updates: dict[str, tuple[Bundle, Metadata]] = {}
        self._ids = 0

    @property
    def figure_formats(self) -> tuple[str, ...]:
        """The formats of figures; any of `figures.FORMATS`."""
        return figures.OPTIONS.formats

    @figure_formats.setter
    def figure_formats(self, formats: Collection[str]) -> None:
        figures.set_formats(formats)

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
        updated = handle.display_id if handle is not None and update else None
        for value in objects:
            if raw and not isinstance(value, dict):
                raise TypeError(f"display(raw=True) takes dicts of MIME type to content, not {type(value).__name__}")
            if raw:
                self._send(*_cleaned(value, metadata or {}), updated)
            elif not shows_itself(value):
                data, about = bundle(value, include, exclude)
                self._send(data, {**about, **_plain_metadata(metadata or {})}, updated)
        return None if update else handle

    def handle(self, display_id: object = None) -> DisplayHandle:
        """Return a place to display things at, a new one unless it is given."""
        if display_id is None or display_id is True:
            self._ids += 1
            display_id = f"display-{self._ids}"
        return DisplayHandle(self, str(display_id))

    def _send(self, data: Bundle, metadata: Metadata, updated: str | None) -> None:
        if data and updated is not None:
            self._updates[updated] = data, metadata
        elif data:
            self.emit(data, metadata)

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
        """Replace what is shown at a place."""
        self.display(value, **{**options, "display_id": display_id, "update": True})

    def clear_output(self, wait: bool = False) -> None:
        """Forget updates that wait; what was sent stays."""
        del wait
        self._updates.clear()

    def show_figures(self) -> None:
        """Send all open figures that were not sent as they are, and close them."""
        figures.flush(self.emit_figure)

    def emit_figure(self, figure: Any, pictures: dict[str, Any], metadata: Metadata) -> None:
        """Send one figure that is drawn already."""
        self.emit(*_cleaned({"text/plain": text_of(figure), **pictures}, metadata))

    def flush_figures(self) -> None:
        """Do what a cell ends with: the functions registered for it, the last update of each place, open figures."""
        if self.shell is not None:
            self.shell.events.trigger("post_execute")
        updates, self._updates = self._updates, {}
        for data, metadata in updates.values():
            self.emit(data, metadata)
        self.show_figures()
