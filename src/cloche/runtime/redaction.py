"""Secrets are taken out of whatever is written down: values of variables that are called like secrets, and what looks
like a token wherever it stands. What is not known to be a secret, and does not look like one, is not found.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from functools import cache, cached_property, lru_cache
from typing import Any

from .redaction_known import LEAST_CHARS, Needles, needles_for, strike_out

_AS_THEY_ARE, _LISTS = (int, float, type(None)), (list, tuple, set, frozenset)
REDACTED = "[redacted]"

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

# Nothing below goes back over text without a bound: what repeats is bounded, possessive (`++`), or ends where another
# character begins; so time grows with the length of a text and not faster. Only single characters are possessive: what
# has a condition in it is matched wrongly then by some versions of Python 3.11.
_WORD = (
    r"(?:api[_-]?key|secret(?:[_-]?key)?|passw(?:or)?d|passphrase|(?:\b|[_-])passcode|(?:\b|[_-])token|"
    r"(?:private|access|account|shared|signing|encryption|master|session)[_-]?key|(?:\b|[_-])(?:pass|pwd))"
)
_MARK = r"(?:\\{0,3}[\"']|(?i:&quot;|&apos;|&#3[49];|&#x2[27];|%2[27]))?"
_ASSIGNED = rf"(?i:{_WORD}){_MARK}\s{{0,4}}(?:[=:]|%3[ADad])\s{{0,4}}"
_QUOTED = rf"({_ASSIGNED}(?P<quote>\\{{0,3}}[\"']))(?!\[redacted|\s)(?:(?!(?P=quote))[^\n]){{1,512}}"
_PAIR = rf"({_ASSIGNED}{_MARK})(?!\[redacted)[^\s\"',;&]{{4,}}+"
# Arguments of commands: `--password X`, and the short ones where what follows is no path, port or plain word.
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
# What tokens look like, by text that each of them has in it: to look for that is quick, and most text has none. What
# group 1 has found stays.
_TOKENS: tuple[tuple[tuple[str, ...], str], ...] = (
    (
        ("PRIVATE KEY-----",),
        r"()-----BEGIN [A-Z0-9 ]{0,40}KEY-----(?:(?!-----END)[\s\S]){0,20000}(?:-----END [A-Z0-9 ]{0,40}-----)?",
    ),
    (("sk-", "pk-", "rk-"), r"()\b[spr]k-[A-Za-z0-9_-]{16,}+"),  # OpenAI, Anthropic and those like them
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
    # JSON web tokens. In the first part begins no second one, or each would be followed to the end of the text.
    (("eyJ",), r"()\beyJ(?:(?![_-]eyJ)[A-Za-z0-9_-]){8,}\.[A-Za-z0-9_-]{8,}+\.[A-Za-z0-9_-]*+"),
    (("SG.",), r"()\bSG\.[A-Za-z0-9_-]{16,}+\.[A-Za-z0-9_-]{16,}+"),  # SendGrid
    (("uthorization", "UTHORIZATION"), _MANY_PARTS),
    (("earer ", "asic ", "EARER "), r"((?i:\b(?:Bearer|Basic)) +)[A-Za-z0-9._~+/=-]{8,}+"),
    (("uthorization", "UTHORIZATION"), _AUTHORIZATION),
    (("ookie", "OOKIE"), _COOKIE),
    (("://",), r"((?<=://)[^\s/:@'\"]{0,256}+:)(?!\[redacted)[^\s/'\"]{1,512}(?=@)"),
    # In the address of anything but a page a password may have a slash.
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
# Where `\b` stands above: behind a letter there is another word, unless that letter belongs to an escape or a colour.
_EDGE = (
    r"(?:(?<![A-Za-z0-9])|(?<=\\[nrt])|"
    r"(?<=m)(?:(?<=\x1b\[m)|(?<=\x1b\[[0-9]m)|(?<=\x1b\[[0-9]{2}m)|(?<=\x1b\[[0-9];[0-9]{2}m)))"
)


_OPTION = re.compile(r"--?[A-Za-z][A-Za-z_-]{0,63}")


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    """Return a pattern, compiled when it is first needed."""
    return re.compile(pattern.replace(r"\b", _EDGE))


class Redactor:
    """Take secrets out of text. `environ` is what the process has, `given` what the program is given besides."""

    def __init__(self, given: Mapping[str, str] | None = None, *, environ: Mapping[str, str] | None = None) -> None:
        self._variables = (os.environ if environ is None else environ, given or {})

    @cached_property
    def _known(self) -> Needles:  # looked for where there is text: most events have none
        return needles_for({value for variables in self._variables for value in _values(variables)})

    def text(self, text: str) -> str:
        """Return text without its secrets."""
        if self._known.exact:
            text = strike_out(text, self._known, REDACTED)
        for markers, pattern in _TOKENS:
            if any(marker in text for marker in markers):
                text = _compiled(pattern).sub(rf"\1{REDACTED}", text)
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
            items = list(value)
            return [self._item(before, item) for before, item in zip([None, *items], items, strict=False)]
        return self.text(str(value))

    def _item(self, before: object, item: object) -> Any:  # noqa: ANN401 - any plain data
        """Return an item of a list without its secrets; behind an argument that is called like a secret it is one."""
        if isinstance(item, str) and isinstance(before, str) and _OPTION.fullmatch(before) and is_secret(before):
            return REDACTED
        return self.plain(item)

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
