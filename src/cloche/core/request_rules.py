"""Which requests a rule allows at a host: methods, and a path. Pure.

Theory of operation: one path can be written in many ways, and servers differ in which of them they take for the same.
So a request's path is first brought into one form (`normal_path`), which is what the server gets; a path that some
servers would read as another one is refused instead. The path of a rule is in that form already, and is compared by
segments: `*` as the last segment stands for all that is below, elsewhere for one segment. Methods are compared exactly.
The query is not looked at, but for a method in it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from unicodedata import normalize
from urllib.parse import unquote_plus

from .hosts import shown
from .record import dataclass
from .refusals import allowed_by, listed

MOST_METHODS, MOST_SEGMENTS = 16, 64
MOST_PART = 120  # characters of a rule that a sentence names
ANY = "*"
# What begins the part of a rule about requests: methods between a slash and a colon, then a path.
PART = re.compile(r"/([^/:@]*):(?=/)")
# Headers by which some servers read another method or path than that of the request's first line, or a further path.
OVERRIDES = frozenset((
    "destination", "x-envoy-original-path", "x-forwarded-method", "x-forwarded-path", "x-forwarded-prefix",
    "x-forwarded-uri", "x-http-method", "x-http-method-override", "x-http-path-override", "x-method-override",
    "x-original-method", "x-original-path", "x-original-uri", "x-original-url", "x-replaced-path", "x-rewrite-path",
    "x-rewrite-uri", "x-rewrite-url", "x-script-name",
))  # fmt: skip
_METHOD = re.compile(r"[A-Z][A-Z-]{0,31}")
_METHOD_KEYS = ("_method", "x-http-method-override", "$httpmethod")  # of a query, in lower case
_QUERY_END = re.compile(r"[&;]")
# Characters of a path as RFC 3986 has them, without the semicolon, whose parameters some servers leave out.
_PATH = re.compile(r"(?:[A-Za-z0-9._~!$&'()*+,=:@/-]|%[0-9A-Fa-f]{2})*")
_ENCODED = re.compile(r"%([0-9A-Fa-f]{2})")
_UNRESERVED = re.compile(r"[A-Za-z0-9._~-]")
_SEPARATORS = "/\\.;?#%"
_LIKE_SLASHES = frozenset("\u2044\u2215\u29f8\u2216\u29f9\u00a5\u20a9")  # in a code page of some servers' they are


class Ambiguous(ValueError):
    """Report a path that servers read in several ways, with words that follow the path."""


def normal_path(path: str) -> str:
    """Return a path in the form that rules have: no character encoded that need not be, and codes in upper case.

    A slash that is encoded stays so. Raises Ambiguous.
    """
    if not path.startswith("/"):
        raise Ambiguous("is no path")
    if (end := _PATH.match(path).end()) < len(path):  # type: ignore[union-attr]  # which matches the empty text
        raise Ambiguous(f"has {shown(path[end])}, which servers read differently")
    normal = _ENCODED.sub(_decoded, path)
    for segment in re.split("/|%2F", normal[1:])[:-1]:
        if not segment:
            raise Ambiguous("has an empty segment (//)")
    for segment in re.split("/|%2F", normal):
        _check_segment(segment)
    return normal


def _decoded(code: re.Match[str]) -> str:
    character = chr(int(code[1], 16))
    if _UNRESERVED.fullmatch(character):
        return character
    if character in "\\%;?#" or not 0x20 <= ord(character) != 0x7F:
        raise Ambiguous(f"has {code[0]}, which servers read differently")
    return code[0].upper()


def _check_segment(segment: str) -> None:
    try:
        text = _ENCODED.sub(lambda code: chr(int(code[1], 16)), segment).encode("latin-1").decode()
    except UnicodeDecodeError:
        raise Ambiguous("has codes that are not UTF-8") from None
    if text in (".", ".."):
        raise Ambiguous("has a dot segment")
    if text.endswith((".", " ")):
        raise Ambiguous("has a segment that ends with a dot or a blank")
    folded = normalize("NFKC", text)  # as some servers do
    is_folded = any(folded.count(mark) > text.count(mark) for mark in _SEPARATORS)
    if is_folded or not text.isprintable() or not _LIKE_SLASHES.isdisjoint(text):
        raise Ambiguous("has characters that some servers read as others")


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRule:
    """Allow requests with one of the methods, or any if there are none, for one path or, with a `*`, for several."""

    methods: tuple[str, ...]
    path: str

    @property
    def text(self) -> str:
        """Return the rule as refusals show it, such as `GET,POST /repos/me/*`."""
        return f"{','.join(self.methods) or ANY} {self.path}"

    def allows(self, method: str, path: str) -> bool:
        """Tell whether a request is allowed; `path` is what `normal_path` returned."""
        return (not self.methods or method in self.methods) and _matches(self.path.split("/"), path.split("/"))

    def is_within(self, rules: Sequence[RequestRule]) -> bool:
        """Tell whether these rules together allow all that this one does."""
        methods = self.methods or (ANY,)
        return all(any(rule._has(method, self.path) for rule in rules) for method in methods)

    def _has(self, method: str, path: str) -> bool:
        return (not self.methods or method in self.methods) and _includes(self.path.split("/"), path.split("/"))


def _matches(pattern: list[str], path: list[str]) -> bool:
    if pattern == ["", ANY]:
        return True
    if pattern[-1] == ANY:  # what is below: something, and not the other spelling of the folder itself
        size = len(pattern) - 1
        is_below = len(path) > size and path[size] != ""
        return is_below and _are_equal(pattern[:size], path[:size])
    return len(path) == len(pattern) and _are_equal(pattern, path)


def _are_equal(pattern: list[str], path: list[str]) -> bool:
    pairs = zip(pattern, path, strict=True)
    return all(part == segment or (part == ANY and segment and "%2F" not in segment) for part, segment in pairs)


def _includes(outer: list[str], inner: list[str]) -> bool:
    """Tell whether a pattern has all paths of another one."""
    if inner[-1] != ANY:
        return _matches(outer, inner)
    return outer[-1] == ANY and (outer == ["", ANY] or (inner != ["", ANY] and _matches(outer, inner)))


def parse_request_rule(methods: str, path: str) -> RequestRule:
    """Read `GET,POST` (or `*`) and a path. Raises ValueError with words that follow the rule's text."""
    names = () if methods == ANY else tuple(dict.fromkeys(methods.split(",")))
    if wrong := next((name for name in names if not _METHOD.fullmatch(name)), None):
        raise ValueError(f"has the method {shown(wrong)}; methods are in capital letters, as in GET,POST:/repos/me/*")
    if "" in names:
        raise ValueError("has an empty method; write * for any, as in *:/repos/me/*")
    if len(names) > MOST_METHODS or path.count("/") > MOST_SEGMENTS:
        raise ValueError(f"has more than {MOST_METHODS} methods or {MOST_SEGMENTS} segments")
    _check_pattern(path)
    return RequestRule(methods=names, path=path)


def _check_pattern(path: str) -> None:
    if "?" in path or "#" in path:
        raise ValueError("has a query; a rule is about methods and paths")
    if any(ANY in segment and segment != ANY for segment in path.split("/")):
        raise ValueError("has a * beside other characters; a * stands for a whole segment, as in /repos/*/issues")
    try:
        normal = normal_path(path)
    except Ambiguous as wrong:
        raise ValueError(f"has a path that {wrong}; no request for it is let through") from None
    if normal != path:
        raise ValueError(f"has a path in another form than requests get; write {shown(normal)}")


def check_request(
    method: str, target: str, headers: Iterable[tuple[bytes, bytes]], rules: Sequence[RequestRule], host: str
) -> str:
    """Return the target for the server, a path with its query. Raises RequestRefused."""
    path, mark, query = target.partition("?")
    what = f"{method} {shown(path)[1:-1]}"
    try:
        normal = normal_path(path)
    except Ambiguous as wrong:
        raise RequestRefused(what, f"its path {wrong}; no rule can allow that") from None
    if override := _override(headers, query):
        raise RequestRefused(what, f"{override} could change its method or path; leave it out")
    if not any(rule.allows(method, normal) for rule in rules):
        told = listed((rule.text for rule in rules), len(rules))
        raise RequestRefused(what, f"the rules for this host are {told}{_allowing(method, normal, host)}")
    return normal + mark + query


class RequestRefused(Exception):
    """Report a request that is not allowed: `what` it is, and `why`, with what would allow it."""

    def __init__(self, what: str, why: str):
        super().__init__(what, why)
        self.what, self.why = what, why


def _allowing(method: str, path: str, host: str) -> str:
    """Return the remedy for a request, empty where its rule would be none, or too long for a sentence."""
    part = f"/{method}:{path}"
    is_rule = _METHOD.fullmatch(method) is not None and ANY not in path and len(part) <= MOST_PART
    return f"; {allowed_by(host + part)}" if is_rule else ""


def _override(headers: Iterable[tuple[bytes, bytes]], query: str) -> str:
    """Name what some servers would read another method or path from; empty for nothing."""
    for name, _ in headers:
        key = name.decode("latin-1").lower().replace("_", "-")
        if key in OVERRIDES:
            return f"its header {key}"
    keys = (unquote_plus(part.partition("=")[0]).lower() for part in _QUERY_END.split(query))
    return next((f"{key} in its query" for key in keys if key in _METHOD_KEYS), "")
