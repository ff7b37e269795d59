"""A certificate authority of a service's own, for one domain: kept in a private folder, the same at each start.

Clients trust it by a file. Its name constraints (RFC 5280, 4.2.1.10) let it sign for the domain, names below it,
`localhost` and 127.0.0.1 alone, so that who gets its key cannot be another host to its clients. The server's
certificate ends soon, and `renew` makes the next one before that.
"""

from __future__ import annotations

import fcntl
import ipaddress
import os
import ssl
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from cloche.core.errors import BackendUnavailable, InvalidRequest
from cloche.core.escape import escape_name
from cloche.core.record import dataclass

from .certificate import EARLIER_S, check_private, context_of, write_private

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec

YEARS, DAYS, LEFT = timedelta(days=3_650), timedelta(days=90), timedelta(days=30)
LOOPBACK, LOCALHOST = ipaddress.ip_address("127.0.0.1"), "localhost"
KEY, CERTIFICATE, SERVED, BUNDLE = "authority-key.pem", "authority.pem", "server.pem", "bundle.pem"
_BUNDLES = ("/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/certs/ca-bundle.crt", "/etc/ssl/cert.pem")


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnAuthority:
    """Hold the files of an authority: `certificate` is its own, `bundle` has the host's too, `served` the server's."""

    certificate: str
    bundle: str
    served: str
    folder: str
    domain: str

    def context_for(self, name: str) -> ssl.SSLContext:
        """Return what serves one host below the domain. Blocks for a fraction of a millisecond."""
        return context_of(_issued(self.folder, self.domain, (name,)))

    def renew(self) -> bool:
        """Make the next certificate of the server if this one ends within 30 days; return whether it did. Blocks."""
        with _locked(self.folder):
            return _serve(self.folder, self.domain)


def keep_authority(folder: str, domain: str) -> OwnAuthority:
    """Return the authority of a domain that this private folder keeps; a folder without one gets it. Blocks.

    Raises BackendUnavailable without the package cryptography, InvalidRequest for a folder that cannot be used.
    """
    try:
        check_private(folder)
        with _locked(folder):
            if not os.path.exists(os.path.join(folder, CERTIFICATE)) or _ends_soon(folder, CERTIFICATE, DAYS):
                _make(folder, domain)
            _serve(folder, domain)
            write_private(os.path.join(folder, BUNDLE), _bundle(folder))
    except ImportError as error:
        raise BackendUnavailable(
            "the package cryptography, which makes certificates, is not installed.",
            remedy='Install the extra that brings it: "pip install cloche[node]", or give --tls-certificate.',
        ) from error
    except (OSError, ValueError) as error:
        raise InvalidRequest(f"{escape_name(folder)} cannot be used: {error}") from error
    paths = {name: os.path.join(folder, file) for name, file in _FILES}
    return OwnAuthority(folder=folder, domain=domain, **paths)


_FILES = (("certificate", CERTIFICATE), ("bundle", BUNDLE), ("served", SERVED))


@contextmanager
def _locked(folder: str) -> Iterator[None]:
    """Let one process at a time change the folder."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _make(folder: str, domain: str) -> None:
    """Make an authority."""
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    network = ipaddress.ip_network(LOOPBACK)
    names = [x509.DNSName(domain), x509.DNSName(LOCALHOST), x509.IPAddress(network)]
    constraints = x509.NameConstraints(permitted_subtrees=names, excluded_subtrees=None)
    own = _certificate(key, key, _name(domain), _name(domain), YEARS)
    usage = x509.KeyUsage(
        digital_signature=False, content_commitment=False, key_encipherment=False, data_encipherment=False,
        key_agreement=False, key_cert_sign=True, crl_sign=True, encipher_only=False, decipher_only=False,
    )  # fmt: skip
    own = own.add_extension(usage, critical=True).add_extension(constraints, critical=True)
    own = own.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    write_private(os.path.join(folder, KEY), _private(key))
    _remove(folder, SERVED)  # of the authority before
    write_private(os.path.join(folder, CERTIFICATE), _signed(own, key))


def _serve(folder: str, domain: str) -> bool:
    """Make a certificate for the domain's hosts, unless there is one that lasts; return whether it was made."""
    if os.path.exists(os.path.join(folder, SERVED)) and not _ends_soon(folder, SERVED, LEFT):
        return False
    write_private(os.path.join(folder, SERVED), _issued(folder, domain, (domain, f"*.{domain}", LOCALHOST)))
    return True


def _issued(folder: str, domain: str, names: Sequence[str]) -> bytes:
    """Return a new key, and its certificate for these names and 127.0.0.1, in PEM."""
    from cryptography import x509
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID

    with open(os.path.join(folder, KEY), "rb") as file:
        signer = serialization.load_pem_private_key(file.read(), None)
    if not isinstance(signer, ec.EllipticCurvePrivateKey):
        raise ValueError(f"{KEY} is no key of this authority")
    key = ec.generate_private_key(ec.SECP256R1())
    hosts = [*map(x509.DNSName, names), x509.IPAddress(LOOPBACK)]
    served = (
        _certificate(key, signer, _name(domain, "server"), _name(domain), DAYS)
        .add_extension(x509.SubjectAlternativeName(hosts), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
    )
    return _private(key) + _signed(served, signer)


def _certificate(
    key: ec.EllipticCurvePrivateKey, signer: ec.EllipticCurvePrivateKey, subject: x509.Name, issuer: x509.Name,
    life: timedelta,
) -> x509.CertificateBuilder:  # fmt: skip
    from cryptography import x509

    now, by = datetime.now(UTC), x509.SubjectKeyIdentifier.from_public_key(signer.public_key())
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(seconds=EARLIER_S))
        .not_valid_after(now + life)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(by), critical=False)
    )


def _name(domain: str, what: str = "authority") -> x509.Name:
    from cryptography import x509

    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, f"Cloche {what} {domain}"[:64])])


def _signed(builder: x509.CertificateBuilder, signer: ec.EllipticCurvePrivateKey) -> bytes:
    from cryptography.hazmat.primitives import hashes, serialization

    return builder.sign(signer, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def _private(key: ec.EllipticCurvePrivateKey) -> bytes:
    from cryptography.hazmat.primitives import serialization

    plain = serialization.NoEncryption()
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain)


def _ends_soon(folder: str, name: str, left: timedelta) -> bool:
    from cryptography import x509

    with open(os.path.join(folder, name), "rb") as file:
        data = file.read()
    certificate = x509.load_pem_x509_certificate(data[data.index(b"-----BEGIN CERTIFICATE") :])
    return certificate.not_valid_after_utc - datetime.now(UTC) < left


def _bundle(folder: str) -> bytes:
    """Return what this host trusts, and the authority: programs read one file in place of the host's."""
    known = (path for path in (ssl.get_default_verify_paths().cafile, *_BUNDLES) if path and os.path.exists(path))
    of_host = (path for path in known if os.path.dirname(os.path.realpath(path)) != os.path.realpath(folder))
    texts = []
    for path in (next(of_host, None), os.path.join(folder, CERTIFICATE)):
        if path is not None:
            with open(path, "rb") as file:
                texts.append(file.read().rstrip(b"\n") + b"\n")
    return b"".join(texts)


def _remove(folder: str, name: str) -> None:
    path = os.path.join(folder, name)
    if os.path.exists(path):
        os.unlink(path)
