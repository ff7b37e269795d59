"""One container: its frames, its first process, and its kill. Start and release are each backend's own.

Theory of operation: our first process (`inside/reaper.py`) writes frames to its standard output: a tag, a length, a
body. A dedicated thread (`ContainerLink`) reads them until the end, because a container whose output pipe is full may
be impossible to kill. Before the first process can receive orders it is sent its own code and the interpreter's
(`boot_message`).
"""

from __future__ import annotations

import functools
import json
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from cloche.core.errors import InternalError, StartFailed
from cloche.core.events import Stream
from cloche.core.guest_json import as_text, decode
from cloche.core.result import Observed
from cloche.core.suppressed import suppress_logged
from cloche.egress.client import SandboxNetwork

from ..layout import STARTUP_FILE, startup_text
from ..live_files import LiveFiles
from ..network import new_network
from .program import NOFILE, STARTUP_FOLDER

if TYPE_CHECKING:
    from cloche.core.network import NetworkRules

    from ..secrets import ContainerSecrets

log = logging.getLogger("cloche.containers")
MAX_FRAME_BYTES = 16 << 20
CHUNK_BYTES = 65_536
OUTPUT_KEPT_BYTES = 4096
OUTPUT = 1
OnFrame = Callable[[bytes, bytes], None]
OnEnd = Callable[[], None]

# Frame tags: those of runs and files, then those of the container.
STARTED, OUT, ERR, VALUE, ENDED, DATA, DONE, FAILED = b"s", b"o", b"e", b"v", b"r", b"D", b"k", b"x"
STREAMS: dict[bytes, Stream] = {OUT: "stdout", ERR: "stderr"}
MOST_BYTES, MOST_PARTS = 65_536, 100  # bounds of a message about the first process itself
READY, ORDER, KILL = b"H", b"O", b"K"

START_S = 60.0
SMALL_BYTES = 32 * 1024  # up to this size, data is sent in the event loop's thread

# The command line and the program of the first process.
LEAST_PYTHON = (3, 11)
# The only text on the command line: it makes the interpreter read a length, then that many bytes, and run them.
ARGUMENTS = (
    "-I",
    "-S",
    "-c",
    (
        "import os\nn=int(os.read(0,9))\nb=b''\nwhile len(b)<n:\n d=os.read(0,n-len(b))\n if not d:os._exit(0)\n b+=d\n"
        "exec(compile(b,'<cloche>','exec'),{'__name__':'cloche_boot'})"
    ),
)
_FIND_MODULES = """
import json, sys
from importlib.machinery import ModuleSpec
class Archive:
    sources = json.loads({sources!r})
    def find_spec(name, path=None, target=None):
        if name in Archive.sources: return ModuleSpec(name, Archive, origin="cloche", is_package="." not in name)
    def create_module(spec): return None
    def exec_module(module):
        text = Archive.sources[module.__name__]
        exec(compile(text, f"<{{module.__name__}}>", "exec", dont_inherit=True), module.__dict__)
sys.meta_path.insert(0, Archive)
"""
_START = """
import inside.{module}
inside.{module}.main(json.loads({settings!r}))
"""
_OURS = ("files", "link", "program", "reaper")
_LIVE = ("files", "link", "live", "program")  # for a sandbox that lives, which also gets `init`


class ContainerWire(Protocol):
    """Carry a container's three streams."""

    def send(self, data: bytes) -> None:
        """Send all of `data` to its standard input. Raises OSError if it has ended."""
        ...

    def pieces(self) -> Iterator[tuple[int, bytes]]:
        """Yield (stream number, output) until both outputs end. Raises OSError or ValueError."""
        ...

    def shutdown(self) -> None:
        """Close its standard input: the first process reads the end of file and exits."""
        ...

    def close(self) -> None:
        """Close all descriptors. Called once, by the reading thread."""
        ...


class ByteReceiver(Protocol):
    """Receiver of a container's standard output, called in its reading thread."""

    def take(self, data: bytes, /) -> None:
        """Handle a piece. May block, which delays further pieces."""
        ...

    def take_end(self, error: Exception | None) -> None:
        """Handle the end of the output."""
        ...


class ContainerLink:
    """Read and write the frames of one container. `on_frame` and `on_end` are called in the reading thread.

    Output goes to `receiver` instead of `on_frame` if one is given, or from `hand_over` on.
    """

    def __init__(self, wire: ContainerWire, on_frame: OnFrame, on_end: OnEnd, receiver: ByteReceiver | None = None):
        self.wire = wire
        self._on_frame, self._on_end, self._receiver = on_frame, on_end, receiver
        self._frames = Splitter()
        self._turn = threading.Lock()
        self.last_output = b""
        threading.Thread(target=self._read, name="cloche-container", daemon=True).start()

    def hand_over(self, receiver: ByteReceiver) -> None:
        """Pass all later output to `receiver`. The container is idle, so no frame is on its way."""
        self._receiver = receiver

    def send_raw(self, data: bytes) -> None:
        """Send bytes. Raises OSError if the container has ended."""
        with self._turn:
            self.wire.send(data)

    def send(self, tag: bytes, body: bytes = b"") -> None:
        """Send one frame. Raises OSError if the container has ended."""
        self.send_raw(tag + len(body).to_bytes(4, "big") + body)

    def send_data(self, data: bytes | memoryview) -> None:
        """Send data as frames, then an empty frame that marks the end."""
        view = memoryview(data)
        for offset in range(0, len(view), CHUNK_BYTES):
            self.send(b"D", bytes(view[offset : offset + CHUNK_BYTES]))
        self.send(b"D")

    def close(self) -> None:
        """Close the first process's standard input; it then exits."""
        with suppress_logged(log, "a container had closed its connection first", OSError):
            self.wire.shutdown()

    def _read(self) -> None:
        failure: Exception | None = None
        try:
            for stream, piece in self.wire.pieces():
                if stream != OUTPUT:
                    self.last_output = (self.last_output + piece)[-OUTPUT_KEPT_BYTES:]
                elif self._receiver is not None:
                    self._receiver.take(piece)
                else:
                    for tag, body in self._frames.feed(piece):
                        self._on_frame(tag, body)
        except (OSError, ValueError, RecursionError) as error:  # RecursionError: JSON nested too deeply
            self.last_output += f"\n{error}".encode()
            failure = error
        finally:
            self.wire.close()
            self._on_end()
            if self._receiver is not None:
                self._receiver.take_end(failure)


class Splitter:
    """Split bytes into frames: a tag, a length of four bytes, a body."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[tuple[bytes, bytes]]:
        """Return the frames that `data` completes. Raises ValueError for a frame that is too long."""
        self._buffer += data
        frames = []
        start = 0
        while len(self._buffer) - start >= 5:
            end = start + 5 + int.from_bytes(self._buffer[start + 1 : start + 5], "big")
            if end - start > MAX_FRAME_BYTES:
                raise ValueError("the container sent a frame that is too long")
            if len(self._buffer) < end:
                break
            frames.append((bytes(self._buffer[start : start + 1]), bytes(self._buffer[start + 5 : end])))
            start = end
        del self._buffer[:start]
        return frames


def read_object(body: bytes) -> dict[str, Any]:
    """Return the JSON object in a frame's body. Raises ValueError if it is too large or no object.

    On some gVisor installations a guest can write to this link, so parsing is bounded.
    """
    if len(body) > MOST_BYTES:
        raise ValueError(f"the container sent {len(body)} bytes at once, of at most {MOST_BYTES}")
    value, _ = decode(as_text(body), MOST_PARTS, mends_text=True)
    if not isinstance(value, dict):
        raise ValueError("the container sent what is no object")
    return value


class Listener(Protocol):
    """Receiver of a container's frames, called in its reading thread."""

    def receive(self, tag: bytes, body: bytes) -> None:
        """Handle one frame."""
        ...

    def lose(self) -> None:
        """Handle the end of the link: no more frames will arrive."""
        ...


class Rootfs(Protocol):
    """The root file system of a container: an image, or a view of the host."""

    @property
    def id(self) -> str:
        """Return its identity."""
        ...

    @property
    def name(self) -> str:
        """Return the name for messages."""
        ...


G = TypeVar("G", bound=Rootfs)


class Container(ABC, Generic[G]):
    """One started container with our first process in it. All methods block and are thread-safe."""

    rootfs: G
    step = "container"  # of a failed start
    shares_streams = False  # later containers use the same open files, so their mode stays as it is

    def __init__(self, secrets: ContainerSecrets | None = None) -> None:
        self.secrets = secrets
        self.is_lost = self.is_given_up = False
        self.started_at, self.start_s = time.time(), 0.0
        self._listener: Listener | None = None
        self.network: SandboxNetwork | None = None  # set if the network is served
        self._ready = threading.Event()
        self._ready_message: Mapping[str, Any] = {}
        self._link: ContainerLink | None = None
        self.init_files: LiveFiles | None = None  # once its first process serves the wire of init

    @property
    def label(self) -> str:
        """Return the name for messages."""
        return "container"

    @property
    def ready_s(self) -> float:
        """Return the maximum seconds until its first process is ready."""
        return START_S

    @property
    def slowness(self) -> float:
        """Return the factor for the time-outs of programs inside."""
        return 1.0

    def start(self, preload: Sequence[str]) -> None:
        """Create and start the container, and wait for its READY. Raises StartFailed; nothing is left then."""
        self.launch(lambda: boot_message(preload, **self.sites()))

    def launch(self, make_boot: Callable[[], bytes], receiver: ByteReceiver | None = None) -> None:
        """Create and start the container, and send it the result of `make_boot()`, called once it is created.

        Its output goes to `receiver`; without one, wait for its READY. Raises StartFailed; nothing is left then.
        """
        try:
            self._open(make_boot, receiver)
            if receiver is None:
                self._await_ready()
        except OSError as error:
            label = self.label
            self._abandon()
            raise StartFailed(f"the {label} is gone: {error}{self.last_output()}", step=self.step) from error
        except BaseException:
            self._abandon()
            raise

    def sites(self) -> dict[str, Any]:
        """Return the arguments of `boot_message` about packages outside of the interpreter."""
        return {}

    @abstractmethod
    def _open(self, make_boot: Callable[[], bytes], receiver: ByteReceiver | None) -> None:
        """Create, connect and start the container, and send it the result of `make_boot()`. Raises OSError too."""

    @abstractmethod
    def _abandon(self) -> None:
        """Remove what a failed start left. Called once or twice."""

    def _await_ready(self) -> None:
        """Wait for its READY. Raises StartFailed."""
        if not self._is_ready(self.ready_s):
            raise StartFailed(f"the {self.label} did not get ready{self.last_output()}", step=self.step)

    @abstractmethod
    def kill(self) -> None:
        """Kill the container."""

    def end_by_guest(self) -> Observed | None:
        """Return the cause of its end if the guest caused it, else None. May wait some seconds for the answer.

        It is also None if the backend has no report of kills by the machine's kernel.
        """
        return None

    @abstractmethod
    def release(self) -> None:
        """Remove the container and everything that belongs to it, in the background."""

    @abstractmethod
    def argv(self) -> Sequence[str]:
        """Return the arguments of a command that makes the same container."""

    def _new_network(self, rules: NetworkRules) -> SandboxNetwork:
        """Return a network, with the secrets of this container's sandbox. Raises StartFailed."""
        return new_network(rules) if self.secrets is None else self.secrets.new_network()

    def _close_network(self) -> None:
        if self.network is not None:
            self.network.close()

    def listen(self, listener: Listener | None) -> None:
        """Pass all later frames to `listener`."""
        self._listener = listener
        if listener is not None and self.is_lost:
            listener.lose()

    @property
    def wire(self) -> ContainerWire:
        """Return the streams of a started container."""
        if self._link is None:
            raise InternalError("a container that was not started has no streams")
        return self._link.wire

    def _connect(self, wire: ContainerWire, receiver: ByteReceiver | None) -> ContainerLink:
        """Read the container's streams from now on."""
        self._link = ContainerLink(wire, self._receive, self.note_lost, receiver)
        return self._link

    def hand_over(self, receiver: ByteReceiver, settings: Mapping[str, Any]) -> None:
        """Have the first process serve the wire of `init` from now on, with `settings`.

        Its later output goes to `receiver`. Raises OSError if the container has ended.
        """
        self._connected().hand_over(receiver)
        self.order({"do": "live", "live": dict(settings), "sources": _modules(is_live=True)})

    def order(self, order: Mapping[str, Any], *payloads: bytes) -> None:
        """Send an order and its payloads. Raises OSError if the container has ended."""
        link = self._connected()
        link.send(ORDER, json.dumps(order).encode())
        for payload in payloads:
            link.send_data(payload)

    def expect_python(self) -> None:
        """Have the first process prefork a guest for a Python program. Raises OSError if the container has ended."""
        self.order({"do": "expect", "nofile": NOFILE})

    def kill_guest(self) -> None:
        """Ask the first process to kill all other processes; kill the container if the request cannot be sent."""
        try:
            self._connected().send(KILL)
        except OSError:
            self.kill()

    def lift_quota(self) -> None:
        """Raise the CPU quota of processes that are being killed, if the backend can: a process dies by running."""
        return

    def shutdown(self) -> None:
        """Close its standard input; the container then ends by itself."""
        if self._link is not None:
            self._link.close()

    def give_up(self) -> None:
        """Treat the container as lost: it does not answer, and its kill did not succeed."""
        self.is_given_up = True
        self.shutdown()
        self._lose()

    def why_lost(self) -> str:
        """Return the message for a run that was lost with the container."""
        if self.is_given_up:
            return f"the {self.label} does not answer and could not be killed; the code may still be running"
        return f"the {self.label} was lost while the code ran, for an unknown reason; it may have run to its end"

    def last_output(self) -> str:
        """Return the end of its standard error, for messages."""
        errors = self._link.last_output.decode("utf-8", "replace").strip() if self._link is not None else ""
        return f": {self._reason_in(errors)}" if errors else ""

    def _reason_in(self, errors: str) -> str:
        return errors[-600:]

    def _connected(self) -> ContainerLink:
        if self._link is None or self.is_lost:
            raise ConnectionError("the container is gone")
        return self._link

    def _is_ready(self, timeout_s: float) -> bool:
        """Wait for READY; return whether it arrived."""
        self._ready.wait(timeout_s)
        self.start_s = time.time() - self.started_at
        return self._ready.is_set() and not self.is_lost

    def _receive(self, tag: bytes, body: bytes) -> None:
        if tag == READY:
            self._ready_message = read_object(body)
            self._ready.set()
        elif self._listener is not None:
            self._listener.receive(tag, body)

    def note_lost(self) -> None:
        """Record that its streams have ended."""
        self._lose()

    def _lose(self) -> None:
        self.is_lost = True
        self._ready.set()
        if self._listener is not None:
            self._listener.lose()


def boot_message(
    preload: Sequence[str],
    *,
    extra_paths: Sequence[str] = (),
    customizes: bool = False,
    live: Mapping[str, Any] | None = None,
) -> bytes:
    """Return the first process's input: its length in nine digits, then its program.

    With `live`, the program is the first process of a sandbox that lives, with these settings.
    """
    settings: dict[str, Any] = {"home": "/workspace", "preload": list(preload), "ahead": None}
    settings |= {"extra_paths": list(extra_paths), "customizes": customizes}
    settings |= {"startup": {f"{STARTUP_FOLDER}/{STARTUP_FILE}": startup_text()}}
    settings |= {"live": dict(live)} if live is not None else {}
    start = _START.format(settings=json.dumps(settings), module="reaper" if live is None else "live")
    program = (_FIND_MODULES.format(sources=json.dumps(_modules(is_live=live is not None))) + start).encode()
    return f"{len(program):09d}".encode() + program


@functools.cache
def _modules(*, is_live: bool) -> dict[str, str]:
    """Return the sources of our modules and the interpreter's, by their names inside."""
    ours = _LIVE if is_live else _OURS
    return {
        **_package("interpreter"),
        # A jail finds the same module below its own copy of `init`.
        **({**_package("init"), "init.accounts": _text("cloche.jail", "accounts.py")} if is_live else {}),
        "inside": "",
        **{f"inside.{name}": _text("cloche.backends.containers.inside", f"{name}.py") for name in ours},
    }


def _package(package: str) -> dict[str, str]:
    names = [entry.name for entry in files(f"cloche.{package}").iterdir() if entry.name.endswith(".py")]
    sources = {f"{package}.{name.removesuffix('.py')}": _text(f"cloche.{package}", name) for name in names}
    sources[package] = sources.pop(f"{package}.__init__")
    return sources


@functools.cache
def _text(package: str, name: str) -> str:
    return (files(package) / name).read_text(encoding="utf-8")
