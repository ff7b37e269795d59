"""`sudo` in sandboxes with several users: options, variables, streams, terminals, signals and exit codes."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

import cloche

pytestmark = [pytest.mark.root, pytest.mark.timeout(60), pytest.mark.usefixtures("settings_of_nobody")]


@pytest.fixture(scope="module")
def sandbox() -> Iterator[cloche.Sandbox]:
    """Open a sandbox with several users."""
    with cloche.Sandbox(users=True, account="user", timeout=60, env={"SHARED": "yes"}) as found:
        yield found


@pytest.mark.parametrize(
    ("line", "printed", "code"),
    [
        ("sudo id -un", "root\n", 0), ("sudo -n -u user id -un", "user\n", 0), ("sudo --user=root id -u", "0\n", 0),
        ("sudo -u '#1000' id -un", "user\n", 0), ("sudo -g users id -gn", "users\n", 0),
        ("echo x | sudo tee /root/f; sudo cat /root/f", "x\nx\n", 0), ("sudo sh -c 'exit 7'", "", 7),
        ("cd /tmp; sudo pwd; sudo -D /usr pwd", "/tmp\n/usr\n", 0), ("sudo -i pwd; sudo -s echo hi", "/root\nhi\n", 0),
        ("sudo -- sh -c 'echo $HOME $USER $SUDO_USER $SUDO_UID $SHARED'", "/root root user 1000\n", 0),
        ("sudo -E sh -c 'echo $HOME $SHARED'", "/home/user yes\n", 0), ("sudo -EH sh -c 'echo $HOME'", "/root\n", 0),
        ("sudo --preserve-env=SHARED printenv SHARED", "yes\n", 0), ("sudo SHARED=1 printenv SHARED", "1\n", 0),
        ("sudo -k; sudo -v; sudo -n true", "", 0), ("sudo sh -c 'kill -TERM $$'; echo $?", "143\n", 0),
        ("sudo sudo -u user sudo id -u", "0\n", 0), ("head -c 300000 /dev/zero | sudo wc -c", "300000\n", 0),
        ("sudo which python3 useradd", "/.venv/bin/python3\n/usr/sbin/useradd\n", 0),
    ],
)  # fmt: skip
def test_a_command_runs_as_another_user(sandbox: cloche.Sandbox, line: str, printed: str, code: int) -> None:
    """As sudo(8) says."""
    result = sandbox.exec(shell=line)
    assert (result.stdout, result.exit_code) == (printed, code), result.stderr


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("sudo", "usage: sudo"), ("sudo -u nobody-here id", "unknown user"), ("sudo nonesuch", "command not found"),
        ("sudo -Z id", "not recognized"), ("sudo -D /nowhere id", "unable to change directory"),
        ("sudo useradd -m joe; sudo -u joe sudo id", "not in the sudoers file"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_told(sandbox: cloche.Sandbox, line: str, message: str) -> None:
    """With exit code 1."""
    result = sandbox.exec(shell=line)
    assert result.exit_code == 1
    assert message in result.stderr


def test_signals_reach_the_command_and_its_own_end_is_the_clients(sandbox: cloche.Sandbox) -> None:
    """One that only sudo's process gets; and who is killed leaves no command behind."""
    line = "sudo sh -c 'trap \"echo got; exit 3\" USR1; echo up; while :; do sleep 0.01; done'"
    with sandbox.start(["sh", "-c", f"exec {line}"]) as process:
        assert process.stdout.read() == b"up\n"
        process.signal("USR1")
        assert process.stdout.read_all(100) == b"got\n"
        assert process.wait().exit_code == 3
    with sandbox.start(["sudo", "sleep", "1234"]) as process:
        while not sandbox.exec(["pgrep", "-xf", "sleep 1234"]).stdout:
            time.sleep(0.01)
        process.signal("KILL")
        process.wait()
        while sandbox.exec(["pgrep", "-xf", "sleep 1234"]).stdout:
            time.sleep(0.01)


def test_a_command_on_a_terminal_has_one_of_its_own(sandbox: cloche.Sandbox) -> None:
    """With the size of the caller's, its keys, and Ctrl-C for the command alone."""
    with sandbox.terminal(["bash", "--norc"], rows=30, columns=100, env={"PS1": "ready> "}) as terminal:
        terminal.write("sudo bash --norc -c 'stty size; read x; echo got $x; exec sleep 1000'\n")
        steps = [
            (b"30 100", "hello\n"),
            (b"got hello", "\x03"),
            (b"ready> ", "echo code $?\n"),
            (b"code 130", "exit\n"),
        ]
        for wanted, keys in steps:
            seen = b""
            while wanted not in seen:
                seen += terminal.stdout.read()
            terminal.write(keys)
        assert terminal.wait().exit_code == 0


def test_a_sandbox_with_one_user_has_none() -> None:
    """Nothing listens there."""
    reach = "import socket; socket.socket(socket.AF_UNIX).connect('\\0cloche-sudo')"
    with cloche.Sandbox(live=True) as sandbox:
        assert "ConnectionRefusedError" in sandbox.exec(["python3", "-c", reach]).stderr
        assert sandbox.exec(["test", "-e", "/etc/cloche/bin/sudo"]).exit_code == 1
