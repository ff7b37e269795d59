"""TLS opened by the egress process: a sandbox's own authority, and a stream of bytes inside TLS.

The keys are made here and are in this process's memory alone. A guest sees a certificate of its sandbox's authority;
the host is verified as any client does, with the authorities that the operator trusts.
"""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID

from .http import Turn
from .stream import Stream, Turns, shared_read_size

READ_BYTES = 256 << 10
HEADER_BYTES = 5  # of a record, which ends with its length
RECORD_COST_BYTES = 256  # of what is parsed, which take as long as a record: so 16 of them are opened at once
EARLIER, LIFE = timedelta(days=1), timedelta(days=30)  # of a certificate; a sandbox lives shorter
HTTP_1, HTTP_2 = "http/1.1", "h2"
NAME = "Cloche sandbox authority"


def host_context(authorities: str) -> ssl.SSLContext:
    """Return what verifies hosts: by these certificates in PEM, or those of this machine where there are none."""
    context = ssl.create_default_context(cadata=authorities or None)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context


class Authority:
    """Be the certificate authority of one sandbox; `certificate` is the text in PEM that its guest trusts."""

    def __init__(self) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, NAME)])
        usage = x509.KeyUsage(
            digital_signature=False, content_commitment=False, key_encipherment=False, data_encipherment=False,
            key_agreement=False, key_cert_sign=True, crl_sign=True, encipher_only=False, decipher_only=False,
        )  # fmt: skip
        own = self._builder(self._name, self._key).add_extension(usage, critical=True)
        own = own.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        signed = own.sign(self._key, hashes.SHA256())
        self.certificate = signed.public_bytes(serialization.Encoding.PEM).decode("ascii")
        self._chains: dict[str, bytes] = {}
        self._contexts: dict[tuple[str, str], ssl.SSLContext] = {}

    def guest_context(self, host: str, protocol: str = HTTP_1) -> ssl.SSLContext:
        """Return what serves a guest in the place of a host, by one protocol; none is named where it is empty."""
        if host not in self._chains:
            self._chains[host] = self._chain(host)
        if (host, protocol) not in self._contexts:
            self._contexts[host, protocol] = _server_context(self._chains[host], protocol)
        return self._contexts[host, protocol]

    def _chain(self, host: str) -> bytes:
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, host[:64])])
        builder = (
            self._builder(name, key)
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(host)]), critical=False)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        )
        plain = serialization.NoEncryption()
        private = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain)
        return private + builder.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    def _builder(self, subject: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
        now, signer = datetime.now(UTC), x509.SubjectKeyIdentifier.from_public_key(self._key.public_key())
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - EARLIER)
            .not_valid_after(now + LIFE)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(signer), critical=False)
        )


def _server_context(chain: bytes, protocol: str) -> ssl.SSLContext:
    """Return a context with a key and its certificate, which `ssl` reads from a file: one in memory, without a name."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if protocol:
        context.set_alpn_protocols([protocol])
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.num_tickets = 0  # a session is not resumed
    descriptor = os.memfd_create("authority", os.MFD_CLOEXEC)
    try:
        os.write(descriptor, chain)
        context.load_cert_chain(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)
    return context


class TlsStream:
    """Move bytes inside TLS over another stream, which it owns.

    `host` is the name that the other side must have, and `protocols` are offered to it; without one this side is the
    server. `first` are bytes of the other side that were read before. Others have their turn between the few records
    that are opened at once: one of 27 bytes may change the keys, and takes longer than one of 16 KiB.
    """

    def __init__(
        self, stream: Stream, context: ssl.SSLContext, *, host: str | None = None,
        protocols: Sequence[str] = (HTTP_1,), first: bytes = b"", turns: Turns | None = None,
    ):  # fmt: skip
        self._stream, self._turn = stream, Turn(turns or Turns())
        self._received, self._left = memoryview(first), 0  # and not opened yet; of a record that was begun
        if host is not None:
            context.set_alpn_protocols(list(protocols))  # which `wrap_bio` copies
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=host is None, server_hostname=host)
        self._sending = asyncio.Lock()
        self._ending: asyncio.Task[None] | None = None

    @property
    def protocol(self) -> str:
        """Return the protocol that both sides agreed on, empty without one."""
        return self._tls.selected_alpn_protocol() or ""

    async def shake_hands(self) -> None:
        """Agree on keys. Raises OSError, of which `ssl.SSLError` is a kind."""
        while True:
            try:
                self._tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                await self._flush()
                await self._read_more()
            except ssl.SSLError:
                with suppress(OSError):  # the alert, which says why
                    await self._flush()
                raise
        await self._flush()

    async def receive(self, size: int) -> bytes:
        """Return at most `size` bytes, none at the end. Raises OSError when the connection broke."""
        pieces: list[bytes] = []
        left = size
        while left:  # one read returns a record at most
            try:
                data = self._tls.read(left)
            except ssl.SSLWantReadError:
                if pieces and (self._outgoing.pending or not await self._open_more()):
                    break
                if not pieces:
                    if self._outgoing.pending:
                        await self._flush()
                    await self._read_more()
                continue
            except ssl.SSLZeroReturnError:
                break
            except OSError:
                if not pieces:
                    raise
                break  # the next call tells of it
            if not data:
                break
            pieces.append(data)
            left -= len(data)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    async def send(self, data: bytes) -> None:
        """Send all of it. Raises OSError when the other side does not take it."""
        if data:
            self._tls.write(data)
            await self._flush()

    def end_sending(self) -> None:
        """Say that nothing more is sent; TLS of before version 1.3 ends both directions so."""
        if self._ending is None:
            self._ending = asyncio.get_running_loop().create_task(self._end())

    async def _end(self) -> None:
        with suppress(OSError):  # the other side's own end is not waited for
            self._tls.unwrap()
        with suppress(OSError):
            await self._flush()
            self._stream.end_sending()

    def close(self) -> None:
        """Give the connection up. It must have no waiter any more."""
        if self._ending is not None:
            self._ending.cancel()
        self._stream.close()

    async def _flush(self) -> None:
        async with self._sending:
            if data := self._outgoing.read():
                await self._stream.send(data)

    async def _read_more(self) -> None:
        if await self._open_more():
            return
        if data := await self._stream.receive(min(READ_BYTES, shared_read_size())):
            self._received = memoryview(bytes(self._received) + data if self._received else data)
        else:
            self._incoming.write_eof()

    async def _open_more(self) -> bool:
        """Have a few more records opened that have come; say whether there were any."""
        end = self._left
        for _ in range(max(1, self._turn.parsed_bytes // RECORD_COST_BYTES)):
            header = self._received[end : end + HEADER_BYTES]
            if len(header) < HEADER_BYTES:
                break
            end += HEADER_BYTES + int.from_bytes(header[3:], "big")
        size = min(end, len(self._received))
        if not size:
            return False
        self._incoming.write(self._received[:size])
        rest, self._left = self._received[size:], end - size
        self._received = rest if len(rest) >= HEADER_BYTES else memoryview(bytes(rest))  # which does not hold all of it
        await self._turn.pass_on()
        return True
