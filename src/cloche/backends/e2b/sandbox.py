"""One open sandbox of the e2b backend, and the container of one run or session in its machine.

The workspace is a tmpfs of one machine, which lives as long as the sandbox. Each run gets a new container in the
machine when the container of the previous run has ended. Each session keeps its own container.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any

from cloche.core.enforcement import Enforcement
from cloche.core.errors import InvalidRequest
from cloche.core.limits import Limits
from cloche.core.policy import Policy
from cloche.core.request import Request
from cloche.core.suppressed import suppress_logged

from ..containers.container import ByteReceiver
from ..containers.machines import LookedInto, SharedSandbox, SharingContainer
from ..session_languages import session_language
from .machine import E2BMachine
from .wire import ProcessWire

log = logging.getLogger("cloche.remote")
MOST_SESSIONS = 16
END_S = 8.0


class E2BContainer(SharingContainer[LookedInto]):
    """One of the containers in a machine."""

    step = "launch"

    def __init__(self, machine: E2BMachine):
        super().__init__()
        self.machine, self.rootfs = machine, machine.create()
        self._wire: ProcessWire | None = None

    @property
    def label(self) -> str:
        """Return the name for messages: the machine if it is lost, else the container."""
        return "sandbox at E2B" if self.machine.is_lost else "container in the sandbox at E2B"

    def _open(self, make_boot: Callable[[], bytes], receiver: ByteReceiver | None) -> None:
        self._wire = self.machine.launch(make_boot())
        self._connect(self._wire, receiver)

    def _abandon(self) -> None:
        self.kill()

    def note_lost(self) -> None:
        """Record that the container's stream has ended. Called in its reading thread."""
        super().note_lost()
        self._over.set()

    def end(self) -> None:
        """Have the machine kill the container, without waiting for that. Raises OSError."""
        if self._wire is not None:
            self._wire.kill()

    def kill(self) -> None:
        """Have the machine kill the container; end the machine if that fails."""
        if self.is_lost:
            return
        if self._wire is not None:
            with suppress_logged(log, "a container could not be killed, so its sandbox is killed", OSError):
                self.end()
                if self._over.wait(END_S):
                    return
        self.machine.end()

    def release(self) -> None:
        """End the machine in the background."""
        self.machine.end_soon()

    def argv(self) -> Sequence[str]:
        """Return the provider's id of the sandbox and the program started in it."""
        return ("e2b", self.machine.id, "python3")


class E2BOpenSandbox(SharedSandbox[LookedInto, E2BContainer]):
    """Run requests in a sandbox at E2B, one at a time, beside sessions; see core.protocols.OpenSandbox."""

    _loses_notice_of_start = True
    _advice = (
        "It may have reached the end of its lifetime, or the connection was lost. Check the effects before you "
        "run the code again"
    )

    def __init__(self, *, machine: E2BMachine, policy: Policy, limits: Limits, enforcement: Enforcement):
        super().__init__(policy=policy, limits=limits, enforcement=enforcement)
        self._machine = machine

    async def close(self) -> None:
        """End the machine and wait until it has ended."""
        try:
            await super().close()
        finally:  # also if the wait is cancelled
            await self._machine.close()

    def _find_rootfs(self, request: Request | None) -> LookedInto:  # noqa: ARG002 - one template serves all
        return self._machine.create()

    def _find_session_rootfs(self, language: str) -> LookedInto:
        session_language(language)
        if len(self._sessions) >= MOST_SESSIONS:
            raise InvalidRequest(f"a sandbox at E2B holds {MOST_SESSIONS} sessions at once; close one, or open another")
        return self._machine.create()

    def _make(self, rootfs: LookedInto, after: E2BContainer | None) -> E2BContainer:  # noqa: ARG002 - one serves all
        if after is not None and after is self._used:  # a session's container continues
            after.empty()
        container = E2BContainer(self._machine)
        container.start(self._policy.preload)
        return container

    async def _start_container(self, rootfs: LookedInto, after: E2BContainer | None) -> E2BContainer:
        """Start a container in a thread. If the caller is cancelled, the container is released once it has started."""
        making = asyncio.ensure_future(asyncio.to_thread(self._make, rootfs, after))
        try:
            return await asyncio.shield(making)
        except asyncio.CancelledError:
            making.add_done_callback(self._release_unread)
            raise

    def _release_unread(self, making: asyncio.Future[E2BContainer]) -> None:
        if not making.cancelled() and making.exception() is None:
            self._release(making.result())

    def _kind(self, rootfs: LookedInto) -> tuple[object, ...]:
        return "e2b", rootfs.id, id(self)

    def _notes(self, container: E2BContainer) -> dict[str, Any]:
        return {**container.machine.notes(), "start_s": round(container.start_s, 3)}
