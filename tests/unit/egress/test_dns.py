"""What the name server answers, and that no message does more than get an answer or none."""

import struct
from typing import NamedTuple

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cloche.egress.dns import MOST_BYTES, TTL_S, DnsAnswer, answer, take_message

KNOWN = {"good.example": "198.18.0.7", "_service.good.example": "198.18.0.8"}
NOERROR, FORMERR, NXDOMAIN, NOTIMP = 0, 1, 3, 4
A, PTR, AAAA, OPT = 1, 12, 28, 41
ASKED_RECURSION = 0x0100
EDNS = b"\0" + struct.pack("!HHIH", OPT, 4096, 0x8000, 0)
COOKIE = b"\0" + struct.pack("!HHIH", OPT, 4096, 0, 12) + struct.pack("!HH", 10, 8) + b"12345678"


def labels(name: str) -> bytes:
    """Write a name."""
    return b"".join(bytes([len(one)]) + one.encode() for one in name.split(".") if one) + b"\0"


def ask(name: str = "good.example", type_: int = A, class_: int = 1, **changed: object) -> bytes:
    """Write a question; `changed` replaces what is usual."""
    usual = {"flags": ASKED_RECURSION, "counts": (1, 0, 0, 0), "raw_name": labels(name), "rest": b"", **changed}
    assert isinstance(usual["counts"], tuple)
    assert isinstance(usual["raw_name"], bytes)
    assert isinstance(usual["rest"], bytes)
    header = struct.pack("!6H", 0x1234, usual["flags"], *usual["counts"])
    return header + usual["raw_name"] + struct.pack("!2H", type_, class_) + usual["rest"]


class Read(NamedTuple):
    """What stands in an answer."""

    code: int
    flags: int
    question: bytes
    counts: tuple[int, ...]
    records: bytes


def read(found: DnsAnswer | None, question_bytes: int) -> Read:
    """Read an answer to our number."""
    assert found is not None
    number, flags, *counts = struct.unpack_from("!6H", found.data)
    assert number == 0x1234
    rest = found.data[12:]
    size = question_bytes if counts[0] else 0
    return Read(flags & 0xF, flags & ~0xF, rest[:size], tuple(counts), rest[size:])


def answered(query: bytes) -> tuple[DnsAnswer | None, list[str]]:
    """Answer over UDP; return also which names were asked for."""
    asked: list[str] = []

    def address_of(name: str) -> str | None:
        asked.append(name)
        return KNOWN.get(name)

    return answer(query, address_of, is_stream=False), asked


def test_a_known_name_has_its_address_and_keeps_the_case_of_the_question() -> None:
    """One record with the address, for a moment; the question is echoed as it was written, the name told once."""
    query = ask("gOOd.exAMPle")
    found, asked = answered(query)
    record = b"\xc0\x0c" + struct.pack("!HHIH", A, 1, TTL_S, 4) + bytes([198, 18, 0, 7])
    assert read(found, len(query) - 12) == Read(NOERROR, 0x8580, query[12:], (1, 1, 0, 0), record)
    assert asked == ["good.example"]
    assert found == DnsAnswer(data=found.data if found else b"", name="good.example", is_known=True)


@pytest.mark.parametrize("type_", [AAAA, 2, 5, 6, 15, 16, 33, 64, 65, 255, 65535])
def test_other_types_of_a_known_name_are_empty(type_: int) -> None:
    """Nothing stands in the answer, and the name exists: resolvers that ask for A beside it keep that answer."""
    found, _ = answered(ask(type_=type_))
    assert read(found, 18)[0::3] == (NOERROR, (1, 0, 0, 0))
    assert found is not None
    assert found.is_known


@pytest.mark.parametrize(
    ("query", "code", "name", "asked"),
    [
        (ask("evil.example"), NXDOMAIN, "evil.example", ["evil.example"]),
        (ask("evil.example", AAAA), NXDOMAIN, "evil.example", ["evil.example"]),
        (ask("evil.example", 255), NXDOMAIN, "evil.example", ["evil.example"]),
        (ask("aGVsbG8.good.example", 16), NXDOMAIN, "agvsbg8.good.example", ["agvsbg8.good.example"]),
        # Names that cannot be one of a host are told to nobody; a dot in a label makes no other name.
        (ask(raw_name=b"\x0cgood.example\0"), NXDOMAIN, "good\\046example", []),
        (ask(raw_name=b"\x05good\0\x07example\0"), NXDOMAIN, "good\\000.example", []),
        (ask(raw_name=b"\x05g\xf6od \x07example\0"), NXDOMAIN, "g\\246od\\032.example", []),
        (ask(""), NXDOMAIN, ".", []),
        (ask("7.0.18.198.in-addr.arpa", PTR), NXDOMAIN, "", []),
        (ask("7.0.18.198.in-addr.ARPA"), NXDOMAIN, "", []),
        (ask("version.bind", 16, 3), NOTIMP, "", []),
        (ask(class_=255), NOTIMP, "", []),
        (ask(type_=OPT), NOTIMP, "", []),
        (ask(type_=250), NOTIMP, "", []),
        (ask(type_=251), NOTIMP, "", []),
        (ask(type_=252), NOTIMP, "", []),
        (ask(flags=0x0900), NOTIMP, "", []),
        (ask(flags=0x2000), NOTIMP, "", []),
        (ask(flags=0x2800), NOTIMP, "", []),
        (ask(flags=0x0300), FORMERR, "", []),
        (ask(counts=(0, 0, 0, 0)), FORMERR, "", []),
        (ask(counts=(2, 0, 0, 0), rest=labels("evil.example") + b"\0\1\0\1"), FORMERR, "", []),
        (ask(counts=(65535, 0, 0, 0)), FORMERR, "", []),
        (ask(counts=(1, 1, 0, 0)), FORMERR, "", []),
        (ask(counts=(1, 0, 1, 0)), FORMERR, "", []),
        (ask(counts=(1, 0, 0, 2), rest=EDNS + EDNS), FORMERR, "", []),
        (ask(counts=(1, 0, 0, 1)), FORMERR, "", []),
        (ask(counts=(1, 0, 0, 1), rest=EDNS[:-1]), FORMERR, "", []),
        (ask(counts=(1, 0, 0, 1), rest=COOKIE[:-1]), FORMERR, "", []),
        (ask(counts=(1, 0, 0, 1), rest=EDNS + b"x"), FORMERR, "", []),
        (ask(counts=(1, 0, 0, 1), rest=b"\1a" + EDNS), FORMERR, "", []),
        (ask(counts=(1, 0, 0, 1), rest=b"\0" + struct.pack("!HHIH", A, 1, 0, 0)), FORMERR, "", []),
        (ask(rest=b"x"), FORMERR, "", []),
        (ask()[:-1], FORMERR, "", []),
        (ask()[:12], FORMERR, "", []),
        (ask(raw_name=b"\xc0\x0c"), FORMERR, "", []),
        (ask(raw_name=b"\4good\xc0\x0c"), FORMERR, "", []),
        (ask(raw_name=b"\x40" + b"a" * 64 + b"\0"), FORMERR, "", []),
        (ask(raw_name=b"\x80good\0"), FORMERR, "", []),
        (ask(raw_name=b"\x3fgood"), FORMERR, "", []),
        (ask(".".join(["a" * 63] * 4)), FORMERR, "", []),
        (ask(".".join(["a"] * 127)), NXDOMAIN, ".".join(["a"] * 127), [".".join(["a"] * 127)]),
        (ask(".".join(["a"] * 128)), FORMERR, "", []),
        (ask(counts=(1, 0, 0, 1), rest=b"\0" + struct.pack("!HHIH", OPT, 4096, 0, 500) + b"0" * 500), FORMERR, "", []),
    ],
)
def test_what_else_is_asked_has_a_code_and_no_record(query: bytes, code: int, name: str, asked: list[str]) -> None:
    """Unknown names do not exist, and no other form of a message is read as a question."""
    found, names = answered(query)
    assert found is not None
    reply = read(found, len(query) - 12)
    assert (reply.code, reply.counts[1:3], reply.records) == (code, (0, 0), b"")
    assert (found.name, found.is_known, names) == (name, False, asked)


@pytest.mark.parametrize("query", [b"", ask()[:11], ask(flags=0x8180), b"\0" * 2 + b"\xff" * 10])
def test_what_is_no_question_has_no_answer(query: bytes) -> None:
    """Neither a piece of a header nor an answer is answered: two servers would answer each other for ever."""
    assert answered(query) == (None, [])


@pytest.mark.parametrize(("rest", "extended"), [(EDNS, 0), (COOKIE, 0), (EDNS[:6] + b"\1" + EDNS[7:], 1)])
def test_edns_is_answered(rest: bytes, extended: int) -> None:
    """A record of EDNS has one in the answer; a later version of it than the first is said to be unknown."""
    found, _ = answered(ask(counts=(1, 0, 0, 1), rest=rest))
    reply = read(found, 18)
    assert (reply.code, reply.counts) == (NOERROR, (1, int(not extended), 0, 1))
    assert reply.records[-11:] == b"\0" + struct.pack("!HHBBHH", OPT, 1232, extended, 0, 0, 0)


def test_messages_of_a_stream_have_their_length_in_front() -> None:
    """Several come off in turn, in whatever pieces; the answer is that of a datagram behind its length."""
    query, buffer = ask(), bytearray()
    sent = 2 * (len(query).to_bytes(2, "big") + query)
    taken = []
    for byte in sent:
        buffer.append(byte)
        while (message := take_message(buffer)) is not None:
            taken.append(message)
    assert (taken, buffer) == ([query, query], b"")
    found = answer(query, KNOWN.get, is_stream=True)
    datagram = answer(query, KNOWN.get, is_stream=False)
    assert found is not None
    assert datagram is not None
    assert found.data == len(datagram.data).to_bytes(2, "big") + datagram.data
    with pytest.raises(ValueError, match="longer than"):
        take_message(bytearray((MOST_BYTES + 1).to_bytes(2, "big")))


@given(
    query=st.binary(max_size=600)
    | st.builds(
        lambda flags, counts, rest: struct.pack("!6H", 0x1234, flags, *counts) + rest,
        st.integers(0, 0xFFFF),
        st.tuples(*[st.integers(0, 2)] * 4),
        st.binary(max_size=80) | st.builds(lambda rest: labels("good.example") + rest, st.binary(max_size=40)),
    )
)
@example(ask(raw_name=b"\1a" * 255))
def test_any_message_has_one_short_answer_or_none(query: bytes) -> None:
    """Whatever a guest sends raises nothing, names at most one name, and has an answer that fits every datagram."""
    found, asked = answered(query)
    assert len(asked) <= 1
    if found is not None:
        assert found.data[:2] == query[:2]
        assert found.data[2] & 0x80
        assert len(found.data) <= 300
        assert set(asked) <= {found.name}
