"""Display classes for programs that import them from `IPython.display` where IPython is not installed.

Each holds data, or a file's or an address's content, and answers in its own format; the constructors take the arguments
of IPython's. Nothing is checked here: a bundle is checked where it is made. Text comes first (`stub_classes`), then
pictures, films, sound and other pages (`media_classes`).
"""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any


def escaped(value: object) -> str:
    """Return text as HTML can hold it, in attributes too."""
    import html

    return html.escape(str(value), quote=True)


def attributes(**values: Any) -> str:
    """Return attributes of an element, without those that are false or None; True ones have no value."""
    pairs = [f" {name}" if value is True else f' {name}="{escaped(value)}"' for name, value in values.items() if value]
    return "".join(pairs)


class DisplayObject:
    """Data to be shown, given itself, as a file's name or as an address."""

    is_binary = False

    def __init__(
        self, data: Any = None, url: str | None = None, filename: Any = None, metadata: dict[str, Any] | None = None
    ) -> None:
        text = os.fspath(data) if isinstance(data, os.PathLike) else data
        if isinstance(text, str) and url is None and text.startswith(("http://", "https://")):
            text, url = None, text
        elif isinstance(text, str) and filename is None and _is_file(text):
            text, filename = None, text
        self.data: Any = text
        self.url, self.metadata = url, metadata or {}
        self.filename = None if filename is None else os.fspath(filename)
        self.reload()

    def __repr__(self) -> str:
        return f"<IPython.core.display.{type(self).__name__} object>"

    def reload(self) -> None:
        """Read the data again from where it comes from."""
        if self.filename is not None:
            with open(self.filename, "rb") as file:
                self.data = self._decoded(file.read())
        elif self.url is not None and self.data is None:
            from urllib.request import urlopen

            with urlopen(self.url) as answer:  # noqa: S310 - it can reach what the program itself can reach
                self.data = self._decoded(answer.read())

    def _decoded(self, data: bytes) -> Any:
        return data if self.is_binary else data.decode("utf-8", "replace")

    def _content(self) -> Any:
        return (self.data, self.metadata) if self.metadata else self.data


def _is_file(text: str) -> bool:
    try:
        return len(text) < 1024 and "\n" not in text and os.path.isfile(text)
    except ValueError:
        return False


class TextDisplayObject(DisplayObject):
    """Text to be shown."""


class Pretty(TextDisplayObject):
    """Text shown as it is, without the quotes of a repr."""

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        del cycle
        printer.text(self.data)


class HTML(TextDisplayObject):
    """A piece of HTML."""

    def _repr_html_(self) -> Any:
        return self._content()

    def __html__(self) -> str:
        return str(self.data)


class Markdown(TextDisplayObject):
    """Markdown."""

    def _repr_markdown_(self) -> Any:
        return self._content()


class Latex(TextDisplayObject):
    """LaTeX, with its own delimiters."""

    def _repr_latex_(self) -> Any:
        return self._content()


class Math(TextDisplayObject):
    """A formula in LaTeX; delimiters are put around it."""

    def _repr_latex_(self) -> Any:
        formula = f"$\\displaystyle {str(self.data).strip('$')}$"
        return (formula, self.metadata) if self.metadata else formula


class SVG(DisplayObject):
    """A drawing in SVG."""

    def _repr_svg_(self) -> Any:
        text = self.data.decode("utf-8", "replace") if isinstance(self.data, bytes) else str(self.data)
        begin, end = text.find("<svg"), text.rfind("</svg>")
        drawing = text[begin : end + len("</svg>")] if 0 <= begin < end else text
        return (drawing, self.metadata) if self.metadata else drawing


class Javascript(TextDisplayObject):
    """A script; `lib` names scripts, and `css` style sheets, to load before it."""

    def __init__(
        self, data: Any = None, url: Any = None, filename: Any = None, lib: Any = None, css: Any = None
    ) -> None:
        self.lib, self.css = ([urls] if isinstance(urls, str) else list(urls or ()) for urls in (lib, css))
        super().__init__(data, url, filename)

    def _repr_javascript_(self) -> str:
        import json

        links = [f"<link{attributes(rel='stylesheet', href=url)}>" for url in self.css]
        sheets = [f'document.head.insertAdjacentHTML("beforeend", {json.dumps(link)});' for link in links]
        body = str(self.data)
        for script_url in reversed(self.lib):
            body = (
                f"var s = document.createElement('script'); s.src = {json.dumps(script_url)}; "
                f"s.onload = function () {{\n{body}\n}}; document.head.appendChild(s);"
            )
        return "\n".join([*sheets, body])


class JSON(DisplayObject):
    """Plain data, or its JSON text."""

    def __init__(self, data: Any = None, url: Any = None, filename: Any = None, **options: Any) -> None:
        metadata = {**(options.pop("metadata", None) or {}), **options}
        super().__init__(data, url, filename, metadata)

    def _plain(self) -> Any:
        import json

        return json.loads(self.data) if isinstance(self.data, (str, bytes)) else self.data

    def _repr_json_(self) -> Any:
        return (self._plain(), self.metadata) if self.metadata else self._plain()


class GeoJSON(JSON):
    """Places and shapes on a map."""

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> Any:
        del include, exclude
        return {"application/geo+json": self._plain()}, {"application/geo+json": self.metadata}


class Code(TextDisplayObject):
    """A program's text, shown as such."""

    def __init__(self, data: Any = None, url: Any = None, filename: Any = None, language: str | None = None) -> None:
        self.language = language
        super().__init__(data, url, filename)

    def __repr__(self) -> str:
        return str(self.data)

    def _repr_html_(self) -> str:
        return f"<pre><code{attributes(**{'class': self.language})}>{escaped(self.data)}</code></pre>"


class ProgressBar:
    """A bar that shows how far something is; iterating over it counts."""

    show: Any = None  # the session's `display`

    def __init__(self, total: int) -> None:
        self.total, self._progress = total, 0
        self._handle: Any = None

    def __repr__(self) -> str:
        filled = 60 * self._progress // max(self.total, 1)
        return f"[{'=' * filled:<60}] {self._progress}/{self.total}"

    def _repr_html_(self) -> str:
        return f'<progress{attributes(style="width:60ex", max=self.total)} value="{self._progress}"></progress>'

    @property
    def progress(self) -> int:
        return self._progress

    @progress.setter
    def progress(self, value: int) -> None:
        self._progress = value
        if self._handle is not None:
            self._handle.update(self)

    def display(self) -> None:
        """Show the bar; from now on it follows `progress`."""
        self._handle = self.show(self, display_id=True)

    def __iter__(self) -> Iterator[int]:
        self.display()
        for count in range(self.total):
            yield count
            self.progress = count + 1


class FileLink:
    """A link to a file."""

    def __init__(self, path: Any, url_prefix: str = "", result_html_prefix: str = "", result_html_suffix: str = "<br>"):
        self.path: str = os.fspath(path)
        self.url_prefix = url_prefix
        self.before, self.after = result_html_prefix, result_html_suffix

    def __repr__(self) -> str:
        return os.path.abspath(self.path)

    def _repr_html_(self) -> str:
        link = f"<a{attributes(href=self.url_prefix + self.path, target='_blank')}>{escaped(self.path)}</a>"
        return f"{self.before}{link}{self.after}"


def stub_classes(show: Callable[..., Any]) -> dict[str, Any]:
    """Return the display classes by name; `show` is the session's `display`."""
    bar = type("ProgressBar", (ProgressBar,), {"show": staticmethod(show)})
    kinds = (
        DisplayObject, TextDisplayObject, Pretty, HTML, Markdown, Latex, Math, SVG, Javascript, JSON, GeoJSON, Code,
        FileLink, bar,
    )  # fmt: skip
    return {kind.__name__: kind for kind in kinds}


_SIGNATURES = (
    (b"\x89PNG\r\n\x1a\n", "png"),
    (b"\xff\xd8\xff", "jpeg"),
    (b"GIF8", "gif"),
    (b"RIFF", "webp"),
)
_PICTURES = {"png": "png", "jpg": "jpeg", "jpeg": "jpeg", "gif": "gif", "webp": "webp"}


def _as_address(mime: str, data: bytes) -> str:
    import binascii

    return f"data:{mime};base64,{binascii.b2a_base64(data, newline=False).decode()}"


class Image(DisplayObject):
    """A picture: its bytes, a file, or an address, which is only linked to unless `embed` is true."""

    is_binary = True

    def __init__(
        self, data: Any = None, url: Any = None, filename: Any = None, format: str | None = None,  # noqa: A002
        embed: bool | None = None, width: Any = None, height: Any = None, retina: bool = False,
        unconfined: bool = False, metadata: Any = None, alt: str | None = None,
    ) -> None:  # fmt: skip
        is_address = url is not None or str(data).startswith(("http://", "https://"))
        self.embed = not is_address if embed is None else embed
        self.format, self.width, self.height, self.alt = format, width, height, alt
        self.retina, self.unconfined = retina, unconfined
        super().__init__(data, url, filename, metadata)
        if isinstance(self.data, str) and not self.filename:
            raise FileNotFoundError(f"there is no file {self.data!r}")
        if self.embed and not isinstance(self.data, (bytes, bytearray)):
            raise ValueError("a picture takes bytes, the name of a file, or an address")
        if self.embed:
            self.format = self._found_format()

    def reload(self) -> None:
        """Read the picture again, if it is to be embedded."""
        if self.embed:
            super().reload()

    def _found_format(self) -> str:
        """Return the data's format by its content, not its name. Raises ValueError for one that cannot be embedded."""
        image_format = next((name for start, name in _SIGNATURES if bytes(self.data[:16]).startswith(start)), None)
        suffix = os.path.splitext(self.filename or "")[1].lstrip(".").lower()
        chosen = image_format or _PICTURES.get((self.format or suffix or "png").lower())
        if chosen is None:
            raise ValueError(f"cannot embed a picture of the format {self.format or suffix}; for SVG there is SVG()")
        return chosen

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> Any:
        del include, exclude
        if not self.embed:
            source = attributes(src=self.url, width=self.width, height=self.height, alt=self.alt)
            return {"text/html": f"<img{source}/>"}, {}
        mime = f"image/{self.format}"
        width, height = self._size()
        about = {"width": width, "height": height, "unconfined": self.unconfined, "alt": self.alt}
        return {mime: self.data}, {mime: {**self.metadata, **{name: item for name, item in about.items() if item}}}

    def _size(self) -> tuple[Any, Any]:
        if self.retina and self.width is None and self.format == "png":
            return tuple(int.from_bytes(self.data[offset : offset + 4], "big") // 2 for offset in (16, 20))  # type: ignore[return-value]
        return self.width, self.height


class Video(DisplayObject):
    """A film: a file or an address to link to, or bytes to embed."""

    is_binary = True

    def __init__(
        self, data: Any = None, url: Any = None, filename: Any = None, embed: bool = False, mimetype: str | None = None,
        width: Any = None, height: Any = None, html_attributes: str = "controls",
    ) -> None:  # fmt: skip
        self.embed = embed or isinstance(data, bytes)
        self.width, self.height, self.html_attributes = width, height, html_attributes
        self.mimetype = mimetype or "video/mp4"
        super().__init__(data, url, filename)

    def reload(self) -> None:
        """Read the film again, if it is to be embedded."""
        if self.embed:
            super().reload()

    def _repr_html_(self) -> str:
        source = _as_address(self.mimetype, bytes(self.data)) if self.embed else self.url or self.filename
        size = attributes(src=source, width=self.width, height=self.height)
        return f"<video{size} {self.html_attributes}></video>"


class Audio(DisplayObject):
    """Sound: samples with a `rate`, a file, an address, or the bytes of a sound file."""

    is_binary = True

    def __init__(
        self, data: Any = None, filename: Any = None, url: Any = None, embed: bool | None = None,
        rate: int | None = None, autoplay: bool = False, normalize: bool = True, *, element_id: str | None = None,
    ) -> None:  # fmt: skip
        self.autoplay, self.element_id = autoplay, element_id
        self.embed = url is None if embed is None else embed
        if data is not None and not isinstance(data, (str, bytes, os.PathLike)):
            if rate is None:
                raise ValueError("samples need their rate: Audio(samples, rate=44100)")
            data = _wave(data, rate, normalize=normalize)
        super().__init__(data, url, filename)
        if isinstance(self.data, str):
            raise FileNotFoundError(f"there is no file {self.data!r}")

    def reload(self) -> None:
        """Read the sound again, if it is to be embedded."""
        if self.embed:
            super().reload()

    def _repr_html_(self) -> str:
        kind = "audio/wav" if self.data and bytes(self.data[:4]) == b"RIFF" else "audio/mpeg"
        source = _as_address(kind, bytes(self.data)) if self.embed and self.data else self.url or self.filename
        about = attributes(id=self.element_id, controls=True, autoplay=self.autoplay, src=source)
        return f"<audio{about}></audio>"


def _wave(samples: Any, rate: int, *, normalize: bool) -> bytes:
    """Return samples, one list or one for each channel, as a sound file of 16 bits."""
    import array
    import io
    import wave

    rows = samples.tolist() if hasattr(samples, "tolist") else list(samples)
    channels = [list(row) for row in rows] if rows and hasattr(rows[0], "__iter__") else [rows]
    loudest = max((abs(sample) for row in channels for sample in row), default=0) or 1
    scale = 32767 / (loudest if normalize else 1)
    frames = array.array("h", (int(sample * scale) for frame in zip(*channels, strict=True) for sample in frame))
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setparams((len(channels), 2, rate, 0, "NONE", ""))
        file.writeframes(frames.tobytes())
    return buffer.getvalue()


class IFrame:
    """Another page inside this one."""

    def __init__(self, src: str, width: Any, height: Any, extras: Any = None, **params: Any) -> None:
        self.src, self.width, self.height, self.extras, self.params = src, width, height, extras or [], params

    def _repr_html_(self) -> str:
        from urllib.parse import urlencode

        source = f"{self.src}?{urlencode(self.params)}" if self.params else self.src
        size = attributes(width=self.width, height=self.height, src=source, frameborder="0", allowfullscreen=True)
        return f"<iframe{size} {' '.join(self.extras)}></iframe>"


class YouTubeVideo(IFrame):
    """A film of YouTube, by its id."""

    def __init__(self, id: str, width: Any = 400, height: Any = 300, **params: Any) -> None:  # noqa: A002
        super().__init__(f"https://www.youtube.com/embed/{id}", width, height, **params)


def media_classes() -> dict[str, Any]:
    """Return these classes by name."""
    return {kind.__name__: kind for kind in (Image, Video, Audio, IFrame, YouTubeVideo)}
