"""Whether an account can be used at all, found out before anybody is asked."""

from __future__ import annotations

import importlib.util
import os
import re
from abc import ABC, abstractmethod
from typing import ClassVar, Self

from cloche.core.errors import BackendUnavailable
from cloche.core.protocols import Capabilities
from cloche.core.remote import LEAST_SILENCE_S, RemoteAccount, why_no_address

from ..session_languages import DRIVERS
from .claims import unavailable

_DOMAIN = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?(:[0-9]{1,5})?")


def check_account(
    account: RemoteAccount | None, *, provider: str, package: str, extra: str, variable: str, needs_url: bool = False
) -> RemoteAccount:
    """Return the account. Raises BackendUnavailable for a package, a key or an address that is missing or wrong.

    `package` is what is imported, `extra` brings it, `variable` has the key. Nothing is imported and nobody is asked.
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
        raise refused("domain is none", "Correct it: HOST or HOST:PORT.")
    if account.silence_s < LEAST_SILENCE_S:
        raise refused(f"silence is {account.silence_s:g} s", f"Give both sides time: {LEAST_SILENCE_S:g} s or more.")
    if account.ca_file and not os.path.isfile(account.ca_file):
        raise refused(f"ca_file: there is no file {account.ca_file}", "Correct the path, or leave it out.")
    return account


class AccountBackend(ABC):
    """Be a backend on machines elsewhere, for one account. Nobody is asked before a sandbox is used."""

    name: ClassVar[str]

    def __init__(self, account: RemoteAccount | None = None):
        self._account = account

    def account(self) -> RemoteAccount | None:
        """Return the account that code is sent with, None before one is given."""
        return self._account

    def with_account(self, account: RemoteAccount) -> Self:
        """Return the same backend for an account."""
        return type(self)(account)

    @abstractmethod
    def _checked(self) -> RemoteAccount:
        """Return the account. Raises BackendUnavailable when the package, the key or the address is missing."""

    @abstractmethod
    def _claimed(self, account: RemoteAccount) -> Capabilities:
        """Return what is claimed of its sandboxes."""

    def capabilities(self) -> Capabilities:
        """Say what is claimed of its sandboxes; nobody is asked."""
        try:
            account = self._checked()
        except BackendUnavailable as error:
            return unavailable(self.name, error)
        return self._claimed(account)

    def session_languages(self) -> tuple[str, ...]:
        """Return the languages that may have sessions, there as far as their programs are there."""
        return tuple(DRIVERS)

    def check(self) -> None:
        """Raise BackendUnavailable, saying what is missing; nobody is asked."""
        self._checked()
