"""What a program gets: the classes of the blocking or the asynchronous SDK, and sandboxes that are ended after it."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable
from typing import Any

from tests.harness.e2b import E2BService
from tests.harness.e2b_sdk.rows import class_of

PATIENCE_S = 30


class Both:
    """Hold one of the two SDKs. `await sdk(value)` waits for what is awaitable, and returns what is not."""

    def __init__(self, service: E2BService, *, is_async: bool):
        self.service, self.is_async = service, is_async
        self.Sandbox = class_of("Sandbox", is_async=is_async)
        self.Template = class_of("Template", is_async=is_async)
        self.Volume = class_of("Volume", is_async=is_async)
        self.Secret = class_of("Secret", is_async=is_async)
        self._shared: Any = None
        self._own: list[Any] = []

    async def __call__(self, value: Any) -> Any:
        """Return a result of either SDK."""
        return await value if inspect.isawaitable(value) else value

    async def create(self, *words: Any, **options: Any) -> Any:
        """Create a sandbox that is ended after the program."""
        sandbox = await self(self.Sandbox.create(*words, **options))
        self._own.append(sandbox)
        return sandbox

    async def shared(self) -> Any:
        """Return a sandbox for programs that leave it as it was."""
        if self._shared is None:
            self._shared = await self(self.Sandbox.create(timeout=600))
        return self._shared

    async def sleep(self, seconds: float) -> None:
        """Wait a little; the blocking SDK's programs have no loop."""
        await asyncio.sleep(seconds) if self.is_async else time.sleep(seconds)

    async def until(self, is_true: Callable[[], Any]) -> Any:
        """Return the first true result of a function of the SDK's, asked for again and again."""
        ends = time.monotonic() + PATIENCE_S
        while not (value := await self(is_true())):
            assert time.monotonic() < ends, "this did not become true"
            await self.sleep(0.02)
        return value

    async def raises(self, kind: type[BaseException] | tuple[type[BaseException], ...], call: Callable[[], Any]) -> Any:
        """Return the error that a call must raise."""
        try:
            value = await self(call())
        except kind as error:
            return error
        raise AssertionError(f"nothing was raised, but {value!r} returned")

    async def collect(self, items: Any) -> list[Any]:
        """Return what an iterator, or asynchronous iterator, yields."""
        return [item async for item in items] if hasattr(items, "__aiter__") else list(items)

    async def pages(self, paginator: Any) -> list[Any]:
        """Return the items of all pages."""
        items = []
        while paginator.has_next:
            items += await self(paginator.next_items())
        return items

    async def end(self, *, with_shared: bool = False) -> None:
        """End the sandboxes of a program."""
        own, self._own = self._own, []
        if with_shared and self._shared is not None:
            own, self._shared = [*own, self._shared], None
        for sandbox in own:
            await self(sandbox.kill())


def run(program: Callable[[Both], Any], sdk: Both, runner: asyncio.Runner) -> None:
    """Run a program: on a loop, or, with the blocking SDK, without one."""

    async def whole() -> None:
        try:
            await program(sdk)
        finally:
            await sdk.end()

    if sdk.is_async:
        runner.run(whole())
        return
    coroutine = whole()
    try:
        coroutine.send(None)
    except StopIteration:
        return
    coroutine.close()
    raise AssertionError("a program of the blocking SDK waited for something")
