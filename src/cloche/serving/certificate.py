"""Certificates that a server makes and signs itself; its clients know it by the certificate's SHA-256.

A node's is made at each start, and its key is never on disk. A service keeps its own in a private file.
"""

from __future__ import annotations

import hashlib
import ipaddress
import os
import ssl
from contextlib import suppress
from datetime import UTC, datetime, timedelta

from cloche.core.errors import BackendUnavailable, InvalidRequest
from cloche.core.escape import escape_name
from cloche.core.record import dataclass

DAYS = 3_650  # the pin counts, and for a node the end of its credentials
EARLIER_S = 86_400.0  # for clients whose clock is behind
KEPT = "certificate.pem"


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnCertificate:
    """Hold the TLS context of a server, and the SHA-256 of its certificate, in hex."""

    context: ssl.SSLContext
    sha256: str


def make_certificate(host: str) -> OwnCertificate:
    """Return a new certificate for a host. Its key is in this process's memory alone. Raises BackendUnavailable."""
    chain = _chain(host)
    return OwnCertificate(context=context_of(chain), sha256=_sha256(chain))


def keep_certificate(folder: str, host: str) -> tuple[str, str]:
    """Return the file with the key and the certificate that this private folder keeps, and the certificate's SHA-256.

    A folder without them gets new ones for a host. Raises BackendUnavailable, and InvalidRequest for a folder that
    others may enter or that cannot be used.
    """
    path = os.path.join(folder, KEPT)
    try:
        check_private(folder)
        if not os.path.exists(path):
            write_private(path, _chain(host))
        with open(path, "rb") as file:
            return path, _sha256(file.read())
    except (OSError, ValueError) as error:
        raise InvalidRequest(f"{escape_name(path)} cannot be used: {error}") from error


def check_private(folder: str) -> None:
    """Make a folder for a key, or check the one that is there. Raises InvalidRequest, OSError."""
    os.makedirs(folder, mode=0o700, exist_ok=True)
    status = os.stat(folder)
    if status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise InvalidRequest(f"{escape_name(folder)}: the folder of a key must be yours, with mode 0700")


def write_private(path: str, chain: bytes) -> None:
    """Write a new file, whole or not at all."""
    made = f"{path}.new"
    with suppress(FileNotFoundError):
        os.unlink(made)
    with open(os.open(made, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
        file.write(chain)
    os.rename(made, path)


def _chain(host: str) -> bytes:
    """Return a new key and its certificate, in PEM."""
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
    except ImportError as error:
        raise BackendUnavailable(
            "the package cryptography, which makes a certificate, is not installed.",
            remedy='Install the extra that brings it: "pip install cloche[node]".',
        ) from error
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "cloche")])
    try:
        alternative: x509.GeneralName = x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        alternative = x509.DNSName(host)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(seconds=EARLIER_S))
        .not_valid_after(now + timedelta(days=DAYS))
        .add_extension(x509.SubjectAlternativeName([alternative]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    plain = serialization.NoEncryption()
    private = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain)
    return private + certificate.public_bytes(serialization.Encoding.PEM)


def _sha256(chain: bytes) -> str:
    """Return the SHA-256 of the certificate behind a key."""
    begin = chain.index(b"-----BEGIN CERTIFICATE")
    return hashlib.sha256(ssl.PEM_cert_to_DER_cert(chain[begin:].decode("ascii"))).hexdigest()


def context_of(chain: bytes) -> ssl.SSLContext:
    """Return a context with a key and its certificate, which `ssl` reads from a file: one in memory, without a name."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    descriptor = os.memfd_create("cloche-node", os.MFD_CLOEXEC)
    try:
        os.write(descriptor, chain)
        context.load_cert_chain(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)
    return context
