"""Remove secrets from text before it is written: values of variables with secret names, and text that looks like a
token. Other secrets are not found.

Theory of operation, known values (`redact`): the text is searched in several decoded forms: unchanged, with escapes
decoded (URLs, HTML, JSON and others, up to three times), and without white space, for wrapped base64. Each decoded form
maps its bytes to offsets in the original text. In each form, all encoded forms of a secret are searched for as plain
bytes, once exactly and once in lower case. Matches are replaced in the original text. No pattern that could backtrack
is used.

Tokens (`_TOKENS`): each pattern has markers, one of which is in every match; the pattern is tried only if one of them
occurs. `Redactor` does both.
"""

from __future__ import annotations

import base64
import json
import os
import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache, cached_property, lru_cache
from typing import Any

from ..core.record import dataclass, field

LEAST_CHARS = 4  # a shorter value would match everywhere
LEAST_ANY_CASE = 8  # a shorter value would match too often if case is ignored
MOST_DECODING_PASSES = 3
FEW_CHARS = 256

# An escape for one byte or character, or an HTML entity; each of bounded length.
_ESCAPE = re.compile(
    rb"%[0-9A-Fa-f]{2}|\\x[0-9A-Fa-f]{2}|\\u[0-9A-Fa-f]{4}|&#[0-9]{1,7};|&#[xX][0-9A-Fa-f]{1,6};"
    rb"|&(?:amp|lt|gt|quot|apos);|\\[\"'/\\]"
)
_GAPS = re.compile(rb"(?:[\s\0]|\\[nrt])+")  # NUL: ASCII in UTF-16 has one after each character

_NOT_TEXT, _LISTS = (int, float, type(None)), (list, tuple, set, frozenset)
REDACTED = "[redacted]"

_SECRET_NAME = re.compile(
    r"api_?key|token|secret|passw|passphrase|pwd\b|auth(?!or)|credential|private_?key|access_?key|signing_?key|"
    r"encryption_?key|connection_?string|session_?key|cookie|\bdsn\b|_dsn|(^|_)pat$|(^|_)pass$",
    re.IGNORECASE,
)
# Names that contain a secret's name, but hold a location or a method.
_PLAIN_NAME = re.compile(
    r"(_sock|_socket|_file|_path|_dir|_folder|_method|_type|_mode|_url_prefix|_user|_name)$", re.IGNORECASE
)
_PLAIN_VALUES = frozenset({"true", "false", "none", "null", "basic", "bearer", "oauth", "auto", "enabled", "disabled"})

# No pattern below backtracks without a bound: repetitions are bounded, possessive (`++`), or end where another
# character begins; so the time is linear in the length of the text. Only single characters are possessive: groups with
# a lookaround are then matched wrongly by some versions of Python 3.11.
_WORD = (
    r"(?:api[_-]?key|secret(?:[_-]?key)?|passw(?:or)?d|passphrase|(?:\b|[_-])passcode|(?:\b|[_-])token|"
    r"(?:private|access|account|shared|signing|encryption|master|session)[_-]?key|(?:\b|[_-])(?:pass|pwd))"
)
_MARK = r"(?:\\{0,3}[\"']|(?i:&quot;|&apos;|&#3[49];|&#x2[27];|%2[27]))?"
_ASSIGNED = rf"(?i:{_WORD}){_MARK}\s{{0,4}}(?:[=:]|%3[ADad])\s{{0,4}}"
_QUOTED = rf"({_ASSIGNED}(?P<quote>\\{{0,3}}[\"']))(?!\[redacted|\s)(?:(?!(?P=quote))[^\n]){{1,512}}"
_PAIR = rf"({_ASSIGNED}{_MARK})(?!\[redacted)[^\s\"',;&]{{4,}}+"
# Arguments of commands: `--password X`, and short options whose value is no path, port or plain word.
_LONG_OPTION = (
    rf"((?<=-)(?i:{_WORD}|auth)(?:[\"']\s{{0,4}},\s{{0,4}}[\"']|[ \t]{{1,4}}+\\{{0,3}}[\"']?))"
    r"(?![-=:]|\[redacted)[^\s\"'\\]{3,512}+"
)
_SHORT_OPTION = (
    r"((?<![^\s\"'\[,(])-p[ \t]{0,4}+[\"']?)(?=[^\s\"'./:]{6,64}+(?:[\s\"',;)\]]|\Z))(?=[^\s0-9]{0,63}+[0-9])"
    r"(?=[^\sA-Za-z]{0,63}+[A-Za-z])[^\s\"'./:,;)\]]{6,64}+"
)
_USER_OPTION = (
    r"((?<=[\s\"'])(?:-u|--user)[ \t=]{0,4}+[\"']?(?![0-9]{1,10}:[0-9]{1,10}(?![0-9A-Za-z]))[^\s:'\"/]{1,64}+:)"
    r"[^\s'\"]{1,256}+"
)
_HEADER = r"\\?[\"']?\s{0,4}[=:]\s{0,4}\\?[\"']?"
_AUTHORIZATION = rf"((?i:\bauthorization){_HEADER}(?:[A-Za-z]{{1,20}}+ +)?)(?!\[redacted)[^\s\"',;\[]{{8,}}+"
_SCHEMES = r"(?i:digest|aws4-hmac-sha256|signature|oauth|hawk|negotiate|ntlm)"
_MANY_PARTS = rf"((?i:\bauthorization){_HEADER}{_SCHEMES} {{1,4}})[^\r\n]{{8,4096}}+"
_COOKIE = r"((?i:\b(?:set-)?cookie2?)\\?[\"']?\s{0,4}[=:]\s{0,4}\\?[\"']?)(?=[^\s\"'=;,]{1,128}=)[^\r\n\"'\\]{3,8192}+"
_IN_QUERY = (
    r"([?&](?i:sig|signature|code|key|auth|sas|x-amz-(?:signature|credential|security-token))=)[^\s&\"'#]{4,2048}+"
)
_ELEMENT = rf"((?i:{_WORD})>\s{{0,4}})(?!\[redacted)[^<\s][^<\n]{{0,512}}+(?=</)"
_STARTS = (
    "GOCSPX-", "sq0csp-", "sq0atp-", "shpat_", "shpss_", "dop_v1_", "hvs.", "hvb.", "lin_api_", "ATATT3", "gsk_",
    "xai-", "pplx-", "r8_", "dckr_pat_", "rubygems_", "glsa_", "sntrys_", "AGE-SECRET-KEY-1", "whsec_", "tfp_",
)  # fmt: skip
# Patterns of tokens, each with text that every match contains: searching for that is fast, and most text has none.
# Group 1 of a match is kept.
_TOKENS: tuple[tuple[tuple[str, ...], str], ...] = (
    (
        ("PRIVATE KEY-----",),
        r"()-----BEGIN [A-Z0-9 ]{0,40}KEY-----(?:(?!-----END)[\s\S]){0,20000}(?:-----END [A-Z0-9 ]{0,40}-----)?",
    ),
    (("sk-", "pk-", "rk-"), r"()\b[spr]k-[A-Za-z0-9_-]{16,}+"),  # OpenAI, Anthropic and others
    (("_live_", "_test_"), r"()\b[spr]k_(?:live|test)_[A-Za-z0-9]{10,}+"),  # Stripe
    (("ghp_", "gho_", "ghu_", "ghs_", "ghr_"), r"()\bgh[pousr]_[A-Za-z0-9]{16,}+"),
    (("github_pat_",), r"()\bgithub_pat_[A-Za-z0-9_]{20,}+"),
    (("glpat-", "glrt-", "gldt-", "glptt-", "glcbt-"), r"()\bgl(?:pat|rt|dt|ptt|cbt)-[A-Za-z0-9_-]{16,}+"),
    (("AKIA", "ASIA"), r"()\bA[KS]IA[A-Z0-9]{16}(?![A-Z0-9])"),
    (("AIza", "ya29."), r"()\b(?:AIza[A-Za-z0-9_-]{30,}+|ya29\.[A-Za-z0-9_-]{20,}+)"),  # Google
    (("xox", "xapp-"), r"()\b(?:xox[abeoprs]|xapp)-[A-Za-z0-9-]{10,}+"),  # Slack
    (("hooks.slack.com/",), r"(hooks\.slack\.com/(?:services|workflows|triggers)/)[A-Za-z0-9/_-]{16,}+"),
    (("hf_", "npm_"), r"()\b(?:hf|npm)_[A-Za-z0-9]{20,}+"),
    (("pypi-",), r"()\bpypi-[A-Za-z0-9_-]{30,}+"),
    (("e2b_", "dtn_"), r"()\b(?:e2b|dtn)_[A-Za-z0-9]{16,}+"),
    (_STARTS, rf"()\b(?:{'|'.join(map(re.escape, _STARTS))})[A-Za-z0-9_-]{{16,}}+"),
    # JSON web tokens. The first part contains no second beginning, or each would be scanned to the end of the text.
    (("eyJ",), r"()\beyJ(?:(?![_-]eyJ)[A-Za-z0-9_-]){8,}\.[A-Za-z0-9_-]{8,}+\.[A-Za-z0-9_-]*+"),
    (("SG.",), r"()\bSG\.[A-Za-z0-9_-]{16,}+\.[A-Za-z0-9_-]{16,}+"),  # SendGrid
    (("uthorization", "UTHORIZATION"), _MANY_PARTS),
    (("earer ", "asic ", "EARER "), r"((?i:\b(?:Bearer|Basic)) +)[A-Za-z0-9._~+/=-]{8,}+"),
    (("uthorization", "UTHORIZATION"), _AUTHORIZATION),
    (("ookie", "OOKIE"), _COOKIE),
    (("://",), r"((?<=://)[^\s/:@'\"]{0,256}+:)(?!\[redacted)[^\s/'\"]{1,512}(?=@)"),
    # In a URL other than http(s), a password may contain a slash.
    (("://",), r"((?<=://)(?<!http://)(?<!https://)[^\s/:@'\"]{0,256}+:)(?!\[redacted)(?:(?!://)[^\s'\"]){1,512}(?=@)"),
    (("://",), r"((?<=://))[^\s/:@'\"]{16,256}+(?=@)"),  # a token in place of a user
    (("?", "&"), _IN_QUERY),
    (("=", ":"), _QUOTED),
    (("=", ":", "%3"), _PAIR),
    (("--",), _LONG_OPTION),
    (("-p",), _SHORT_OPTION),
    (("-u", "--user"), _USER_OPTION),
    (("</",), _ELEMENT),
)
# Replaces `\b` above: a letter before the token ends no word if it belongs to an escape or a terminal's colour code.
_EDGE = (
    r"(?:(?<![A-Za-z0-9])|(?<=\\[nrt])|"
    r"(?<=m)(?:(?<=\x1b\[m)|(?<=\x1b\[[0-9]m)|(?<=\x1b\[[0-9]{2}m)|(?<=\x1b\[[0-9];[0-9]{2}m)))"
)
_OPTION = re.compile(r"--?[A-Za-z][A-Za-z_-]{0,63}")


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedForms:
    """The encoded forms of some secrets: `exact` is searched for in the text, `small` in its lower-case form."""

    exact: tuple[bytes, ...] = ()
    small: tuple[bytes, ...] = ()


@dataclass(slots=True)
class _DecodedText:
    """A decoded form of a text. From `offsets[i]` on, a byte's offset in the original text is `shift[i]` larger."""

    data: bytes
    offsets: list[int] = field(default_factory=list)
    shift: list[int] = field(default_factory=list)
    has_gaps: bool = False

    def origin(self, index: int) -> int:
        mark = bisect_right(self.offsets, index) - 1
        return index + (self.shift[mark] if mark >= 0 else 0)


def redact(text: str, forms: EncodedForms, replacement: str) -> str:
    """Return text with every secret replaced."""
    data = text.encode("utf-8", "surrogatepass")
    spans = sorted({span for decoded in _decoded_texts(data) for span in _spans(decoded, forms)})
    if not spans:
        return text
    pieces, end = [], 0
    for start, stop in spans:
        if start >= end:
            pieces += [data[end:start], replacement.encode()]
        end = max(end, stop)
    pieces.append(data[end:])
    return b"".join(pieces).decode("utf-8", "surrogatepass")


def _decoded_texts(data: bytes) -> Iterator[_DecodedText]:
    decoded = _DecodedText(data)
    yield decoded
    if _GAPS.search(data):
        yield _decoded_once(decoded, _GAPS)
    for _ in range(MOST_DECODING_PASSES):
        if not _ESCAPE.search(decoded.data):
            return
        decoded = _decoded_once(decoded, _ESCAPE)
        yield decoded


def _decoded_once(decoded: _DecodedText, pattern: re.Pattern[bytes]) -> _DecodedText:
    """Return the text with each match of the pattern decoded, or removed if it is white space."""
    pieces, copied, size = [], 0, 0
    result = _DecodedText(b"", has_gaps=pattern is _GAPS)
    for match in pattern.finditer(decoded.data):
        start, end = match.span()
        meant = _unescaped(match[0]) if pattern is _ESCAPE else b""
        pieces += [decoded.data[copied:start], meant]
        _add_mark(result, decoded, size, copied)
        _copy_marks(result, decoded, size, copied, start)
        size += start - copied
        if meant:
            _add_mark(result, decoded, size, start)
        size += len(meant)
        copied = end
    _add_mark(result, decoded, size, copied)
    _copy_marks(result, decoded, size, copied, len(decoded.data))
    pieces.append(decoded.data[copied:])
    result.data = b"".join(pieces)
    return result


def _add_mark(result: _DecodedText, decoded: _DecodedText, index: int, old: int) -> None:
    """Note that the result continues at `index` with the byte at `old` of the text before."""
    if result.offsets and result.offsets[-1] == index:
        result.offsets.pop()
        result.shift.pop()
    result.offsets.append(index)
    result.shift.append(decoded.origin(old) - index)


def _copy_marks(result: _DecodedText, decoded: _DecodedText, index: int, old: int, end: int) -> None:
    """Copy the marks of the bytes between `old` and `end` of the text before, which begin at `index` in the result."""
    for mark in range(bisect_right(decoded.offsets, old), bisect_left(decoded.offsets, end)):
        offset = decoded.offsets[mark] - old + index
        result.offsets.append(offset)
        result.shift.append(decoded.offsets[mark] + decoded.shift[mark] - offset)


def _unescaped(escape: bytes) -> bytes:
    if escape[:1] == b"%":
        return bytes([int(escape[1:], 16)])
    if escape[:1] == b"&":
        import html

        return html.unescape(escape.decode("ascii")).encode("utf-8", "surrogatepass")
    if escape[1:2] not in b"xu":
        return escape[1:]
    code = int(escape[2:], base=16)  # noqa: FURB166 - the prefix is \x or \u, not 0x
    return bytes([code]) if escape[1:2] == b"x" else chr(code).encode("utf-8", "surrogatepass")


def _spans(decoded: _DecodedText, forms: EncodedForms) -> Iterator[tuple[int, int]]:
    for data, encoded_forms in ((decoded.data, forms.exact), (decoded.data.lower(), forms.small)):
        for encoded in encoded_forms:
            index = data.find(encoded)
            while index >= 0:
                end = index + len(encoded)
                yield decoded.origin(index), _end(decoded, end)
                index = data.find(encoded, end)


def _end(decoded: _DecodedText, index: int) -> int:
    """Return the original offset of a match's end: after its last escape, and before a gap."""
    return decoded.origin(index - 1) + 1 if decoded.has_gaps else decoded.origin(index)


def encoded_forms_of(values: Iterable[str]) -> EncodedForms:
    """Return the encoded forms of some secrets, the longest first."""
    exact: set[bytes] = set()
    small: set[bytes] = set()
    for value in values:
        some, lower_case = _encodings(value)
        exact.update(some)
        small.update(lower_case)
    return EncodedForms(exact=_longest_first(exact), small=_longest_first(small))


def _longest_first(encodings: Iterable[bytes]) -> tuple[bytes, ...]:
    return tuple(sorted(encodings, key=lambda data: (-len(data), data)))


@lru_cache(maxsize=64)
def _encodings(value: str) -> tuple[Sequence[bytes], Sequence[bytes]]:
    """Return a secret as it is, in a URL, in JSON, as a Python repr, in hex and base64; and its lower-case forms."""
    from urllib.parse import quote, quote_plus

    raw = value.encode("utf-8", "surrogateescape")
    texts = [value, quote(raw, safe=""), quote(raw), quote_plus(raw), value.replace(" ", "+")]
    texts += [json.dumps(value)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1], repr(value)[1:-1]]
    small = [value, value.replace(" ", "+"), "".join(value.split())] if len(value) >= LEAST_ANY_CASE else []
    if len(raw) >= LEAST_ANY_CASE:
        texts += [*_in_base64(raw), *_in_base64(value.encode("utf-16-le", "surrogatepass"))]
        small.append(raw.hex())
    lines = value.splitlines()
    if len(lines) > 1:  # a multi-line key: each of its lines is a secret
        texts += [line for line in lines if len(line) >= 4 * LEAST_CHARS and not line.startswith("-----")]
    exact = [text.encode("utf-8", "surrogatepass") for text in texts]
    return (
        [data for data in exact if len(data) >= LEAST_CHARS],
        [text.encode("utf-8", "surrogatepass").lower() for text in small if len(text) >= LEAST_ANY_CASE],
    )


def _in_base64(raw: bytes) -> Iterator[str]:
    """Yield base64 of the secret alone, and, for the secret after other bytes (as in `user:password`), the characters
    that do not depend on those.
    """
    for encoded in (base64.b64encode, base64.urlsafe_b64encode):
        yield encoded(raw).decode().rstrip("=")
        for before in range(3):
            inner = encoded(bytes(before) + raw).decode()[(before * 8 + 5) // 6 : (before + len(raw)) * 8 // 6]
            if len(inner) >= 2 * LEAST_CHARS:
                yield inner


@cache
def _any_marker() -> re.Pattern[str]:
    """Return a pattern that finds any marker, which in short text is faster than searching for each."""
    return re.compile("|".join(re.escape(marker) for markers, _ in _TOKENS for marker in markers))


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern.replace(r"\b", _EDGE))


class Redactor:
    """Remove secrets from text. `environ` is this process's environment, `guest_environ` the variables of the guest."""

    def __init__(
        self, guest_environ: Mapping[str, str] | None = None, *, environ: Mapping[str, str] | None = None
    ) -> None:
        self._variables = (os.environ if environ is None else environ, guest_environ or {})

    @cached_property
    def _forms(self) -> EncodedForms:  # computed for the first text: most events have none
        return encoded_forms_of({value for variables in self._variables for value in _values(variables)})

    def text(self, text: str) -> str:
        """Return text without its secrets."""
        if self._forms.exact:
            text = redact(text, self._forms, REDACTED)
        if len(text) <= FEW_CHARS and not _any_marker().search(text):
            return text
        for markers, pattern in _TOKENS:
            if any(marker in text for marker in markers):
                text = _compiled(pattern).sub(rf"\1{REDACTED}", text)
        return text

    def data(self, data: bytes) -> bytes:
        """Return bytes without the secrets in them; invalid UTF-8 is unchanged."""
        return self.text(data.decode("utf-8", "surrogateescape")).encode("utf-8", "surrogateescape")

    def clean(self, value: Any) -> Any:  # noqa: ANN401 - any plain data
        """Return plain data (mappings, lists, text, numbers) without the secrets in its texts."""
        if isinstance(value, _NOT_TEXT):
            return value
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping):
            return {self.text(str(name)): self.member(str(name), item) for name, item in value.items()}
        if isinstance(value, _LISTS):
            items = list(value)
            return [self._item(before, item) for before, item in zip([None, *items], items, strict=False)]
        return self.text(str(value))

    def _item(self, before: object, item: object) -> Any:  # noqa: ANN401 - any plain data
        """Return an item of a list without its secrets; the item after an option with a secret name is one."""
        if isinstance(item, str) and isinstance(before, str) and _OPTION.fullmatch(before) and is_secret(before):
            return REDACTED
        return self.clean(item)

    def member(self, name: str, value: object) -> Any:  # noqa: ANN401 - any plain data
        """Return a member of a mapping without its secrets; text under a secret name is one."""
        if isinstance(value, str) and value and is_secret(name):
            return REDACTED
        return self.clean(value)


@lru_cache(maxsize=1024)
def is_secret(name: str) -> bool:
    """Tell whether a variable of this name holds a secret, judged by the name alone."""
    is_named = _SECRET_NAME.search(name) is not None and _PLAIN_NAME.search(name) is None
    return is_named and name not in ("PWD", "OLDPWD")  # a shell's working directory


def _values(variables: Mapping[str, str]) -> Iterator[str]:
    for name in variables:
        if is_secret(name):
            value = variables.get(name, "").strip()
            if len(value) >= LEAST_CHARS and value.lower() not in _PLAIN_VALUES:
                yield value
