"""What the command line says, read and checked before anything is served."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from cloche.agent.approval import deny
from cloche.agent.queue import ApprovalQueue
from cloche.core.errors import BackendUnavailable, InvalidRequest
from cloche.mcp.command import MOST_TOKEN_BYTES, TOKEN_VARIABLE, McpCommand, approver_of, read_tokens, serve
from cloche.mcp.server import StaticTokens
from cloche.serving.http import is_loopback

TOKEN = "sixteen-characters-at-least"


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ({"over_http": True, "host": "0.0.0.0"}, "--token-file"),
        ({"over_http": True, "path": "mcp"}, "begin with a slash"),
        ({"over_http": True, "token_file": "/dev/null"}, "there is no token in it"),
        ({"over_http": True, "token_file": "/nowhere/tokens"}, "cannot be read"),
        ({"over_http": True, "port": 65_536}, "no such port"),
        ({"over_http": True, "path": "/healthz"}, "cannot be the endpoint"),
        ({"over_http": True, "path": "/{x}"}, "cannot be the endpoint"),
        ({"over_http": True, "host": "a..b"}, "--host a..b"),
        ({"over_http": True, "allowed_origins": ("*",)}, "no wildcard"),
        ({"over_http": True, "allowed_origins": ("https://app.example/",)}, "no path"),
        ({"over_http": True, "allowed_hosts": ("http://proxy",)}, "write a name alone"),
        ({"token_file": "tokens"}, "--token-file is for --http"),
        ({"allowed_hosts": ("here",)}, "--allow-host is for --http"),
        ({"port": 9000}, "--port is for --http"),
        ({"approve": "critical"}, "use one of client, deny, high"),
        ({"approve": "high", "approvals": "queue.db"}, "exclude each other"),
        ({"tools": ("run_code",), "options": {"tier": 2}}, "tier 2 has no tool 'run_code'"),
        ({"tools": ("run",)}, "there is no tool 'run'"),
        ({"roots": {"/etc": "/etc"}}, "/etc"),
        ({"patience_s": 0}, "patience_s"),
        ({"options": {"memory": "lots"}}, "memory"),
    ],
)
def test_a_wrong_command_line_is_told(command: Mapping[str, Any], words: str) -> None:
    """What does not fit is refused before anything is served, in words that name it."""
    with pytest.raises(InvalidRequest) as caught:
        serve(McpCommand(**command))
    assert words in str(caught.value)


def test_a_port_that_is_taken_is_told() -> None:
    """Who cannot listen says where, why and what to do."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(BackendUnavailable, match=rf"127\.0\.0\.1 port {port}: .*--port"):
            serve(McpCommand(over_http=True, port=port))


def test_who_approves() -> None:
    """By default the client's user does; the operator may name a rule or a queue."""
    assert approver_of(McpCommand()) is None
    assert approver_of(McpCommand(approve="deny")) is deny


def test_a_queue_approves(tmp_path: Path) -> None:
    """A file names a queue that another process decides by."""
    assert isinstance(approver_of(McpCommand(approvals=str(tmp_path / "queue.db"))), ApprovalQueue)


def test_tokens_are_read_from_a_file_of_their_owner(tmp_path: Path) -> None:
    """One a line, without comments; a file that others may read is refused."""
    path = tmp_path / "tokens"
    path.touch(mode=0o600)
    path.write_text(f"# of the laptop\n{TOKEN}\n\n {TOKEN}-2 \n")
    assert read_tokens(str(path)) == (TOKEN, f"{TOKEN}-2")
    path.chmod(0o644)
    with pytest.raises(InvalidRequest, match="chmod 600"):
        read_tokens(str(path))


def test_a_token_of_the_environment_goes_no_further(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the server starts does not inherit it."""
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    assert read_tokens(None) == (TOKEN,)
    assert TOKEN_VARIABLE not in os.environ


def test_an_empty_token_of_the_environment_is_no_open_door(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever sets the variable wants a lock: the server does not start without one."""
    monkeypatch.setenv(TOKEN_VARIABLE, "")
    with pytest.raises(InvalidRequest, match=f"{TOKEN_VARIABLE} is set and empty"):
        read_tokens(None)


def test_a_token_that_would_be_cut_is_refused(tmp_path: Path) -> None:
    """The beginning of a token is none."""
    path = tmp_path / "tokens"
    path.touch(mode=0o600)
    path.write_text("x" * (MOST_TOKEN_BYTES + 1))
    with pytest.raises(InvalidRequest, match="is it the right file"):
        read_tokens(str(path))


def test_the_log_has_nothing_that_a_terminal_obeys() -> None:
    """What clients send is in some messages and in stack traces: it is shown as escapes."""
    script = (
        "import logging; from cloche.serving.process import log_plainly; log_plainly()\n"
        "try: raise ValueError('\\x1b]0;trace\\x07')\n"
        "except ValueError: logging.getLogger('x').exception('Invalid Host: \\x9b2J')"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert "Invalid Host: \\x9b2J" in done.stderr
    assert "\\x1b]0;trace\\x07" in done.stderr
    assert not {"\x1b", "\x9b", "\x07"} & set(done.stderr)


@pytest.mark.parametrize("token", ["", "short", "with blanks in the middle of it", "nicht-ascii-genug-für-das"])
def test_a_weak_token_is_refused(token: str) -> None:
    """The error says how to make one."""
    with pytest.raises(InvalidRequest, match="token_urlsafe"):
        StaticTokens([TOKEN, token])


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", True), ("::1", True), ("localhost", True), ("127.8.9.10", True), ("0.0.0.0", False), ("::", False),
     ("192.0.2.1", False), ("nowhere.invalid", False)],
)  # fmt: skip
def test_what_only_this_machine_reaches(host: str, expected: bool) -> None:
    """A wildcard is no loopback, and neither is a name that nobody knows."""
    assert is_loopback(host) is expected


WITHOUT = "import sys; sys.modules['mcp'] = None; sys.argv = ['cloche', 'mcp']; from cloche.cli import main; main()"


def test_a_missing_extra_is_named(tmp_path: Path) -> None:
    """Without the package the verb says what to install, on standard error alone."""
    env = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT], env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60,
        check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (125, "")
    assert 'pip install cloche[mcp]"' in done.stderr


def test_the_factories_are_loaded_when_used() -> None:
    """The package itself needs no extra; an unknown name is an attribute error."""
    import cloche.mcp

    assert {"create_app", "create_server"} == set(cloche.mcp.__all__)
    assert callable(cloche.mcp.create_server)
    with pytest.raises(AttributeError, match="create_sever"):
        _ = cloche.mcp.create_sever
