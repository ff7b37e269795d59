"""Pydantic AI: its conformance suite for workspace backends, with every optional fixture."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from pydantic_ai.workspaces import WorkspaceBackend, WorkspaceRef
from pydantic_ai.workspaces.conformance import WorkspaceBackendSuite

from cloche.integrations.pydantic_ai import ClocheBackend, ClocheWorkspace

TESTS = 40
pytestmark = pytest.mark.anyio


class TestBackend(WorkspaceBackendSuite):
    """All of it. What attaches does so in the same process: until sandboxes have names, no other one finds them."""

    @pytest.fixture
    async def backend(self) -> AsyncIterator[ClocheBackend]:
        """Return one for each test."""
        made = ClocheBackend()
        yield made
        await made.close()

    @pytest.fixture
    async def fresh_backend(self) -> AsyncIterator[Callable[[], WorkspaceBackend]]:
        """Return what makes another one, which ends with the test."""
        made: list[ClocheBackend] = []

        def make() -> WorkspaceBackend:
            made.append(ClocheBackend())
            return made[-1]

        yield make
        for one in made:
            await one.close()

    @pytest.fixture
    def attach_backend(self) -> Callable[[WorkspaceRef], WorkspaceBackend]:
        """Return what finds one again."""
        return lambda ref: ClocheBackend(ref=ref)

    @pytest.fixture
    def destroy_environment(self) -> Callable[[WorkspaceBackend], Awaitable[None]]:
        """Return what ends one."""

        async def destroy(backend: WorkspaceBackend) -> None:
            assert isinstance(backend, ClocheBackend)
            await backend.close()

        return destroy


def test_these_are_all_of_them() -> None:
    """A new release with more of them is looked at before it is pinned."""
    assert sum(name.startswith("test_") for name in dir(WorkspaceBackendSuite)) == TESTS


async def test_a_reference_of_somebody_else_s_is_not_taken() -> None:
    """Another capability is asked for it."""
    capability = ClocheWorkspace()
    assert capability.get_workspace(None, ref=WorkspaceRef(provider="local", id="/")) is None


def test_the_example(example: Callable[[str], str]) -> None:
    """Two runs in one sandbox."""
    assert example("pydantic_ai") == '{"count_up":"line\\n"}\n{"count_up":"line\\nline\\n"}\n'


def test_the_adapter_is_well_typed(well_typed: Callable[[str], None]) -> None:
    """Against Pydantic AI's own types."""
    well_typed("pydantic_ai")
