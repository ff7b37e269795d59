"""Commands of an agent on the host, in a sandbox of its project: one folder, and nothing that runs on the host."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cloche import Sandbox
from cloche.coding_agents.places import AgentPlace
from tests.harness.commands import imported_once

COMMAND_S = 60


class HostAgent:
    """Be an agent on the host: it edits files, and its hook has its commands run elsewhere."""

    def __init__(self, home: Path) -> None:
        self.home, self.project = home, home / "project"
        self.project.mkdir()
        subprocess.run(["git", "init", "-q", str(self.project)], check=True)
        (home / "secret").write_text("of the user")
        self.env = {"PATH": os.environ["PATH"], "HOME": str(home), "LANG": "C.UTF-8", "CLOCHE_AUDIT": "off"}
        self.cloche = str(imported_once("cloche.coding_agents.host_shell", "cloche.sync").folder / "cloche")

    def asks(self, command: str, agent: str = "claude", **env: str) -> subprocess.CompletedProcess[str]:
        """Ask the hook, and run the command that it answers; without an answer run nothing, as agents do."""
        event = json.dumps({"tool_name": "Bash", "tool_input": {"command": command}})
        hook = json.loads(self.settings())["hooks"]["PreToolUse"][0]["hooks"][0]["command"]
        answer = self.sh(hook, event, **env)
        if answer.returncode:
            return answer
        return self.sh(json.loads(answer.stdout)["hookSpecificOutput"]["updatedInput"]["command"], **env)

    def settings(self) -> str:
        """Return the agent's settings."""
        return (self.home / ".claude/settings.json").read_text()

    def sh(self, command: str, text: str | None = None, **env: str) -> subprocess.CompletedProcess[str]:
        """Run a command on the host, as the agent does."""
        stdin: dict[str, Any] = {"stdin": subprocess.DEVNULL} if text is None else {"input": text}
        return subprocess.run(
            ["bash", "-c", command], env={**self.env, **env}, cwd=self.project, capture_output=True, text=True,
            timeout=COMMAND_S, check=False, **stdin,
        )  # fmt: skip

    def end(self) -> None:
        """End its sandbox: another one on this machine is none of ours."""
        name = AgentPlace(agent="shell", folder=str(self.project)).sandbox
        self.sh(f"{self.cloche} sandbox kill {name} --yes --force")


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostAgent]:
    """Give an agent whose commands go through its hook."""
    agent = HostAgent(tmp_path_factory.mktemp("host"))
    done = agent.sh(f"{agent.cloche} agent hook claude --yes")
    assert done.returncode == 0, done.stderr
    yield agent
    agent.end()


@pytest.mark.both_users
def test_a_command_runs_inside_and_both_see_one_folder(agent: HostAgent) -> None:
    """It cannot read the user's home; the agent's edits are there at once, and what the command writes comes back."""
    (agent.project / "code.py").write_text("print('one')\n")
    done = agent.asks('cat ~/secret; hostname; pwd; python3 code.py; echo made > made; echo "it\'s" >&2; exit 3')
    assert done.returncode == 3
    assert done.stdout.splitlines() == ["cloche", str(agent.project), "one"]
    assert "No such file" in done.stderr
    assert "it's" in done.stderr
    assert (agent.project / "made").read_text() == "made\n"
    for word in ("two", "three"):  # replaced, as agents write files; the command writes to the same file
        (agent.project / "new").write_text(f"print('{word}')\n")
        (agent.project / "new").replace(agent.project / "code.py")
        done = agent.asks("python3 code.py; echo '# more' >> code.py")
        assert (done.stdout, done.stderr) == (f"{word}\n", "")
        assert (agent.project / "code.py").read_text() == f"print('{word}')\n# more\n"
    (agent.project / "made").unlink()
    assert agent.asks("cat made").returncode == 1


@pytest.mark.soak
def test_commands_that_come_at_once_share_one_sandbox(agent: HostAgent) -> None:
    """The first opens it, none is refused, and what each writes comes to the project."""
    agent.end()
    words = [sys.executable, "-m", "cloche", "agent", "shell", "-c"]
    at_once = [
        subprocess.Popen([*words, f"echo {name} > {name}; cat {name}"], env=agent.env, cwd=agent.project,
                         stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for name in ("one", "two", "three")
    ]  # fmt: skip
    for running, name in zip(at_once, ("one", "two", "three"), strict=True):
        assert running.communicate(timeout=COMMAND_S)[0] == f"{name}\n"
        assert running.returncode == 0
        assert (agent.project / name).read_text() == f"{name}\n"


def test_what_runs_on_the_host_is_held_and_told_once(agent: HostAgent) -> None:
    """A dangerous change stays inside, where later commands see it, and the project has none of it."""
    done = agent.asks("echo '{}' > package.json; echo x > harmless")
    assert "package.json (a build, test or package tool runs it" in done.stderr
    assert (agent.project / "harmless").exists()
    assert not (agent.project / "package.json").exists()
    (agent.project / ".gitignore").write_text("built/\n")
    done = agent.asks("cat package.json; mkdir built; echo x > built/file")
    assert (done.stdout, done.stderr.count("git ignores these")) == ("{}\n", 1)
    assert not (agent.project / "built").exists()
    (agent.project / ".gitignore").unlink()
    assert agent.asks("rm package.json").stderr == ""
    assert (agent.project / "built/file").read_text() == "x\n"


def test_both_changed_one_file(agent: HostAgent) -> None:
    """The host's version is kept, and the agent is told which file it is."""
    (agent.project / "both").write_text("first\n")
    agent.asks("cat both")
    running = subprocess.Popen(
        [agent.cloche, "agent", "shell", "-c", "echo ready; read line; echo inside > both"], env=agent.env,
        cwd=agent.project, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert running.stdout is not None
    assert running.stdout.readline() == "ready\n"
    (agent.project / "both").write_text("host\n")
    _, told = running.communicate("go on\n", timeout=COMMAND_S)
    assert "the host has changed these files, too: both" in told
    assert (agent.project / "both").read_text() == "host\n"
    agent.asks("true")
    name = told.partition("cloche discard ")[2].partition(" ")[0]
    assert agent.sh(f"{agent.cloche} discard {name} both --yes").returncode == 0
    assert agent.asks("cat both").stdout == "host\n"


@pytest.mark.soak
def test_commits_of_both_sides(agent: HostAgent) -> None:
    """Those made inside are references of the project's; when its own branch moves, git inside follows."""
    commit = "git -c user.name=A -c user.email=a@example.org commit -q"
    agent.sh(f"echo 1 > versioned; git add versioned; {commit} -m first")
    done = agent.asks(f"git log --format=%s; echo 2 >> versioned; git add versioned; {commit} -m inside")
    assert done.stdout == "first\n"
    name = done.stderr.partition("sandbox are ")[2].partition(" ")[0]
    assert agent.sh(f"git log --format=%s {name}; git log --format=%s").stdout == "inside\nfirst\nfirst\n"
    assert agent.asks("git log --format=%s").stdout == "inside\nfirst\n"
    agent.sh(f"git reset -q {name}; echo 3 >> versioned; {commit} -a -m host")
    assert agent.asks("git status --short versioned; git log --format=%s").stdout == "host\ninside\nfirst\n"


@pytest.mark.soak
def test_a_command_that_is_stopped_ends_inside(agent: HostAgent) -> None:
    """Whatever signal the agent sends; and what it did until then comes with the next command."""
    for number, code in ((signal.SIGTERM, 143), (signal.SIGKILL, -9)):
        running = subprocess.Popen(
            [sys.executable, "-m", "cloche", "agent", "shell", "-c", "echo half > part; echo ready; sleep 1234.5"],
            env=agent.env, cwd=agent.project, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True,
        )  # fmt: skip
        assert running.stdout is not None
        assert running.stdout.readline() == "ready\n"
        running.send_signal(number)
        assert running.wait(COMMAND_S) == code
        running.communicate()
        waits = "for i in $(seq 500); do pgrep -f '[s]leep 1234' || exit 0; sleep 0.02; done; exit 1"
        assert agent.asks(waits).returncode == 0
        assert (agent.project / "part").read_text() == "half\n"
        (agent.project / "part").unlink()


@pytest.mark.parametrize("missing", ["Cloche", "its state", "the hook's answer"])
def test_nothing_runs_on_the_host(missing: str, agent: HostAgent) -> None:
    """If Cloche or its sandbox is missing, the command does not run, and the agent gets a reason."""
    word = agent.project / "ran"
    if missing == "Cloche":
        settings = agent.home / ".claude/settings.json"
        before = settings.read_text()
        settings.write_text(before.replace(" agent _rewrite", "-gone agent _rewrite"))
        done = agent.asks(f"touch {word}")
        settings.write_text(before)
        assert done.returncode == 2
        assert "this command was not run" in done.stderr
        assert agent.sh(f"/gone/cloche agent shell -c {shlex.quote(f'touch {word}')}").returncode == 127
    elif missing == "its state":
        done = agent.asks(f"touch {word}", HOME="/proc", XDG_STATE_HOME="/proc")
        assert done.returncode not in (0, 3)
    else:
        event = json.dumps({"tool_input": {"file_path": "x"}})
        hook = json.loads(agent.settings())["hooks"]["PreToolUse"][0]["hooks"][0]["command"]
        assert agent.sh(hook, event).returncode == 2
    assert not word.exists()


@pytest.mark.both_users
def test_a_view_shows_the_hosts_files_beside_a_process(tmp_path: Path) -> None:
    """Files that a process uses stay as they are for it; replaced, removed and new ones are seen; nothing is lost."""
    project = tmp_path / "project"
    project.mkdir()
    for name in ("kept", "replaced", "gone"):
        (project / name).write_text("old\n")
    with Sandbox(workspace=project) as sandbox:
        assert sandbox.exec(["sh", "-c", "cat kept replaced gone; cat new"]).exit_code == 1
        server = sandbox.start(["sh", "-c", "exec 3>>log; echo 1 >&3; echo up; read line; echo 2 >&3; echo done"])
        assert next(iter(server.stdout)) == b"up\n"
        sandbox.exec(
            ["sh", "-c", "mkdir -p made/deep; echo inside > made/deep/file; rm -r gone; mkdir gone; echo x > gone/x"]
        )
        shared = sandbox.share()
        assert {"log", "made/deep/file", "gone/x"} <= set(shared.written)
        assert (shared.held, shared.conflicts) == ((), ())
        (project / "replaced.new").write_text("new\n")
        (project / "replaced.new").replace(project / "replaced")
        (project / "new").write_text("new\n")
        (project / "made/deep/file").write_text("host\n")
        (project / "made/deep/other").write_text("host\n")
        (project / "gone/y").write_text("host\n")
        (project / "kept").unlink()
        sandbox.share()
        seen = sandbox.exec(["sh", "-c", "cat replaced new made/deep/file made/deep/other gone/x gone/y; ls kept"])
        assert seen.stdout == "new\nnew\nhost\nhost\nx\nhost\n"
        assert seen.exit_code != 0
        server.write(b"\n")
        assert b"".join(server.stdout) == b"done\n"
        server.wait()
        assert sandbox.share().written == ("log",)
        assert (project / "log").read_text() == "1\n2\n"
        left = sandbox.exec(["sh", "-c", "ls -A /.cloche-changes"]).stdout.split()
        assert left == [], "nothing of it is kept twice"
