"""Checks of a provider account's configuration, without a request to the provider."""

from __future__ import annotations

import importlib.util
import os
import re
from abc import ABC, abstractmethod
from typing import Self

from cloche.core.errors import BackendUnavailable
from cloche.core.protocols import Capabilities
from cloche.core.remote import LEAST_SILENCE_S, RemoteAccount, why_no_address

from ..session_languages import DRIVERS
from .claims import unavailable

_DOMAIN = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?(:[0-9]{1,5})?")


def check_account(
    account: RemoteAccount | None, *, provider: str, package: str, extra: str, variable: str, needs_url: bool = False
) -> RemoteAccount:
    """Return the account. Raises BackendUnavailable if the package, the key or an address is missing or invalid.

    `package` is the imported package, `extra` the extra that installs it, `variable` the environment variable of the
    key. Nothing is imported, and no request is sent.
    """

    def refused(reason: str, remedy: str) -> BackendUnavailable:
        return BackendUnavailable(f"backend {provider!r}: {reason}.", remedy=remedy)

    if importlib.util.find_spec(package) is None:
        remedy = f'Install the extra that brings it: "pip install cloche[{extra}]".'
        raise refused(f"the package {package} is not installed", remedy)
    if account is None or not account.api_key.reveal():
        remedy = f"Set {variable}, or {provider}.api_key in your own configuration file or a .env that you name."
        raise refused("no key is configured", remedy)
    if needs_url and not account.url:
        remedy = f"Set {provider}.url in your configuration: https://HOST[:PORT]."
        raise refused("no address is configured", remedy)
    for name, text in (("url", account.url), ("sandbox_url", account.sandbox_url)):
        if text and (why := why_no_address(text)):
            raise refused(f"{name} {why}", "Correct it: https://HOST[:PORT].")
    if account.domain and not _DOMAIN.fullmatch(account.domain):
        raise refused("domain is not a host name", "Correct it: HOST or HOST:PORT.")
    if account.silence_s < LEAST_SILENCE_S:
        raise refused(f"silence is {account.silence_s:g} s", f"Use {LEAST_SILENCE_S:g} s or more.")
    if account.ca_file and not os.path.isfile(account.ca_file):
        raise refused(f"ca_file: there is no file {account.ca_file}", "Correct the path, or leave it out.")
    return account


class AccountBackend(ABC):
    """Base of the backends on remote machines, for one account.

    The first request is sent when a sandbox is first used.
    """

    name: str  # of the class

    def __init__(self, account: RemoteAccount | None = None):
        self._account = account

    def account(self) -> RemoteAccount | None:
        """Return the configured account, or None."""
        return self._account

    def with_account(self, account: RemoteAccount) -> Self:
        """Return a backend of the same class for another account."""
        return type(self)(account)

    @abstractmethod
    def _checked(self) -> RemoteAccount:
        """Return the account. Raises BackendUnavailable if the package, the key or the address is missing."""

    @abstractmethod
    def _claimed(self, account: RemoteAccount) -> Capabilities:
        """Return the capabilities that the provider claims for its sandboxes."""

    def capabilities(self) -> Capabilities:
        """Return the claimed capabilities, without a request to the provider."""
        try:
            account = self._checked()
        except BackendUnavailable as error:
            return unavailable(self.name, error)
        return self._claimed(account)

    def session_languages(self) -> tuple[str, ...]:
        """Return the languages that support sessions. A sandbox also needs the language's program."""
        return tuple(DRIVERS)

    def check(self) -> None:
        """Raise BackendUnavailable if the package, the key or the address is missing. Sends no request."""
        self._checked()
