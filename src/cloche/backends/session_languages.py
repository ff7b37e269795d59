"""The languages with live sessions: the driver of each, and how its cells are interrupted."""

from __future__ import annotations

import functools
import signal
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from cloche.core.errors import BackendUnavailable, InvalidRequest
from cloche.core.frames import BashCodec, FrameReader, encode
from cloche.core.languages import Language, session_language_named
from cloche.core.record import dataclass
from cloche.core.request import PLAIN_CELL, CellOptions

from .toolchain import Toolchain, sets_interpreter_variables

ControlMessage = tuple[str, Mapping[str, int]]  # for the session's supervisor: a tag and its fields


@dataclass(frozen=True, slots=True, kw_only=True)
class Interrupt:
    """Say which controls interrupt a cell: the `first` ones, and those sent `again` until the cell has ended."""

    first: tuple[ControlMessage, ...]
    again: tuple[ControlMessage, ...] = ()


class Codec(Protocol):
    """Encode requests and decode frames."""

    def encode_run(self, request_id: int, code: str, options: CellOptions, /) -> bytes: ...
    def feed(self, data: bytes) -> list[dict[str, Any]]: ...
    def renew(self) -> None: ...


class JsonCodec:
    """Encode and decode frames of JSON."""

    def __init__(self) -> None:
        self._reader = FrameReader()

    def encode_run(self, request_id: int, code: str, options: CellOptions = PLAIN_CELL) -> bytes:
        return encode({"op": "run", "id": request_id, "code": code, **options.as_fields()})

    def feed(self, data: bytes) -> list[dict[str, Any]]:
        return self._reader.feed(data)

    def renew(self) -> None:
        self._reader.renew()


class RCodec(JsonCodec):
    """Encode requests for the driver of R, which reads no JSON: a line, then blocks with their lengths."""

    def encode_run(self, request_id: int, code: str, options: CellOptions = PLAIN_CELL) -> bytes:
        texts = [code, options.cwd or "", *(text for pair in options.env.items() for text in pair)]
        if any("\0" in text for text in texts):
            raise ValueError("R's code cannot hold a NUL character")
        blocks = [text.encode("utf-8", "replace") for text in texts]
        head = b"%d %d\n" % (request_id, len(blocks))
        return head + b"".join(b"%d\n%b" % (len(block), block) for block in blocks)


def _signal(number: int, *, to_group: bool) -> ControlMessage:
    return "signal", {"id": 0, "number": int(number), "to_group": to_group}


_CTRL_C: ControlMessage = ("interrupt", {})
# Sent once: code may take time to clean up after a KeyboardInterrupt.
ONCE = Interrupt(first=(_CTRL_C,))
# Sent until it is answered: a child that Node starts just after a signal to the group has not received it, and Node
# waits for that child (`execSync`). V8 ends the cell's code at the first one; a further one interrupts no clean-up.
AGAIN = Interrupt(first=(_CTRL_C,), again=(_CTRL_C,))
# interpreter/session.sh says why Ctrl-C alone does not suffice.
_BASH_FIRST = (_signal(signal.SIGURG, to_group=False), _signal(signal.SIGQUIT, to_group=True))
AS_BASH_NEEDS = Interrupt(first=_BASH_FIRST, again=(*_BASH_FIRST, _CTRL_C))


@dataclass(frozen=True, slots=True, kw_only=True)
class Driver:
    """Hold a driver's file in `cloche.interpreter`, the program that runs it, its codec and its interrupt."""

    file_name: str
    program: str
    options: tuple[str, ...]
    new_codec: Callable[[], Codec]
    interrupt: Interrupt
    more: tuple[str, ...] = ()  # files that are appended to it
    is_on_input: bool = False  # its link is standard input

    def text(self) -> str:
        """Return the driver's source."""
        return "".join(_text(name) for name in (self.file_name, *self.more))

    def command(self, program: str, path: str, link: int, answers: int) -> list[str]:
        """Return the arguments that start the driver at `path`, with descriptors `link` to read and `answers` to
        write.
        """
        if self.is_on_input:
            return ["/bin/bash", "-c", f'exec "$0" "$@" <&{link} {link}<&-', program, *self.options, path, str(answers)]
        return [program, *self.options, path, str(link), str(answers)]


@functools.cache
def _text(file_name: str) -> str:
    from importlib import resources

    return resources.files("cloche.interpreter").joinpath(file_name).read_text("utf-8")


JAVASCRIPT = Driver(
    file_name="session.js",
    program="node",
    options=("--expose-internals", "--no-force-async-hooks-checks"),
    new_codec=JsonCodec,
    interrupt=AGAIN,
    more=("session_types.js",),
)
BASH = Driver(
    file_name="session.sh",
    program="bash",
    options=("--noprofile", "--norc"),
    new_codec=BashCodec,
    interrupt=AS_BASH_NEEDS,
)
JAVA = Driver(
    file_name="session.java",
    program="java",
    options=(
        "-XX:+UseSerialGC",
        "-XX:TieredStopAtLevel=1",
        "-Xmx256m",
        "--add-modules",
        "jdk.jshell",
        "--add-opens",
        "java.base/java.io=ALL-UNNAMED",
    ),
    new_codec=JsonCodec,
    interrupt=ONCE,
    is_on_input=True,
)
R = Driver(
    file_name="session.R",
    program="Rscript",
    options=("--vanilla",),
    new_codec=RCodec,
    interrupt=ONCE,
    is_on_input=True,
)
# Python needs no driver: the jail's own interpreter serves the session.
DRIVERS: Mapping[str, Driver | None] = {"python": None, "javascript": JAVASCRIPT, "bash": BASH}

# Languages that only the native jail has sessions of.
LOCAL_DRIVERS: Mapping[str, Driver | None] = {**DRIVERS, "java": JAVA, "r": R}


def session_language(
    name: str, drivers: Mapping[str, Driver | None] = DRIVERS
) -> tuple[Language, Driver | None]:  # fmt: skip
    """Return a language and its driver. Raises BackendUnavailable for a language without sessions."""
    language = session_language_named(name)
    if language.name not in drivers:
        have = ", ".join(drivers)
        raise BackendUnavailable(f"there are no sessions of {language.name} (there are of {have}); use run instead")
    return language, drivers[language.name]


def check_variables(env: Mapping[str, str]) -> None:
    """Raise InvalidRequest if `env` has variables that an interpreter reads only at its start."""
    if sets_interpreter_variables(env):
        raise InvalidRequest("env: PYTHON* variables take effect only before a session begins; leave them out")


def check_toolchain(language: Language, driver: Driver, toolchain: Toolchain) -> None:
    """Raise BackendUnavailable if a toolchain can run a language but not its driver."""
    if driver.program not in toolchain.programs:
        raise BackendUnavailable(f"a {language.name} session needs {driver.program}; {toolchain.engine.name} cannot")
