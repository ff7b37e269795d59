"""The secrets of the sandbox that a network serves at present, and the authority that the next one will have.

A network may serve one sandbox after the other, in a jail that waits for each. Between two of them it has no secrets,
and carries nothing. The certificate of the next authority is announced to the caller, so that no run waits for one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from cloche.core.errors import InvalidRequest

if TYPE_CHECKING:
    from .opened import SandboxSecrets, SecretsOpener
    from .tls import Authority

Rows = list[dict[str, Any]]


class PresentSecrets:
    """Hold them for one network; `tell` sends its caller a message."""

    def __init__(self, tell: Callable[[str, dict[str, Any]], object]):
        self.secrets: SandboxSecrets | None = None
        self.are_awaited = False
        self.opener: SecretsOpener | None = None  # None in an egress process without secrets
        self._tell = tell
        self._authority: Authority | None = None  # that was announced
        self._reading: asyncio.Task[None] | None = None
        self._was_read: SandboxSecrets | None = None  # by this network, and not by one that shares it

    def begin(self, opener: SecretsOpener, rows: Rows | None, fds: list[int]) -> None:
        """Have the secrets of the only sandbox; without rows, those of one sandbox after the other."""
        self.opener = opener
        self.renew(0, rows, fds, is_answered=True)

    def end(self) -> None:
        """Read nothing any more, and let go of what was read here."""
        if self._reading is not None:
            self._reading.cancel()
        if self._was_read is not None:
            self._was_read.close()

    def renew(self, number: int, rows: Rows | None, fds: list[int], *, is_answered: bool) -> None:
        """Have a sandbox's secrets in place of those before; without rows, wait for those of the next sandbox."""
        assert self.opener is not None  # noqa: S101 - who has none is told of no secrets
        self.secrets, self.are_awaited = None, True
        self.end()
        self._was_read = None
        authority = self._authority or self.opener.new_authority()
        if rows is None:
            self._authority = authority
            self._tell("authority", {"certificate": authority.certificate})
            return
        self._authority = None
        reading = self._read(self.opener, number, rows, fds, authority, is_answered=is_answered)
        self._reading = asyncio.get_running_loop().create_task(reading)

    async def _read(
        self, opener: SecretsOpener, number: int, rows: Rows, fds: list[int], authority: Authority, *, is_answered: bool
    ) -> None:
        """Have these secrets, and tell the caller what its sandbox gets; or why there are none."""
        try:
            self.secrets = self._was_read = await opener.open(rows, fds, authority)
            self.are_awaited, told = False, self.secrets.as_wire()
        except InvalidRequest as error:
            told = {"error": str(error)}
        if is_answered:
            self._tell("secrets", {**told, "number": number})
