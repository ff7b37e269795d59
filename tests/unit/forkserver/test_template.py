"""A template forks helpers for a caller who may be gone by then."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

from cloche.forkserver.slot import Template
from tests.harness.processes import stop_and_wait

SETTINGS: dict[str, Any] = {
    "preload": [], "extra_paths": [], "customizes": False, "home": "/workspace", "ahead": None,
}  # fmt: skip
PATIENCE_S = 30.0


def _wait_until_ready(template: Template) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not template.is_ready():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_group_is_removed_whose_maker_is_gone_before_its_helper_is_there(tmp_path: Path) -> None:
    """Nobody else knows of it: here a folder stands for it, and a closed socket for the end of the caller."""
    group = tmp_path / "group"
    template = Template(SETTINGS)
    try:
        _wait_until_ready(template)
        process = template._process
        stop_and_wait([process.pid])
        try:
            link = template.fork_helper(1, {"memory": str(group)})
            group.mkdir()
            link.close()
        finally:
            os.kill(process.pid, signal.SIGCONT)
        deadline = time.monotonic() + PATIENCE_S
        while group.exists():
            assert time.monotonic() < deadline, "the group was left behind"
            time.sleep(0.01)
    finally:
        template.close().wait()
