"""One sandbox as a framework wants it: opened at its first use, once, and used from any event loop and any thread.

Theory of operation: frameworks call their adapters from event loops that come and go, and from threads. A sandbox is
bound to one loop. So it lives in the loop that the blocking calls share, held open there by one task, and every
operation is a coroutine that runs there (`blocking.calls`). A caller that is cancelled waits until the operation has
ended, so a command is killed by then.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar, Unpack, cast

from cloche.blocking import calls
from cloche.config.options import SandboxOptions
from cloche.core.errors import BackendUnavailable, OutcomeUnknown, StartFailed
from cloche.execution.inputs import Files
from cloche.execution.sandbox import AsyncSandbox

T = TypeVar("T")
Operation = Callable[[AsyncSandbox], Coroutine[Any, Any, T]]

OUTPUT_BYTES = 10 << 20  # of each stream of a command: the most that frameworks take
WORKING_DIR = "/workspace"
# What is raised where it is the sandbox that is not there, whatever was asked of it.
GONE = (BackendUnavailable, OutcomeUnknown, StartFailed)


class Environment:
    """Hold one sandbox open from its first use until `close`, or until the program ends.

    Takes the keywords of AsyncSandbox. `output_limit` is 10 MiB by default.
    """

    def __init__(
        self, *, env: Mapping[str, str] | None = None, files: Files | None = None, **options: Unpack[SandboxOptions]
    ):
        self.id = f"cloche-{secrets.token_hex(16)}"
        self._env, self._files = env, files
        self._options = cast(SandboxOptions, {"output_limit": OUTPUT_BYTES, **options})
        self._holder: asyncio.Task[None] | None = None
        self._opened: asyncio.Future[AsyncSandbox] | None = None
        self._closing = asyncio.Event()

    async def use(self, operation: Operation[T]) -> T:
        """Await an operation from any event loop. Raises one of GONE where the sandbox cannot be had, or has ended."""
        return await calls.call_from_loop(lambda: self._use(operation))

    def use_and_wait(self, operation: Operation[T]) -> T:
        """Do an operation and block until it has ended."""
        return calls.call(lambda: self._use(operation))

    async def close(self) -> None:
        """Kill and remove everything, for good."""
        await calls.call_from_loop(self._close)

    def close_and_wait(self) -> None:
        """Do as `close` does, and block until it is done."""
        calls.call(self._close)

    # All that follows runs in the shared loop.

    async def _use(self, operation: Operation[T]) -> T:
        if self._closing.is_set():
            raise BackendUnavailable("This sandbox is closed.", remedy="Make another one.")
        if self._opened is None:
            self._opened = asyncio.get_running_loop().create_future()
            self._holder = asyncio.create_task(self._hold_open(self._opened))
        return await operation(await asyncio.shield(self._opened))

    async def _hold_open(self, opened: asyncio.Future[AsyncSandbox]) -> None:
        """Be the one task that enters and leaves the sandbox; what fails to open is tried again at the next use."""
        try:
            async with AsyncSandbox(live=True, env=self._env, files=self._files, **self._options) as sandbox:
                opened.set_result(sandbox)
                await self._closing.wait()
        except BaseException as error:
            if opened.done():
                raise
            self._opened = None
            opened.set_exception(error)
            opened.exception()  # whoever waited may have been cancelled

    async def _close(self) -> None:
        self._closing.set()
        if self._holder is not None:
            await asyncio.wait([self._holder])
