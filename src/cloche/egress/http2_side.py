"""One of the two connections of an HTTP/2 relay, and the bytes of a stream on their way to it. No I/O.

Theory of operation: `h2` holds the state of a connection and writes its frames. The bytes of a stream wait in a `Flow`
until the windows of the side that they go to take them, and only then does their sender get room for more: so what is
held is bounded by the windows that are given here. All other frames wait in `unsent`, which its user bounds. Streams
take turns, frame by frame.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.exceptions import NoSuchStreamError, ProtocolError
from h2.settings import SettingCodes, Settings
from hpack import Encoder, HeaderTuple
from hyperframe.frame import GoAwayFrame

from .http2_frames import MOST_FRAME_BYTES, PREFACE, FrameReader
from .http_request import Headers
from .stream import Stream

MOST_STREAMS = 100
# Of what comes: headers, and bodies before they are passed on. The host is far away, and gets larger windows.
MOST_HEAD_BYTES = 32 << 10
GUEST_WINDOW_BYTES = 256 << 10
_BATCH_BYTES = 64 << 10
_INITIAL_WINDOW_BYTES = 65_535  # of a connection, which settings cannot change


_Text = bytes | str
_Row = HeaderTuple | tuple[_Text, _Text] | tuple[_Text, _Text, bool | None]


class _Encoder(Encoder):
    """Write headers as they are: to pack their text takes the square of its length."""

    def encode(self, headers: Iterable[_Row] | dict[_Text, _Text], huffman: bool = False) -> bytes:
        """Return a block."""
        return super().encode(headers, huffman)


class _Connection(H2Connection):
    MAX_CLOSED_STREAMS = 1000  # that are remembered


class Flow:
    """The bytes of one stream in one direction; `on_done` is called when the other side has all of them."""

    def __init__(self, source: Side, target: Side, on_done: Callable[[], None]):
        self._source, self._target, self._on_done = source, target, on_done
        self.source_id = self.target_id = 0  # none yet
        self.held = bytearray()
        self.owed_bytes = 0  # that the sender has not got back
        self.trailers: Headers = ()
        self.has_ended = self.is_done = False  # its end has come, and was passed on
        self.is_queued = False

    @property
    def has_something(self) -> bool:
        """Tell whether there is something to hand over."""
        return bool(self.target_id) and not self.is_done and (bool(self.held) or self.has_ended)

    def pay(self) -> None:
        """Give the sender room for what is not held any more."""
        paid = self.owed_bytes - len(self.held)
        if paid > 0:
            self.owed_bytes -= paid
            self._source.h2.acknowledge_received_data(paid, self.source_id)
            self._source.wake()

    def move(self, room: int) -> bool:
        """Hand over what is held, as far as the windows of the other side take it; say whether there was anything."""
        h2 = self._target.h2
        size = min(h2.local_flow_control_window(self.target_id), h2.max_outbound_frame_size, len(self.held), room)
        if size > 0:
            is_last = size == len(self.held) and self.has_ended and not self.trailers
            h2.send_data(self.target_id, bytes(self.held[:size]), end_stream=is_last)
            del self.held[:size]
            self.pay()
            if is_last:
                self.finish()
        if not self.held and self.has_ended and not self.is_done:
            if self.trailers:
                h2.send_headers(self.target_id, self.trailers, end_stream=True)
            else:
                h2.end_stream(self.target_id)
            self.finish()
        return size > 0 or self.is_done

    def finish(self) -> None:
        """Note that all of it was passed on."""
        self.is_done = True
        self._on_done()

    def drop(self) -> None:
        """Pass on nothing more."""
        self.is_done = True
        self.held.clear()
        self.pay()


class Side:
    """One connection: what comes is read frame by frame, and what goes there waits in `unsent`."""

    def __init__(self, stream: Stream, *, is_host: bool, window_bytes: int):
        self.stream, self._is_host, self._window_bytes = stream, is_host, window_bytes
        self.frames = FrameReader(has_preface=not is_host, most_block_bytes=MOST_HEAD_BYTES)
        self.h2 = _Connection(H2Configuration(
            client_side=is_host, header_encoding=None, validate_inbound_headers=False, normalize_inbound_headers=False,
            validate_outbound_headers=False, normalize_outbound_headers=False,
        ))  # fmt: skip
        self.h2.encoder = _Encoder()
        self.h2.decoder.max_header_list_size = MOST_HEAD_BYTES
        self.h2.max_inbound_frame_size = MOST_HEAD_BYTES  # a block of headers comes as one frame
        self.unsent = bytearray()
        self._flows: deque[Flow] = deque()  # to this side
        self.wakes = asyncio.Event()
        self._may_hear = False
        if not is_host:
            self.h2.receive_data(PREFACE)

    def begin(self, *, takes_web_sockets: bool = False) -> None:
        """Send the settings, before all that waits already."""
        values: dict[SettingCodes, int] = {
            SettingCodes.MAX_CONCURRENT_STREAMS: MOST_STREAMS,
            SettingCodes.MAX_HEADER_LIST_SIZE: MOST_HEAD_BYTES,
            SettingCodes.ENABLE_CONNECT_PROTOCOL: int(takes_web_sockets),
        }
        if self._is_host:
            values = {SettingCodes.ENABLE_PUSH: 0, SettingCodes.INITIAL_WINDOW_SIZE: self._window_bytes // 2}
        earlier = self.h2.data_to_send()
        self.h2.local_settings = Settings(client=self._is_host, initial_values=values)
        self.h2.initiate_connection()
        self.h2.increment_flow_control_window(self._window_bytes - _INITIAL_WINDOW_BYTES)
        self.unsent[:0] = self.h2.data_to_send() + earlier
        self._may_hear = True
        self.wake()

    @property
    def has_room_for_stream(self) -> bool:
        """Tell whether one more stream may be opened there."""
        return self.h2.open_outbound_streams < self.h2.remote_settings.max_concurrent_streams

    @property
    def has_nothing_to_send(self) -> bool:
        """Tell whether all was sent."""
        return not self.unsent and not self._flows

    def wake(self) -> None:
        """Have the writer look for what is to be sent."""
        self.unsent += self.h2.data_to_send()
        self.wakes.set()

    def add(self, flow: Flow) -> None:
        """Have a flow's bytes sent."""
        if not flow.is_queued and flow.has_something:
            flow.is_queued = True
            self._flows.append(flow)
            self.wake()

    def reset(self, stream_id: int, code: int) -> None:
        """End a stream at once, if it is open."""
        with suppress(ProtocolError):
            self.h2.reset_stream(stream_id, code)
        self.wake()

    def send_headers(self, stream_id: int, headers: Headers, *, ends: bool) -> None:
        """Send headers."""
        self.h2.send_headers(stream_id, headers, end_stream=ends)
        self.wake()

    def send_goaway(self, code: int) -> None:
        """Say that no new stream is taken. For `h2` everything would be over."""
        self.unsent += self.h2.data_to_send()
        last_id = self.h2.highest_inbound_stream_id
        self.unsent += GoAwayFrame(0, last_stream_id=last_id, error_code=code).serialize()
        self.wake()

    def _move(self, flow: Flow) -> bool:
        """Take a frame of a flow; say whether there was one."""
        if not flow.has_something:
            return False
        try:
            has_moved = flow.move(MOST_FRAME_BYTES)
        except NoSuchStreamError:  # the other side has ended it
            flow.drop()
            return False
        self.unsent += self.h2.data_to_send()
        return has_moved

    def clear(self) -> None:
        """Pass nothing on any more."""
        self._flows.clear()

    def next_batch(self) -> bytes:
        """Return what is to be sent now, empty where there is nothing, or no window for it. Streams take turns."""
        if not self._may_hear:
            return b""
        blocked = 0
        while blocked < len(self._flows) and len(self.unsent) < _BATCH_BYTES:
            flow = self._flows.popleft()
            blocked = 0 if self._move(flow) else blocked + 1
            if flow.has_something:
                self._flows.append(flow)
            else:
                flow.is_queued = False
        batch, self.unsent = bytes(self.unsent), bytearray()
        return batch
