"""What the adapters for frameworks stand on, without any framework: one sandbox for all event loops and threads.

The frameworks' own suites are in tests/frameworks, which `make soak AREA=frameworks` runs.
"""

from __future__ import annotations

import asyncio
import importlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cloche.core.errors import BackendUnavailable, InvalidRequest
from cloche.execution.sandbox import AsyncSandbox
from cloche.integrations.environment import GONE, Environment, Operation

EXAMPLES = Path(__file__).parents[2] / "examples"
MOST_LINES = 20
NAMES = ("deepagents", "inspect_ai", "pydantic_ai")


@pytest.fixture
def environment() -> Iterator[Environment]:
    """Return one that is not open yet."""
    made = Environment()
    yield made
    made.close_and_wait()


def said(line: str) -> Operation[str]:
    """Return an operation that runs a line of shell, and returns what it prints."""

    async def run(sandbox: AsyncSandbox) -> str:
        return (await sandbox.exec(shell=line)).stdout

    return run


def test_those_who_come_first_together_share_one_sandbox(environment: Environment) -> None:
    """From one event loop, from another one later, and from a thread: the same processes and files."""

    async def first() -> None:
        await asyncio.gather(*(environment.use(said(f"echo {n} > /tmp/{n}")) for n in range(8)))

    asyncio.run(first())
    assert asyncio.run(environment.use(said("ls /tmp"))).split() == list(map(str, range(8)))
    found: list[str] = []
    thread = threading.Thread(target=lambda: found.append(environment.use_and_wait(said("cat /tmp/7"))))
    thread.start()
    thread.join()
    assert found == ["7\n"]


def test_who_is_cancelled_finds_the_command_killed(environment: Environment) -> None:
    """A command that was told to last for a year has ended when the cancellation is raised."""

    async def main() -> None:
        await environment.use(said("mkfifo /tmp/begun"))
        command = environment.use(lambda one: one.exec(shell="echo $$ > /tmp/begun; sleep 9999", timeout="365d"))
        task = asyncio.create_task(command)
        pid = int(await environment.use(said("cat /tmp/begun")))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await environment.use(said(f"kill -0 {pid} 2>/dev/null || echo gone")) == "gone\n"

    asyncio.run(main())


def test_what_was_closed_is_gone(environment: Environment) -> None:
    """For the command that runs, and for whoever comes later."""

    async def main() -> None:
        await environment.use(said("mkfifo /tmp/begun"))
        task = asyncio.create_task(environment.use(said("echo > /tmp/begun; sleep 9999")))
        await environment.use(said("cat /tmp/begun"))
        await environment.close()
        with pytest.raises(GONE):
            await task
        with pytest.raises(BackendUnavailable, match="closed"):
            await environment.use(said("true"))

    asyncio.run(main())


def test_what_cannot_be_opened_is_tried_again() -> None:
    """Each use says why."""
    environment = Environment(preset="no such one")
    for _ in range(2):
        with pytest.raises(InvalidRequest, match="no such one"):
            environment.use_and_wait(said("true"))
    environment.close_and_wait()


@pytest.mark.parametrize("name", NAMES)
def test_an_adapter_without_its_framework_says_what_to_install(name: str, hide: Callable[[str], None]) -> None:
    """The name of the extra."""
    hide(name)
    with pytest.raises(BackendUnavailable, match=r"pip install cloche\[" + name.removesuffix("_ai").replace("_", "-")):
        importlib.import_module(f"cloche.integrations.{name}")


@pytest.fixture
def hide(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Return a function that lets nobody import a package."""
    return lambda name: monkeypatch.setitem(importlib.import_module("sys").modules, name, None)


@pytest.mark.parametrize("name", NAMES)
def test_an_example_takes_twenty_lines(name: str) -> None:
    """All of it."""
    assert len((EXAMPLES / f"{name}_sandbox.py").read_text().splitlines()) <= MOST_LINES
