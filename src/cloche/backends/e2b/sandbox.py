"""One open sandbox of the e2b backend, and the container of one run or session in its machine.

The workspace is a file system in the memory of one machine, which lives as long as the sandbox. Each run gets a new
container in it, once that of the last one has ended, and each session one that it keeps.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from cloche.core.enforcement import Enforcement
from cloche.core.errors import BackendUnavailable, InvalidRequest, StartFailed
from cloche.core.limits import Limits
from cloche.core.policy import Policy
from cloche.core.request import Request
from cloche.core.result import Observed
from cloche.core.suppressed import suppress_logged

from ..containers.container import Container, Link, Wire, boot_message
from ..containers.program import IMAGE_PATH, Program, SessionProgram, program_of, session_of
from ..containers.sandbox import SessionSandbox
from ..session_languages import session_language
from .machine import Machine, Template
from .wire import ProcessWire

log = logging.getLogger("cloche.remote")
MOST_SESSIONS = 16
LEAVE_S, END_S = 20.0, 8.0
VARIABLES = {"PATH": IMAGE_PATH}


class E2BContainer(Container[Template]):
    """Hold one container in a machine, which may hold others."""

    def __init__(self, machine: Machine):
        super().__init__()
        self.machine, self.rootfs = machine, machine.create()
        self._wire: ProcessWire | None = None
        self._over = threading.Event()

    @property
    def what(self) -> str:
        """Name what is lost when this container is."""
        return "sandbox at E2B" if self.machine.is_lost else "container in the sandbox at E2B"

    def start(self, preload: Sequence[str]) -> None:
        """Make it, and wait until it listens. Raises StartFailed or BackendUnavailable; then nothing of it is left."""
        try:
            self._wire = self.machine.launch(boot_message(preload))
            self._link = Link(self._wire, self._receive, self.note_lost)
            if not self._is_ready():
                raise StartFailed(f"nothing got ready in a sandbox at E2B{self.last_output()}", step="launch")
        except OSError as error:
            self.kill()
            raise StartFailed(f"a sandbox at E2B is gone: {error}{self.last_output()}", step="launch") from error
        except BaseException:
            self.kill()
            raise

    def start_live(self, boot: bytes) -> Wire:
        """Make the only container of the machine, send it `boot`, and return its streams.

        Raises StartFailed or BackendUnavailable; then nothing of it is left.
        """
        try:
            self._wire = self.machine.launch(boot)
        except OSError as error:
            self.machine.end_soon()
            raise StartFailed(f"a sandbox at E2B is gone: {error}", step="launch") from error
        except BaseException:
            self.machine.end_soon()
            raise
        return self._wire

    def note_lost(self) -> None:
        """Take note that nothing more comes from it; in the container's reading thread."""
        super().note_lost()
        self._over.set()

    def empty(self) -> None:
        """End what is left in it, and wait until that is done."""
        if not self.is_lost:
            with suppress_logged(log, "a container could not be asked to end, and will be killed", OSError):
                self.order({"do": "leave"})
            if not self._over.wait(LEAVE_S):
                self.kill()

    def kill(self) -> None:
        """Have the machine end it, and end the machine when it does not do so."""
        if self.is_lost:
            return
        if self._wire is not None:
            with suppress_logged(log, "a container could not be killed, and its sandbox will be", OSError):
                self._wire.kill()
                if self._over.wait(END_S):
                    return
        self.machine.end()

    def end_by_guest(self) -> Observed | None:
        """Return None: the machine does not report what its kernel killed."""
        return None

    def release(self) -> None:
        """End the machine, in the background."""
        self.machine.end_soon()

    def argv(self) -> Sequence[str]:
        """Return the program that is started, with the provider's name for the sandbox."""
        return ("e2b", self.machine.id, "python3")


def build_session_program(name: str, env: Mapping[str, str], template: Template) -> SessionProgram:
    """Return what serves a session. Raises InvalidRequest, or BackendUnavailable where there can be none."""
    language, driver = session_language(name)
    if driver is not None and driver.program not in template.programs:
        engine = template.engine(language)
        raise BackendUnavailable(f"a {language.name} session needs {driver.program}; {engine.name} cannot hold one")
    return session_of(language, driver, template, VARIABLES, env)


class E2BOpenSandbox(SessionSandbox[Template, E2BContainer]):
    """Run requests in a sandbox at E2B, one at a time, beside sessions; see core.protocols.OpenSandbox."""

    _loses_notice_of_start = True
    _advice = "It may have reached the end of its time, or the connection was lost. Do not run the code again blindly"

    def __init__(self, *, machine: Machine, policy: Policy, limits: Limits, enforcement: Enforcement):
        super().__init__(policy=policy, limits=limits, enforcement=enforcement)
        self._machine = machine

    async def close(self) -> None:
        """End the machine, and wait until it is gone."""
        try:
            await super().close()
        finally:  # also when nobody waits for it any more
            await self._machine.close()

    def _find_rootfs(self, request: Request | None) -> Template:  # noqa: ARG002 - one template serves all
        return self._machine.create()

    def _build_program(self, request: Request, rootfs: Template) -> Program:
        return program_of(request, rootfs, VARIABLES, has_interpreter=True)

    def _find_session_rootfs(self, language: str) -> Template:
        session_language(language)
        if len(self._sessions) >= MOST_SESSIONS:
            raise InvalidRequest(f"a sandbox at E2B holds {MOST_SESSIONS} sessions at once; close one, or open another")
        return self._machine.create()

    def _build_session_program(self, language: str, env: Mapping[str, str], rootfs: Template) -> SessionProgram:
        return build_session_program(language, env, rootfs)

    def _make(self, rootfs: Template, after: E2BContainer | None) -> E2BContainer:  # noqa: ARG002 - one serves all
        if after is not None and after is self._used:  # that of a session goes on
            after.empty()
        container = E2BContainer(self._machine)
        container.start(self._policy.preload)
        return container

    async def _made(self, rootfs: Template, after: E2BContainer | None) -> E2BContainer:
        """Start a container in a thread; one that nobody waits for any more is ended once it is there."""
        making = asyncio.ensure_future(asyncio.to_thread(self._make, rootfs, after))
        try:
            return await asyncio.shield(making)
        except asyncio.CancelledError:
            making.add_done_callback(self._release_unread)
            raise

    def _release_unread(self, making: asyncio.Future[E2BContainer]) -> None:
        if not making.cancelled() and making.exception() is None:
            self._release(making.result())

    def _kind(self, rootfs: Template) -> tuple[object, ...]:
        return "e2b", rootfs.id, id(self)

    def _release(self, container: E2BContainer, *, with_workspace: bool = False) -> None:
        if with_workspace:
            container.release()
        elif not container.is_lost:
            threading.Thread(target=container.empty, name="cloche-container-end", daemon=True).start()

    def _prepare_next(self, container: E2BContainer, program: Program) -> None:
        """Make nothing ready: the machine is there, and a container in it is made when a run comes."""

    def _notes(self, container: E2BContainer) -> dict[str, Any]:
        return {**container.machine.notes(), "start_s": round(container.start_s, 3)}
