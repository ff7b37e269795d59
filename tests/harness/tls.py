"""Certificates for servers of the tests' own: an authority, and what it signs, also what does not fit."""

from __future__ import annotations

import datetime as dt
import ipaddress
import ssl
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

DAY = dt.timedelta(days=1)


class Authority:
    """Sign certificates; `file` is what a client trusts."""

    def __init__(self, folder: Path, name: str = "tests"):
        self._folder, self._name = folder, x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self._key = ec.generate_private_key(ec.SECP256R1())
        builder = self._builder(self._name, self._key, dt.timedelta())
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        self.file = folder / f"{name}-ca.pem"
        self.file.write_bytes(builder.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))

    def server_context(self, host: str = "127.0.0.1", since: dt.timedelta = -DAY) -> ssl.SSLContext:
        """Return what a server of this host uses; its certificate holds for two days, and begins `since` from now."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.server_file(host, since))
        return context

    def server_file(self, host: str = "127.0.0.1", since: dt.timedelta = -DAY) -> Path:
        """Return a file with the key and the certificate of such a server."""
        return self.file_of(host, hosts=[host], since=since, file=f"{host}-{abs(hash((host, since)))}.pem")

    def file_of(
        self, name: str, *, group: str = "", hosts: Sequence[str] = (), since: dt.timedelta = -DAY, file: str = ""
    ) -> Path:
        """Return a file with a key and a certificate of this name, and of a group as its organization."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = [x509.NameAttribute(NameOID.COMMON_NAME, name)]
        subject += [x509.NameAttribute(NameOID.ORGANIZATION_NAME, group)] if group else []
        builder = self._builder(x509.Name(subject), key, since)
        if hosts:
            builder = builder.add_extension(x509.SubjectAlternativeName(list(map(_host, hosts))), critical=False)
        signed = builder.sign(self._key, hashes.SHA256())
        path = self._folder / (file or f"{name}.pem")
        private = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        path.write_bytes(private + signed.public_bytes(serialization.Encoding.PEM))
        return path

    def _builder(
        self, subject: x509.Name, key: ec.EllipticCurvePrivateKey, since: dt.timedelta
    ) -> x509.CertificateBuilder:
        begin = dt.datetime.now(dt.UTC) + since
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(begin)
            .not_valid_after(begin + 2 * DAY)
        )


def _host(text: str) -> x509.GeneralName:
    return x509.IPAddress(ipaddress.ip_address(text)) if text[0].isdigit() else x509.DNSName(text)
