"""The command line of deepagents, `dcode`: it finds the provider, opens a sandbox with it, and closes it."""

from __future__ import annotations

from pathlib import Path

import pytest
from deepagents_code.integrations.sandbox_factory import create_sandbox
from deepagents_code.integrations.sandbox_provider import SandboxNotFoundError
from deepagents_code.integrations.sandbox_registry import SandboxRegistry

from cloche.core.errors import BackendUnavailable


def test_dcode_opens_and_closes_a_sandbox(tmp_path: Path) -> None:
    """With the options and the script of its configuration; afterwards nothing answers by that id."""
    script = tmp_path / "setup.sh"
    script.write_text("echo ready > /tmp/state\n")
    with create_sandbox("cloche", setup_script_path=str(script), params={"memory": "200m"}) as backend:
        assert backend.execute("cat /tmp/state; pwd").output == "ready\n/workspace\n"
        provider = SandboxRegistry().create_provider("cloche")
        assert provider.get_or_create(sandbox_id=backend.id) is backend
    with pytest.raises(BackendUnavailable):
        backend.execute("true")
    with pytest.raises(SandboxNotFoundError):
        provider.get_or_create(sandbox_id=backend.id)


def test_dcode_knows_what_it_can() -> None:
    """Where an agent works, and that a sandbox of an earlier start cannot be named."""
    found = SandboxRegistry().get_metadata("cloche")
    assert found is not None
    assert (found.working_dir, found.supports_sandbox_id) == ("/workspace", False)
