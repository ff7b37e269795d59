"""One container of a daemon: its start, kill and release, and the connection that carries its streams."""

from __future__ import annotations

import logging
import select
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, TypeVar

from cloche.core.record import replace
from cloche.core.result import KillCause, Observed
from cloche.core.suppressed import suppress_logged

from ..containers.container import CHUNK_BYTES, MAX_FRAME_BYTES, ByteReceiver, Container, ContainerLink
from .daemon import Daemon, explained, release
from .images import DockerImage
from .network import serve_container
from .plan import ContainerPlan

if TYPE_CHECKING:
    from ..secrets import ContainerSecrets

log = logging.getLogger("cloche.docker")
STALL_S = 60.0  # without progress in sending to a container

T = TypeVar("T")


def stream_of(connection: Any, stall_s: float = STALL_S) -> Any:  # noqa: ANN401 - whatever the SDK opened
    """Return an object with `sendall` and `recv` for a connection of the SDK, usable from two threads.

    It has no time-out for receiving. Over TLS, sending fails after `stall_s` in which the other end reads nothing.
    """
    raw: Any = getattr(connection, "_sock", connection)
    if isinstance(raw, ssl.SSLSocket):
        return Encrypted(raw, stall_s)
    raw.settimeout(None)
    return raw


class Encrypted:
    """Send and receive over TLS from two threads.

    OpenSSL allows one call at a time on a connection, and a blocking read could take hours. The socket is therefore
    non-blocking: a thread that must wait polls the socket without the lock. TLS offers no way to close one direction
    only.
    """

    def __init__(self, wrapped: ssl.SSLSocket, stall_s: float):
        self._socket, self._stall_s = wrapped, stall_s
        self._turn = threading.Lock()
        wrapped.setblocking(False)

    def attempt(self, call: Callable[..., T], *args: object) -> T:
        """Repeat a call on the socket until it does not have to wait. Raises OSError."""
        while True:
            try:
                with self._turn:
                    return call(*args)
            except ssl.SSLWantReadError:
                self._wait(select.POLLIN, None)
            except ssl.SSLWantWriteError:
                self._wait(select.POLLOUT, self._stall_s * 1000)

    def sendall(self, data: bytes) -> None:
        """Send all of `data`. Raises OSError if the other end is closed."""
        view = memoryview(data)
        while view:
            view = view[self.attempt(self._socket.send, view) :]

    def recv(self, max_bytes: int) -> bytes:
        """Return received data, at most `max_bytes`; b"" at the end."""
        return self.attempt(self._socket.recv, max_bytes)

    def shutdown(self, how: int) -> None:
        """Shut down the TCP connection below TLS, also while another thread waits for it.

        `SSLSocket.shutdown` would drop the TLS state and continue in plain text.
        """
        socket.socket.shutdown(self._socket, how)

    def close(self) -> None:
        """Close the socket and the HTTP response that it came with, which would keep it open."""
        response = getattr(self._socket, "_response", None)
        if response is not None:
            response.close()
        self._socket.close()

    def _wait(self, event: int, timeout_ms: float | None) -> None:
        poll = select.poll()
        try:
            poll.register(self._socket.fileno(), event)
        except ValueError as error:
            raise OSError("the connection was closed") from error
        if not poll.poll(timeout_ms):
            raise TimeoutError(f"it did not read its input for {self._stall_s:g} s")


class AttachedWire:
    """The connection to the attached streams of one container; see containers.container.ContainerWire."""

    def __init__(self, connection: Any, stall_s: float = STALL_S):  # noqa: ANN401 - whatever the SDK opened
        self._connection, self._stall_s = connection, stall_s
        self._socket: Any = stream_of(connection, stall_s)
        if hasattr(self._socket, "setsockopt"):  # a channel over ssh lacks it; `Encrypted` waits by itself
            seconds, fraction = divmod(stall_s, 1)
            self._socket.setsockopt(
                socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(seconds), int(fraction * 1_000_000))
            )

    def send(self, data: bytes) -> None:
        """Send bytes. Raises OSError if the container has ended, TimeoutError if it reads nothing for `stall_s`."""
        try:
            self._socket.sendall(data)
        except BlockingIOError as error:
            raise TimeoutError(f"it did not read its input for {self._stall_s:g} s") from error

    def pieces(self) -> Iterator[tuple[int, bytes]]:
        """Yield the container's output."""
        streams = Demultiplexer()
        while data := self._socket.recv(CHUNK_BYTES):
            yield from streams.feed(data)

    def shutdown(self) -> None:
        """Shut down the connection in both directions."""
        self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection."""
        with suppress_logged(log, "the connection to a container could not be closed", OSError):
            self._connection.close()
            self._socket.close()


class Demultiplexer:
    """Split docker's stream format into pieces of standard output (1) and standard error (2)."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[tuple[int, bytes]]:
        """Return the pieces that `data` completes. Raises ValueError for a malformed stream."""
        self._buffer += data
        pieces = []
        while len(self._buffer) >= 8:
            end = 8 + int.from_bytes(self._buffer[4:8], "big")
            if end > MAX_FRAME_BYTES:
                raise ValueError("docker sent what is no stream of frames")
            if len(self._buffer) < end:
                break
            pieces.append((self._buffer[0], bytes(self._buffer[8:end])))
            del self._buffer[:end]
        return pieces


class DockerContainer(Container[DockerImage]):
    """One started container with our first process in it. All methods block and are thread-safe."""

    def __init__(
        self, daemon: Daemon, plan: ContainerPlan, image: DockerImage, secrets: ContainerSecrets | None = None
    ):
        super().__init__(secrets)
        self.daemon, self.plan, self.rootfs = daemon, plan, image
        self.id = ""

    @property
    def label(self) -> str:
        """Return the name for messages."""
        return f"container of {self.rootfs.name!r}"

    def _open(self, make_boot: Callable[[], bytes], receiver: ByteReceiver | None) -> None:
        with self._certificates() as binds:
            self.plan = replace(self.plan, binds=binds)
            self.id = self.daemon.create(self.plan.api())
            boot = make_boot()
            link = self._connect(AttachedWire(self.daemon.attach(self.id)), receiver)
            self.daemon.start(self.id)
        self._serve_network()
        self._begin(link, boot)

    def _certificates(self) -> AbstractContextManager[dict[str, str]]:
        if self.secrets is None:
            return nullcontext({})
        from .certificates import shown_certificates  # needed by some containers only

        return shown_certificates(self.daemon, self.rootfs, self.secrets.guest.authority)

    def _serve_network(self) -> None:
        """Have the container's network served, if it has one, before any code of the guest runs."""
        if self.plan.rules is not None:
            self.network = self._new_network(self.plan.rules)
            serve_container(self.daemon, self.id, self.rootfs, self.plan.rules, self.network)

    def _begin(self, link: ContainerLink, boot: bytes) -> None:
        """Send the first process its program."""
        link.send_raw(boot)

    def _abandon(self) -> None:
        self.shutdown()
        self._close_network()
        if self.id:
            self.daemon.remove(self.id)

    def kill(self) -> None:
        """Kill the container."""
        self.daemon.kill(self.id)

    def lift_quota(self) -> None:
        """Let processes that are being killed use a whole processor. gVisor has no such call."""
        if self.plan.cpus < 1 and not self.plan.is_gvisor:
            with suppress_logged(log, "what is killed dies with the share of the processors that it had", Exception):
                self.daemon.give_processor(self.id, self.plan.pids)

    def release(self) -> None:
        """Remove the container and its own workspace."""
        self._close_network()
        release(self)

    def argv(self) -> Sequence[str]:
        """Return the arguments of the `docker run` that makes the same container."""
        return self.plan.arguments()

    def end_by_guest(self) -> Observed | None:
        """Ask the daemon whether the container ran out of memory."""
        import docker.errors
        import requests

        try:
            has_run_out = self.daemon.ran_out_of_memory(self.id, self.started_at, time.time())
        except (docker.errors.DockerException, requests.exceptions.RequestException) as error:
            log.debug("the daemon does not report what a container died of: %s", explained(error))
            return None
        return Observed(cause=KillCause.OUT_OF_MEMORY) if has_run_out else None
