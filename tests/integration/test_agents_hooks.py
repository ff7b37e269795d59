"""Real coding agents on the host, whose commands run in a sandbox by their own hooks; a scripted model on loopback."""

from __future__ import annotations

import http.server
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from cloche.coding_agents.host_hooks import HOOKS
from cloche.coding_agents.places import AgentPlace
from tests.harness import model_servers
from tests.harness.agents import programs
from tests.harness.internet.providers import VALUES
from tests.harness.internet.web import Request
from tests.harness.model_servers import SCRIPT, Step

pytestmark = [pytest.mark.soak, pytest.mark.xdist_group("scripted models")]
CLOCHE = (sys.executable, "-m", "cloche")
AGENT_S = 240
OPENCODE = {"models": {"m": {"name": "m", "tool_call": True, "limit": {"context": 100_000, "output": 8000}}}}
CODEX = """# the user's own
model = "gpt-5.1-codex"
model_provider = "loopback"
[model_providers.loopback]
name = "loopback"
base_url = "{url}/v1"
env_key = "OPENAI_API_KEY"
wire_api = "responses"
supports_websockets = false
"""
GEMINI = """{
  // the user's own
  "security": {"auth": {"selectedType": "gemini-api-key"}}
}
"""


@dataclass(frozen=True, slots=True)
class HostAgent:
    """Say how an agent is started for one prompt, with the key of its model's host; and which file its hook is in."""

    host: str
    words: tuple[str, ...]
    hook_file: str
    env: Callable[[str, str], Mapping[str, str]]
    files: Mapping[str, str]
    package: str = "agents"


def _opencode(url: str, key: str) -> Mapping[str, str]:
    provider = {"npm": "@ai-sdk/openai-compatible", "options": {"baseURL": f"{url}/v1", "apiKey": key}, **OPENCODE}
    config = {"provider": {"loopback": provider}, "model": "loopback/m", "autoupdate": False}
    return {"OPENCODE_CONFIG_CONTENT": json.dumps(config), "OPENCODE_DISABLE_MODELS_FETCH": "1"}


AGENTS = {
    "claude": HostAgent(
        "api.anthropic.com",
        ("claude", "--print", "do it", "--dangerously-skip-permissions"),
        ".claude/settings.json",
        lambda url, key: {
            "ANTHROPIC_BASE_URL": url, "ANTHROPIC_API_KEY": key, "IS_SANDBOX": "1", "DISABLE_AUTOUPDATER": "1",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        },
        {},
    ),
    "codex": HostAgent(
        "api.openai.com",
        ("codex", "exec", "--dangerously-bypass-approvals-and-sandbox", "do it"),
        ".codex/hooks.json",
        lambda _, key: {"OPENAI_API_KEY": key},
        {".codex/config.toml": CODEX},
    ),
    "gemini": HostAgent(
        "generativelanguage.googleapis.com",
        ("gemini", "--skip-trust", "-y", "-p", "do it"),
        ".gemini/settings.json",
        lambda url, key: {"GEMINI_API_KEY": key, "GOOGLE_GEMINI_BASE_URL": url},
        {".gemini/settings.json": GEMINI},
        package="more-agents",
    ),
    "opencode": HostAgent(
        "api.openai.com", ("opencode", "run", "do it"), ".config/opencode/plugins/cloche.js", _opencode, {},
        package="more-agents",
    ),
}  # fmt: skip


@contextmanager
def model(host: str) -> Iterator[str]:
    """Serve the scripted model of a provider on loopback; give its address."""

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length") or 0))
            headers = {**{name.lower(): value for name, value in self.headers.items()}, "host": host}
            answer = model_servers.answer(Request(self.command, self.path, "1.1", headers, body, "", 0))
            assert answer is not None
            assert isinstance(answer.body, bytes)
            self.send_response(int(answer.status.split()[0]))
            for name, value in {**answer.headers, "Content-Length": str(len(answer.body))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(answer.body)

        do_GET = do_HEAD = do_POST  # noqa: N815 - names of the library's

        def log_message(self, *_: object) -> None: ...

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class Place:
    """Hold a user's home with a project, an agent's configuration and its hook."""

    def __init__(self, name: str, home: Path, url: str) -> None:
        self.agent, self.home, self.project = AGENTS[name], home, home / "project"
        self.words = self.agent.words
        path = os.pathsep.join([programs(self.agent.package), os.environ["PATH"]])
        own = self.agent.env(url, VALUES[self.agent.host])
        self.env = {"PATH": path, "HOME": str(home), "LANG": "C.UTF-8", **own}
        self.project.mkdir()
        (home / "secret").write_text("of the user")
        (self.project / "code.py").write_text("print('one')\n")
        self.files = {file: text.replace("{url}", url) for file, text in self.agent.files.items()}
        for file, text in self.files.items():
            (home / file).parent.mkdir(parents=True, exist_ok=True)
            (home / file).write_text(text)
        self.run("git", "init", "-q")
        self.run(*CLOCHE, "agent", "hook", name, "--yes")

    def run(self, *words: str) -> str:
        """Run a command of the user's, which succeeds."""
        done = subprocess.run(
            words, env=self.env, cwd=self.project, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=AGENT_S, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{words}: {done.stdout[-2000:]} {done.stderr[-2000:]}"
        return done.stdout

    def follow(self, *steps: Step) -> list[str]:
        """Have the agent follow a script; return what its tools gave."""
        SCRIPT.set([*steps, model_servers.say("done")])
        self.run(*self.words)
        return model_servers.results(SCRIPT.asked())

    def end(self) -> None:
        """End its sandbox."""
        if (self.home / "state").exists():
            return  # there is none
        name = AgentPlace(agent="shell", folder=str(self.project)).sandbox
        words = [*CLOCHE, "sandbox", "kill", name, "--yes", "--force"]  # it may be that none was opened
        subprocess.run(words, env=self.env, cwd=self.project, capture_output=True, check=False)


@pytest.fixture(params=list(AGENTS))
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    """Give each agent, with its hook."""
    with model(AGENTS[request.param].host) as url:
        place = Place(request.param, tmp_path, url)
        yield place
        place.end()


def test_commands_run_inside_and_edits_outside(place: Place) -> None:
    """They see one folder; the user's home is not there; a dangerous change is held, and the model is told."""
    code = str(place.project / "code.py")
    quoted = """echo "it's" '$HOME' `echo "a b"` && exit 3"""
    first, _, _, fourth, fifth = place.follow(
        model_servers.run(
            "hostname; pwd; cat ~/secret; python3 code.py; echo '{}' > package.json; echo x > made; exit 3"
        ),
        model_servers.read(code),
        model_servers.edit(code, "print('one')", "print('two')"),
        model_servers.run("python3 code.py; sed -i s/two/three/ code.py"),
        model_servers.run(quoted),
    )
    assert "\ncloche\n" in f"\n{first}".replace("Output: ", "\n")
    assert "No such file" in first
    assert "of the user" not in first
    assert "one" in first
    assert "3" in first
    assert "held in the sandbox" in first
    assert "two" in fourth
    assert "it's $HOME a b" in fifth
    assert (place.project / "code.py").read_text() == "print('three')\n"
    assert (place.project / "made").exists()
    assert not (place.project / "package.json").exists()


@pytest.mark.parametrize("missing", ["Cloche", "the sandbox"])
def test_without_a_sandbox_nothing_runs(missing: str, place: Place) -> None:
    """The command of the agent does not run on the host."""
    state = place.home / ".local/state/cloche"
    if missing == "the sandbox" or place.agent.hook_file.startswith(".codex"):  # codex ignores a hook that was changed
        state.rename(place.home / "state")
        state.write_text("no folder")
    else:
        settings = place.home / place.agent.hook_file
        settings.write_text(settings.read_text().replace(sys.executable, "/gone/python3"))
    place.follow(model_servers.run(f"touch {place.project}/ran"))
    assert not (place.project / "ran").exists()


@pytest.mark.parametrize("place", ["claude", "codex"], indirect=True)
def test_a_project_that_switches_hooks_off(place: Place) -> None:
    """Its settings count less than the words by which the user starts the agent, as the command told."""
    off = {
        "claude": (".claude/settings.json", '{"disableAllHooks": true}'),
        "codex": (".codex/config.toml", "[features]\nhooks = false\n"),
    }
    file, text = off[place.agent.words[0]]
    (place.project / file).parent.mkdir(exist_ok=True)
    (place.project / file).write_text(text)
    program, *words = place.agent.words
    place.words = (program, *HOOKS[program].start.replace("'", "").split()[1:3], *words)
    if program == "codex":  # the subcommand comes first
        place.words = (program, words[0], "--enable", "hooks", *words[1:])
    (given,) = place.follow(model_servers.run("hostname"))
    assert "cloche" in given


@pytest.mark.parametrize("place", ["codex"], indirect=True)
def test_in_the_agents_own_sandbox_nothing_runs(place: Place) -> None:
    """It does not let a command reach Cloche; the model is told, and does not wait."""
    place.words = ("codex", "exec", "--sandbox", "workspace-write", "do it")
    place.env["TMPDIR"] = "/var/tmp"  # below the folder for temporary files codex puts no helper of its sandbox
    (given,) = place.follow(model_servers.run(f"touch {place.project}/ran"))
    assert "so it was not run" in given
    assert not (place.project / "ran").exists()


def test_removing_the_hook_leaves_the_users_own(place: Place) -> None:
    """Its files are as they were, and commands run on the host again."""
    name = next(name for name, agent in AGENTS.items() if agent is place.agent)
    place.run(*CLOCHE, "agent", "hook", name, "--remove", "--yes")
    for file, text in place.files.items():
        assert (place.home / file).read_text() == text
    assert (place.home / place.agent.hook_file).exists() is (place.agent.hook_file in place.agent.files)
    (given,) = place.follow(model_servers.run("hostname"))
    assert socket.gethostname() in given
