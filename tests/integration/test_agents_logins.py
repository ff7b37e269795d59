"""Coding agents log in: in a sandbox by their own command, by the host's browser, once for all projects.

The token server rotates (harness/internet/logins.py); the model answers the access token of now alone.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cloche.coding_agents.places import AgentPlace
from tests.harness.agents import CLOCHE, Agent, Host, prompt
from tests.harness.internet.build import HOME, SYSTEM_PATH
from tests.harness.internet.logins import ACCESS, REFRESH
from tests.harness.world import NAMES, PUBLIC, World, open_world

pytestmark = pytest.mark.both_users
HOSTS = ("api.anthropic.com", "platform.claude.com", "claude.ai", "claude.com", "auth.openai.com", "chatgpt.com")
TABLE = {**NAMES, **{host: [[PUBLIC]] for host in HOSTS}}
# Does what a user's browser does after a click: it goes where the link wants the answer.
BROWSER = """#!/usr/bin/env python3
import sys, urllib.parse, urllib.request
asked = dict(urllib.parse.parse_qsl(urllib.parse.urlsplit(sys.argv[1]).query))
answer = urllib.parse.urlencode({"code": "the-code", "state": asked["state"]})
urllib.request.urlopen(asked["redirect_uri"] + "?" + answer)
"""


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """Open a world with token servers."""
    with open_world(TABLE) as world:
        yield world


def user(world: World, folder: Path, agent: Agent) -> Host:
    """Return a user with a browser."""
    host = Host(world, agent)
    browser = folder / "browser"
    browser.write_text(BROWSER)
    browser.chmod(0o755)
    host.env["BROWSER"] = str(browser)
    return host


def logged_in(world: World, name: str, folder: Path) -> Host:
    """Log an agent in by the command, and return its user."""
    host = user(world, folder, Agent(name, {}, "", ""))
    told = command(host, folder, "agent", "login", name)
    assert f"logged in: {name}" in told.stderr, told
    return host


def command(host: Host, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a command of Cloche's in a folder."""
    return subprocess.run(
        host.words(folder, *CLOCHE, *words), stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120,
        check=False,
    )  # fmt: skip


def on_host(host: Host, folder: Path, program: str) -> Any:
    """Return the JSON that a program of Python's prints on the host."""
    return json.loads(host.run(folder, "python3", "-c", f"import glob, json, os, urllib.request\n{program}"))


def state(host: Host, folder: Path, server: str, **changes: object) -> Any:
    """Return what a token server knows, once it is changed."""
    data = f", {json.dumps(changes)!r}.encode()" if changes else ""
    return on_host(host, folder, f"print(urllib.request.urlopen('https://{server}/state'{data}).read().decode())")


# How many files the user has below hidden folders, with those of all sandboxes, and how many of them have a token.
FILES = f"""
paths = glob.glob("{HOME}/.*/**/*", recursive=True, include_hidden=True)
texts = [open(path, "rb").read() for path in paths if os.path.isfile(path)]
tokens = {ACCESS.encode()!r}, {REFRESH.encode()!r}
print(json.dumps([len(texts), *(sum(token in text for text in texts) for token in tokens)]))
"""


# An agent: it logs in by the browser, or uses the login in its file, and says where it finds a token.
MINE = r"""#!/usr/bin/env python3
import http.server, json, os, subprocess, sys, threading, urllib.parse, urllib.request
FILE = os.path.expanduser("~/.mine.json")
def ask(url, body=None, **headers):
    data = json.dumps(body).encode() if body else None
    headers |= {"Content-Type": "application/json"} if body else {}
    return json.load(urllib.request.urlopen(urllib.request.Request(url, data, headers)))
class Callback(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.server.code = dict(urllib.parse.parse_qsl(self.path.partition("?")[2]))["code"]
        self.send_response(204)
        self.end_headers()
if sys.argv[1:] == ["login"]:
    server = http.server.HTTPServer(("127.0.0.1", 0), Callback)
    target = urllib.parse.quote(f"http://localhost:{server.server_port}/callback")
    for origin in ("https://claude.ai.evil.example", "https://claude.ai"):
        subprocess.run([os.environ["BROWSER"], f"{origin}/oauth?state=s&redirect_uri={target}"], check=True)
    server.handle_request()
    body = {"grant_type": "authorization_code", "code": server.code}
    tokens = ask("https://platform.claude.com/v1/oauth/token", body)
else:
    tokens = json.load(open(FILE))
account = ask("https://api.anthropic.com/api/me", Authorization="Bearer " + tokens["access_token"])
print(account["account"]["email"], "AccessOfTheLogin" in json.dumps(tokens) + str(os.environ))
"""
ROW = {
    "program": "mine", "for_prompt": ["{prompt}"],
    "login": {
        "provider": "anthropic", "file": ".mine.json", "command": ["login"], "browser": ["https://claude.ai"],
        "template": '{"access_token": "{access_token}"}',
    },
}  # fmt: skip


def test_an_agent_logs_in_by_the_browser_once(world: World, tmp_path: Path) -> None:
    """Its link opens on the host, unless it leads elsewhere; the answer comes in; a project then asks for nothing."""
    agent = Agent("mine", {}, "", "", package="")
    host, program, folder = user(world, tmp_path, agent), tmp_path / "tools" / "bin" / "mine", tmp_path / "project"
    host.run(tmp_path, "git", "init", "--quiet", str(folder))
    program.parent.mkdir(parents=True)
    program.write_text(MINE)
    program.chmod(0o755)
    host.env["PATH"] = f"{program.parent}:{SYSTEM_PATH}"
    config = tmp_path / "config" / "cloche.json"
    config.parent.mkdir()
    config.write_text(json.dumps({"agents": {"mine": ROW}}))
    host.env["CLOCHE_CONFIG"] = str(config)
    try:
        told = command(host, tmp_path, "agent", "login", "mine")
        assert told.stdout == "me@good.example False\n", told
        assert "claude.ai.evil.example is no place where this agent logs in" in told.stderr
        assert "logged in: mine" in told.stderr
        assert [row for row in json.loads(command(host, folder, "agent", "list", "--json").stdout) if row["login"]]
        told = command(host, folder, "agent", "mine", "--print", "hello")
        assert told.stdout == "me@good.example False\n", told
        assert "forgotten" in command(host, tmp_path, "agent", "logout", "mine").stdout
    finally:
        host.end(folder)


@pytest.mark.soak
def test_claude_logs_in_once_for_all_projects(world: World, tmp_path: Path) -> None:
    """Two projects ask for nothing; a token that the server ended is refreshed; no file of the user's has one."""
    host = logged_in(world, "claude", tmp_path)
    try:
        for project in ("one", "two"):
            folder = tmp_path / project
            host.run(tmp_path, "git", "init", "--quiet", str(folder))
            told = command(host, folder, "agent", "claude", "--print", "hello")
            assert "Streamed in pieces" in told.stdout, told
            state(host, folder, "platform.claude.com", has_ended=True)
        host.run(tmp_path, "git", "init", "--quiet", str(tmp_path / "three"))
        with host.window(tmp_path / "three", tmp_path / "tmux") as screen:
            screen.see("bypass permissions on")
            prompt(screen, "hello")
            screen.see("Streamed in pieces")
            prompt(screen, "/exit")
        now = state(host, tmp_path, "platform.claude.com")
        assert not now["is_revoked"]
        assert now["refreshes"] >= 2
        count, *counts = on_host(host, tmp_path, FILES)
        assert count > 10
        assert counts == [0, 0]
        assert "forgotten" in command(host, tmp_path, "agent", "logout", "claude").stdout
    finally:
        for project in ("one", "two"):
            host.end(tmp_path / project)


@pytest.mark.soak
def test_codex_logs_in_and_out(world: World, tmp_path: Path) -> None:
    """By a fixed port of the loopback, with web tokens; its logout inside ends the login for all sandboxes."""
    host = logged_in(world, "codex", tmp_path)
    folder = tmp_path / "project"
    host.run(tmp_path, "git", "init", "--quiet", str(folder))
    try:
        command(host, folder, "agent", "codex", "--print", "hello")  # the server is no model: it ends with an error
        name = AgentPlace(agent="codex", folder=str(folder)).sandbox
        codex = shutil.which("codex", path=host.env["PATH"])
        words = ("exec", name, "--", os.path.realpath(str(codex)))
        status = command(host, folder, *words, "login", "status")
        assert "Logged in using ChatGPT" in status.stderr, status
        command(host, folder, *words, "logout")
        assert state(host, folder, "auth.openai.com")["is_revoked"]
        assert "there is no login" in command(host, folder, "agent", "logout", "codex").stderr
    finally:
        host.end(folder)
