"""A node's certificate: made at its start, signed by itself, pinned by its SHA-256 in each lease."""

from __future__ import annotations

import hashlib
import ipaddress
import os
import ssl
from datetime import UTC, datetime, timedelta

from cloche.core.errors import BackendUnavailable
from cloche.core.record import dataclass

DAYS = 3_650  # a node's process is younger; the credential's end and the pin are what counts
EARLIER_S = 86_400.0  # for clients whose clock is behind


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeCertificate:
    """Hold the TLS context of a node, and the SHA-256 of its certificate, in hex."""

    context: ssl.SSLContext
    sha256: str


def make_certificate(host: str) -> NodeCertificate:
    """Return a new certificate for a host. Its key is in this process's memory alone. Raises BackendUnavailable."""
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
    except ImportError as error:
        raise BackendUnavailable(
            "the package cryptography, which makes the certificate of a node, is not installed.",
            remedy='Install the extra that brings it: "pip install cloche[node]".',
        ) from error
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "cloche node")])
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
    der = certificate.public_bytes(serialization.Encoding.DER)
    chain = private + certificate.public_bytes(serialization.Encoding.PEM)
    return NodeCertificate(context=_context(chain), sha256=hashlib.sha256(der).hexdigest())


def _context(chain: bytes) -> ssl.SSLContext:
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
