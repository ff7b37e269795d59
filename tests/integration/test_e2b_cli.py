"""E2B's command line, unmodified: what it does with sandboxes and templates."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.harness.e2b import E2BService, javascript, serving
from tests.harness.terminals import Terminal

pytestmark = pytest.mark.soak  # Node starts for each command


class CommandLine:
    """Run `e2b` for a service, and return what it prints."""

    def __init__(self, service: E2BService, folder: Path):
        self.program = str(javascript("e2b") / ".bin" / "e2b")
        self.env, self.folder = service.environment(folder), folder

    def __call__(self, *words: str, code: int = 0) -> str:
        """Run a command that must end with a code."""
        done = subprocess.run(
            [self.program, *words], cwd=self.folder, env=self.env, stdin=subprocess.DEVNULL, capture_output=True,
            text=True, timeout=120, check=False,
        )  # fmt: skip
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout

    def json(self, *words: str) -> Any:
        """Return what a command prints as JSON."""
        return json.loads(self(*words, "--format", "json"))


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[E2BService]:
    """Serve for all tests here."""
    with serving(tmp_path_factory.mktemp("e2b")) as service:
        yield service


@pytest.fixture
def e2b(service: E2BService, tmp_path: Path) -> Iterator[CommandLine]:
    """Give the command line with a home of its own, and end all sandboxes."""
    command_line = CommandLine(service, tmp_path)
    yield command_line
    command_line("sandbox", "kill", "--all", "--state", "running,paused")


def test_a_sandbox_is_made_used_and_killed(e2b: CommandLine) -> None:
    """With what `list` and `info` say of it, and commands in it; paused and resumed; then it is gone."""
    made = e2b("sandbox", "create", "--detach", "base")
    (listed,) = e2b.json("sandbox", "list")
    name = listed["sandboxId"]
    assert name in made
    assert e2b.json("sandbox", "info", name)["state"] == "running"
    assert "x y-user-/tmp" in e2b("sandbox", "exec", "-e", "A=x y", "-c", "/tmp", name, "echo $A-$(id -un)-$(pwd)")
    e2b("sandbox", "exec", name, "exit 3", code=3)
    e2b("sandbox", "pause", name)
    assert [row["sandboxId"] for row in e2b.json("sandbox", "list", "--state", "paused")] == [name]
    e2b("sandbox", "resume", name)
    assert "cpu" in e2b("sandbox", "metrics", name).lower()
    e2b("sandbox", "logs", name)
    e2b("sandbox", "kill", name)
    assert e2b.json("sandbox", "list", "--state", "running,paused") == []


def test_a_terminal_is_connected(e2b: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    """`connect` types into a shell inside."""
    e2b("sandbox", "create", "--detach", "base")
    (listed,) = e2b.json("sandbox", "list")
    for variable in os.environ.keys() - e2b.env.keys():
        monkeypatch.delenv(variable)
    for variable, value in e2b.env.items():
        monkeypatch.setenv(variable, value)
    with Terminal("sandbox", "connect", listed["sandboxId"], program=e2b.program) as terminal:
        terminal.see("$")
        terminal.type("echo inside-$((40+2))-$(id -un)\n")
        terminal.see("inside-42-user")
        terminal.type("exit\n")


def test_templates_and_snapshots_are_listed(e2b: CommandLine) -> None:
    """A snapshot of a sandbox is one more, until it is deleted."""
    e2b("template", "list")
    e2b("sandbox", "create", "--detach", "base")
    (listed,) = e2b.json("sandbox", "list")
    e2b("sandbox", "snapshot", "create", listed["sandboxId"])
    (snapshot,) = e2b.json("sandbox", "snapshot", "list")
    e2b("sandbox", "snapshot", "delete", snapshot["snapshotId"])
    assert e2b.json("sandbox", "snapshot", "list") == []
