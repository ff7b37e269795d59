"""Values in answers: the placeholder in place of each, in the usual encodings, as the bytes pass. No I/O.

Theory of operation: `_forms` writes a text in all the ways that are looked for. A value and its placeholder have the
same length and the same punctuation, so each form of one has a form of the other of the same length, and no length of
a message changes, unless the value was fetched anew. Of a body only those last bytes are held back that may be the
beginning of a value.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Sequence
from functools import lru_cache
from urllib.parse import quote

from cloche.core.secrets import kept_chars

from .credentials import Grant
from .http_answer import AnswerRefused
from .http_request import Headers

MOST_KEPT = 128  # values whose forms are kept
_PLAIN = {b"", b"identity"}
_CODINGS = (b"content-encoding", b"grpc-encoding")
_PROBE_BYTES, _MOST_TRIES = 6, 64
# What writers of JSON escape, and how: Gson, .NET, those for scripts, and who escapes all.
_ALL = "".join(map(chr, range(0x21, 0x7F)))
_ESCAPED = (("=&<>'", "x"), ("+&<>'`\"", "X"), ("-=&<>'`;\"\\", "X"), (_ALL, "x"), (_ALL, "X"))
_WRITERS = tuple(
    {ord('"'): '\\"', ord("\\"): "\\\\"} | {ord(char): f"\\u{ord(char):04{case}}" for char in chars}
    for chars, case in _ESCAPED
)


def _forms(text: bytes) -> Iterator[bytes]:
    yield from json_forms(text)
    yield from percent_forms(text)
    yield text.hex().encode()
    yield text.hex().upper().encode()
    for shift in range(3):
        yield from _base64(text, shift)


def json_forms(text: bytes) -> Iterator[bytes]:
    """Yield what a text is inside of JSON's quotes, as its writers escape it."""
    word = text.decode("ascii")
    yield text
    in_json = json.dumps(word)[1:-1]
    yield in_json.encode()
    yield in_json.replace("/", "\\/").encode()
    for writer in _WRITERS:
        yield word.translate(writer).encode()


def percent_forms(text: bytes) -> Iterator[bytes]:
    """Yield what a text is in a query or a form, as its writers encode it."""
    word = text.decode("ascii")
    yield text
    for safe in ("", "/", "/:=+@,"):
        percent = quote(word, safe=safe)
        yield percent.encode()
        yield _small_percent(percent).encode()
    yield "".join(f"%{ord(character):02X}" for character in word).encode()
    yield "".join(f"%{ord(character):02x}" for character in word).encode()


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
    pairs = [pair for grant in grants for pair in _pairs_of(grant.value, grant.placeholder)]
    return list(dict(sorted(pairs, key=lambda pair: -len(pair[0]))).items())


@lru_cache(MOST_KEPT)  # a captured token may be long, and each new one changes the pairs of its sandbox
def _pairs_of(value: bytes, placeholder: bytes) -> Pairs:
    kept, own = (kept_chars(text.decode("ascii")) for text in (value, placeholder))
    return list(zip(_forms(value[kept:]), _forms(placeholder[own:]), strict=True))


class StreamRedactor:
    """Replace values in a stream of bytes, also where they come in pieces."""

    def __init__(self, pairs: Pairs):
        self._pairs = pairs
        self.keeps_length = all(len(form) == len(replaced) for form, replaced in pairs)
        self._longest, self._shortest = (len(pairs[0][0]), len(pairs[-1][0])) if pairs else (0, 0)
        self._held = b""

    @property
    def held_bytes(self) -> int:
        """Count the bytes that are held back."""
        return len(self._held)

    @property
    def most_held_bytes(self) -> int:
        """Return how many bytes may be held back at most."""
        return max(0, self._longest - 1)

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
        for form, replaced in self._pairs if len(data) >= self._shortest else ():
            if form in data:
                data = data.replace(form, replaced)
        return data

    def _may_begin(self, tail: bytes) -> int:
        """Return the length of the longest end of some bytes that a form begins with."""
        return max((_overlap(tail, form) for form, _ in self._pairs), default=0)


def _overlap(tail: bytes, form: bytes) -> int:
    """Return the length of the longest end of some bytes that a form begins with; a longer one where that takes long.

    Else bytes that look like the form again and again would take time with their square.
    """
    tries, at = 0, tail.find(form[:_PROBE_BYTES], max(0, len(tail) - len(form) + 1))
    while at >= 0 and tries < _MOST_TRIES and not form.startswith(tail[at:]):
        tries, at = tries + 1, tail.find(form[:_PROBE_BYTES], at + 1)
    if at < 0:
        at = tail.find(form[:1], max(0, len(tail) - _PROBE_BYTES + 1))
        while at >= 0 and not form.startswith(tail[at:]):
            at = tail.find(form[:1], at + 1)
    return len(tail) - at if at >= 0 else 0


class AnswerRedaction:
    """Replace values in an answer. A value that was fetched anew may have another length than its placeholder.

    Cookies are left out, unless `has_cookies`: they are credentials that no request to the host may have.
    """

    def __init__(self, redactor: StreamRedactor, *, has_cookies: bool = False):
        self._redactor, self._left_out = redactor, () if has_cookies else (b"set-cookie", b"set-cookie2")
        self.keeps_length = redactor.keeps_length
        self.feed, self.end = redactor.feed, redactor.end

    def head(self, _: int, headers: Headers) -> Headers:
        """Return an answer's headers. Raises AnswerRefused for a body that cannot be searched."""
        codings = {value.strip().lower() for name, value in headers if name.lower().endswith(_CODINGS)}
        if codings - _PLAIN:
            raise AnswerRefused("the host's answer is compressed, although identity was asked for; it is not passed on")
        kept = [header for header in headers if header[0].lower() not in self._left_out]
        return [(self._redactor.whole(name), self._redactor.whole(value)) for name, value in kept]
