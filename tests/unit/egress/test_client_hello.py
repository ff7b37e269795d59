"""Which server a TLS connection asks for, and that nothing but that name, or a refusal, comes of any bytes."""

import ssl
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloche.egress.client_hello import MOST_BYTES, MOST_HELLO_BYTES, MOST_RECORDS, NotTls, read_server_name
from cloche.egress.errors import Refused


def sent_by_openssl(name: str | None, newest: ssl.TLSVersion = ssl.TLSVersion.TLSv1_3) -> bytes:
    """Return what a real client sends first."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.maximum_version = newest
    context.set_alpn_protocols(["h2", "http/1.1"])
    sent = ssl.MemoryBIO()
    with pytest.raises(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), sent, server_hostname=name).do_handshake()
    return sent.read()


def block(size: int, content: bytes) -> bytes:
    """Put a length of so many bytes in front."""
    return len(content).to_bytes(size, "big") + content


def extension(kind: int, content: bytes) -> bytes:
    """Write an extension."""
    return kind.to_bytes(2, "big") + block(2, content)


def server_name(*names: bytes, kind: int = 0) -> bytes:
    """Write the extension with names."""
    return extension(0, block(2, b"".join(bytes([kind]) + block(2, name) for name in names)))


def hello(extensions: bytes | None = None, *, version: bytes = b"\3\3", behind: bytes = b"", kind: int = 1) -> bytes:
    """Write the message, by hand."""
    content = server_name(b"good.example") if extensions is None else extensions
    body = version + bytes(32) + block(1, b"") + block(2, b"\x13\x01") + block(1, b"\0") + block(2, content) + behind
    return bytes([kind]) + block(3, body)


def record(content: bytes, kind: int = 22, version: bytes = b"\3\1") -> bytes:
    """Write a record."""
    return bytes([kind]) + version + block(2, content)


def records(message: bytes, sizes: Sequence[int]) -> bytes:
    """Write a message in records of these sizes, the rest in a last one."""
    written, at = b"", 0
    for size in sizes:
        written += record(message[at : at + size]) if message[at : at + size] else b""
        at += size
    return written + (record(message[at:]) if message[at:] else b"")


def words(value: bytes | str) -> str:
    """Name a row by what comes of it: some hellos are long."""
    return value[:60] if isinstance(value, str) else ""


HELLO = hello()
GREASE = extension(0x0A0A, b"") + extension(0x1A1A, b"\0")
ECH = extension(0xFE0D, bytes(200))


@pytest.mark.parametrize("newest", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_a_real_client_asks_for_its_server(newest: ssl.TLSVersion) -> None:
    """The name is there with the last byte of the hello and not before, in lower case, whatever follows."""
    data = sent_by_openssl("API.Good.Example", newest)
    assert [read_server_name(data[:size]) for size in range(len(data))] == [None] * len(data)
    assert read_server_name(data) == read_server_name(data + record(b"x" * 100, kind=23)) == "api.good.example"


@given(sizes=st.lists(st.integers(1, 60), max_size=MOST_RECORDS - 1))
def test_a_hello_may_come_in_several_records(sizes: list[int]) -> None:
    """Wherever it is cut, also in its header, the name is the same."""
    assert read_server_name(records(HELLO, sizes)) == "good.example"


@pytest.mark.parametrize(
    ("data", "name"),
    [
        (record(hello(GREASE + server_name(b"good.example") + ECH)), "good.example"),
        (record(hello(ECH + server_name(b"_x-1.good.example"))), "_x-1.good.example"),
        (record(hello(), version=b"\3\3"), "good.example"),
        (record(hello(server_name(b"localhost"))), "localhost"),
        (record(hello(server_name(b"1.2.3.4.example"))), "1.2.3.4.example"),
        (record(hello(server_name(b"0xname.example0"))), "0xname.example0"),
        (record(hello(server_name(b"a" * 63 + b".example") + extension(21, bytes(15_000)))), "a" * 63 + ".example"),
    ],
    ids=words,
)
def test_the_name_outside_counts(data: bytes, name: str) -> None:
    """Extensions that nobody knows, or that hide another hello, are no reason to refuse."""
    assert read_server_name(data) == name


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (record(sent_by_openssl("10.0.0.5")[5:]), "names no server"),
        (record(sent_by_openssl(None)[5:]), "names no server"),
        (record(hello(b"")), "names no server"),
        (record(b"\1" + block(3, HELLO[4:45])), "names no server"),
        (record(hello(extension(0, b""))), "names no server"),
        (record(hello(GREASE + ECH)), "names no server"),
        (record(hello(server_name(b"good.example", b"evil.example"))), "several servers"),
        (record(hello(server_name(b"good.example") * 2)), "several servers"),
        (record(hello(server_name(b"good.example") + server_name(b"evil.example"))), "several servers"),
        (record(hello(server_name(b"good.example", kind=1))), "not a host name"),
        (record(hello(server_name(b"good.example."))), "not a host name"),
        (record(hello(server_name(b""))), "not a host name"),
        (record(hello(server_name(b"good..example"))), "not a host name"),
        (record(hello(server_name(b".good.example"))), "not a host name"),
        (record(hello(server_name(b"*.good.example"))), "not a host name"),
        (record(hello(server_name(b"good.example\0.evil.example"))), "not a host name"),
        (record(hello(server_name(b"good.example\n"))), "not a host name"),
        (record(hello(server_name(b"good.example:443"))), "not a host name"),
        (record(hello(server_name("göod.example".encode()))), "not a host name"),
        (record(hello(server_name(b"a" * 64 + b".example"))), "not a host name"),
        (record(hello(server_name(b".".join([b"a" * 63] * 4)))), "not a host name"),
        (record(hello(server_name(b"10.0.0.5"))), "not a host name"),
        (record(hello(server_name(b"0x0a000005"))), "not a host name"),
        (record(hello(server_name(b"10.0x5"))), "not a host name"),
        (record(hello(server_name(b"167772165"))), "not a host name"),
        (record(hello(server_name(b"good.0"))), "not a host name"),
        (record(hello(server_name(b"::1"))), "not a host name"),
        (record(hello(server_name(b"[::1]"))), "not a host name"),
        (record(hello(extension(0, b"\0"))), "ClientHello cannot be parsed"),
        (record(hello(extension(0, block(2, b"")))), "ClientHello cannot be parsed"),
        (record(hello(extension(0, block(2, b"\0\0\4good") + b"x"))), "ClientHello cannot be parsed"),
        (record(hello(extension(0, block(2, b"\0\0\5good")))), "ClientHello cannot be parsed"),
        (record(hello(server_name(b"good.example") + extension(5, b"") * 2)), "ClientHello cannot be parsed"),
        (record(hello(server_name(b"good.example") + b"\0\5\0\1")), "ClientHello cannot be parsed"),
        (record(hello(behind=b"x")), "ClientHello cannot be parsed"),
        (record(hello(version=b"\4\0")), "ClientHello cannot be parsed"),
        (record(hello(kind=2)), "ClientHello cannot be parsed"),
        (record(b"\1\0\0\0"), "ClientHello cannot be parsed"),
        (record(HELLO + b"\x0b"), "ClientHello cannot be parsed"),
        (record(HELLO + HELLO), "ClientHello cannot be parsed"),
        (record(HELLO, version=b"\4\1"), "ClientHello cannot be parsed"),
        (record(HELLO, version=b"\0\1"), "ClientHello cannot be parsed"),
        (b"\x16\3\1\0\0" + record(HELLO), "ClientHello cannot be parsed"),
        (record(HELLO[:20]) + record(b"") + record(HELLO[20:]), "ClientHello cannot be parsed"),
        (record(HELLO[:20]) + record(b"\1", kind=20) + record(HELLO[20:]), "ClientHello cannot be parsed"),
        (record(HELLO[:20]) + record(b"\1\0", kind=21) + record(HELLO[20:]), "ClientHello cannot be parsed"),
        (record(HELLO[:20]) + record(b"x", kind=23), "ClientHello cannot be parsed"),
        (record(HELLO[:20]) + b"GET / HTTP/1.1", "ClientHello cannot be parsed"),
        (record(b"\1\0", kind=21) + record(HELLO), "ClientHello cannot be parsed"),
        (record(b"\1", kind=20) + record(HELLO), "ClientHello cannot be parsed"),
        (b"\x17\3", "ClientHello cannot be parsed"),
        (b"\x16\2", "ClientHello cannot be parsed"),
        (record(b"\1\xff\xff\xff"), "larger than"),
        (record(b"\1" + (MOST_HELLO_BYTES - 3).to_bytes(3, "big")), "larger than"),
        (records(HELLO, [1] * MOST_RECORDS), "larger than"),
        (b"\x80\x2e\1\0\2\0\x15\0\0\0\x10", "SSL 2.0"),
        (b"\x80\x2e\1\3\1", "SSL 2.0"),
    ],
    ids=words,
)
def test_what_a_server_might_read_in_another_way_is_refused(data: bytes, reason: str) -> None:
    """A hello that names none, several, or no host, or that has another form than the standard's, is not passed on."""
    with pytest.raises(Refused, match=reason):
        read_server_name(data)


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n\r\n", b"SSH-2.0-OpenSSH_9.6\r\n", b"\0\0\0\x08\x04\xd2\x16\x2f", b"\x15\1", b"\x17GET",
        b"\x80\0\2", b"\xff\xff\1GET", b"\x90\1\1\3\5",
    ],
)  # fmt: skip
def test_other_protocols_are_none_of_it(data: bytes) -> None:
    """What does not begin as TLS does is told apart from what does and is malformed."""
    with pytest.raises(NotTls):
        read_server_name(data)


def follow(data: bytes) -> str | type[Exception] | None:
    """Read a connection byte by byte, as far as anybody would."""
    for size in range(len(data) + 1):
        try:
            name = read_server_name(data[:size])
        except (Refused, NotTls) as error:
            return type(error)
        if name is not None:
            return name
    assert len(data) <= MOST_BYTES
    return None


@given(data=st.binary(max_size=300) | st.binary(max_size=300).map(lambda data: record(b"\1" + block(3, data))))
def test_any_bytes_are_a_name_or_declared_errors(data: bytes) -> None:
    """Nothing else is ever raised, and what is not decided is short."""
    assert follow(data) in {None, Refused, NotTls} or isinstance(follow(data), str)


@given(at=st.integers(0, len(record(HELLO)) - 1), byte=st.integers(0, 255))
def test_no_changed_byte_gives_another_name_unseen(at: int, byte: int) -> None:
    """Of a hello with one byte changed comes the name that stands in it, or none."""
    data = bytearray(record(HELLO))
    data[at] = byte
    found = follow(bytes(data))
    assert not isinstance(found, str) or found.encode() in bytes(data).lower()
