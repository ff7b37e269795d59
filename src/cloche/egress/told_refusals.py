"""A refusal as an answer inside TLS, in the place of a host that is not reached: a sandbox with an authority trusts it.

The guest's program reads the sentence with status 403, as it does in plain HTTP, and not that its connection was reset.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NoReturn

from .connections import GuestConnection
from .errors import Failed, Refused
from .first_bytes import HELLO_S, NameIn, read_hello
from .http import relay
from .http_request import Rejected, RequestHead
from .stream import SocketStream, Turns
from .tls import HTTP_1

if TYPE_CHECKING:
    from .opened import SandboxSecrets

MOST_HOSTS = 64  # of one sandbox: each gets a certificate, which a guest can cause


async def tell_refusal(
    secrets: SandboxSecrets, connection: GuestConnection, guest: SocketStream, name_in: NameIn, why: str, turns: Turns
) -> bool:
    """Answer the first request in a guest's TLS to a host by name with a reason; tell whether that was done."""
    told = secrets.told_hosts
    if len(told) >= MOST_HOSTS and connection.host not in told:
        return False
    try:
        first = await read_hello(guest, connection, name_in)
        told.add(connection.host)
        opened = await secrets.open_guest(guest, connection.host, first, HTTP_1, turns)
        edits = _Refusing(why)
        refuse = partial(_sentence, why)
        await relay(opened, connection.host, connection.port, _never, refuse, idle_s=HELLO_S, turns=turns, edits=edits)
    except (Refused, Failed, OSError, TimeoutError):  # it is no TLS for that name, or the certificate is not accepted
        return False
    return True


def _sentence(why: str, _: str) -> str:
    return why


async def _never() -> NoReturn:
    raise Refused("this host is not connected to")


class _Refusing:
    """Reject each request."""

    is_tls = True

    def __init__(self, why: str):
        self._why = why

    def edit(self, head: RequestHead) -> RequestHead:
        """Raise Rejected."""
        raise Rejected(403, head.method.decode("ascii", "replace"), self._why)

    def body_edit(self, _: RequestHead) -> None:
        """Leave the body as it is."""

    def answer_edit(self, _: RequestHead) -> None:
        """Leave the answer as it is."""

    def message_edit(self, _: RequestHead) -> None:
        """Leave messages as they are."""
