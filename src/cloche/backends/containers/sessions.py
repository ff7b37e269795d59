"""A sandbox of containers that holds sessions: each in a container of its own, beside those of runs.

A session's container has the files too while it lives, and holds them afterwards when no other one does.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any

from cloche.core.enforcement import Enforcement
from cloche.core.errors import SandboxFileError, StartFailed
from cloche.core.limits import Limits
from cloche.core.policy import Policy

from ..saving import Changes
from ..session import Session
from ..waiting import finish
from ..walking import Until, time_for_files
from .container import Container, G
from .running import Conversation
from .sandbox import C, ContainerSandbox
from .session import ContainerTransport
from .session_program import SessionProgram


class SessionSandbox(ContainerSandbox[G, C]):
    """Run requests, and keep interpreters; see core.protocols.SupportsSessions."""

    def __init__(self, *, policy: Policy, limits: Limits, enforcement: Enforcement):
        super().__init__(policy=policy, limits=limits, enforcement=enforcement)
        self._sessions: dict[C, Session] = {}  # by the containers that they have

    @abstractmethod
    def _find_session_ground(self, language: str) -> G:
        """Return what the container of a session is made of. Raises BackendUnavailable where there can be none."""

    @abstractmethod
    def _build_session_program(self, language: str, env: Mapping[str, str], ground: G) -> SessionProgram:
        """Return what serves a session. Raises InvalidRequest or BackendUnavailable."""

    async def open_session(self, language: str, env: Mapping[str, str]) -> Session:
        """Start an interpreter that lives, in this workspace; see core.protocols.SupportsSessions."""
        async with self._turn:
            ground = await self._ground(lambda: self._find_session_ground(language))
            program = self._build_session_program(language, env, ground)
            container, start = await self._take(ground)
            transport = ContainerTransport(self, container, program, self._limits)
            session = Session(
                transport, transport.changes, language=program.language.name, interrupt=program.interrupt,
                limits=self._limits, enforcement=self._enforced(container),
                notes={**self._notes(container), "start": start},
            )  # fmt: skip
            self._sessions[container] = session
        try:
            await session.await_ready(await transport.start())
        except BaseException:
            await finish(session.close())
            raise
        return session

    def take_back(self, container: Container[Any]) -> None:
        """Take the container of a session that is over: it may be the only one that has the files."""
        mine = next(one for one in self._sessions if one is container)
        del self._sessions[mine]
        if self._is_closed or mine.is_lost or self._keeper() is not None:
            self._let_go(mine, with_workspace=self._is_closed)
        else:
            self._used = mine

    async def changes_in(self, container: Container[Any], timeout_s: float) -> Changes:
        """Look at the files after a cell that had so long; nothing where they cannot be seen any more."""
        async with self._turn:
            if container.is_lost or self._is_closed:
                return Changes()
            talk, walk_s = Conversation(self._limits.disk_bytes), time_for_files(timeout_s)
            order = {"do": "look", "disk_bytes": self._limits.disk_bytes, "walk_s": walk_s}
            try:
                answer = await self._ask(container, talk, order)
            except SandboxFileError:
                return Changes(skipped=1)
            except StartFailed:
                return Changes()
            return await self._workspace.changes(talk.spool, {}, answer, Until(walk_s))

    async def close(self) -> None:
        """Kill and remove everything, for good."""
        self._is_closed = True
        async with AsyncExitStack() as stack:  # which goes on with the others when one is interrupted
            stack.push_async_callback(super().close)
            for session in reversed(self._sessions.values()):
                stack.push_async_callback(session.close)

    def _others(self) -> Sequence[C]:
        return list(self._sessions)
