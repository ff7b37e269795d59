"""The name server's codec: one question in, one answer out. No I/O, and no question is ever passed on.

Theory of operation: a guest learns one fact here, the address of a name inside its jail. Names without a rule do not
exist, and an allowed name has an IPv4 address and nothing else. For other types the answer is empty, and not that the
name does not exist: resolvers ask for A and AAAA side by side, and some drop both then. The same holds for HTTPS (type
65): browsers and curl wait for that answer.

Messages are bounded and have one form: a header, one question without compression, and at most one record, which is
EDNS. The question is echoed as it was written, because resolvers mix cases at random and compare. Numbers and layouts
are those of RFC 1035, RFC 6891 (EDNS) and RFC 6895 (which types are data).
"""

from __future__ import annotations

import ipaddress
import re
import struct
from collections.abc import Callable

from ..core.record import dataclass

MOST_BYTES = 512  # of a message from a guest: a name has at most 255
TTL_S = 5

_HEADER = struct.Struct("!6H")  # number, flags, and how many questions, answers, authorities and additional records
_RECORD = struct.Struct("!HHIH")  # what follows a record's name: type, class, time to live, length of the data
_RESPONSE, _OPCODE, _AUTHORITATIVE = 0x8000, 0x7800, 0x0400
_TRUNCATED, _RECURSION_DESIRED, _RECURSION_AVAILABLE = 0x0200, 0x0100, 0x0080
_NOERROR, _FORMERR, _NXDOMAIN, _NOTIMP, _BADVERS = 0, 1, 3, 4, 16
_A, _OPT, _IN = 1, 41, 1
_TRANSFERS = range(128, 255)  # types that ask for something else than data: transfers, signatures; 255 is ANY
_MOST_NAME_BYTES = 255
_PAYLOAD_BYTES = 1232  # what EDNS says that may be sent to us: less than any path's packet size
_NAME_OF_QUESTION = b"\xc0\x0c"  # a pointer to the first byte after the header
_HOST_LABEL = re.compile(rb"[A-Za-z0-9_-]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class DnsAnswer:
    """Hold a message for the guest, and the name of its question.

    `name` is in lower case, without a dot at its end; empty for an unreadable or a reverse question.
    """

    data: bytes
    name: str = ""
    is_known: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Question:
    section: bytes
    labels: tuple[bytes, ...]
    type: int
    class_: int
    edns_version: int | None


def answer(query: bytes, address_of: Callable[[str], str | None], *, is_stream: bool) -> DnsAnswer | None:
    """Return the answer to a message; None for one that gets no answer: not DNS, or itself an answer.

    `address_of` returns the IPv4 address that a name has in the jail, None for one that is not allowed. It is called at
    most once for each message. Over a stream an answer has its length in front; a message is given without it.
    """
    if len(query) < _HEADER.size or query[2] & 0x80:
        return None
    number, flags, *counts = _HEADER.unpack_from(query)
    if flags & _OPCODE:
        return _answer(number, flags, _NOTIMP, is_stream=is_stream)
    try:
        question = _read(query, flags, counts)
    except ValueError:
        return _answer(number, flags, _FORMERR, is_stream=is_stream)
    if question.edns_version:
        return _answer(number, flags, _BADVERS, question, is_stream=is_stream)
    if question.class_ != _IN or question.type == _OPT or question.type in _TRANSFERS:
        return _answer(number, flags, _NOTIMP, question, is_stream=is_stream)
    if question.labels and question.labels[-1].lower() == b"arpa":
        return _answer(number, flags, _NXDOMAIN, question, is_stream=is_stream)
    name = _text(question.labels)
    address = address_of(name) if _is_host(question.labels) else None
    code = _NXDOMAIN if address is None else _NOERROR
    shown = address if question.type == _A else None
    return _answer(number, flags, code, question, is_stream=is_stream, name=name, address=shown)


def take_message(buffer: bytearray) -> bytes | None:
    """Take the next complete message off a stream's bytes. Raises ValueError for one too long."""
    size = int.from_bytes(buffer[:2], "big")
    if size > MOST_BYTES:
        raise ValueError(f"a message of {size} bytes is longer than {MOST_BYTES}")
    if len(buffer) < 2 + size:
        return None
    message = bytes(buffer[2 : 2 + size])
    del buffer[: 2 + size]
    return message


def _read(query: bytes, flags: int, counts: list[int]) -> _Question:
    """Read all of a message. Raises ValueError for any other form than ours."""
    questions, answers, authorities, additional = counts
    if len(query) > MOST_BYTES or flags & _TRUNCATED:
        raise ValueError("the message is too long, or marked as truncated")
    if questions != 1 or answers or authorities or additional > 1:
        raise ValueError("the message has not exactly one question, or has other records")
    labels, offset = _read_labels(query)
    end = offset + 4
    if end > len(query):
        raise ValueError("the question has no type and class")
    version, end_of_records = _read_edns(query, end) if additional else (None, end)
    if end_of_records != len(query):
        raise ValueError("data follows the message")
    type_, class_ = struct.unpack_from("!2H", query, offset)
    section = query[_HEADER.size : end]
    return _Question(section=section, labels=labels, type=type_, class_=class_, edns_version=version)


def _read_labels(query: bytes) -> tuple[tuple[bytes, ...], int]:
    """Return the labels of the question's name, and where it ends."""
    labels: list[bytes] = []
    offset = _HEADER.size
    while offset < len(query):
        size = query[offset]
        offset += 1
        if not size:
            return tuple(labels), offset
        if size > 63:
            raise ValueError("a pointer, or an unknown kind of label")
        if offset + size - _HEADER.size >= _MOST_NAME_BYTES:
            raise ValueError("the name is too long")
        labels.append(query[offset : offset + size])
        offset += size
    raise ValueError("the name has no end")


def _read_edns(query: bytes, offset: int) -> tuple[int, int]:
    """Return the version of EDNS that the one additional record is about, and where it ends."""
    start = offset + 1
    if start + _RECORD.size > len(query) or query[offset]:
        raise ValueError("no record of EDNS: its name is not the root")
    type_, _, meaning, size = _RECORD.unpack_from(query, start)
    if type_ != _OPT:
        raise ValueError("no record of EDNS")
    return meaning >> 16 & 0xFF, start + _RECORD.size + size


def _is_host(labels: tuple[bytes, ...]) -> bool:
    """Tell whether a name can be that of a host; the approver is not asked about others."""
    return bool(labels) and all(map(_HOST_LABEL.fullmatch, labels))


def _text(labels: tuple[bytes, ...]) -> str:
    """Return a name as text, with other characters escaped as in zone files."""
    return ".".join("".join(map(_shown, label.lower())) for label in labels) or "."


def _shown(byte: int) -> str:
    return chr(byte) if 0x21 <= byte <= 0x7E and byte not in b".\\" else f"\\{byte:03d}"


def _answer(
    number: int, flags: int, code: int, question: _Question | None = None, *, is_stream: bool, name: str = "",
    address: str | None = None,
) -> DnsAnswer:  # fmt: skip
    """Write a message. Its flags keep those of the question, and claim recursion: resolvers complain without it."""
    query_flags = flags & (_OPCODE | _RECURSION_DESIRED)
    answer_flags = query_flags | _RESPONSE | _AUTHORITATIVE | _RECURSION_AVAILABLE | (code & 0xF)
    has_edns = question is not None and question.edns_version is not None
    header = _HEADER.pack(number, answer_flags, question is not None, address is not None, 0, has_edns)
    records = b""
    if address is not None:
        data = ipaddress.IPv4Address(address).packed
        records += _NAME_OF_QUESTION + _RECORD.pack(_A, _IN, TTL_S, len(data)) + data
    if has_edns:
        records += b"\0" + _RECORD.pack(_OPT, _PAYLOAD_BYTES, code >> 4 << 24, 0)
    message = header + (question.section if question is not None else b"") + records
    length = len(message).to_bytes(2, "big") if is_stream else b""
    return DnsAnswer(data=length + message, name=name, is_known=bool(name) and code == _NOERROR)
