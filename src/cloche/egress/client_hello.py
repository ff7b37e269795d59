"""The server name of a TLS connection, and the protocols that it offers, read from the client's first message. No I/O.

Theory of operation: the client's first message, the ClientHello, is not encrypted and has the server's name in its
extension `server_name` (RFC 8446 section 4.1.2, RFC 6066 section 3). It comes in one or several records of one or
several segments. No byte is skipped or guessed: input that a server might read in another way is refused, as are other
records before the hello's end, records without content, and several names. Extensions are known by their numbers alone:
reserved values (GREASE, RFC 8701) and an encrypted inner hello (ECH) pass, and the outer name counts, because every
browser sends something of that kind.
"""

from __future__ import annotations

import re

from .errors import Refused

MOST_HELLO_BYTES = 16 << 10  # with the header of the message
MOST_RECORDS = 32  # a hello in more pieces is there to keep us busy

_RECORD_HEADER_BYTES, _MESSAGE_HEADER_BYTES, _RANDOM_BYTES = 5, 4, 32
MOST_BYTES = MOST_HELLO_BYTES + MOST_RECORDS * _RECORD_HEADER_BYTES  # that a caller has to keep

_HANDSHAKE, _RECORDS = 22, range(20, 25)
_MAJOR_VERSION = 3  # of SSL 3.0 and of each TLS
_CLIENT_HELLO = 1
_SERVER_NAME, _HOST_NAME, _PROTOCOLS = 0, 0, 16
_OLD_VERSIONS = (b"\x00\x02", b"\x03\x00", b"\x03\x01", b"\x03\x02", b"\x03\x03", b"\x03\x04")
_NAME = re.compile(rb"(?=.{1,253}\Z)[A-Za-z0-9_-]{1,63}(?:\.[A-Za-z0-9_-]{1,63})*")
# What C libraries take for an address, in any of their spellings: the last label says so.
_ADDRESS = re.compile(r"(?:.*\.)?(?:[0-9]+|0x[0-9a-f]*)")

_MALFORMED = "the connection begins like TLS, but its ClientHello cannot be parsed; use a common TLS library"
_TOO_LARGE = f"the TLS ClientHello is larger than {MOST_HELLO_BYTES} bytes, or in more than {MOST_RECORDS} records"
_TOO_OLD = "the connection begins with the hello of SSL 2.0; use TLS 1.2 or newer"
_NO_NAME = "the TLS ClientHello names no server; connect by name, with a client that sends SNI"
_SEVERAL_NAMES = "the TLS ClientHello names several servers; name exactly one"
_NO_HOST = "the TLS ClientHello names a server that is not a host name; connect by name, without a dot at its end"


class NotTls(Exception):
    """Report that the first bytes of a connection are no record of TLS."""


class NoServerName(Refused):
    """Report a hello that names no server: what connects to an address does so."""


def read_server_name(data: bytes) -> str | None:
    """Return the server's name, in lower case, from all bytes of a connection so far; None while more are needed.

    Raises NotTls for bytes that do not begin a TLS connection, and Refused for a hello that is not carried. Each is
    raised at the first byte that shows it, and at most `MOST_BYTES` are looked at.
    """
    hello = _read_records(data)
    return None if hello is None else _read_name(_extensions(_Reader(hello)))


def read_protocols(data: bytes) -> list[str]:
    """Return the protocols that a complete hello offers (ALPN, RFC 7301), the client's first one first.

    Raises Refused for an extension that servers might read in different ways.
    """
    hello = _read_records(data)
    extension = _extensions(_Reader(hello or b"")).get(_PROTOCOLS)
    if extension is None:
        return []
    protocols, block = [], extension.block(2)
    while block:
        protocols.append(block.take(block.number(1)).decode("latin-1"))
    if extension or not all(protocols):
        raise Refused(_MALFORMED)
    return protocols


def _read_records(data: bytes) -> bytes | None:
    """Return the body of the hello, once it is complete."""
    hello, offset = bytearray(), 0
    for _ in range(MOST_RECORDS):
        if not _is_handshake(data[offset : offset + _RECORD_HEADER_BYTES], is_first=not offset):
            return None
        size = int.from_bytes(data[offset + 3 : offset + _RECORD_HEADER_BYTES], "big")
        offset += _RECORD_HEADER_BYTES
        brought = len(hello) + size
        hello += data[offset : offset + size]
        offset += size
        if not size or bytes(hello[:1]) not in (b"", bytes([_CLIENT_HELLO])):
            raise Refused(_MALFORMED)
        if len(hello) >= _MESSAGE_HEADER_BYTES:
            message_bytes = _MESSAGE_HEADER_BYTES + int.from_bytes(hello[1:_MESSAGE_HEADER_BYTES], "big")
            if message_bytes > MOST_HELLO_BYTES:
                raise Refused(_TOO_LARGE)
            if brought > message_bytes:  # another message in the hello's last record
                raise Refused(_MALFORMED)
            if len(hello) == message_bytes:
                return bytes(hello[_MESSAGE_HEADER_BYTES:])
        if offset > len(data):
            return None
    raise Refused(_TOO_LARGE)


def _is_handshake(header: bytes, *, is_first: bool) -> bool:
    """Say whether a record's header is there and is that of a handshake; False while it is not complete."""
    if not header:
        return False
    if header[0] != _HANDSHAKE and is_first:
        return _refuse_other(header)
    if header[0] != _HANDSHAKE or header[1:2] not in (b"", bytes([_MAJOR_VERSION])):
        raise Refused(_MALFORMED)
    return len(header) == _RECORD_HEADER_BYTES


def _refuse_other(header: bytes) -> bool:
    """Refuse other beginnings that a TLS server might accept; False while more bytes are needed."""
    if header[0] in _RECORDS and header[1:2] in (b"", bytes([_MAJOR_VERSION])):
        if len(header) > 1:
            raise Refused(_MALFORMED)
        return False
    if header[0] & 0x80 and header[2:3] in (b"", bytes([_CLIENT_HELLO])):
        if header[3:] in _OLD_VERSIONS:
            raise Refused(_TOO_OLD)
        if any(version.startswith(header[3:]) for version in _OLD_VERSIONS):
            return False
    raise NotTls


class _Reader:
    """Take numbers and blocks off a message, and no byte that is not there."""

    def __init__(self, data: bytes):
        self._data, self._at = data, 0

    def __bool__(self) -> bool:
        return self._at < len(self._data)

    def take(self, size: int) -> bytes:
        """Return the next bytes."""
        if self._at + size > len(self._data):
            raise Refused(_MALFORMED)
        self._at += size
        return self._data[self._at - size : self._at]

    def number(self, size: int) -> int:
        """Return a number of so many bytes."""
        return int.from_bytes(self.take(size), "big")

    def block(self, size_of_length: int) -> _Reader:
        """Return what follows a length of so many bytes."""
        return _Reader(self.take(self.number(size_of_length)))


def _extensions(hello: _Reader) -> dict[int, _Reader]:
    """Return the extensions of a hello by their numbers; refuse a form other than that of RFC 8446."""
    if hello.number(1) != _MAJOR_VERSION:
        raise Refused(_MALFORMED)
    hello.take(1 + _RANDOM_BYTES)
    hello.block(1)  # the session that it goes on with
    hello.block(2)  # ciphers
    hello.block(1)  # compressions
    extensions: dict[int, _Reader] = {}
    block = hello.block(2) if hello else hello
    while block:
        kind, content = block.number(2), block.block(2)
        if kind in extensions:
            raise Refused(_SEVERAL_NAMES if kind == _SERVER_NAME else _MALFORMED)
        extensions[kind] = content
    if hello:
        raise Refused(_MALFORMED)
    return extensions


def _read_name(extensions: dict[int, _Reader]) -> str:
    """Return the one name of a host that the extension `server_name` holds."""
    extension = extensions.get(_SERVER_NAME)
    if not extension:
        raise NoServerName(_NO_NAME)
    names = extension.block(2)
    if extension or not names:
        raise Refused(_MALFORMED)
    kind, name = names.number(1), names.take(names.number(2))
    if names:
        raise Refused(_SEVERAL_NAMES)
    host = name.decode("ascii", "replace").lower()
    if kind != _HOST_NAME or not _NAME.fullmatch(name) or _ADDRESS.fullmatch(host):
        raise Refused(_NO_HOST)
    return host
