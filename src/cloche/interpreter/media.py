"""Display classes for pictures, films, sound and other pages, where IPython is not installed."""

from __future__ import annotations

import os

from .standin import DisplayObject, attributes

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

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
        """Return what the data is, whatever it is called. Raises ValueError for what cannot be embedded."""
        found = next((name for start, name in _SIGNATURES if bytes(self.data[:16]).startswith(start)), None)
        ending = os.path.splitext(self.filename or "")[1].lstrip(".").lower()
        chosen = found or _PICTURES.get((self.format or ending or "png").lower())
        if chosen is None:
            raise ValueError(f"cannot embed a picture of the format {self.format or ending}; for SVG there is SVG()")
        return chosen

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> Any:
        del include, exclude
        if not self.embed:
            source = attributes(src=self.url, width=self.width, height=self.height, alt=self.alt)
            return {"text/html": f"<img{source}/>"}, {}
        mime = f"image/{self.format}"
        width, height = self._size()
        about = {"width": width, "height": height, "unconfined": self.unconfined, "alt": self.alt}
        return {mime: self.data}, {mime: {**self.metadata, **{name: one for name, one in about.items() if one}}}

    def _size(self) -> tuple[Any, Any]:
        if self.retina and self.width is None and self.format == "png":
            return tuple(int.from_bytes(self.data[at : at + 4], "big") // 2 for at in (16, 20))  # type: ignore[return-value]
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
    loudest = max((abs(one) for row in channels for one in row), default=0) or 1
    scale = 32767 / (loudest if normalize else 1)
    frames = array.array("h", (int(one * scale) for frame in zip(*channels, strict=True) for one in frame))
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


def classes() -> dict[str, Any]:
    """Return these classes by name."""
    return {kind.__name__: kind for kind in (Image, Video, Audio, IFrame, YouTubeVideo)}
