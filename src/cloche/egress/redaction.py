"""Values in answers: the placeholder in place of each, in the usual encodings, as the bytes pass. No I/O.

Theory of operation: `_forms` writes a text in all the ways that are looked for. A value and its placeholder have the
same length and the same punctuation, so each form of one has a form of the other of the same length, and no length of
a message changes. A head is written anew from its parts, and so is the framing of a body, since a value may lie across
chunks. Of a body only those last bytes are held back that may be the beginning of a value.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Sequence
from urllib.parse import quote

import h11

from cloche.core.secrets import kept_chars

from .credentials import Grant
from .http_request import AnswerReader, AnswerRefused, HttpRequest

_PLAIN = {b"", b"identity"}
_WITHOUT_BODY = (204, 304)


def _forms(text: bytes) -> Iterator[bytes]:
    word = text.decode("ascii")
    yield text
    in_json = json.dumps(word)[1:-1]
    yield in_json.encode()
    yield in_json.replace("/", "\\/").encode()
    yield "".join(f"\\u{ord(character):04x}" for character in word).encode()
    for safe in ("", "/", "/:=+@,"):
        percent = quote(word, safe=safe)
        yield percent.encode()
        yield _small_percent(percent).encode()
    yield "".join(f"%{ord(character):02X}" for character in word).encode()
    yield text.hex().encode()
    yield text.hex().upper().encode()
    for shift in range(3):
        yield from _base64(text, shift)


def _small_percent(text: str) -> str:
    first, *rest = text.split("%")
    return "%".join([first, *(part[:2].lower() + part[2:] for part in rest)])


def _base64(text: bytes, shift: int) -> Iterator[bytes]:
    """Yield what base64 makes of a text behind `shift` other bytes, without what these change in it."""
    groups, more = divmod(shift + len(text), 3)
    first, last = (0, 2, 3)[shift], 4 * groups + more
    padded = bytes(shift) + text
    yield base64.b64encode(padded)[first:last]
    yield base64.urlsafe_b64encode(padded)[first:last]


Pairs = list[tuple[bytes, bytes]]


def pairs_of(grants: Sequence[Grant]) -> Pairs:
    """Return each form of each value, the longest first, with what stands in its place.

    Looked for is what the guest does not know: the value without the characters that its placeholder has, too.
    """
    pairs: list[tuple[bytes, bytes]] = []
    for grant in grants:
        kept = kept_chars(grant.value.decode("ascii"))
        pairs += zip(_forms(grant.value[kept:]), _forms(grant.placeholder[kept:]), strict=True)
    return list(dict(sorted(pairs, key=lambda pair: -len(pair[0]))).items())


class StreamRedactor:
    """Replace values in a stream of bytes, also where they come in pieces."""

    def __init__(self, pairs: Pairs):
        self._pairs = pairs
        self._longest = max((len(form) for form, _ in pairs), default=0)
        self._held = b""

    def feed(self, data: bytes) -> bytes:
        """Return what may be passed on of the bytes so far."""
        data = self.whole(self._held + data)
        size = self._may_begin(data[max(0, len(data) - self._longest + 1) :])
        self._held = data[len(data) - size :]
        return data[: len(data) - size]

    def end(self) -> bytes:
        """Return what was held back."""
        held, self._held = self._held, b""
        return held

    def whole(self, data: bytes) -> bytes:
        """Return bytes with all values replaced."""
        for form, replaced in self._pairs:
            if form in data:
                data = data.replace(form, replaced)
        return data

    def _may_begin(self, tail: bytes) -> int:
        """Return the length of the longest end of some bytes that a form begins with."""
        longest = 0
        for form, _ in self._pairs:
            at = tail.find(form[:1], max(0, len(tail) - len(form) + 1))
            while 0 <= at < len(tail) - longest:
                if form.startswith(tail[at:]):
                    longest = len(tail) - at
                at = tail.find(form[:1], at + 1)
        return longest


class RedactedAnswer(AnswerReader):
    """Follow an answer, and write it anew without values."""

    def __init__(self, request: HttpRequest, redactor: StreamRedactor):
        super().__init__(request)
        self._redactor, self._has_body = redactor, request.method != b"HEAD"
        self._is_framed = False
        self._written: list[bytes] = []

    def feed(self, data: bytes) -> bytes:
        """Take received bytes, and return those to pass on. Raises AnswerRefused."""
        if self.progress != "open":
            self.progress = "last"  # nobody asked for more
            return b""
        self._connection.receive_data(data)
        try:
            self._follow()
        except h11.RemoteProtocolError:  # whose words may be the answer's own
            raise AnswerRefused("the host's answer is malformed") from None
        written, self._written = b"".join(self._written), []
        self.has_begun = self.has_begun or bool(written)
        return written

    def end(self) -> bytes:
        """Take note of the end of the connection, which ends some answers. Raises AnswerRefused for half an answer."""
        return self.feed(b"") if self.progress == "open" and self.has_begun else b""

    def _take(self, event: h11.Event) -> None:
        """Write what an event stands for."""
        if isinstance(event, h11.InformationalResponse | h11.Response):
            self._write_head(event)
        elif isinstance(event, h11.Data):
            self._write_data(self._redactor.feed(event.data))
        elif isinstance(event, h11.EndOfMessage):
            self._write_data(self._redactor.end())
            if self._is_framed:
                self._written.append(b"0\r\n\r\n")

    def _write_data(self, content: bytes) -> None:
        if content:
            self._written.append(b"%x\r\n%b\r\n" % (len(content), content) if self._is_framed else content)

    def _write_head(self, event: h11.InformationalResponse | h11.Response) -> None:
        if event.status_code == 101:
            raise AnswerRefused("the host changes to another protocol, which nobody asked for")
        codings = {value.strip().lower() for name, value in event.headers if name == b"content-encoding"}
        if codings - _PLAIN:
            raise AnswerRefused("the host's answer is compressed, although identity was asked for; it is not passed on")
        has_body = self._has_body and event.status_code >= 200 and event.status_code not in _WITHOUT_BODY
        self._is_framed = has_body and any(name == b"transfer-encoding" for name, _ in event.headers)
        head = b"HTTP/1.1 %d %b\r\n" % (event.status_code, event.reason)
        head += b"".join(b"%b: %b\r\n" % header for header in event.headers.raw_items())
        self._written.append(self._redactor.whole(head) + b"\r\n")
