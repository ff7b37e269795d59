"""What several modules of tests have in common."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import cloche
from cloche.sync import Session


@pytest.fixture
def settings_of_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the machine's own configuration out of a test; the caller's home stays what it is."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for name in ("SANDBOX_TYPE", "SANDBOX_TIMEOUT_SEC", "CLOCHE_CONFIG"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def session() -> Iterator[Session]:
    """Return a session in a sandbox of its own."""
    with cloche.Sandbox() as sandbox:
        yield sandbox.session()
