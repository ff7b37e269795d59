"""The caller's functions for a Python program: the module `cloche_host`, and the link that its calls travel on.

It is in `sys.modules` before the program starts, so a file of that name in the program's folder is never looked for.
Calls go to a pipe, answers come on a socket, both as frames of `init.wire`: a header of nine bytes (length, number,
kind), then JSON. An OPEN frame is a call, a CLOSE frame its answer, or from here its cancellation. The first frame is
the caller's HELLO, with the source of each function.

No thread is made, so that a session can be cloned: of the threads that wait for answers one reads for all, and an event
loop reads while one of its own calls is open.

An interrupt of a session's cell (SIGINT) may come after any instruction. What is read or written is noted in the same
one (`_in_one_step`), and what is left over is done by the next call.
"""

from __future__ import annotations

import itertools
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_thread: Any = __import__("_thread")
json: Any = __import__("json")  # before the program's folder is searched, where there may be another one

NAME = "cloche_host"
HEADER_BYTES = 9
HELLO, OPEN, CLOSE = 0, 1, 7
READ_BYTES = 1 << 18
WRITTEN_BYTES = 1 << 16  # at once
LOOK_AGAIN_MS = 50  # while another thread reads the answers
POLLIN, POLLOUT = 1, 4
FUTURE_FLAGS = 0x1FF0000
GONE = "the caller takes no more calls from this program"


class HostError(Exception):
    """Report that a function of the host failed, or was not called. `kind` is a word or the name of its exception."""

    def __init__(self, message: str, kind: str = "gone"):
        super().__init__(message)
        self.kind = kind


class Waiter:
    """Wait for one answer: in a thread, which holds `wake`, or by a function, which gets the answer."""

    __slots__ = ("answer", "deliver", "wake")

    def __init__(self, deliver: Callable[[bytes], None] | None = None) -> None:
        self.answer: bytes | None = None
        self.deliver = deliver
        self.wake: Any = None
        if deliver is None:
            self.wake = _thread.allocate_lock()
            self.wake.acquire()

    def rouse(self) -> None:
        """Let the thread look again whether its answer has come."""
        if self.wake is not None:
            try:
                self.wake.release()
            except RuntimeError:
                pass  # another thread has done it


class Link:
    """Send calls and take answers, for all threads and event loops of this process."""

    def __init__(self, calls: int, answers: int) -> None:
        self.calls, self.answers = calls, answers
        self.functions: dict[str, Any] = {}
        self.has_greeting = False
        self.numbers = itertools.count(1)  # whose step is one instruction, for all threads
        self._paths = list(sys.path)
        self._poll: Any = None
        self.begin()

    def poll(self) -> Any:
        """Return a new poll object, of a module that costs most runs too much, and never of the program's folder."""
        if self._poll is None:
            self._poll = _load("select", self._paths).poll
        return self._poll()

    def begin(self) -> None:
        """Begin with new descriptors under the old numbers, as a clone has them, or with the first ones."""
        for fd in (self.calls, self.answers):
            os.set_blocking(fd, False)
        self.pid = os.getpid()
        self.received, self.unsent = bytearray(), bytearray()
        self.waiting: dict[int, Waiter] = {}
        self.listening: dict[Any, int] = {}  # open calls of each event loop
        self.writing, self.reading = _thread.RLock(), _thread.RLock()
        self.is_lost = False

    def greet(self) -> None:
        """Wait for the caller's greeting, unless it has come."""
        if not self.has_greeting:
            self._check_process()
            waiter = self.waiting[0] = Waiter()
            self._wait(waiter)
            if not self.has_greeting:
                raise HostError(GONE)

    def call(self, name: str, values: dict[str, Any], more: tuple[Any, ...] = (), named: Any = None) -> Any:
        """Call a function: return its result, or an awaitable where an event loop runs in this thread."""
        asyncio = sys.modules.get("asyncio")
        loop = asyncio._get_running_loop() if hasattr(asyncio, "_get_running_loop") else None  # type: ignore[union-attr]
        if loop is not None:
            return self._start(loop, name, _body(name, values, more, named))
        return self.call_and_wait(name, values, more, named)

    def call_and_wait(self, name: str, values: dict[str, Any], more: tuple[Any, ...] = (), named: Any = None) -> Any:
        """Call a function and block this thread until its result is there."""
        body, waiter, number = _body(name, values, more, named), Waiter(), self._next_number()
        try:
            self.waiting[number] = waiter
            self._send(OPEN, number, body)
            self._wait(waiter)
        finally:
            if self.waiting.pop(number, None) is not None and not self.is_lost:  # interrupted
                self._send(CLOSE, number, b"")
        if not waiter.answer:
            raise HostError(GONE)
        return _read(waiter.answer)

    def _next_number(self) -> int:
        self._check_process()
        return next(self.numbers)

    def _check_process(self) -> None:
        if os.getpid() != self.pid:
            raise HostError(
                "functions of the host are called by the process that the run began with; call them there, and pass "
                "their results on"
            )

    # An event loop.

    def _start(self, loop: Any, name: str, body: bytes) -> Any:
        future = _pending(name, loop)

        def settle(answer: bytes) -> None:
            if future.done():
                return
            try:
                future.set_result(_read(answer) if answer else _gone())
            except HostError as error:
                future.set_exception(error)

        def deliver(answer: bytes) -> None:
            if sys.modules["asyncio"]._get_running_loop() is loop:
                settle(answer)
            else:
                loop.call_soon_threadsafe(settle, answer)

        number = self._next_number()
        self.waiting[number] = Waiter(deliver)

        def end(_: Any) -> None:
            if self.waiting.pop(number, None) is not None and not self.is_lost:
                self._send(CLOSE, number, b"")
            self._listen(loop, -1)

        self._listen(loop, 1)
        future.add_done_callback(end)
        self._send(OPEN, number, body)
        return future

    def _listen(self, loop: Any, more: int) -> None:
        count = self.listening[loop] = self.listening.get(loop, 0) + more
        if count == 1 and more > 0:
            loop.add_reader(self.answers, self._take_turn)
        elif count == 0:
            del self.listening[loop]
            loop.remove_reader(self.answers)

    def _take_turn(self) -> None:
        """Read, unless a thread does."""
        try:
            if self.reading.acquire(False):
                self._read_some()
        finally:
            self._end_reading()

    # Both directions.

    def _send(self, kind: int, number: int, body: bytes) -> None:
        header = len(body).to_bytes(4, "big") + number.to_bytes(4, "big") + bytes((kind,))
        with self.writing:
            self.unsent += header + body  # what an interrupt leaves of it goes out before the next one
            while self.unsent and not self.is_lost:
                try:
                    data = bytes(self.unsent[:WRITTEN_BYTES])
                    _in_one_step((os.write, slice, self.unsent.__delitem__), self.calls, data)
                except BlockingIOError:
                    self._wait_for_room()
                except OSError:
                    self._lose()

    def _wait_for_room(self) -> None:
        """Wait until more can be written; take answers meanwhile, for which the caller may be waiting."""
        poll = self.poll()
        poll.register(self.calls, POLLOUT)
        try:
            if not self.reading.acquire(False):
                poll.poll(LOOK_AGAIN_MS)
                return
            poll.register(self.answers, POLLIN)
            if any(fd == self.answers for fd, _ in poll.poll()):
                self._read_some()
        finally:
            self._end_reading()

    def _wait(self, waiter: Waiter) -> None:
        """Wait for an answer: as the thread that reads, or for that one."""
        poll = self.poll()
        poll.register(self.answers, POLLIN)
        while self._is_open(waiter):
            try:
                is_reader = self.reading.acquire(False)
                if is_reader:
                    self._take_frames()  # of a read that was interrupted
                    if self._is_open(waiter):
                        poll.poll()
                        self._read_some()
            finally:
                self._end_reading()
            if not is_reader:
                waiter.wake.acquire()

    def _is_open(self, waiter: Waiter) -> bool:
        return waiter.answer is None and not self.is_lost

    def _end_reading(self) -> None:
        """Let another thread read, if this one did; it owns the lock, however it got here."""
        if self.reading._is_owned():
            while self.reading._is_owned():
                self.reading.release()
            self._rouse_one()

    def _rouse_one(self) -> None:
        """Have another thread read that waits, if there is one."""
        for waiter in list(self.waiting.values()):
            if waiter.wake is not None:
                waiter.rouse()
                return

    def _read_some(self) -> None:
        held_bytes = len(self.received)
        try:
            _in_one_step((os.read, self.received.extend), self.answers, READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            pass
        if len(self.received) == held_bytes:
            self._lose()
        self._take_frames()

    def _take_frames(self) -> None:
        while len(self.received) >= HEADER_BYTES:
            end = HEADER_BYTES + int.from_bytes(self.received[:4], "big")
            if len(self.received) < end:
                break
            number, kind = int.from_bytes(self.received[4:8], "big"), self.received[8]
            body = bytes(self.received[HEADER_BYTES:end])
            if kind == HELLO:
                self._take_greeting(body)
            waiter = self.waiting.get(number) if kind in (HELLO, CLOSE) else None
            if waiter is not None:
                _answer(waiter, body)
                self.waiting.pop(number, None)
            del self.received[:end]

    def _lose(self) -> None:
        self.is_lost = True
        self.unsent.clear()
        lost, self.waiting = list(self.waiting.values()), {}
        for waiter in lost:
            if waiter.deliver is not None:
                waiter.deliver(b"")
            waiter.rouse()

    def _take_greeting(self, body: bytes) -> None:
        if self.has_greeting:
            return
        for row in json.loads(body)["functions"]:
            function = _made(row["source"], row["name"], self.call)
            function.wait = _made(row["source"], row["name"], self.call_and_wait)
            self.functions[row["name"]] = function
        self.has_greeting = True


def _in_one_step(functions: tuple[Any, ...], *arguments: Any) -> None:
    """Call the first function with the arguments, and each other one with what the one before it returned.

    All of it is one instruction of the interpreter: an interrupt comes before it or after it.
    """
    values: Any = map(functions[0], *[(argument,) for argument in arguments])
    for function in functions[1:]:
        values = map(function, values)
    list(values)


def _pending(name: str, loop: Any) -> Any:
    """Return a future that says, where it is used as the value, that it has to be awaited."""
    asyncio: Any = sys.modules["asyncio"]
    words = f"in a running event loop {name}(...) returns an awaitable: `await {name}(...)`, or `{name}.wait(...)`"

    def refuse(*_: Any) -> Any:
        raise TypeError(words)

    names = ("__getitem__", "__iter__", "__len__", "__contains__", "__add__", "__int__", "__float__")
    kind = type("Pending", (asyncio.Future,), {**dict.fromkeys(names, refuse), "__repr__": lambda _: f"<{words}>"})
    return kind(loop=loop)


class Annotation(str):
    """Be an annotation that `help` shows without quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


class HostModule(type(sys)):  # type: ignore[misc]
    """Be the module `cloche_host`: its functions are known when the first of its names is asked for."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__all__":
            raise AttributeError(f"module {NAME!r} has no attribute {name!r}")
        functions = self._functions()
        if name == "__all__":
            return [*functions]
        if name in functions:
            return functions[name]
        known = ", ".join(functions)
        raise AttributeError(f"module {NAME!r} has no function {name!r}; the caller gave: {known}")

    def __dir__(self) -> list[str]:
        return sorted({*self._functions(), "HostError"})


def install(calls: int, answers: int) -> Link:
    """Put the module where imports find it, and return the link."""
    link = Link(calls, answers)

    def functions() -> dict[str, Any]:
        link.greet()
        return link.functions

    module: Any = HostModule(NAME, "Functions of the program that started this one; `help` shows each of them.")
    HostError.__module__ = NAME
    module.__dict__.update(HostError=HostError, _functions=functions)
    sys.modules[NAME] = module
    return link


def _load(name: str, paths: list[str]) -> Any:
    """Return a module of the interpreter's own, which is found on these paths or built in."""
    if name in sys.builtin_module_names:
        return __import__(name)
    import _frozen_importlib
    import _frozen_importlib_external

    spec: Any = _frozen_importlib_external.PathFinder.find_spec(name, paths)
    module = _frozen_importlib.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _made(source: str, name: str, call: Callable[..., Any]) -> Any:
    namespace: dict[str, Any] = {"__name__": NAME, "_cloche_call": call}
    flags = install.__code__.co_flags & FUTURE_FLAGS  # annotations are text here, too
    exec(compile(source, f"<{NAME}.{name}>", "exec", flags, dont_inherit=True), namespace)
    function = namespace[name]
    function.__annotations__ = {key: Annotation(text) for key, text in function.__annotations__.items()}
    return function


def _body(name: str, values: dict[str, Any], more: tuple[Any, ...], named: Any) -> bytes:
    """Return a call as JSON. An argument that was left out, whose default the caller alone knows, is `...`."""
    call: dict[str, Any] = {"call": name, "data": {key: value for key, value in values.items() if value is not ...}}
    if more:
        call["more"] = list(more)
    if named:
        call["data"] = {**named, **call["data"]}
    try:
        return bytes(json.dumps(call, allow_nan=False), "ascii")
    except (TypeError, ValueError, RecursionError) as error:
        raise TypeError(f"{name}: its arguments cannot be sent as JSON: {error}") from None


def _read(answer: bytes) -> Any:
    """Return the value of an answer, or raise its error."""
    message = json.loads(answer)
    error = message.get("error")
    if error is not None:
        raise HostError(str(error["message"]), str(error["kind"]))
    return message["value"]


def _gone() -> Any:
    raise HostError(GONE)


def _answer(waiter: Waiter, body: bytes) -> None:
    waiter.answer = body
    if waiter.deliver is not None:
        waiter.deliver(body)
    waiter.rouse()
