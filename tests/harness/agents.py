"""Coding agents from their packages (scripts/agents.sh), in a window of tmux on the host of a world with models."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from cloche.agent.approval import Decision
from cloche.agent.queue import ApprovalQueue
from cloche.coding_agents.places import AgentPlace
from cloche.execution.naming import APPROVALS
from tests.harness.internet.build import HOME, SYSTEM_PATH
from tests.harness.internet.providers import VALUES
from tests.harness.tmux import PATIENCE_S, POLL_S, Screen
from tests.harness.world import ROOT, World, host_variables

CLOCHE = (sys.executable, "-m", "cloche")
PASTE_S = 0.3  # what is typed faster than this before a Return is taken for a paste


@dataclass(frozen=True, slots=True)
class Agent:
    """Say which package an agent is from, its variables with the hosts whose values they have, and how it looks.

    `ready` is what the screen shows when it takes a prompt, `leave` what ends it. Without `package` it is a test's.
    """

    name: str
    secrets: Mapping[str, str]
    ready: str
    leave: str
    package: str = "agents"
    env: Mapping[str, str] = field(default_factory=dict)


AGENTS: Mapping[str, Agent] = {
    agent.name: agent
    for agent in (
        Agent("claude", {"ANTHROPIC_API_KEY": "api.anthropic.com"}, "bypass permissions on", "/exit"),
        Agent("codex", {"OPENAI_API_KEY": "api.openai.com"}, "YOLO mode", "/quit"),
    )
}


def programs(package: str) -> str:
    """Return the folder of the programs of a lock, which are installed unless they are there."""
    done = subprocess.run(["scripts/agents.sh", package], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"missing: coding agents: {done.stderr.strip()[-300:]}")
    return done.stdout.strip()


class Host:
    """A user's place in a world: an agent's programs on PATH, its keys in the environment, a state folder."""

    def __init__(self, world: World, agent: Agent, state: Path | None = None) -> None:
        self.world, self.agent = world, agent
        path = os.pathsep.join([*([programs(agent.package)] if agent.package else []), SYSTEM_PATH])
        keys = {name: VALUES[host] for name, host in agent.secrets.items()}
        # Sockets are where nobody else looks for sandboxes: other tests end those of this machine.
        own = {"XDG_RUNTIME_DIR": f"{HOME}/run"}
        if state is not None:
            state.mkdir(mode=0o700)
            own |= {"XDG_STATE_HOME": str(state), APPROVALS: f"{state}/approvals"}
        self.env = {**host_variables(), "PATH": path, "COLORTERM": "truecolor", **own, **agent.env, **keys}
        self.run(HOME, "mkdir", "-p", "-m", "700", "run")
        for name, value in {"user.name": "A User", "user.email": "user@acme.example"}.items():
            self.run(HOME, "git", "config", "--global", name, value)

    def words(self, folder: Path, *words: str) -> list[str]:
        """Return a command of the user's in a folder."""
        variables = [f"{name}={value}" for name, value in self.env.items()]
        return [*self.world.words(), "env", "-i", "-C", str(folder), *variables, "TERM=tmux-256color", *words]

    def run(self, folder: Path, *words: str) -> str:
        """Run a command of the user's, which succeeds, and return what it prints."""
        command = self.words(folder, *words)
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def deny(self, host: str, screen: Screen) -> None:
        """Wait for a question about a host, the only one, and say no, as a user does in a second terminal."""
        deadline, queue = time.monotonic() + PATIENCE_S, ApprovalQueue(self.env[APPROVALS])
        while not (waiting := queue.waiting()):
            assert time.monotonic() < deadline, f"nothing asks for {host}:\n{screen.all()}"
            time.sleep(POLL_S)
        asked = [entry.request.arguments["host"] for entry in waiting]
        assert asked == [host], asked
        queue.decide(waiting[0].number, Decision(is_approved=False, by="a test"))

    @contextmanager
    def window(self, folder: Path, socket: Path, *words: str, columns: int = 100, rows: int = 40) -> Iterator[Screen]:
        """Start `cloche agent` with the agent in a window; at the end nothing of it is left."""
        screen = Screen(
            socket, self.words(folder, *CLOCHE, "agent", self.agent.name, *words), columns=columns, rows=rows
        )
        try:
            yield screen
        finally:
            screen.close()
            self.end(folder)

    def end(self, folder: Path) -> None:
        """End the agent's sandboxes on a folder."""
        name = AgentPlace(agent=self.agent.name, folder=str(folder)).sandbox
        words = self.words(folder, *CLOCHE, "sandbox", "kill", name, "--yes", "--force")
        subprocess.run(words, capture_output=True, check=False)  # it may be that none was opened


def prompt(screen: Screen, text: str) -> None:
    """Type a prompt, and send it when it is shown."""
    screen.type(text)
    screen.see(text)
    time.sleep(PASTE_S)
    screen.type("Enter")
