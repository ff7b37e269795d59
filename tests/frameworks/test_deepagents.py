"""LangChain deepagents: LangChain's standard tests of a sandbox, with deepagents 0.6, for which they are, and 0.7."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.metadata import version

import pytest
from langchain_tests.integration_tests import SandboxIntegrationTests

from cloche.integrations.deepagents import Cloche

TESTS = 86
# What deepagents 0.7 does by intent, and langchain-tests 1.1.9 does not expect.
OVERWRITES = "deepagents 0.7: write replaces a file that is there"
ABSOLUTE = "deepagents 0.7: glob returns absolute paths, of files alone"
STALE = {
    "test_write_existing_file_fails": OVERWRITES,
    "test_glob": ABSOLUTE,
    "test_glob_basic_pattern": ABSOLUTE,
    "test_glob_with_directories": ABSOLUTE,
    "test_glob_hidden_files_explicitly": ABSOLUTE,
    "test_glob_with_character_class": ABSOLUTE,
    "test_glob_with_question_mark": ABSOLUTE,
}
IS_STALE = version("deepagents").split(".")[:2] != ["0", "6"]


class TestSandbox(SandboxIntegrationTests):
    """All of them."""

    @pytest.fixture(scope="class")
    def sandbox(self) -> Iterator[Cloche]:
        """Open one for all."""
        with Cloche() as backend:
            yield backend

    @pytest.fixture(autouse=True)
    def _name_stale_ones(self, request: pytest.FixtureRequest) -> None:
        if IS_STALE and (why := STALE.get(request.node.originalname)):
            request.applymarker(pytest.mark.xfail(reason=why, strict=True))


def test_these_are_all_of_them() -> None:
    """A new release with more of them is looked at before it is pinned."""
    assert sum(name.startswith("test_") for name in dir(SandboxIntegrationTests)) == TESTS


def test_a_command_that_is_late_says_so_and_ends_alone() -> None:
    """With the exit code of `timeout`, and what it had printed."""
    with Cloche() as backend:
        late = backend.execute("echo begun; sleep 9999", timeout=1)
        assert (late.exit_code, late.output.splitlines()[0]) == (124, "begun")
        both = backend.execute("echo out; echo err >&2; exit 3")
        assert (both.exit_code, both.output) == (3, "out\nerr\n")


def test_the_example(example: Callable[[str], str]) -> None:
    """An agent that runs one command."""
    assert "42" in example("deepagents").split()


def test_the_adapter_is_well_typed(well_typed: Callable[[str], None]) -> None:
    """Against deepagents' own types."""
    well_typed("deepagents")
