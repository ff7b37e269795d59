"""Inspect AI: its own checks of a sandbox provider, and what they leave open."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from inspect_ai.util import OutputLimitExceededError, SandboxEnvironment, SandboxUserUnsupportedError
from inspect_ai.util._sandbox import self_check
from inspect_ai.util._sandbox.environment import SandboxUnavailableError
from inspect_ai.util._sandbox.events import SandboxEnvironmentProxy
from inspect_ai.util._sandbox.registry import registry_find_sandboxenv
from inspect_ai.util._sandbox.self_check import *  # noqa: F403 - that is how they are taken

from tests.harness.environments import run_as_user

ROOT = Path(__file__).parents[2]
CHECKS = 44
ONE_USER = {"test_exec_as_user": "this host has no ids for several users in a sandbox"}


@pytest.fixture
async def sandbox_env(request: pytest.FixtureRequest) -> AsyncIterator[SandboxEnvironment]:
    """Open what Inspect finds by the entry point, as it does for a sample."""
    provider = registry_find_sandboxenv("cloche")
    await provider.task_init("task", None)
    environments = await provider.sample_init("task", None, {})
    if why := ONE_USER.get(getattr(request.node, "originalname", "")):
        with contextlib.suppress(SandboxUserUnsupportedError):
            await environments["default"].exec(["true"], user="root")
            why = ""
        if why:
            request.applymarker(pytest.mark.xfail(reason=why, strict=True))
    try:
        yield environments["default"]
    finally:
        await provider.sample_cleanup("task", None, environments, False)
        await provider.task_cleanup("task", None, True)


@pytest.mark.root
def test_all_hold_for_an_ordinary_user_with_a_range_of_ids() -> None:
    """Also the one about users; the user is one of a mount namespace's own /etc."""
    chosen = " or ".join(self_check.__all__)
    words = ["-q", "-p", "no:cacheprovider", "--runxfail", "-o", "filterwarnings=default", "--rootdir", str(ROOT)]
    program = f"import json, pytest\nprint('\\n', int(pytest.main({[*words, '-k', chosen, __file__]})), sep='')"
    assert run_as_user(program) == 0


def test_these_are_all_of_them() -> None:
    """A new release with more of them is looked at before it is pinned."""
    assert len(self_check.__all__) == CHECKS


async def test_what_is_over_a_limit_ends_the_command_alone(sandbox_env: SandboxEnvironment) -> None:
    """Output; memory, whether it is killed for it or refused more; the next command runs."""
    with pytest.raises(OutputLimitExceededError):
        await sandbox_env.exec(["sh", "-c", "yes | head -c 11000000"])
    assert not (await sandbox_env.exec(["python3", "-c", "b'a' * (900 << 20)"])).success
    assert (await sandbox_env.exec(["echo", "here"])).stdout == "here\n"


async def test_a_sandbox_that_is_closed_is_unavailable(sandbox_env: SandboxEnvironment) -> None:
    """As Inspect has it: no failure of the command."""
    await type(sandbox_env).sample_cleanup("task", None, {"default": sandbox_env}, False)
    with pytest.raises(SandboxUnavailableError):
        await sandbox_env.exec(["true"])


async def test_inspect_s_own_tools_run_inside(sandbox_env: SandboxEnvironment) -> None:
    """A process that Inspect starts through the program that it puts there, with its output piece by piece."""
    process = await SandboxEnvironmentProxy(sandbox_env).exec_remote(["sh", "-c", "echo one; echo two >&2; exit 3"])
    events = [event async for event in process]
    assert {getattr(event, "data", "") for event in events} >= {"one\n", "two\n"}
    assert events[-1].exit_code == 3


def test_the_example(example: Callable[[str], str]) -> None:
    """An evaluation of three samples, each in a sandbox of its own."""
    assert example("inspect_ai") == "success 6 12 18\n"


def test_the_adapter_is_well_typed(well_typed: Callable[[str], None]) -> None:
    """Against Inspect's own types."""
    well_typed("inspect_ai")
