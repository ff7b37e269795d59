"""A client of a running service: by its address, with a key from the configuration or a file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cloche.core.errors import BackendUnavailable, ClocheError, InvalidRequest, PolicyDenied
from cloche.core.escape import escape_line
from cloche.core.remote import RemoteAccount, why_no_address

if TYPE_CHECKING:
    import ssl
    from collections.abc import Mapping

HERE = "http://127.0.0.1:8470"
TIMEOUT_S = 30.0
MOST_KEY = 4096
NOT_KNOWN = (401, 403)


def ask_service(
    method: str, path: str, *, url: str | None, key_file: str | None, body: Mapping[str, Any] | None = None
) -> tuple[str, dict[str, Any]]:
    """Return the service's origin and its JSON answer. Raises InvalidRequest, BackendUnavailable, PolicyDenied."""
    from urllib.parse import urlsplit

    from cloche.records import require_extra

    require_extra()
    import httpx

    account = _account()
    address = (url or account.url or HERE).rstrip("/")
    key = account.api_key.reveal() if key_file is None else _read_key(key_file)
    _check(address, key)
    try:
        with httpx.Client(verify=_context(account, address), trust_env=False, timeout=TIMEOUT_S) as client:
            answer = client.request(method, address + path, headers={"Authorization": f"Bearer {key}"}, json=body)
            document = answer.json()
    except (OSError, ValueError, httpx.HTTPError) as error:
        raise BackendUnavailable(
            f"the service at {escape_line(address)} does not answer correctly: {escape_line(str(error))}"
        ) from error
    if answer.is_success and isinstance(document, dict):
        return "{0.scheme}://{0.netloc}".format(urlsplit(address)), document
    raise _failure(answer.status_code, document)


def _context(account: RemoteAccount, address: str) -> ssl.SSLContext | bool:
    """Return what verifies the service's certificate. Raises OSError, ValueError for another one than is pinned."""
    import hashlib
    import ssl
    from urllib.parse import urlsplit

    if not account.certificate:
        return ssl.create_default_context(cafile=account.ca_file) if account.ca_file else True
    parts = urlsplit(address)
    text = ssl.get_server_certificate((parts.hostname or "", parts.port or 443), timeout=TIMEOUT_S)
    if hashlib.sha256(ssl.PEM_cert_to_DER_cert(text)).hexdigest() != account.certificate:
        raise ValueError("the SHA-256 of its certificate is not that of cloche.certificate")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # trusts this certificate alone, for whatever name it is
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.load_verify_locations(cadata=text)
    return context


def _account() -> RemoteAccount:
    from cloche.config.settings import load_settings
    from cloche.execution.accounts import accounts_of

    return accounts_of(load_settings({})).get("cloche", RemoteAccount(provider="cloche"))


def _read_key(path: str) -> str:
    try:
        with open(path, encoding="ascii") as file:
            return file.read(MOST_KEY).strip()
    except (OSError, ValueError) as error:
        raise InvalidRequest(f"--key-file {escape_line(path)}: cannot be read: {error}") from error


def _check(address: str, key: str) -> None:
    if why := why_no_address(address):
        raise InvalidRequest(f"--url {why}")
    if not key:
        raise InvalidRequest(
            "no key: name a file with --key-file, or set CLOCHE_REMOTE_KEY; "
            "cloche keys create NAME --scope admin makes one"
        )
    if not key.isprintable() or not key.isascii():
        raise InvalidRequest("--key-file: this is not a key")


def _failure(status: int, document: object) -> ClocheError:
    problem = document if isinstance(document, dict) else {}
    words = [str(problem[name]) for name in ("detail", "remedy") if problem.get(name)]
    text = f"the service refused: {escape_line('; '.join(words) or str(status))}"
    return PolicyDenied(text) if status in NOT_KNOWN else BackendUnavailable(text)
