"""The relay of plain HTTP between a guest and one host: each request is decided, written anew, and answered in turn.

Theory of operation: the guest's side is read head by head (`http_request` decides), and no connection is opened before
the first request is allowed. A separate task carries the host's answers, at any time and as they come. A request goes
upstream when the answer to the one before is complete, so a refusal never appears inside an answer, and a WebSocket
begins exactly where the host agreed to it. While an answer goes on, the guest is read ahead, no further than one head,
so that its disconnect is noticed. A read is never cancelled while its bytes are still wanted.

The guest has `head_s` for each head, however much it sends, and no direction may be idle for longer than `idle_s`. At
the end the guest is read for a moment longer: closing with bytes unread would reset the connection and lose the answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Protocol

from cloche.core.record import replace

from .errors import Refused
from .http_answer import AnswerEdit, AnswerReader, AnswerRefused, EditedAnswer, WholeAnswer, reason_of
from .http_request import (
    MOST_HEAD_BYTES,
    Body,
    HeadFinder,
    HttpRequest,
    Rejected,
    RequestHead,
    RequestTarget,
    read_request,
)
from .stream import Stream, Turns, idle_limit, sharing, splice

HEAD_S = 30.0
IDLE_S = 300.0
LINGER_S = 2.0
MOST_LINGER_BYTES = 1 << 20
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_READ_BYTES = 64 << 10
TEXT = "text/plain; charset=utf-8"
_COUNTED_BYTES = 256 << 10  # of what is not parsed: the more at once, the less it costs
# Of heads and chunks, before a look at the clock: short ones cost as much as long ones, so it is more while it is fast.
_LEAST_PARSED_BYTES, _MOST_PARSED_BYTES, _PARSED_S = 256, 4096, 0.0003


async def relay(
    guest: Stream, host: str, port: int, connect: Callable[[], Awaitable[Stream]], refuse: Callable[[str], str],
    *, proxied: bool = False, head_s: float = HEAD_S, idle_s: float = IDLE_S, turns: Turns | None = None,
    edits: Edits | None = None,
) -> None:  # fmt: skip
    """Carry a guest's requests for `host`, which is in lower case, and the answers; close both sides at the end.

    `connect` is called once, for the first allowed request. It raises Refused for a forbidden target, which the guest
    reads with status 403, and OSError, which becomes 502. `refuse` takes the refused target, such as "a request for
    other.example", and returns the sentence that the guest reads. `proxied` writes targets as a proxy needs them.
    `turns` are shared with the guest's other connections. `edits` change requests and answers. Returns at the end of
    the connection, for any cause.
    """
    edit, is_tls = (edits.edit, edits.is_tls) if edits is not None else (None, False)
    target = RequestTarget(host=host, port=port, is_proxied=proxied, is_tls=is_tls, edit=edit)
    connection = _Connection(guest, target, connect, refuse, head_s, turns or Turns(), edits)
    try:
        async with idle_limit(idle_s) as note:
            connection.note = note
            await connection.serve()
        await connection.finish(idle_s)
    except OSError:  # an end is gone, or nothing moved for too long
        pass
    finally:
        await connection.close()


class Edits(Protocol):
    """Change the requests and answers of connections to one host, which come in TLS if `is_tls`."""

    is_tls: bool

    async def prepare(self) -> None:
        """Take note that a request has come, before it is edited."""
        ...

    def edit(self, head: RequestHead) -> RequestHead:
        """Return the head of a request for upstream, with its method as it was. Raises Rejected."""
        ...

    def body_edit(self, head: RequestHead, /) -> BodyEdit | None:
        """Return what changes the body of an edited request; None where it passes as it comes. Raises Rejected."""
        ...

    def answer_edit(self, head: RequestHead, /) -> AnswerEdit | None:
        """Return what changes the answer to an edited request; None where it passes as it is."""
        ...

    def message_edit(self, head: RequestHead, /) -> StreamEdit | None:
        """Return what changes the guest's bytes on a web socket; None where they pass as they are."""
        ...


AnswerBody = Callable[[bytes], Awaitable[WholeAnswer | None]]


class StreamEdit(Protocol):
    """Change bytes as they pass."""

    def feed(self, data: bytes) -> bytes:
        """Return what may be passed on of the bytes so far. Raises AnswerRefused."""
        ...

    def end(self) -> bytes:
        """Return the rest."""
        ...


class BodyEdit(Protocol):
    """Change a whole body, which has `most_bytes` at most.

    Where there is an `answer`, it is called before: it returns the answer to the request, which then does not go
    upstream, or None where it does. It raises Rejected.
    """

    @property
    def most_bytes(self) -> int: ...
    @property
    def answer(self) -> AnswerBody | None: ...

    def edit(self, body: bytes) -> bytes:
        """Return the body for upstream. Raises Rejected."""
        ...


class _GuestGone(OSError):
    """Report that the guest's connection broke."""


class _Answered(Exception):
    """Report a request whose answer is there."""

    def __init__(self, answer: WholeAnswer):
        super().__init__()
        self.answer = answer


class _Failed(Exception):
    """Report a failure to the guest that is no refusal."""

    def __init__(self, status: int, sentence: str):
        super().__init__(sentence)
        self.status, self.sentence = status, sentence


class Turn:
    """Let other connections have their turn when this one has computed for long; say how much to parse until then."""

    def __init__(self, turns: Turns) -> None:
        self._loop, self._turns = asyncio.get_running_loop(), turns
        self._since = self._looked = self._loop.time()
        self.parsed_bytes = _LEAST_PARSED_BYTES

    async def pass_on(self) -> None:
        """Let others run, where it is time."""
        now = self._loop.time()
        is_slow = now - self._looked > _PARSED_S
        new_bytes = self.parsed_bytes // 2 if is_slow else self.parsed_bytes * 2
        self.parsed_bytes = max(_LEAST_PARSED_BYTES, min(_MOST_PARSED_BYTES, new_bytes))
        if now - self._since > self._turns.turn_s(now):
            await self._turns.take()
            self._since = now = self._loop.time()
        self._looked = now


class _Guest:
    """The guest's bytes, read ahead during other waits; a stream for the protocol after HTTP."""

    def __init__(self, stream: Stream):
        self._stream = stream
        self.buffer = bytearray()
        self.has_ended = False
        self._reading: asyncio.Task[bytes] | None = None
        self.send, self.end_sending = stream.send, stream.end_sending

    async def wait(self, *futures: asyncio.Future[None]) -> None:
        """Wait until the guest has sent more or has ended, or one of the others is done."""
        waited: set[asyncio.Future[None] | asyncio.Future[bytes]] = set(futures)
        if not self.has_ended and len(self.buffer) <= MOST_HEAD_BYTES:
            self._reading = self._reading or asyncio.create_task(self._stream.receive(_READ_BYTES))
            waited.add(self._reading)
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        if self._reading is not None and self._reading.done():
            self.buffer += await self._end_reading(self._reading)

    async def _end_reading(self, reading: asyncio.Task[bytes]) -> bytes:
        self._reading = None
        try:
            data = await reading
        except OSError as error:
            raise _GuestGone from error
        self.has_ended = not data
        return data

    async def receive(self, size: int) -> bytes:
        """Return the bytes read ahead, then later ones."""
        if self.buffer:
            return self.take(size)
        if self._reading is not None:
            return await self._end_reading(self._reading)
        return b"" if self.has_ended else await self._stream.receive(size)

    def take(self, size: int) -> bytes:
        """Take off bytes that were read ahead."""
        data = bytes(self.buffer[:size])
        del self.buffer[:size]
        return data

    async def stop(self) -> None:
        """End reading ahead."""
        if self._reading is not None:
            await _cancel(self._reading)

    def close(self) -> None:
        """Give the guest up."""
        self._stream.close()


class _Edited:
    """Edit what is received of a stream."""

    def __init__(self, stream: Stream, edit: StreamEdit, turns: Turns):
        self._stream, self._edit, self._turn = stream, edit, Turn(turns)
        self.send, self.end_sending, self.close = stream.send, stream.end_sending, stream.close

    async def receive(self, size: int) -> bytes:
        """Return what passes, none at the end. Raises OSError, of which AnswerRefused is a kind."""
        while data := await self._stream.receive(min(size, _READ_BYTES)):
            pieces, offset = [], 0
            while offset < len(data):
                step = self._turn.parsed_bytes
                pieces.append(self._edit.feed(data[offset : offset + step]))
                offset += step
                await self._turn.pass_on()
            if passed := b"".join(pieces):
                return passed
        return self._edit.end()


class _Upstream:
    """The connection to the host, and the task that carries its answers.

    `answered` is done when the guest has the whole answer to the last request; it never is if only the connection's end
    shows it. `passing` is done when the host sends no more, or the connection is no longer HTTP.
    """

    def __init__(
        self, stream: Stream, guest: _Guest, answer: AnswerReader, note: Callable[[], None], turns: Turns
    ):  # fmt: skip
        self.stream, self._turns = stream, turns
        self._guest, self._note = guest, note
        self.expect(answer)
        self.passing = asyncio.create_task(self._pass_answers())

    def expect(self, answer: AnswerReader) -> None:
        """Read answers so from now on: a request is about to be sent."""
        self.answer = answer
        self.answered: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def is_between_answers(self) -> bool:
        """Say whether the guest has all of an answer and nothing of the next one."""
        return not self.answer.has_begun or (self.answer.progress == "complete" and self.answered.done())

    async def _pass_answers(self) -> None:
        with sharing() as size:
            while data := await self.stream.receive(min(size(), self._most())):
                self._note()
                if passed := await self._follow(data):
                    await self._guest.send(passed)
                self._note()
                if self.answer.progress not in ("open", "unknown") and not self.answered.done():
                    self.answered.set_result(None)
                if self.answer.is_switched:
                    return
            if rest := self.answer.end():
                await self._guest.send(rest)

    def _most(self) -> int:
        return _COUNTED_BYTES if self.answer.is_counted else _READ_BYTES

    async def _follow(self, data: bytes) -> bytes:
        """Have the answer read, and return the bytes to pass on."""
        offset, turn, pieces = 0, Turn(self._turns), []
        while offset < len(data):
            size = len(data) if self.answer.is_counted else turn.parsed_bytes
            pieces.append(self.answer.feed(data[offset : offset + size]))
            offset += size
            await turn.pass_on()
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    async def stop(self) -> None:
        """Pass on nothing more."""
        await _cancel(self.passing)


class _Connection:
    """One connection of a guest."""

    def __init__(
        self, guest: Stream, place: RequestTarget, connect: Callable[[], Awaitable[Stream]],
        refuse: Callable[[str], str], head_s: float, turns: Turns, edits: Edits | None,
    ):  # fmt: skip
        self._guest, self._place, self._edits = _Guest(guest), place, edits
        self._connect, self._refuse, self._head_s, self._turns = connect, refuse, head_s, turns
        self._upstream: _Upstream | None = None
        self._watch: StreamEdit | None = None
        self.note: Callable[[], None] = lambda: None

    async def serve(self) -> None:
        """Answer one request after the other, until there can be no further one."""
        try:
            while (head := await self._next_head()) is not None:
                if self._edits is not None:
                    await self._edits.prepare()
                request, body = read_request(head, self._place)
                if not await self._exchange(request, body):
                    return
        except Rejected as rejected:
            await self._say(rejected.status, self._refuse(rejected.what))
        except Refused as refused:
            await self._say(403, refused.reason)
        except _Failed as failed:
            await self._say(failed.status, failed.sentence)
        except _Answered as answered:
            await self._send(answered.answer)

    async def _next_head(self) -> bytes | None:
        """Return the head of the next request; None at the end. Only the first one's time begins before it."""
        finder, until, upstream = HeadFinder(), None, self._upstream
        if upstream is None:
            until = asyncio.get_running_loop().time() + self._head_s
        while True:
            if self._guest.buffer:
                until = until or asyncio.get_running_loop().time() + self._head_s
                if end := finder.find(self._guest.buffer):
                    return self._guest.take(end)
            if self._guest.has_ended or (upstream is not None and upstream.passing.done()):
                return None
            try:
                async with asyncio.timeout_at(until):
                    await self._guest.wait(*(() if upstream is None else (upstream.passing,)))
            except TimeoutError:
                if not self._guest.buffer:
                    return None
                raise _Failed(408, f"the request's header did not arrive within {self._head_s:g} s") from None
            self.note()

    async def _exchange(self, request: HttpRequest, body: Body) -> bool:
        """Pass on a request and its answer; say whether another one may follow."""
        request = await self._with_whole_body(request, body)
        if self._upstream is None:
            answer = self._read_answer(request)
            self._upstream = _Upstream(await self._open(), self._guest, answer, self.note, self._turns)
        elif self._upstream.answer.progress == "complete":
            self._upstream.expect(self._read_answer(request))
        else:  # the host said something that nobody had asked for
            return False
        try:
            await self._upstream.stream.send(request.head)
            is_sent = await self._send_body(self._upstream, body)
        except _GuestGone:
            raise
        except OSError:  # the host takes no more, but may have said why
            is_sent = False
        await self._wait_for_answer(self._upstream)
        return is_sent and not request.is_last and self._upstream.answer.progress == "complete"

    async def _open(self) -> Stream:
        try:
            return await self._connect()
        except OSError as error:
            why = error.strerror or str(error) or "the server did not answer in time"
            raise _Failed(502, f"cannot connect to {self._place.host}:{self._place.port}: {why}") from error

    def _read_answer(self, request: HttpRequest) -> AnswerReader:
        edit = self._edits.answer_edit(request.edited) if self._edits is not None else None
        self._watch = self._edits.message_edit(request.edited) if self._edits is not None else None
        return EditedAnswer(request, edit) if edit is not None else AnswerReader(request)

    async def _with_whole_body(self, request: HttpRequest, body: Body) -> HttpRequest:
        """Read the body where it is edited or signed, and return the request with it behind a head for it."""
        edit = self._edits.body_edit(request.edited) if self._edits is not None else None
        signing = request.edited.signing
        if edit is None and signing is None:
            return request
        most_bytes = min(each.most_bytes for each in (edit, signing) if each is not None)
        content = await self._whole_body(request, body, most_bytes)
        if edit is not None and edit.answer is not None and (answer := await edit.answer(content)) is not None:
            raise _Answered(answer)
        await self._turns.take()  # to edit a whole one takes some milliseconds
        content = content if edit is None else edit.edit(content)
        added = () if signing is None else signing.headers(content)
        return replace(request, head=request.head_for(len(content), added) + content)

    async def _whole_body(self, request: HttpRequest, body: Body, most_bytes: int) -> bytes:
        """Return a request's body. Raises Rejected for a larger one, _GuestGone for half of one."""
        content, turn = bytearray(body.read(b"")), Turn(self._turns)
        if request.awaits_continue and not body.has_ended:
            await self._guest.send(_CONTINUE)
        while not body.has_ended:
            while not self._guest.buffer:
                if self._guest.has_ended:
                    raise _GuestGone
                await self._guest.wait()
            content += body.read(self._guest.take(turn.parsed_bytes if body.is_chunked else _READ_BYTES))
            if len(content) > most_bytes:
                raise Rejected(413, f"a request whose body has more than {most_bytes} bytes where it has to be read")
            self.note()
            await turn.pass_on()
        return bytes(content)

    async def _send_body(self, upstream: _Upstream, body: Body) -> bool:
        """Send the body as it comes, unless it went with the head; say whether all of it went."""
        data, turn = b"", Turn(self._turns)
        while True:
            if not body.has_ended and (content := body.feed(data)):
                await upstream.stream.send(content)
            self.note()
            if body.has_ended:
                self._guest.buffer[:0] = body.rest
                return True
            if not self._guest.buffer:
                if self._guest.has_ended or upstream.passing.done():
                    upstream.stream.end_sending()
                    return False
                await self._guest.wait(upstream.passing)
            await turn.pass_on()
            data = self._guest.take(turn.parsed_bytes if body.is_chunked else _READ_BYTES)

    async def _wait_for_answer(self, upstream: _Upstream) -> None:
        """Wait until the answer is complete, or nothing more comes; meanwhile the guest may end its side."""
        while not (upstream.answered.done() or upstream.passing.done()):
            if self._guest.has_ended and not self._guest.buffer:
                upstream.stream.end_sending()
            await self._guest.wait(upstream.answered, upstream.passing)
        if upstream.passing.done() and isinstance(refused := upstream.passing.exception(), AnswerRefused):
            raise _Failed(502, f"{self._place.host}: {refused.strerror}")

    async def _say(self, status: int, sentence: str) -> None:
        """Answer in the host's place, unless the guest has the beginning of another answer."""
        if self._upstream is not None:
            await self._upstream.stop()
            if not self._upstream.is_between_answers:
                return
        body = f"{sentence}\n".encode(errors="replace")
        await self._send(WholeAnswer(status=status, body=body, content_type=TEXT))

    async def _send(self, answer: WholeAnswer) -> None:
        head = (
            f"HTTP/1.1 {answer.status} {reason_of(answer.status)}\r\nContent-Type: {answer.content_type}\r\n"
            f"Content-Length: {len(answer.body)}\r\nConnection: close\r\n\r\n"
        )
        with suppress(OSError):
            await self._guest.send(head.encode() + answer.body)

    async def finish(self, idle_s: float) -> None:
        """Carry the bytes of another protocol that the host agreed to; else close the guest's side."""
        if self._upstream is not None and self._upstream.answer.is_switched:
            await splice(*self._switched(self._upstream), idle_s=idle_s)
            return
        if self._upstream is not None:
            await self._upstream.stop()
            self._upstream.stream.close()
        self._guest.end_sending()
        budget = MOST_LINGER_BYTES
        async with asyncio.timeout(LINGER_S):
            while budget > 0 and (data := await self._guest.receive(_READ_BYTES)):
                budget -= len(data)

    def _switched(self, upstream: _Upstream) -> tuple[Stream, Stream]:
        """Return both sides of a web socket, edited."""
        answer, watch = upstream.answer, self._watch
        guest = self._guest if watch is None else _Edited(self._guest, watch, self._turns)
        if isinstance(answer, EditedAnswer):
            return guest, _Edited(upstream.stream, answer.edit, self._turns)
        return guest, upstream.stream

    async def close(self) -> None:
        """Give both sides up."""
        try:
            await self._guest.stop()
            if self._upstream is not None:
                await self._upstream.stop()
        finally:
            self._guest.close()
            if self._upstream is not None:
                self._upstream.stream.close()


async def _cancel(task: asyncio.Task[bytes] | asyncio.Task[None]) -> None:
    """End a task, and report its failure, unless a connection broke."""
    task.cancel()
    await asyncio.wait({task})
    if not task.cancelled() and (error := task.exception()) is not None and not isinstance(error, OSError):
        raise error
