"""E2B's own SDK for Python, unmodified, against the service; in `make soak AREA=e2b` also an older pair of packages."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from e2b_code_interpreter import Sandbox

from tests.harness.e2b import E2BService, serving, variables


@pytest.fixture(scope="module")
def e2b(tmp_path_factory: pytest.TempPathFactory) -> Iterator[E2BService]:
    """Serve for all tests here, and have the SDKs of this process use it."""
    with serving(tmp_path_factory.mktemp("e2b")) as service, variables(service):
        yield service


def test_a_command_runs_in_a_sandbox(e2b: E2BService) -> None:
    """As in E2B's first example."""
    with Sandbox.create() as sandbox:
        assert sandbox.commands.run("echo out; echo err >&2").stdout == "out\n"
