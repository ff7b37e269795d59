"""The way to a pod: its address, or the API server's port-forward where no pod can be reached, as from outside.

Theory of operation: a listener on this machine's loopback stands for the port of one pod. Each connection to it is one
web socket to `pods/NAME/portforward`, with a separate HTTP client: streams take no connection from requests. The bytes
are the TLS of the node's server, whose certificate is compared as ever, so neither API server nor kubelet reads them. A
stream that ends closes its connection, as a cut link would. Only processes of this user are let in.

Protocol `v4.channel.k8s.io`: the first byte of a message is its channel. Channel 0 has the data, 1 an error as text;
the first message of each is the port (2 bytes).
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, Literal
from urllib.parse import urlsplit

from cloche.core.errors import BackendUnavailable, ClocheError

from ..tending import Reach, reach
from .api import ApiError, KubernetesApi

PROTOCOL = "v4.channel.k8s.io"
DATA, ERROR = b"\0", b"\1"
LOOPBACK = "127.0.0.1"
MOST_STREAMS = 64  # of one pod at once
PIECE_BYTES = 1 << 15
OPEN_S, ERROR_S = 3.0, 0.25  # for a stream; in which a kubelet says that nothing listens
CONNECTIONS = "/proc/net/tcp"
_WORDS = {"refused": "nothing listens in the pod, or it is gone", "silent": "the pod's kubelet does not answer"}
log = logging.getLogger("cloche.fleet")


class PodForward:
    """Listen on loopback in place of a port of one pod. `path` is the pod's."""

    def __init__(self, api: KubernetesApi, path: str, port: int):
        self._api, self._path, self._port = api, f"{path}/portforward", port
        self._serving: asyncio.Task[asyncio.Server] | None = None
        self._streams: set[asyncio.Task[None]] = set()
        self._own_port = 0

    def listen(self) -> str:
        """Begin to listen, and return the address."""
        listener = socket.create_server((LOOPBACK, 0))
        self._own_port = listener.getsockname()[1]
        self._serving = asyncio.ensure_future(asyncio.start_server(self._take, sock=listener))
        return f"https://{LOOPBACK}:{self._own_port}"

    async def close(self) -> None:
        """Stop listening, and close all connections."""
        if self._serving is not None:
            (await self._serving).close()
        for stream in self._streams:
            stream.cancel()
        await asyncio.gather(*self._streams, return_exceptions=True)

    async def reach(self) -> Reach:
        """Try a stream. Raises ApiError for missing rights."""
        try:
            async with asyncio.timeout(OPEN_S), self._stream() as stream:
                return await _answer_of(stream)
        except TimeoutError:
            return "silent"
        except ApiError as error:
            if error.status in (401, 403):
                raise
            return "refused" if error.status == 404 else "silent"
        except (ClocheError, OSError):  # of the API server: nothing is known of the pod
            return "open"

    def _stream(self) -> AbstractAsyncContextManager[Any]:
        return self._api.socket(self._path, PROTOCOL, ports=str(self._port))

    def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = writer.get_extra_info("peername")[1]
        if len(self._streams) >= MOST_STREAMS or not is_own(peer, self._own_port):
            log.warning("%s: refused a connection of another user, or beyond %d", self._path, MOST_STREAMS)
            writer.transport.abort()
            return
        stream = asyncio.ensure_future(self._pass_on(reader, writer))
        self._streams.add(stream)
        stream.add_done_callback(self._streams.discard)

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Copy both directions, each at the receiver's pace, until either ends."""
        try:
            async with self._stream() as stream:
                ways = [asyncio.ensure_future(work) for work in (_send(reader, stream), _receive(stream, writer))]
                try:
                    await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    for way in ways:
                        way.cancel()
                    results = await asyncio.gather(*ways, return_exceptions=True)
                log.debug("%s: a stream has ended: %s", self._path, results)
        except (ClocheError, OSError, TimeoutError) as error:
            log.debug("%s: %s", self._path, error)
        finally:
            writer.close()


async def _send(reader: asyncio.StreamReader, stream: Any) -> None:  # noqa: ANN401 - a web socket
    while data := await reader.read(PIECE_BYTES):
        await stream.send_bytes(DATA + data)


async def _receive(stream: Any, writer: asyncio.StreamWriter) -> None:  # noqa: ANN401 - a web socket
    async for data in _received(stream):
        writer.write(data)
        await writer.drain()


async def _received(stream: Any) -> AsyncIterator[bytes]:  # noqa: ANN401 - a web socket
    """Yield what a pod sends. Raises ConnectionError with the kubelet's words."""
    announced = set[bytes]()
    async for message in stream:
        if not isinstance(message.data, bytes):
            raise ConnectionError(f"not a message of {PROTOCOL}")
        channel, data = message.data[:1], message.data[1:]
        if channel not in announced:
            announced.add(channel)
        elif channel == ERROR:
            text = data.decode(errors="replace")
            raise (ConnectionRefusedError if "refused" in text else ConnectionError)(text)
        else:
            yield data


async def _answer_of(stream: Any) -> Reach:  # noqa: ANN401 - a web socket
    """Tell what a kubelet says of a new stream: nothing while it is connected."""
    try:
        async with asyncio.timeout(ERROR_S):
            await anext(_received(stream), None)
    except TimeoutError:
        return "open"
    except ConnectionRefusedError:
        return "refused"
    except ConnectionError:
        return "silent"
    return "silent"  # it has ended


def is_own(peer: int, port: int) -> bool:
    """Tell whether a process of this user made a connection on loopback; true where the system has no list of them."""
    here = f"{int.from_bytes(socket.inet_aton(LOOPBACK), sys.byteorder):08X}"
    row = f" {here}:{peer:04X} {here}:{port:04X} "
    try:
        with open(CONNECTIONS, encoding="ascii") as lines:
            return any(row in line and int(line.split()[7]) == os.geteuid() for line in lines)
    except FileNotFoundError:
        return True


class PodAddresses:
    """Choose the way to the pods below `path`, as `fleet.reach` says; the first one that works is remembered."""

    def __init__(
        self,
        api: KubernetesApi,
        path: str,
        mode: Literal["auto", "address", "forward"],
        *,
        reach: Callable[[str], Awaitable[Reach]] = reach,
    ):
        self._api, self._path, self._reach = api, path, reach
        self._mode, self._is_inside, self._is_outside = mode, mode == "address", False
        self._forwards: dict[str, PodForward] = {}  # by the address that stands for a pod's

    async def check(self, pod: str, address: str) -> None:
        """Try to reach a pod. Raises BackendUnavailable."""
        if self._mode != "forward" and not self._forwards_all and await self._reach(address) == "open":
            self._is_inside = True
            return
        why = "" if self._is_inside else await self._why_no_forward(pod, address)
        if why or self._is_inside:
            raise BackendUnavailable(
                f"{address} cannot be reached from here{why and f', and not by port-forward either: {why}'}.",
                remedy="Run in a pod of the cluster that the NetworkPolicy lets in (label cloche/role: caller), or let "
                'this account forward ports (role cloche-outside, by "cloche fleet up" with fleet.reach: forward).',
            )
        self._is_outside = True

    @property
    def _forwards_all(self) -> bool:
        return self._is_outside and not self._is_inside

    async def _why_no_forward(self, pod: str, address: str) -> str:
        try:
            reached = await self._forward(pod, address).reach()
        except ApiError as error:
            return error.reason.rstrip(".")
        return _WORDS.get(reached, "")

    def _forward(self, pod: str, address: str) -> PodForward:
        return PodForward(self._api, f"{self._path}/{pod}", urlsplit(address).port or 0)

    def open(self, pod: str, address: str) -> str:
        """Return the address at which a pod is reached from here; `close` it."""
        if not self._forwards_all:
            return address
        forward = self._forward(pod, address)
        here = forward.listen()
        self._forwards[here] = forward
        return here

    async def close(self, *addresses: str) -> None:
        """Close the ways to these addresses; without any, to all."""
        closing = [self._forwards.pop(address, None) for address in addresses or tuple(self._forwards)]
        await asyncio.gather(*(forward.close() for forward in closing if forward is not None))

    async def reach(self, address: str) -> Reach:
        """Try to connect to an address that `open` returned."""
        forward = self._forwards.get(address)
        if forward is None:
            return await self._reach(address)
        try:
            return await forward.reach()
        except ApiError:
            return "silent"
