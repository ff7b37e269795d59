"""One end of an HTTP/2 connection, for tests: what came of each stream, and bytes that no library would write."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import (
    ConnectionTerminated,
    DataReceived,
    Event,
    InformationalResponseReceived,
    RemoteSettingsChanged,
    RequestReceived,
    ResponseReceived,
    StreamEnded,
    StreamReset,
    TrailersReceived,
)
from h2.exceptions import ProtocolError
from h2.settings import SettingCodes

Headers = Sequence[tuple[str, str]]


@dataclass(slots=True)
class Exchanged:
    """What came of a stream."""

    headers: dict[str, str] = field(default_factory=dict)
    informed: list[str] = field(default_factory=list)
    data: bytearray = field(default_factory=bytearray)
    trailers: dict[str, str] = field(default_factory=dict)
    has_ended: bool = False
    reset: int | None = None

    @property
    def is_over(self) -> bool:
        return self.has_ended or self.reset is not None


class Http2End:
    """Speak HTTP/2 over streams of asyncio; `keeps_windows` gives no room back for what came."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_client: bool,
        keeps_windows: bool = False, settings: Mapping[SettingCodes, int] | None = None,
        on_event: Callable[[Http2End, Event], None] = lambda *_: None,
    ):  # fmt: skip
        self.reader, self.writer, self._on_event, self.keeps_windows = reader, writer, on_event, keeps_windows
        self.h2 = H2Connection(H2Configuration(
            client_side=is_client, header_encoding="latin-1", validate_outbound_headers=False,
            normalize_outbound_headers=False, normalize_inbound_headers=False,
        ))  # fmt: skip
        self.streams: dict[int, Exchanged] = {}
        self.ended_by: int | None = None
        self.settings: dict[int, int] = {}
        self.is_closed = False
        self.came = asyncio.Condition()
        self.h2.initiate_connection()
        if settings:
            self.h2.update_settings(dict(settings))
        self.flush()
        self.task = asyncio.create_task(self._read())

    def flush(self) -> None:
        """Send what the library has written."""
        self.writer.write(self.h2.data_to_send())

    async def _read(self) -> None:
        with suppress(ConnectionError, ProtocolError):
            while data := await self.reader.read(1 << 16):
                for event in self.h2.receive_data(data):
                    self._take(event)
                    self._on_event(self, event)
                self.flush()
                async with self.came:
                    self.came.notify_all()
        self.is_closed = True
        async with self.came:
            self.came.notify_all()

    def _take(self, event: Event) -> None:
        if isinstance(event, RemoteSettingsChanged):
            self.settings |= {int(code): change.new_value for code, change in event.changed_settings.items()}
        if isinstance(event, ConnectionTerminated):
            self.ended_by = int(event.error_code or 0)
        stream = self.streams.setdefault(getattr(event, "stream_id", None) or 0, Exchanged())
        if isinstance(event, RequestReceived | ResponseReceived):
            stream.headers = {str(name): str(value) for name, value in event.headers}
        elif isinstance(event, InformationalResponseReceived):
            stream.informed.append(str(dict(event.headers)[":status"]))
        elif isinstance(event, TrailersReceived):
            stream.trailers = {str(name): str(value) for name, value in event.headers}
        elif isinstance(event, DataReceived):
            stream.data += event.data
            if not self.keeps_windows:
                self.h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
        elif isinstance(event, StreamEnded):
            stream.has_ended = True
        elif isinstance(event, StreamReset):
            stream.reset = int(event.error_code)

    def ask(self, headers: Headers = (), body: bytes | None = b"", *, ends: bool = True, **pseudo: str) -> int:
        """Send a request, and return its stream; `body=None` leaves it open."""
        stream_id = self.h2.get_next_available_stream_id()
        first = {"method": "GET", "scheme": "https", "authority": "a.example", "path": "/", **pseudo}
        rows = [*((f":{name}", value) for name, value in first.items() if value), *headers]
        self.h2.send_headers(stream_id, rows, end_stream=ends and body == b"")
        self.streams[stream_id] = Exchanged()
        if body:
            self.h2.send_data(stream_id, body, end_stream=ends)
        self.flush()
        return stream_id

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until something has come."""
        async with asyncio.timeout(20), self.came:
            await self.came.wait_for(lambda: condition() or self.is_closed)
        assert condition(), "the connection was closed"

    async def answer_to(self, stream_id: int) -> Exchanged:
        """Return what came of a stream, once it is over."""
        await self.until(lambda: self.streams[stream_id].is_over)
        return self.streams[stream_id]

    async def stop_reading(self) -> None:
        """Leave what comes to who reads `reader`."""
        self.task.cancel()
        await asyncio.wait({self.task})

    async def close(self) -> None:
        """Close the connection."""
        self.writer.close()
        await self.stop_reading()


def frame(kind: int, flags: int, stream_id: int, content: bytes = b"") -> bytes:
    """Write a frame by hand."""
    return struct.pack("!I", len(content))[1:] + struct.pack("!BBI", kind, flags, stream_id) + content
