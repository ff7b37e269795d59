"""Headers that requests to a host get on their way out, in place of what the program has sent. Pure.

A host is a name, or `*.` and a name for all below it. The exact one counts, else the longest wildcard; sets of headers
are not merged.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from .errors import InvalidRequest
from .escape import escape_name
from .hosts import normalize_host, parse_address
from .record import dataclass, field

MOST_HOSTS, MOST_HEADERS, MOST_NAME, MOST_VALUE = 64, 20, 64, 2048
MOST_BYTES = 32 << 10  # of all headers of a sandbox, which are sent to its egress process in one message
Headers: TypeAlias = tuple[tuple[bytes, bytes], ...]
_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_VALUE = re.compile(r"[\x20-\x7e\x80-\xff\t]*")
# About the connection or the length of a body, or what else a server could read in two ways.
_NEVER = re.compile(
    r"connection|content-length|expect|host|keep-alive|proxy-.*|te|trailer|transfer-encoding|upgrade|:.*", re.IGNORECASE
)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostHeaders:
    """Hold the headers for one host, or with `is_wildcard` for all names below it."""

    host: str
    is_wildcard: bool = False
    headers: Headers = field(repr=False)

    @property
    def text(self) -> str:
        """Return the host as it is written."""
        return f"*.{self.host}" if self.is_wildcard else self.host

    def as_wire(self) -> dict[str, str]:
        """Return the headers as `parse_headers` takes them."""
        return {name.decode("ascii"): value.decode("latin-1") for name, value in self.headers}


def parse_headers(given: Mapping[str, Mapping[str, str]]) -> tuple[HostHeaders, ...]:
    """Read headers by host. Raises InvalidRequest for the first wrong one."""
    if len(given) > MOST_HOSTS:
        raise InvalidRequest(f"headers: {len(given)} hosts; at most {MOST_HOSTS} have headers")
    rows = tuple(_row(host, headers) for host, headers in given.items())
    size = sum(len(name) + len(value) for row in rows for name, value in row.headers)
    if size > MOST_BYTES:
        raise InvalidRequest(f"headers: they have {size} bytes together; at most {MOST_BYTES} are taken")
    return rows


def _row(text: str, headers: Mapping[str, str]) -> HostHeaders:
    name = text.removeprefix("*.")
    try:
        if parse_address(name) is not None:
            raise ValueError("it is an address")
        host = normalize_host(name)
    except ValueError as error:
        raise InvalidRequest(f"headers: {escape_name(text[:200])} is no host name: {error}") from error
    if len(headers) > MOST_HEADERS:
        raise InvalidRequest(f"headers: {len(headers)} headers for {text}; at most {MOST_HEADERS}")
    read = tuple(_header(name, value) for name, value in headers.items())
    return HostHeaders(host=host, is_wildcard=text.startswith("*."), headers=read)


def _header(name: str, value: str) -> tuple[bytes, bytes]:
    if len(name) > MOST_NAME or _TOKEN.fullmatch(name) is None:
        raise InvalidRequest(f"headers: {escape_name(name[:100])} is no name of a header of {MOST_NAME} characters")
    if _NEVER.fullmatch(name):
        raise InvalidRequest(f"headers: {name} cannot be set: it is about the connection or the length of the request")
    if len(value) > MOST_VALUE or _VALUE.fullmatch(value) is None or value != value.strip():
        raise InvalidRequest(
            f"headers: the value of {name} has control characters, blanks at its ends, or more than {MOST_VALUE} "
            "characters"
        )
    return name.encode("ascii"), value.encode("latin-1")


def headers_for(rows: Sequence[HostHeaders], host: str) -> Headers:
    """Return the headers for a host's requests."""
    matching = [row for row in rows if _covers(row, host)]
    chosen = max(matching, key=lambda row: (not row.is_wildcard, len(row.host)), default=None)
    return chosen.headers if chosen is not None else ()


def _covers(row: HostHeaders, host: str) -> bool:
    return host.endswith(f".{row.host}") if row.is_wildcard else host == row.host
