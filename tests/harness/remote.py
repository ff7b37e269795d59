"""A service for the backend `cloche`: `cloche serve` with TLS in a process of its own, and accounts that lead there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from cloche.core.remote import RemoteAccount, Secret

from .containers import make_certificates
from .service import Service, serving


def account_at(url: str, key: str, ca_file: Path | str = "", **more: object) -> RemoteAccount:
    """Return an account of the backend."""
    account = RemoteAccount(provider="cloche", api_key=Secret(key), url=url, ca_file=str(ca_file))
    return replace(account, **more)  # type: ignore[arg-type]


def tls_words(certificates: Path) -> tuple[str, ...]:
    """Return the options with which a service shows a certificate of the tests' own."""
    server = certificates / "server"
    return "--tls-certificate", str(server / "cert.pem"), "--tls-key", str(server / "key.pem")


@contextmanager
def serving_tls(home: Path, *words: str, **variables: str) -> Iterator[tuple[Service, RemoteAccount]]:
    """Serve over TLS for the body, which gets the service and the account of its first key."""
    certificates = make_certificates(home / "certificates")
    with serving(home, *tls_words(certificates), *words, **variables) as service:
        yield service, account_at(service.address, service.key, certificates / "ca.pem")
