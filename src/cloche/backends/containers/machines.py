"""Code shared by backends whose containers are in a machine: microVMs, microsandbox, providers of remote machines.

The machine exists before a container and holds the workspace, so no container is prepared ahead. A machine holds
several containers (`SharingContainer`), or one first process after the other (`HostedContainer`), which ends with it.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Protocol, TypeVar

from cloche.core.errors import LanguageUnavailable
from cloche.core.languages import Engine, Language
from cloche.core.loops import finish
from cloche.core.record import dataclass
from cloche.core.request import Request
from cloche.core.suppressed import suppress_logged

from ..garbage_collection import Background
from ..toolchain import find_version
from .container import ByteReceiver, Container, ContainerWire, G, Rootfs
from .live import ContainerLiveSandbox
from .program import (
    ENVIRONMENT,
    IMAGE_PATH,
    PROGRAMS,
    TEMPORARY,
    WORKSPACE,
    Equipment,
    Program,
    SessionProgram,
    engine_of,
    program_of,
    session_in,
)
from .sandbox import C, ContainerSandbox, SessionSandbox

log = logging.getLogger("cloche.backends")
LEAVE_S = 20.0
MOST_PROGRAMS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class LookedInto:
    """The programs found in a machine, with paths and versions.

    `shown` and `remedy` are for the error about a missing program.
    """

    name: str
    programs: Mapping[str, str]
    versions: Mapping[str, str]
    shown: str
    remedy: str

    @property
    def id(self) -> str:
        return self.name

    @classmethod
    def of(cls, name: str, output: str, *, shown: str, remedy: str) -> LookedInto:
        """Parse the output of the script `program.LOOK`; other lines are ignored."""
        rows = [line.split("\t") for line in output.splitlines()[:MOST_PROGRAMS]]
        valid_rows = [row for row in rows if len(row) == 3 and row[0] in PROGRAMS and row[1].startswith("/")]
        programs, versions = {row[0]: row[1] for row in valid_rows}, {row[0]: row[2] for row in valid_rows}
        return cls(name=name, programs=programs, versions=versions, shown=shown, remedy=remedy)

    def engine(self, language: Language) -> Engine:
        """Return the first engine that the machine can run.

        Raises BackendUnavailable that names the missing programs.
        """
        engine = engine_of(language, self.programs, self.versions)
        if engine is not None:
            return engine
        missing = "; or ".join(", ".join(engine.programs) for engine in language.engines)
        raise LanguageUnavailable(f"{self.shown} cannot run {language.name}: it has no {missing}.", remedy=self.remedy)

    def version(self, engine: Engine) -> str:
        """Return the version that the engine's main program prints, else its name."""
        return find_version(self.versions.get(engine.programs[0], "")) or engine.programs[0]


class SharingContainer(Container[G]):
    """One of the containers in a machine."""

    def __init__(self) -> None:
        super().__init__()
        self._over = threading.Event()

    def empty(self) -> None:
        """End all processes in the container, and wait until they have ended."""
        if self.is_lost:
            return
        with suppress_logged(log, "a container could not be asked to end, and will be killed", OSError):
            if self.init_files is None:
                self.order({"do": "leave"})
            else:
                self.end()
        if not self._over.wait(LEAVE_S):
            self.kill()

    @abstractmethod
    def end(self) -> None:
        """Have the machine kill the container, without waiting for that. Raises OSError."""

    def empty_soon(self) -> None:
        """Call `empty` in the background."""
        if not self.is_lost:
            threading.Thread(target=self.empty, name="cloche-container-end", daemon=True).start()


class Equipped(Rootfs, Equipment, Protocol):
    """A root file system whose programs are known."""


E = TypeVar("E", bound=Equipped)
S = TypeVar("S", bound=SharingContainer[Any])


class Hosting(Protocol):
    """A machine that runs one first process after the other. Its methods block."""

    def start(self) -> ContainerWire:
        """Start a first process and return its streams. Raises OSError, StartFailed, BackendUnavailable."""
        ...

    def end(self) -> None:
        """End the machine."""
        ...


class HostedContainer(Container[LookedInto]):
    """One first process in a machine. If it does not answer, its machine is ended."""

    background: ClassVar[Background]
    machine: Any  # a `Hosting` of the backend
    step = "boot"

    def _open(self, make_boot: Callable[[], bytes], receiver: ByteReceiver | None) -> None:
        self._connect(self._started(), receiver).send_raw(make_boot())

    def _abandon(self) -> None:
        self.machine.end()

    def _started(self) -> ContainerWire:
        machine: Hosting = self.machine
        return machine.start()

    def kill(self) -> None:
        """End the machine: an unresponsive first process cannot be distinguished from its guest."""
        self.machine.end()

    def release(self) -> None:
        """End the machine in the background."""
        self.shutdown()
        self.background.begin(self.machine.end)


class InMachine:
    """Mixin for sandboxes whose runs are in a machine; must precede the sandbox class."""

    path = IMAGE_PATH

    def _build_program(self, request: Request, rootfs: Equipment) -> Program:
        return program_of(request, rootfs, {"PATH": self.path}, has_interpreter=True)

    def _prepare_next(self, container: Container[Any], program: Program) -> None:
        """Prepare nothing: the machine exists, and a container in it is made when a run arrives."""


class LiveInMachine(ContainerLiveSandbox[C]):
    """One container in a machine, with the programs that `_equipment` finds there."""

    path = IMAGE_PATH

    @abstractmethod
    def _equipment(self) -> Equipment:
        """Return the programs of the machine. Blocks. Raises StartFailed, BackendUnavailable."""

    def _in_memory(self) -> Sequence[str]:
        return (WORKSPACE, *TEMPORARY)

    def _build_program(self, request: Request, number: int) -> Program:
        return program_of(request, self._equipment(), {"PATH": self.path}, has_interpreter=True, number=number)

    def _build_session_program(self, language: str, env: Mapping[str, str]) -> SessionProgram:
        return session_in(language, env, self._equipment(), self.path)

    def _variables(self) -> Mapping[str, str]:
        return {"PATH": self.path, **ENVIRONMENT}


class SharedSandbox(InMachine, SessionSandbox[E, S]):
    """Run requests in a machine, one at a time, beside sessions; each has its own container."""

    def _build_session_program(self, language: str, env: Mapping[str, str], rootfs: E) -> SessionProgram:
        return session_in(language, env, rootfs, self.path)

    def _release(self, container: S, *, with_workspace: bool = False) -> None:
        if with_workspace:
            container.release()
        else:
            container.empty_soon()


class HostedSandbox(InMachine, ContainerSandbox[LookedInto, C]):
    """Run requests in a machine, one at a time, each in a new first process."""

    _machine: Any  # a `Hosting`, or None

    async def close(self) -> None:
        """End the machine and wait until it has ended."""
        try:
            await super().close()
        finally:  # also if the wait is cancelled
            if self._machine is not None:
                await finish(asyncio.to_thread(self._machine.end))

    def _release(self, container: C, *, with_workspace: bool = False) -> None:
        if with_workspace:
            container.release()
        else:
            container.shutdown()
