"""Secrets are taken out of whatever is written down: values of variables that are called like secrets, and what looks
like a token wherever it stands. What is not known to be a secret, and does not look like one, is not found.
"""

from __future__ import annotations

import base64
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property, lru_cache
from typing import Any
from urllib.parse import quote, quote_plus

_AS_THEY_ARE, _LISTS = (int, float, type(None)), (list, tuple, set, frozenset)
REDACTED = "[redacted]"
LEAST_CHARS = 4  # a shorter value would be found everywhere

_SECRET_NAME = re.compile(
    r"api_?key|token|secret|passw|passphrase|pwd\b|auth(?!or)|credential|private_?key|access_?key|signing_?key|"
    r"encryption_?key|connection_?string|session_?key|cookie|\bdsn\b|_dsn|(^|_)pat$|(^|_)pass$",
    re.IGNORECASE,
)
# Called like secrets, and none: where something is, or what is used.
_PLAIN_NAME = re.compile(
    r"(_sock|_socket|_file|_path|_dir|_folder|_method|_type|_mode|_url_prefix|_user|_name)$", re.IGNORECASE
)
_PLAIN_VALUES = frozenset({"true", "false", "none", "null", "basic", "bearer", "oauth", "auto", "enabled", "disabled"})

_ASSIGNED = (
    r"(?i:api[_-]?key|secret(?:[_-]?key)?|passw(?:or)?d|passphrase|(?:\b|[_-])token|(?:private|access)[_-]?key|"
    r"[_-]pass|[_-]pwd)\\{0,3}[\"']?\s{0,4}[=:]\s{0,4}"
)
_QUOTED = rf"({_ASSIGNED}(?P<quote>\\{{0,3}}[\"']))(?!\[redacted|\s)(?:(?!(?P=quote))[^\n]){{4,512}}"
_PAIR = rf"({_ASSIGNED}\\{{0,3}}[\"']?)(?!\[redacted)[^\s\"',;&]{{4,}}"
_AUTHORIZATION = (
    r"((?i:\bauthorization)\\?[\"']?\s{0,4}[=:]\s{0,4}\\?[\"']?(?:[A-Za-z]{1,20} +)?)(?!\[redacted)[^\s\"',;\[]{8,}"
)
# What tokens look like, by text that each of them has in it: to look for that is quick, and most text has none. What
# group 1 has found stays.
_TOKENS: tuple[tuple[tuple[str, ...], str], ...] = (
    (
        ("PRIVATE KEY-----",),
        r"()-----BEGIN [A-Z0-9 ]{0,40}KEY-----(?:(?!-----END)[\s\S]){0,20000}(?:-----END [A-Z0-9 ]{0,40}-----)?",
    ),
    (("sk-", "pk-", "rk-"), r"()\b[spr]k-[A-Za-z0-9_-]{16,}"),  # OpenAI, Anthropic and those like them
    (("_live_", "_test_"), r"()\b[spr]k_(?:live|test)_[A-Za-z0-9]{10,}"),  # Stripe
    (("ghp_", "gho_", "ghu_", "ghs_", "ghr_"), r"()\bgh[pousr]_[A-Za-z0-9]{16,}"),
    (("github_pat_",), r"()\bgithub_pat_[A-Za-z0-9_]{20,}"),
    (("glpat-", "glrt-", "gldt-", "glptt-", "glcbt-"), r"()\bgl(?:pat|rt|dt|ptt|cbt)-[A-Za-z0-9_-]{16,}"),
    (("AKIA", "ASIA"), r"()\bA[KS]IA[A-Z0-9]{16}(?![A-Z0-9])"),
    (("AIza", "ya29."), r"()\b(?:AIza[A-Za-z0-9_-]{30,}|ya29\.[A-Za-z0-9_-]{20,})"),  # Google
    (("xox", "xapp-"), r"()\b(?:xox[abeoprs]|xapp)-[A-Za-z0-9-]{10,}"),  # Slack
    (("hf_", "npm_"), r"()\b(?:hf|npm)_[A-Za-z0-9]{20,}"),
    (("pypi-",), r"()\bpypi-[A-Za-z0-9_-]{30,}"),
    (("e2b_", "dtn_"), r"()\b(?:e2b|dtn)_[A-Za-z0-9]{16,}"),
    # JSON web tokens. In the first part begins no second one, or each would be followed to the end of the text.
    (("eyJ",), r"()\beyJ(?:(?![_-]eyJ)[A-Za-z0-9_-]){8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]*"),
    (("SG.",), r"()\bSG\.[A-Za-z0-9_-]{16,}\.[A-Za-z0-9_-]{16,}"),  # SendGrid
    (("earer ", "asic ", "EARER "), r"((?i:\b(?:Bearer|Basic)) +)[A-Za-z0-9._~+/=-]{8,}"),
    (("uthorization", "UTHORIZATION"), _AUTHORIZATION),
    (("://",), r"((?<=://)[^\s/:@'\"]{0,256}:)[^\s/@'\"]{1,512}(?=@)"),
    (("://",), r"((?<=://))[^\s/:@'\"]{16,256}(?=@)"),  # a token in place of a user
    (("=", ":"), _QUOTED),
    (("=", ":"), _PAIR),
)
# Where `\b` stands above: behind a letter there is another word, unless that letter belongs to an escape or a colour.
_EDGE = (
    r"(?:(?<![A-Za-z0-9])|(?<=\\[nrt])|"
    r"(?<=m)(?:(?<=\x1b\[m)|(?<=\x1b\[[0-9]m)|(?<=\x1b\[[0-9]{2}m)|(?<=\x1b\[[0-9];[0-9]{2}m)))"
)


class Redactor:
    """Take secrets out of text. `environ` is what the process has, `given` what the program is given besides."""

    def __init__(self, given: Mapping[str, str] | None = None, *, environ: Mapping[str, str] | None = None) -> None:
        self._variables = (os.environ if environ is None else environ, given or {})

    @cached_property
    def _known(self) -> re.Pattern[str] | None:  # looked for where there is text: most events have none
        found = {value for variables in self._variables for value in _values(variables)}
        return _joined(frozenset(shape for value in found for shape in _shapes(value)))

    def text(self, text: str) -> str:
        """Return text without its secrets."""
        if self._known is not None:
            text = self._known.sub(REDACTED, text)
        for markers, pattern in _TOKENS:
            if any(marker in text for marker in markers):
                text = re.sub(pattern.replace(r"\b", _EDGE), rf"\1{REDACTED}", text)  # compiled when it is first needed
        return text

    def data(self, data: bytes) -> bytes:
        """Return bytes without the secrets in them; what is no UTF-8 comes out as it was."""
        return self.text(data.decode("utf-8", "surrogateescape")).encode("utf-8", "surrogateescape")

    def plain(self, value: Any) -> Any:  # noqa: ANN401 - any plain data
        """Return plain data (mappings, lists, text, numbers) without the secrets in its texts."""
        if isinstance(value, _AS_THEY_ARE):
            return value
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping):
            return {self.text(str(name)): self.member(str(name), item) for name, item in value.items()}
        if isinstance(value, _LISTS):
            return [self.plain(item) for item in value]
        return self.text(str(value))

    def member(self, name: str, value: object) -> Any:  # noqa: ANN401 - any plain data
        """Return what stands under a name without its secrets; text under a secret's name is one."""
        if isinstance(value, str) and value and is_secret(name):
            return REDACTED
        return self.plain(value)


@lru_cache(maxsize=1024)
def is_secret(name: str) -> bool:
    """Tell whether a variable of this name holds a secret, as far as its name says."""
    is_named = _SECRET_NAME.search(name) is not None and _PLAIN_NAME.search(name) is None
    return is_named and name not in ("PWD", "OLDPWD")  # a shell's folder


def _values(variables: Mapping[str, str]) -> Iterator[str]:
    for name in variables:
        if is_secret(name):
            value = variables.get(name, "").strip()
            if len(value) >= LEAST_CHARS and value.lower() not in _PLAIN_VALUES:
                yield value


@lru_cache(maxsize=64)
def _shapes(value: str) -> tuple[str, ...]:
    """Return all ways to write a secret that are looked for."""
    return tuple(_written(value))


def _written(value: str) -> Iterable[str]:
    """Yield a secret as it stands, in a URL, in JSON, as Python prints it, in hex, in base64 (behind others, too)."""
    raw = value.encode("utf-8", "surrogateescape")
    yield value
    yield from (quote(raw, safe=""), quote(raw), quote_plus(raw))
    yield from (json.dumps(value)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1], repr(value)[1:-1])
    if len(raw) < 2 * LEAST_CHARS:
        return
    yield from (raw.hex(), raw.hex().upper())
    for encoded in (base64.b64encode, base64.urlsafe_b64encode):
        yield encoded(raw).decode().rstrip("=")
        for before in range(3):  # as in `user:password`: the characters that depend on this secret alone
            inner = encoded(bytes(before) + raw).decode()[(before * 8 + 5) // 6 : (before + len(raw)) * 8 // 6]
            if len(inner) >= 2 * LEAST_CHARS:
                yield inner
    lines = value.splitlines()
    if len(lines) > 1:  # a key, of which one line is enough to give some of it away
        yield from (line for line in lines if len(line) >= 4 * LEAST_CHARS and not line.startswith("-----"))


@lru_cache(maxsize=8)
def _joined(shapes: frozenset[str]) -> re.Pattern[str] | None:
    """Return one pattern for all, the longest first."""
    if not shapes:
        return None
    return re.compile("|".join(re.escape(shape) for shape in sorted(shapes, key=lambda text: (-len(text), text))))
