"""Real coding agents, unmodified, in a terminal: `cloche agent NAME` with a scripted model at its provider's own host.

The model answers over TLS, to the real key alone; what it is asked has all that the agent was told by its tools.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.agents import AGENTS, Agent, Host, prompt
from tests.harness.internet.providers import VALUES
from tests.harness.model_servers import Step, edit, read, results, run, say, write
from tests.harness.recording import Screenshot, picture
from tests.harness.world import NAMES, PUBLIC, World, open_world

PICTURE = Path(__file__).parents[2] / "docs" / "pictures" / "coding-agent.svg"
COLUMNS, ROWS, MOST_PICTURE_BYTES = 92, 28, 100_000
IN_GATE = ("claude", "codex")
MORE = ("gemini", "opencode", "qwen")
pytestmark = pytest.mark.both_users
TABLE = {**NAMES, **{host: [[PUBLIC]] for host in VALUES}}
REFUSED, SAID_NO = "other.example", "the user was asked, and refused it\ncurl ended with 0"
FILES = {
    "calc.py": "def add(a, b):\n    return a - b\n",
    "test_calc.py": """import unittest

from calc import add


class Test(unittest.TestCase):
    def test_add(self):
        self.assertEqual(add(2, 3), 5)
""",
}
# Told the two halves of a text, and a variable that holds what must be found; prints how often each is there.
SEARCH = """
import glob, os
value, shown = "".join({halves}).encode(), os.environ["{name}"].encode()
paths = glob.glob("/proc/[0-9]*/environ") + glob.glob("/proc/[0-9]*/cmdline")
for top in (os.environ["HOME"], os.getcwd(), "/tmp", "/etc", "/run", "/var"):
    paths += [os.path.join(folder, name) for folder, _, names in os.walk(top) for name in names]
counts = {{"value": 0, "placeholder": 0}}
for path in paths:
    try:
        data = open(path, "rb").read(1 << 24) if not os.path.islink(path) and not os.path.isdir(path) else b""
    except OSError:
        continue
    counts["value"] += value in data
    counts["placeholder"] += shown in data
print("the value is in", counts["value"], "files, what is in its place in some:", counts["placeholder"] > 0)
"""
KEPT = "the value is in 0 files, what is in its place in some: True"


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """Open a world with models."""
    with open_world(TABLE) as world:
        yield world


def make_project(folder: Path) -> Path:
    """Make a repository with a mistake, and a test that finds it."""
    folder.mkdir()
    for name, text in FILES.items():
        (folder / name).write_text(text)
    git = ["git", "-C", str(folder), "-c", "user.name=A User", "-c", "user.email=user@acme.example"]
    subprocess.run([*git, "init", "--quiet", "--initial-branch=main"], check=True)
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "--quiet", "--message=Begin"], check=True)
    return folder


def steps(project: Path, agent: Agent) -> list[Step]:
    """Return what the model does: all that a user lets an agent do, and what it must not."""
    (name, host), *_ = agent.secrets.items()
    halves = repr((VALUES[host][:20], VALUES[host][20:]))
    # gemini keeps the user's settings from git, whatever they are.
    own = "-c user.name='A User' -c user.email=user@acme.example" if agent.name == "gemini" else ""
    search = SEARCH.format(halves=halves, name=name)
    return [
        read(f"{project}/calc.py"),
        edit(f"{project}/calc.py", "    return a - b\n", "    return a + b\n"),
        write(f"{project}/NOTES.md", "Written inside\n"),
        run("python3 -m unittest 2>&1 | tail -n 1"),
        run(f"git add . && git {own} commit --quiet --message 'Mend add' && git log -1 --format='%s by %an'"),
        run(f"curl --silent --show-error https://{REFUSED}/; echo curl ended with $?"),
        run(f"env; python3 - <<'END'\n{search}END"),
        say("All is done."),
    ]


@pytest.mark.parametrize("name", [*IN_GATE, *(pytest.param(name, marks=pytest.mark.soak) for name in MORE)])
def test_a_real_agent_works_with_a_key_that_it_never_has(world: World, name: str, tmp_path: Path) -> None:
    """It edits, runs the tests, commits, is refused a host; the diff is what it did, the key is nowhere inside."""
    host, project = Host(world, AGENTS[name], tmp_path / "state"), make_project(tmp_path / "project")
    work(host, project, tmp_path / "tmux")
    check(host, project)


def work(host: Host, project: Path, socket: Path) -> None:
    """Have the agent follow the script in a window, and take its changes."""
    host.world.forget()
    host.world.script(steps(project, host.agent))
    with host.window(project, socket) as screen:
        screen.see(host.agent.ready)
        prompt(screen, "Mend the mistake")
        asked = host.deny(REFUSED, screen)
        assert asked == [REFUSED] or host.agent.name in MORE  # some look for plugins by themselves
        screen.see("All is done.")
        prompt(screen, host.agent.leave)
        shown = screen.see("[K]eep")
        assert re.search(rf"refused: .*{re.escape(REFUSED)}:443\n", shown), shown
        assert "cloche: network:" not in shown
        assert re.search(r"\+1 -0 +A NOTES.md\n +\+1 -1 +M calc.py\n", shown), shown
        screen.type("a", "Enter")
        assert screen.exit_code() == 0, screen.shown()


def check(host: Host, project: Path) -> None:
    """Check what was asked for, what the agent's tools said, and what came into the folder."""
    asked = host.world.asked()
    assert "Hosts that you reach: " in asked[-1]["body"]
    told = results(asked)
    parts = ("OK", "Mend add by A User", SAID_NO, KEPT)
    for text, part in zip(told[3:], parts, strict=True):
        assert part in text, text
    ((name, provider),) = host.agent.secrets.items()
    answered = [row for row in asked if row["status"] == "200 OK"]
    assert all(VALUES[provider] in str(row["headers"]) for row in answered)
    assert not [row for row in asked if VALUES[provider] in row["body"]]
    assert f"{name}={VALUES[provider][:4]}" in told[-1]  # what is in its place
    assert not [one for one in host.world.seen().arrivals if one["server_name"] == REFUSED]
    changed = {"calc.py": FILES["calc.py"].replace("-", "+"), "NOTES.md": "Written inside\n"}
    assert {path.name: path.read_text() for path in project.glob("[!.]*")} == {**FILES, **changed}


@pytest.mark.soak
def test_a_session_is_a_picture(world: World, tmp_path: Path) -> None:
    """The picture of the documents is of a session with the scripted model; PICTURES=1 writes it."""
    host, project = Host(world, AGENTS["claude"], tmp_path / "state"), make_project(tmp_path / "calculator")
    world.script([*steps(project, host.agent)[:5], say("The mistake is mended: the tests pass, and it is committed.")])
    screens: list[Screenshot] = []

    def keep(seconds: float, *what: str) -> None:
        screen.see(*what)
        text = screen.shown(colours=True).replace(str(project), "/home/you/calculator")
        screens.append(Screenshot(text.replace("^[[?1;2c", ""), seconds))  # an answer of this terminal's own

    with host.shell(project, tmp_path / "tmux", columns=COLUMNS, rows=ROWS) as screen:
        keep(1, "$")
        screen.type("cloche agent claude")
        keep(2, "agent claude")
        screen.type("Enter")
        keep(2, host.agent.ready)
        prompt(screen, "Mend the mistake in calc.py")
        keep(4, "it is committed.")
        prompt(screen, host.agent.leave)
        keep(4, "[K]eep")
        screen.type("a", "Enter")
        keep(4, "wrote 2 paths")
    text = picture(screens, COLUMNS, ROWS, "A session of cloche agent claude")
    assert 5_000 < len(text) < MOST_PICTURE_BYTES
    if os.environ.get("PICTURES") == "1":
        PICTURE.write_text(text)


def test_the_picture_is_small() -> None:
    """The picture that PICTURES=1 has written is there, and is no larger than a page should load."""
    assert 5_000 < PICTURE.stat().st_size < MOST_PICTURE_BYTES
