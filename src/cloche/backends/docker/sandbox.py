"""One open sandbox of the docker backend: a workspace that lives, and every run in a container of its own.

Theory of operation: the workspace is a volume in memory, which lives as long as a container that has it. A container
runs one program. After that it is idle: nothing but its first process is left, which serves the workspace until
the next container has come up. So there is always one that holds the files, and never one that runs twice. A session's
container has them too, as long as it lives, and afterwards when no other one has.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import random
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from cloche.core.enforcement import Enforcement
from cloche.core.errors import InvalidRequest, OutcomeUnknown, SandboxFileError, StartFailed
from cloche.core.events import PlanStep, Sink, discard
from cloche.core.limits import Limits
from cloche.core.outcome import KillCause
from cloche.core.policy import Policy
from cloche.core.request import InputFile, Request, workspace_path
from cloche.core.result import Result

from ..saving import Changes
from ..waiting import finish
from .archive import pack
from .boot import COMMAND
from .container import Container
from .daemon import OWNER_LABEL, Daemon, owner
from .ending import Ending
from .hearing import SMALL_BYTES
from .images import Image, find_image, image_name
from .plan import FIRST_ID, IDS, Plan, plan_container
from .pool import shared_pool
from .program import Program, build_program, language_of
from .remains import see_out
from .results import Workspace, make_result, observed_end
from .running import Conversation, Lost, Running
from .session import DockerSession
from .session_program import build_session_program, image_language
from .shell import COMMAND as SHELL_COMMAND
from .shell import ShellContainer


class DockerOpenSandbox:
    """Run requests one at a time; see core.protocols.OpenSandbox."""

    def __init__(
        self,
        *,
        daemon: Daemon,
        policy: Policy,
        limits: Limits,
        enforcement: Enforcement,
        images: Mapping[str, str],
        runtime: str = "",
    ):
        self._daemon, self._policy, self._limits, self._images = daemon, policy, limits, images
        self.enforcement, self._runtime = enforcement, runtime
        self._turn = asyncio.Lock()
        self._fresh: Container | None = None  # has run nothing yet
        self._used: Container | None = None  # holds the workspace, and runs nothing more
        self._coming: asyncio.Task[None] | None = None
        self._volume = ""
        self._workspace = Workspace()
        self._sessions: list[DockerSession] = []
        self._has_workspace = self._is_last = self._is_closed = False

    def expect_single_run(self) -> None:
        """Say that the next run is the last one: no container is made ready for another."""
        self._is_last = True

    async def run(self, request: Request) -> Result:
        """Run code or a command and return what came of it."""
        return await self.run_streaming(request, discard)

    async def run_streaming(self, request: Request, sink: Sink) -> Result:
        """Run like `run`, handing `Started` and `OutputChunk` events to `sink` as they happen."""
        async with self._turn:
            image = await self._image(image_name(language_of(request).name, self._images))
            program = build_program(request, image)
            container, start = await self._take(image)
            return await self._run(container, request, program, sink, start)

    async def read_file(self, path: str, *, max_bytes: int) -> bytes:
        """Return a regular file of the workspace. Raises the SandboxFile errors."""
        inside = workspace_path(path)
        async with self._turn:
            talk = Conversation(max_bytes)
            await self._converse(talk, {"do": "read", "path": inside, "max_bytes": max_bytes})
            talk.spool.file.seek(0)
            data = talk.spool.file.read()
            talk.spool.file.close()
            return data

    async def list_files(self, path: str = ".") -> tuple[str, ...]:
        """Return the paths of all regular files below `path`, relative to the workspace."""
        top = "" if path in (".", "", "/workspace") else workspace_path(path) + "/"
        async with self._turn:
            answer = await self._converse(Conversation(0), {"do": "list"})
            found = answer.get("paths")
            return tuple(str(one) for one in found if str(one).startswith(top)) if isinstance(found, list) else ()

    async def write_file(self, path: str, data: bytes) -> None:
        """Create or replace a file of the workspace, with its folders. Raises the SandboxFile errors."""
        await self.write_files([InputFile(path=path, data=data)])

    async def write_files(self, files: Sequence[InputFile]) -> None:
        """Create or replace all of `files`."""
        async with self._turn:
            await self._converse(Conversation(0), {"do": "write"}, pack(files))
            self._workspace.note(files)

    async def open_session(self, language: str, env: Mapping[str, str]) -> DockerSession:
        """Start an interpreter that lives, in this workspace; see core.protocols.SupportsSessions."""
        async with self._turn:
            image = await self._image(image_name(image_language(language).name, self._images))
            program = build_session_program(language, env, image)
            container, start = await self._take(image)
            if self._is_closed:
                see_out(container, self._volume)
                raise InvalidRequest("this sandbox was closed before the session began; open another one")
            session = DockerSession(self, container, program, self._limits, start)
            self._sessions.append(session)
        try:
            await session.open()
        except BaseException:
            await finish(session.close())
            raise
        return session

    def take_back(self, session: DockerSession) -> None:
        """Take the container of a session that is over: it may be the only one that has the files."""
        self._sessions.remove(session)
        if self._is_closed or session.container.is_lost or self._keeper() is not None:
            see_out(session.container, self._volume if self._is_closed else "")
        else:
            self._used = session.container

    async def changes_in(self, container: Container) -> Changes:
        """Look at the files after a cell; nothing where they cannot be seen any more."""
        async with self._turn:
            if container.is_lost or self._is_closed:
                return Changes()
            talk = Conversation(self._limits.disk_bytes)
            try:
                answer = await self._ask(container, talk, {"do": "look", "disk_bytes": self._limits.disk_bytes})
            except SandboxFileError:
                return Changes(skipped=1)
            except StartFailed:
                return Changes()
            return await asyncio.to_thread(self._workspace.changes, talk.spool, {}, answer)

    async def close(self) -> None:
        """Kill and remove everything, for good."""
        self._is_closed = True
        for session in list(self._sessions):
            await finish(session.close())
        if self._coming is not None:
            with contextlib.suppress(Exception):  # it is not needed any more, whatever came of it
                await finish(self._coming)
        for container in (self._used, self._fresh):
            if container is not None:
                see_out(container, self._volume)
        self._used = self._fresh = None

    async def _image(self, name: str) -> Image:
        if self._is_closed:
            raise InvalidRequest("this sandbox is closed; open another one")
        return await asyncio.to_thread(find_image, self._daemon, name)

    async def _take(self, image: Image) -> tuple[Container, str]:
        """Return a container that has run nothing, with this sandbox's workspace, and how it came about."""
        if self._coming is not None:
            await asyncio.shield(self._coming)
            self._coming = None
        fresh, self._fresh = self._fresh, None
        if fresh is not None and not fresh.is_lost and fresh.image.id == image.id:
            return fresh, "pooled"
        if fresh is not None and self._keeper() is None:
            self._used, fresh = fresh, None
        try:
            found = await self._start(image)
        finally:
            if fresh is not None:
                see_out(fresh)
        return found

    async def _start(self, image: Image) -> tuple[Container, str]:
        keeper = self._keeper()
        if keeper is None and self._has_workspace:
            words = self._used.last_words() if self._used is not None else ""
            raise StartFailed(f"the workspace is gone with its container{words}", step="container")
        if keeper is None:
            warm = shared_pool().take(self._kind(image)) if self._policy.warm else None
            found = (warm, "pooled") if warm is not None else (await self._made(image, ""), "cold")
            self._has_workspace = True
            return found
        if not self._volume:
            self._volume = await asyncio.to_thread(self._daemon.volume_of, keeper.id)
        return await self._made(image, self._volume), "cold"

    def _keeper(self) -> Container | None:
        """Return a container that has the workspace; one that runs nothing before one with a session."""
        all_of_them = (self._used, self._fresh, *(session.container for session in self._sessions))
        return next((one for one in all_of_them if one is not None and not one.is_lost), None)

    async def _made(self, image: Image, volume: str) -> Container:
        """Start a container in a thread; should nobody wait for it any more, it is let go."""
        making = asyncio.ensure_future(asyncio.to_thread(self._make, image, volume))
        try:
            return await finish(making)
        except asyncio.CancelledError:
            if not making.cancelled() and making.exception() is None:
                see_out(making.result())
            raise

    def _make(self, image: Image, volume: str) -> Container:
        """Start a container; blocks."""
        kind = Container if image.has_reaper else ShellContainer
        container = kind(self._daemon, self._plan(image, volume), image)
        container.start(self._policy.preload)
        return container

    def _plan(self, image: Image, volume: str) -> Plan:
        keeper = self._keeper() if volume else None
        plan = plan_container(
            self._policy,
            self._limits,
            image=image.id,
            command=COMMAND if image.has_reaper else SHELL_COMMAND,
            user=keeper.plan.user if keeper is not None else _any_id(),
            is_watched=image.has_reaper,
            runtime=self._runtime,
            is_id_mapped=self._daemon.is_id_mapped,
            labels={OWNER_LABEL: owner()},
        )
        return dataclasses.replace(plan, volume=volume) if volume else plan

    def _kind(self, image: Image) -> tuple[object, ...]:
        plan = self._plan(image, "")
        return id(self._daemon), self._policy.preload, plan.kind()

    async def _run(self, container: Container, request: Request, program: Program, sink: Sink, start: str) -> Result:
        before, self._used = self._used, container
        if before is not None:
            see_out(before)
        timeout_s = request.timeout_s or self._limits.timeout_s
        ending = Ending(container)
        running = Running(self._limits, sink, ending.kill, lambda: ending.expect(timeout_s))
        if sink is not discard:
            shown = shlex.join(container.plan.arguments())
            running.plan = (PlanStep(name="container", description=shown, seconds=container.start_s),)
        container.listen(running)
        answer: dict[str, Any] = {}
        try:
            order = program.order(request, self._limits, timeout_s)
            payloads = (pack(program.files), *((request.stdin,) if request.stdin else ()))
            answer = await self._attend(container, running, ending, order, payloads)
        except Lost:
            if not running.has_started and ending.cause is None:
                raise StartFailed(f"the container was lost before the code ran{container.last_words()}") from None
        finally:
            ending.close()
            container.listen(None)
            self._go_on(container)
        end = await observed_end(container, running.report, ending.cause)
        if end is None:
            raise OutcomeUnknown(
                "the container was lost while the code ran, and nobody said why; it may have run to its end. "
                f'See whether the daemon is well: "docker info"{container.last_words()}'
            )
        found = await asyncio.to_thread(self._workspace.changes, running.spool, program.given(), answer)
        return make_result(
            end, running, found, program=program, image=container.image, limits=self._limits,
            enforcement=self.enforcement, daemon=self._daemon, start=start,
        )  # fmt: skip

    def _go_on(self, container: Container) -> None:
        """Make the next container ready, or one for the next sandbox like this one."""
        if not self._policy.warm:
            return
        if self._is_last:
            image = container.image
            shared_pool().refill(self._kind(image), lambda: self._make(image, ""))
        elif not container.is_lost and not self._is_closed:
            self._coming = asyncio.create_task(self._succeed(container.image))

    async def _succeed(self, image: Image) -> None:
        """Start the container of the next run while the last one holds the workspace."""
        try:
            self._fresh, _ = await self._start(image)
        except StartFailed:
            pass  # the next run tries again, and says why

    async def _attend(
        self,
        container: Container,
        running: Running,
        ending: Ending,
        order: dict[str, Any],
        payloads: tuple[bytes, ...],
    ) -> dict[str, Any]:
        """Send a run and wait for its end; when cancelled, kill it and wait until it is dead."""
        sending = asyncio.ensure_future(_send(container, order, payloads))
        try:
            return await asyncio.shield(running.answer)
        except asyncio.CancelledError:
            ending.kill(KillCause.CANCELLED)
            with contextlib.suppress(Lost, Exception):  # whatever came of it, nobody waits for it any more
                await finish(running.answer)
            raise
        finally:
            with contextlib.suppress(OSError):  # the container is gone, which is told elsewhere
                await finish(sending)

    async def _converse(self, talk: Conversation, order: dict[str, Any], *payloads: bytes) -> dict[str, Any]:
        """Ask a container of this sandbox about files."""
        return await self._ask(await self._holder(), talk, order, *payloads)

    async def _ask(
        self, container: Container, talk: Conversation, order: dict[str, Any], *payloads: bytes
    ) -> dict[str, Any]:
        container.answer_to(talk)
        try:
            return await self._answer(container, talk, order, payloads)
        except (Lost, OSError) as error:
            if isinstance(error, OSError) and not isinstance(error, ConnectionError):
                raise
            raise StartFailed(
                "the workspace is gone with its container; open another sandbox", step="container"
            ) from error
        finally:
            container.answer_to(None)

    async def _answer(
        self, container: Container, talk: Conversation, order: dict[str, Any], payloads: tuple[bytes, ...]
    ) -> dict[str, Any]:
        """Wait for the answer, even when cancelled: what came later would be taken for that of another question."""
        try:
            await finish(_send(container, order, payloads))
            return await finish(asyncio.shield(talk.answer))
        except BaseException:
            talk.spool.file.close()
            raise

    async def _holder(self) -> Container:
        """Return a container that has the workspace."""
        if self._is_closed:
            raise InvalidRequest("this sandbox is closed; open another one")
        keeper = self._keeper()
        if keeper is None:
            image = await self._image(image_name("python", self._images))
            self._fresh, _ = await self._take(image)
            keeper = self._fresh
        return keeper


def _any_id() -> int:
    """Return an id that, most likely, no other sandbox has."""
    return FIRST_ID + random.SystemRandom().randrange(IDS)


async def _send(container: Container, order: dict[str, Any], payloads: tuple[bytes, ...]) -> None:
    if sum(map(len, payloads)) < SMALL_BYTES:
        container.order(order, *payloads)
    else:
        await asyncio.to_thread(container.order, order, *payloads)
