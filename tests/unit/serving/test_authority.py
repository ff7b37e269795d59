"""The authority of a service's own: what it signs for, that it stays, and that its certificates are renewed."""

import ipaddress
import os
import ssl
import stat
import subprocess
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import pytest
from cryptography import x509

from cloche.core.errors import InvalidRequest
from cloche.serving import authority as authorities
from cloche.serving.authority import OwnAuthority, keep_authority


@pytest.fixture
def authority(tmp_path: Path) -> OwnAuthority:
    """Make an authority of example.test."""
    return keep_authority(str(tmp_path / "kept"), "example.test")


def _handshake(authority: OwnAuthority, served: str | ssl.SSLContext, name: str) -> str:
    """Return why a client that trusts the authority alone refuses a server's certificate; empty for no reason."""
    server = served
    if isinstance(server, str):
        path, server = server, ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        server.load_cert_chain(path)
    client = ssl.create_default_context(cafile=authority.certificate)
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = (
        client.wrap_bio(to_client, to_server, server_hostname=name),
        server.wrap_bio(to_server, to_client, server_side=True),
    )
    for _ in range(4):
        for side in sides:
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
            except ssl.SSLCertVerificationError as error:
                return error.verify_message
    return ""


def test_it_is_valid_for_the_hosts_of_its_domain(authority: OwnAuthority, tmp_path: Path) -> None:
    """Below a domain of one label by a certificate for each host, as clients take no wildcard there."""
    for name in ("example.test", "8000-abc.example.test", "localhost", "127.0.0.1"):
        assert not _handshake(authority, authority.served, name)
    for name in ("a.b.example.test", "example.org"):
        assert "mismatch" in _handshake(authority, authority.served, name)
    single = keep_authority(str(tmp_path / "single"), "localtest")
    assert _handshake(single, single.served, "api.localtest")
    assert not _handshake(single, single.context_for("api.localtest"), "api.localtest")


@pytest.mark.parametrize("names", [("example.org",), ("example.test.example.org",), ("badexample.test",)])
def test_its_key_signs_for_no_other_domain(authority: OwnAuthority, names: Sequence[str]) -> None:
    """Clients refuse what it signs for others, addresses too."""
    assert "permitted subtree violation" in _handshake(authority, authority.context_for(names[0]), names[0])
    with open(authority.certificate, "rb") as file:
        limits = x509.load_pem_x509_certificate(file.read()).extensions.get_extension_for_class(x509.NameConstraints)
    assert limits.critical
    assert x509.IPAddress(ipaddress.ip_network("127.0.0.1/32")) in (limits.value.permitted_subtrees or [])


def test_it_stays_and_its_files_are_private(authority: OwnAuthority) -> None:
    """The next start has the same; the key is for its owner alone, and the bundle has what the host trusts, once."""
    before = {path.name: path.read_bytes() for path in Path(authority.folder).iterdir()}
    keep_authority(authority.folder, "example.test")
    assert {path.name: path.read_bytes() for path in Path(authority.folder).iterdir()} == before
    assert {stat.S_IMODE(path.stat().st_mode) for path in Path(authority.folder).iterdir()} == {0o600}
    assert before["bundle.pem"].endswith(before["authority.pem"])
    env = {**os.environ, "SSL_CERT_FILE": authority.bundle}
    program = f"from cloche.serving.authority import keep_authority as k; k({authority.folder!r}, 'example.test')"
    subprocess.run([sys.executable, "-c", program], env=env, check=True)
    assert Path(authority.bundle).read_bytes() == before["bundle.pem"]


def test_a_certificate_is_renewed_before_its_end(authority: OwnAuthority, monkeypatch: pytest.MonkeyPatch) -> None:
    """One with less than 30 days left is replaced, by the same authority; one with more stays."""
    assert not authority.renew()
    monkeypatch.setattr(authorities, "LEFT", authorities.DAYS + timedelta(days=1))
    before, own = Path(authority.served).read_bytes(), Path(authority.certificate).read_bytes()
    assert authority.renew()
    assert Path(authority.served).read_bytes() != before
    assert Path(authority.certificate).read_bytes() == own
    assert not _handshake(authority, authority.served, "api.example.test")


def test_a_folder_that_others_may_enter_is_refused(tmp_path: Path) -> None:
    """Its key would not be private."""
    tmp_path.chmod(0o755)
    with pytest.raises(InvalidRequest, match="0700"):
        keep_authority(str(tmp_path), "example.test")
