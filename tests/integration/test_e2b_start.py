"""The first lines of docs/e2b.md, from `pip install` to E2B's own quick start."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from cloche.server.e2b.listening import NO_USERS
from tests.harness.e2b import serving
from tests.harness.service import end_sandboxes, environment
from tests.harness.texts import blocks

ROOT = Path(__file__).parents[2]


def test_the_quick_start_runs_as_it_stands(tmp_path: Path) -> None:
    """Six lines; only the port is another one, and pip has nothing to do, as all of it is installed."""
    text = blocks(ROOT / "docs/e2b.md", "sh")[0]
    assert len(text.strip().splitlines()) <= 6
    port = _free_port()
    waits = f"until curl -s 127.0.0.1:{port}; do sleep 0.1; done"
    serve = f"cloche serve --end-sandboxes --port 0 --e2b --e2b-port {port} & {waits}"
    text = text.replace("3000", str(port)).replace("cloche serve --e2b", serve)
    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "pip").write_text("#!/bin/sh\n")
    (programs / "pip").chmod(0o755)
    path = f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-ec", f"trap 'kill %1; wait' EXIT\n{text}"], env={**environment(tmp_path), "PATH": path},
        cwd=tmp_path, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    end_sandboxes(tmp_path)
    assert "Logs(stdout: ['42\\n'], stderr: [])" in done.stdout, done.stderr
    assert "'home'" in done.stdout


@pytest.mark.soak
def test_a_service_tells_that_its_sandboxes_lack_what_e2bs_have(tmp_path: Path) -> None:
    """There the account has another name and home."""
    with serving(tmp_path, "--backend", "gvisor") as service:
        assert NO_USERS in service.service.log.read_text()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port
