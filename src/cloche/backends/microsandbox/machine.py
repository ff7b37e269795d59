"""One machine of microsandbox's, and the programs in it. All methods block, and are for any thread."""

from __future__ import annotations

import contextlib
import functools
import logging
import re
import threading
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cloche.core.errors import BackendUnavailable, StartFailed
from cloche.core.languages import Engine, Language

from ..containers.boot import ARGUMENTS
from ..containers.frames import OUTPUT
from ..containers.look import LOOK, PROGRAMS
from ..noting import noted
from .package import call
from .plan import COMMAND, PATH, Plan

log = logging.getLogger("cloche.microsandbox")
CREATE_S = 300.0  # an image may have to be fetched
ANSWER_S, STALL_S, END_S = 30.0, 60.0, 20.0
ERROR = 2
_VERSION = re.compile(r"\d+(?:\.\d+)+")
# As the user that programs run as: whoever else it is ends, and what they left in places for a moment goes.
SWEEP = """
import os, shutil
try: os.kill(-1, 9)
except ProcessLookupError: pass
for place in ("/tmp", "/dev/shm"):
    for entry in os.scandir(place):
        if entry.is_dir(follow_symlinks=False): shutil.rmtree(entry.path, ignore_errors=True)
        else:
            try: os.unlink(entry.path)
            except OSError: pass
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """Hold what is known of an image: its name, the programs in it with paths and versions."""

    name: str
    programs: Mapping[str, str]
    versions: Mapping[str, str]

    @property
    def id(self) -> str:
        return self.name

    def engine(self, language: Language) -> Engine:
        """Return the first engine that is there. Raises BackendUnavailable saying what is missing."""
        for engine in language.engines:
            found = _numbers(self.versions.get(engine.programs[0], ""))
            if all(name in self.programs for name in engine.programs) and found >= engine.least_version:
                return engine
        wanted = "; or ".join(", ".join(engine.programs) for engine in language.engines)
        raise BackendUnavailable(
            f"image {self.name!r} cannot run {language.name}: it has no {wanted}.", remedy="Name one that has: --image."
        )

    def version(self, engine: Engine) -> str:
        """Return what the engine's main program says of its version, else its name."""
        found = _VERSION.search(self.versions.get(engine.programs[0], ""))
        return found[0] if found else engine.programs[0]


def _numbers(text: str) -> tuple[int, ...]:
    found = _VERSION.search(text)
    return tuple(int(part) for part in found[0].split(".")) if found else ()


class Machine:
    """Hold one machine; it is created at once, and gone when it was let go or its caller is dead."""

    def __init__(self, package: Any, plan: Plan):
        self.package, self.plan = package, plan
        self.name = f"cloche-{uuid.uuid4().hex[:16]}"
        self.is_lost = False
        self._turn = threading.Lock()
        self._sandbox: Any = None

    def create(self) -> Image:
        """Create it, and look what its image holds. Raises StartFailed; then nothing of it is left."""
        try:
            given = self.plan.creation(self.package)
            self._sandbox = call(lambda: self.package.Sandbox.create(self.name, **given), CREATE_S)
            self._run("/bin/sh", self.plan.preparation(), "0")
            said = self._run("/bin/sh", ["-c", LOOK, "look", *PROGRAMS], str(self.plan.user))
        except (self.package.MicrosandboxError, OSError) as error:
            self.end()
            raise StartFailed(f"a machine of microsandbox did not get ready: {_told(error)}", step="boot") from error
        except BaseException:
            self.end()
            raise
        rows = [line.split("\t") for line in said.decode("utf-8", "replace").splitlines()]
        rows = [row for row in rows if len(row) == 3]
        return Image(
            name=self.plan.image,
            programs={name: path for name, path, _ in rows},
            versions={name: version for name, _, version in rows},
        )

    def _run(self, program: str, words: Sequence[str], user: str) -> bytes:
        """Run a program to its end, and return what it writes. Raises OSError when it fails."""
        sandbox, more = self._sandbox, {"cwd": "/", "user": user, "env": {"PATH": PATH}, "timeout": ANSWER_S}
        done = call(lambda: sandbox.exec(program, list(words), **more), 2 * ANSWER_S)
        if done.exit_code != 0:
            raise OSError(f"{program} failed with exit code {done.exit_code}: {done.stderr_text[-600:]}")
        return bytes(done.stdout_bytes)

    def start(self) -> ExecWire:
        """Start a first process. Raises OSError."""
        try:
            sandbox, more = self._sandbox, self.plan.execution(self.package)
            handle = call(lambda: sandbox.exec_stream(COMMAND, list(ARGUMENTS), **more), ANSWER_S)
        except self.package.MicrosandboxError as error:
            raise ConnectionError(_told(error)) from error
        return ExecWire(self.package, handle)

    def sweep(self) -> None:
        """End all that programs left running, and remove what they left for a moment. Raises OSError when it cannot."""
        try:
            self._run(COMMAND, ["-I", "-S", "-c", SWEEP], str(self.plan.user))
        except self.package.MicrosandboxError as error:
            raise ConnectionError(_told(error)) from error

    def end(self) -> None:
        """Kill it, and have nothing of it left; whoever comes second waits for the first."""
        with self._turn:
            sandbox, self._sandbox, self.is_lost = self._sandbox, None, True
            if sandbox is None:
                return
            for way in (sandbox.kill, functools.partial(sandbox.destroy, force=True)):
                with noted(log, "a machine of microsandbox may be left", self.package.MicrosandboxError, OSError):
                    call(functools.partial(way, timeout=END_S / 2), END_S)


def _told(error: BaseException) -> str:
    return str(error) or type(error).__name__


class ExecWire:
    """Carry the streams of a program in a machine; see containers.frames.Wire."""

    def __init__(self, package: Any, handle: Any):
        self._package, self._handle = package, handle
        self._sink = handle.take_stdin()
        self._turn = threading.Lock()
        self._is_hung_up = False

    def send(self, data: bytes) -> None:
        """Send all of `data`. Raises OSError when it is gone, or takes nothing for a while."""
        if self._is_hung_up or self._sink is None:
            raise ConnectionError("the machine was let go")
        try:
            call(lambda: self._sink.write(data), STALL_S)
        except self._package.MicrosandboxError as error:
            raise ConnectionError(_told(error)) from error

    def pieces(self) -> Iterator[tuple[int, bytes]]:
        """Yield what it writes, until it ends. Raises OSError."""
        kinds = self._package.ExecEventType
        streams = {kinds.STDOUT: OUTPUT, kinds.STDERR: ERROR}
        while True:
            try:
                event = call(self._handle.recv, None)
            except self._package.MicrosandboxError as error:
                raise ConnectionError(_told(error)) from error
            if event is None or event.event_type in (kinds.EXITED, kinds.FAILED):
                return
            stream = streams.get(event.event_type)
            if stream is not None and event.data:
                yield stream, bytes(event.data)

    def hang_up(self) -> None:
        """End its standard input."""
        with self._turn:
            is_first, self._is_hung_up = not self._is_hung_up, True
        if is_first and self._sink is not None:
            with contextlib.suppress(self._package.MicrosandboxError, OSError):
                call(self._sink.close, ANSWER_S)

    def close(self) -> None:
        """Let go of everything."""
        self.hang_up()
        with contextlib.suppress(self._package.MicrosandboxError, OSError):
            call(self._handle.kill, ANSWER_S)
