"""Coding agents from their packages (scripts/agents.sh), in a window of tmux on the host of a world with models."""

from __future__ import annotations

import os
import shlex
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

    `ready` is what the screen shows when it takes a prompt, `leave` what ends it. Without `package` it is a test's;
    several are parted by commas.
    """

    name: str
    secrets: Mapping[str, str]
    ready: str
    leave: str
    package: str = "agents"
    arguments: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)


ANTHROPIC = {"ANTHROPIC_API_KEY": "api.anthropic.com"}
OPENAI = {"OPENAI_API_KEY": "api.openai.com"}
GOOGLE = {"GEMINI_API_KEY": "generativelanguage.googleapis.com"}
QWEN = ("--", "--openai-base-url", "https://api.openai.com/v1", "--model", "gpt-5")
AGENTS: Mapping[str, Agent] = {
    agent.name: agent
    for agent in (
        Agent("claude", ANTHROPIC, "bypass permissions on", "/exit"),
        Agent("codex", OPENAI, "YOLO mode", "/quit"),
        Agent("gemini", GOOGLE, "Type your message", "/quit", "more-agents"),
        Agent("qwen", OPENAI, "Type your message", "/quit", "more-agents,node 3.11", QWEN),
        Agent("opencode", ANTHROPIC, "Ask anything", "/exit", "more-agents"),
    )
}


def programs(package: str) -> str:
    """Return the folder of the programs of a lock (and its Python), which are installed unless they are there."""
    done = subprocess.run(
        ["scripts/agents.sh", *package.split()], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.skip(f"missing: coding agents: {done.stderr.strip()[-300:]}")
    return done.stdout.strip()


class Host:
    """A user's place in a world: an agent's programs on PATH, its keys in the environment, a state folder."""

    def __init__(self, world: World, agent: Agent, state: Path | None = None) -> None:
        self.world, self.agent = world, agent
        path = os.pathsep.join([*map(programs, filter(None, agent.package.split(","))), SYSTEM_PATH])
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

    def deny(self, host: str, screen: Screen) -> list[str]:
        """Say no to each question, as a user does in a second terminal, until one about this host; return all hosts."""
        deadline, queue, hosts = time.monotonic() + PATIENCE_S, ApprovalQueue(self.env[APPROVALS]), []
        while host not in hosts:
            assert time.monotonic() < deadline, f"nothing asks for {host}:\n{screen.all()}"
            for entry in queue.waiting():
                queue.decide(entry.number, Decision(is_approved=False, by="a test"))
                hosts.append(entry.request.arguments["host"])
            time.sleep(POLL_S)
        return hosts

    @contextmanager
    def window(self, folder: Path, socket: Path, *words: str, columns: int = 100, rows: int = 40) -> Iterator[Screen]:
        """Start `cloche agent` with the agent in a window; at the end nothing of it is left."""
        screen = Screen(
            socket, self.words(folder, *CLOCHE, "agent", self.agent.name, *words, *self.agent.arguments),
            columns=columns, rows=rows,
        )  # fmt: skip
        try:
            yield screen
        finally:
            screen.close()
            self.end(folder)

    @contextmanager
    def shell(self, folder: Path, socket: Path, *, columns: int, rows: int) -> Iterator[Screen]:
        """Start a shell in a window, in which `cloche` is a command."""
        named = f"cloche() {{ {shlex.join(CLOCHE)} \"$@\"; }}; PS1='$ '; unset PROMPT_COMMAND; clear"
        screen = Screen(socket, self.words(folder, "bash", "--norc", "--noprofile"), columns=columns, rows=rows)
        try:
            screen.see("#", "$")
            screen.type(named, "Enter")
            screen.wait(lambda shown: shown.strip() == "$", "a prompt")
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
