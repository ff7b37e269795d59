"""The one protocol between a live sandbox and its clients: frames, channels, windows, operations. No I/O here.

**Frames.** A frame is a header of nine bytes (`>IIB`: length of the body, channel, kind) and a body of at most
`MOST_BODY` bytes. The first frame of either side is HELLO on channel 0, with `{"version": VERSION}` and further facts
about the sender; a side that speaks another version closes the connection.

**Channels.** The client opens a channel with OPEN, under an unused number that it chooses. Its body is a JSON object
with the operation in `op` and its arguments. All frames of the operation travel on that channel: EVENT from the sandbox
and ASK from the client (JSON), DATA and END of numbered streams either way. CLOSE is the last frame of a channel: from
the sandbox with `{}`, or `{"error": {"kind", "message", ...}}`; a client's CLOSE ends the channel, and nothing else
unless the operation says so. Frames on a closed channel are dropped.

**Flow control** is per stream and direction. A DATA frame is a byte with the stream's number and content. A sender may
have `WINDOW_BYTES` unacknowledged; the receiver grants more with a WINDOW frame (`>BI`: stream, bytes) when it has
consumed data. A slow reader blocks only its own stream. Exceeding the window, and a grant of more than was sent, end
the connection. `Credit` counts both directions.

**Operations** (arguments; events; streams):

- `start`: a process. `argv`, or `python` (settings of the interpreter), `env`, `cwd`, `user`, `timeout_s`, `streams`,
  `terminal` (`[rows, columns]`), `is_kept`, `tag`, `listed` (text for `processes`), `alone`, `remove`, `folders` and
  `files` (paths; path, mode, content in hexadecimal: done first, by the process). With `waits`, a process without room
  among the sandbox's processes waits for it, as long as its time-out or LONGEST_WAIT_S, after earlier ones, and then
  fails as it does without: `pids`. With `alone` it ends when its output does, which others may still write, and its
  time-out kills none of these. It is `started` when its program runs, if that is known.
  Events: `waiting`; `started` with `id`, `pid` and `is_terminal`; `exit` with `status` (a wait status), `cause`,
  `usage`, `dropped` bytes, how many system calls of the tree were `denied`, and of a failed process `pids_hits` and
  `is_full`: whether the limit on processes was reached meanwhile, and nothing more can be written.
  Streams: 0 in, 1 and 2 out, 3 reports of a Python program, 4 a session's requests. ASK: `signal` with `number` and
  `to` (`process`, `group` or `tree`), `resize` with `rows` and `columns`, `kill` with `cause`, `keep`, `rest` with
  `is_resting`: it has no request now, so its memory need not be watched closely. CLOSE by the client kills the tree,
  unless `is_kept`. With stream 4 it is a session: its answers on 3 come after all output that was printed before them,
  its end when all processes that it started have ended. A program has its ends of 4 and 3 as descriptors 3 and 4. 5 and
  6 carry its calls of the client's functions and the answers (`cloche.functions`): frames like these, OPEN and CLOSE,
  whose channel is the number of a call; the first one inside is HELLO. It has them as descriptors 5 and 6.
- `attach`: the streams and the exit of a running or kept process, by `id`, `pid` or `tag`: the last one that was
  started, one that runs before others. First come the last unread bytes.
- `control`: a running process, by the same, whose output stays where it is. Event `started`, also with `has_input`.
  Stream 0 in; ASK: `signal`, `resize`, `kill`. It is closed with the error `closed` if the process does not read input.
- `processes`: one event `processes` with a list of the running and the kept ended ones. Of each: its `tag`, `printed`
  bytes so far, whether a client `is_attached`, and whether all in the foreground of its terminal `is_stopped`; of
  running ones `listed`, as far as there is room.
- `usage`: one event `usage` with `cpu_s` of all processes so far, how many `processes` live and how many of them are
  `stopped`, their `memory_bytes` (shared pages count for each), init's own `init_bytes`, and the `disk_bytes` of
  `disk_total_bytes` that are used.
- `kill`: a tree, by `id`.
- `files`: one operation on files, see `files`. Streams: 0 content in, 1 content out.
- `connect`: a TCP connection to `port` on loopback inside. Event `connected`. Streams: 0 to the server, 1 from it. If
  it `hands_out`, and init has another transport to the client, the socket itself goes that way, and the channel ends.
- `ports`: one event `ports` with the listening processes.
- `clock`: one event `clock` with `ns`, the time that a file gets which changes now, and none that has changed before.
- `output`: the last unread bytes of a process, by `id`, on its streams 1 and 2; they are kept.
- `pause`: stop all processes and the clocks of commands; no process is started until `resume`. Both answer by CLOSE.
  With `memory` false, either ends all processes first.
- `limits`: `ends_in_s`, after which all ends, even with clients, or with `pauses` is paused a little later, until the
  next `limits` or `resume`; `idle_s`, after which it ends if no process but init has lived and no frame has come. Null
  means no limit. They replace earlier ones, and count on CLOCK_BOOTTIME.
- `stop`: SIGTERM to all processes, paused ones too; no process is started from then on. CLOSE comes when all have
  ended, after `grace_s` at the latest.
- `end`: kill everything. The sandbox is over when the connection closes.

**A keeper** (`cloche.keeper`) may be between the sandbox and any number of clients, each with its connection and its
numbers of channels, from 1 to 65,535. A client that breaks the protocol loses its connection; the others keep theirs.
Its HELLO is that of the sandbox with `keeper` beside: `name`, `boot` (the id of the host's boot). That of a client may
have `"is_visit": true`: the client does not count for keeping the sandbox alive. When a client goes, its channels are
closed. The keeper answers some operations itself; their OPEN is short and has `op` as the first member, without spaces:
`pause` and `resume` as above, which also stop and start the clock of the lifetime, unless `life_goes_on`; `lifetime`:
`left_s` from now on, with `only_extends` unless more is left; `at_end`, one of `end`, `pause` and `pause-files`
(without the processes); with `resumes` it ends a pause, too; `watch`: an event `life` now and at each change of these,
until the channel is closed; `end`, when nothing is left; `own`: `owner_s`, the time without a sign of its owner and any
client after which all ends; `keep`: `keep_s`, the time without a client after which all ends; `linger`: while its
channel is open, SIGTERM and `end` wait until the client has closed it, at most `linger_s`;
it gets an event `ending` then; `info`: one event `info` with `name`, `pid`, `clients`, `is_paused`, `paused_s` (in
all), `has_memory` (whether the processes of before a pause go on after it), `age_s`, `keep_s`, `lifetime_s`, `idle_s`,
`left_s` (of the lifetime), `at_end` and `without_client_s`.

All frames of a sandbox may be forged by a guest where the guest could have caused them. Clients read them with
`decode_object`, bounded.
"""

from __future__ import annotations

import struct

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

VERSION = 1
HEADER = struct.Struct(">IIB")
GRANT = struct.Struct(">BI")
HELLO, OPEN, EVENT, ASK, DATA, END, WINDOW, CLOSE, PING, PONG = range(10)
MOST_BODY = 2 << 20  # an argument list of 1 MiB, as JSON
MOST_DATA = 1 << 16  # content of one DATA frame
WINDOW_BYTES = 1 << 18
GRANTED_AT_ONCE = WINDOW_BYTES // 4  # small pieces are not acknowledged one by one
MOST_AT_ONCE = 512  # frames that are handled in one turn of an event loop
MOST_CHANNELS = 512  # of one connection
LONGEST_WAIT_S = 30.0  # for room, of a process without a time-out
STDIN, STDOUT, STDERR, REPORT, REQUESTS, HOST_CALLS, HOST_ANSWERS = range(7)
STREAMS = 7  # of one channel


class WireError(ValueError):
    """Say that the other side broke the protocol: nothing it sends can be trusted to mean anything any more."""


class Refused(Exception):
    """Hold why an operation cannot be done, as the client reads it."""

    def __init__(self, kind: str, message: str, **more: Any):
        super().__init__(message)
        self.error = {"kind": kind, "message": message, **more}


def frame(kind: int, channel: int, body: bytes = b"") -> bytes:
    """Return one frame."""
    return HEADER.pack(len(body), channel, kind) + body


def json_frame(kind: int, channel: int, **body: Any) -> bytes:
    """Return a frame whose body is a JSON object."""
    import json

    return frame(kind, channel, json.dumps(body, separators=(",", ":")).encode("ascii"))


def data_frame(channel: int, stream: int, data: bytes | memoryview) -> bytes:
    """Return a frame with a piece of a stream."""
    return b"".join((HEADER.pack(len(data) + 1, channel, DATA), bytes((stream,)), data))


def grant_frame(channel: int, stream: int, count: int) -> bytes:
    """Return a frame that opens a stream's window by `count` bytes."""
    return frame(WINDOW, channel, GRANT.pack(stream, count))


class FrameBuffer:
    """Cut received bytes, in pieces of any size, into frames: kind, channel, body."""

    def __init__(self, most_body: int = MOST_BODY, last_kind: int = CLOSE) -> None:
        self._buffer = bytearray()
        self._most, self._last_kind = most_body, last_kind

    def feed(self, data: bytes, max_frames: int = -1) -> list[tuple[int, int, bytes]]:
        """Return the frames that are complete with `data`, at most `most` of them unless that is -1.

        If `most` frames are returned, `feed(b"", most)` returns the next. Raises WireError for a frame that is too long
        or of no kind.
        """
        if self._buffer:
            self._buffer += data
            with memoryview(self._buffer) as view:
                frames, end = self._cut(view, max_frames)
            del self._buffer[:end]
        else:  # as nearly always: nothing is copied but the bodies
            frames, end = self._cut(memoryview(data), max_frames)
            self._buffer += data[end:] if end else data
        return frames

    def _cut(self, view: memoryview, max_frames: int) -> tuple[list[tuple[int, int, bytes]], int]:
        """Return the frames, and where the last one ends."""
        start, size = 0, len(view)
        frames: list[tuple[int, int, bytes]] = []
        while size - start >= HEADER.size and len(frames) != max_frames:
            length, channel, kind = HEADER.unpack_from(view, start)
            if length > self._most or kind > self._last_kind:
                raise WireError(f"a frame of kind {kind} with {length} bytes")
            end = start + HEADER.size + length
            if end > size:
                break
            frames.append((kind, channel, bytes(view[start + HEADER.size : end])))
            start = end
        return frames, start


class Credit:
    """Count the bytes that may be sent and received on the streams of one channel. Nothing is sent here."""

    def __init__(self) -> None:
        self._sendable = [WINDOW_BYTES] * STREAMS
        self._receivable = [WINDOW_BYTES] * STREAMS
        self._consumed = [0] * STREAMS  # and not granted again yet

    def sendable(self, stream: int) -> int:
        """Return how many bytes of a stream may be sent now; 0 or less for none."""
        return self._sendable[stream]

    def note_sent(self, stream: int, count: int) -> None:
        """Count bytes that were sent."""
        self._sendable[stream] -= count

    def note_granted(self, stream: int, count: int) -> None:
        """Take a grant of the receiver. Raises WireError for more than was sent."""
        if stream >= STREAMS or not count or self._sendable[stream] + count > WINDOW_BYTES:
            raise WireError(f"stream {stream}: a window for data that was not sent")
        self._sendable[stream] += count

    def receivable(self, stream: int) -> int:
        """Return how many bytes of a stream may arrive now."""
        return self._receivable[stream]

    def note_received(self, stream: int, count: int) -> None:
        """Count bytes that arrived. Raises WireError for more than the window, and for a stream that there is not."""
        if stream >= STREAMS or count > self._receivable[stream]:
            raise WireError(f"stream {stream}: data exceeds its window")
        self._receivable[stream] -= count

    def note_whole(self, stream: int, count: int) -> None:
        """Count a message that is sent whole while anything is left of the window. Raises WireError if nothing is."""
        if self._receivable[stream] <= 0:
            raise WireError(f"stream {stream}: data exceeds its window")
        self._receivable[stream] -= count

    def note_consumed(self, stream: int, count: int) -> int:
        """Count bytes that were consumed, and return how many to grant now: 0 until they are worth a frame."""
        consumed = self._consumed[stream] = self._consumed[stream] + count
        if consumed < GRANTED_AT_ONCE:
            return 0
        self._consumed[stream] = 0
        self._receivable[stream] += consumed
        return consumed

    def ungranted(self) -> list[tuple[int, int]]:
        """Return the streams with bytes that were consumed and not granted, and how many."""
        return [(stream, count) for stream, count in enumerate(self._consumed) if count]


def read_object(body: bytes) -> dict[str, Any]:
    """Return the object of a frame from a side that is trusted. Raises WireError for other contents."""
    import json  # which a keeper does without

    try:
        parsed = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise WireError(f"a frame holds no JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise WireError("a frame holds no JSON object")
    return parsed


def read_data(body: bytes) -> tuple[int, memoryview]:
    """Return the stream's number and the content of a DATA frame."""
    if not 1 <= len(body) <= MOST_DATA + 1:
        raise WireError(f"a piece of {len(body)} bytes")
    return body[0], memoryview(body)[1:]


def read_grant(body: bytes) -> tuple[int, int]:
    """Return the stream and the bytes of a WINDOW frame."""
    if len(body) != GRANT.size:
        raise WireError("a malformed window")
    stream, count = GRANT.unpack(body)
    return stream, count
