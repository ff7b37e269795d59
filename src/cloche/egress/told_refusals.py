"""A refusal as an answer inside TLS, in the place of a host that is not reached: a sandbox with an authority trusts it.

The guest's program reads the sentence with status 403, as it does in plain HTTP, and not that its connection was reset.
"""

from __future__ import annotations

from functools import partial
from typing import NoReturn

from .connections import GuestConnection
from .errors import Failed, Refused
from .first_bytes import HELLO_S, NameIn, read_hello
from .http import relay
from .http_request import Rejected, RequestHead
from .opened import SandboxSecrets, WatchingEdits
from .stream import SocketStream, Turns
from .tls import HTTP_1

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
        edits = WatchingEdits(partial(_reject, why), _look_at_nothing, is_tls=True)
        refuse = partial(_sentence, why)
        await relay(opened, connection.host, connection.port, _never, refuse, idle_s=HELLO_S, turns=turns, edits=edits)
    except (Refused, Failed, OSError, TimeoutError):  # it is no TLS for that name, or the certificate is not accepted
        return False
    return True


def _look_at_nothing(_: RequestHead) -> None:
    """Be there: a refused request is looked at by nobody."""


def _sentence(why: str, _: str) -> str:
    return why


async def _never() -> NoReturn:
    raise Refused("this host is not connected to")


def _reject(why: str, head: RequestHead) -> NoReturn:
    raise Rejected(403, head.method.decode("ascii", "replace"), why)
