"""Whoever runs the commands of secrets again, when the egress process asks; their output is read by nobody else.

An output waits in its pipe, and the end of it is handed over when the command has ended well. For a sandbox that is
kept this is a process of its own, which ends with the egress process; else a thread of the caller.
"""

from __future__ import annotations

import os
import select
import shlex
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping

from cloche.jail import messages
from cloche.jail.setup.launch import RESET_SIGNALS

COMMAND_S = 60.0
BOOT = "import sys; sys.path.append({path!r}); from cloche.egress.commands import main; main(0)"
_PATH = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_processes: list[subprocess.Popen[bytes]] = []  # children of this process, to be taken note of when they end


class NoOutput(Exception):
    """Report a command that was not started, or has not ended well, with a sentence."""


def start(command: str, env: Mapping[str, str] | None = None) -> tuple[subprocess.Popen[bytes], int]:
    """Start a command, without a shell, and return it with the end of a pipe that has its output. Raises NoOutput."""
    output, theirs = os.pipe2(os.O_CLOEXEC)
    try:
        words = shlex.split(command)
        process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=theirs, stderr=subprocess.DEVNULL, env=env)
    except (OSError, ValueError, IndexError) as error:
        os.close(output)
        raise NoOutput(f"cannot be started: {error}") from None
    finally:
        os.close(theirs)
    return process, output


def await_end(process: subprocess.Popen[bytes]) -> None:
    """Wait for the end of a command, and end it where it takes too long. Raises NoOutput."""
    try:
        code = process.wait(COMMAND_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        raise NoOutput(f"has not ended within {COMMAND_S:.0f} s") from None
    if code:
        raise NoOutput(f"ended with exit code {code}; run it to see why")


def serve(link: int, commands: Mapping[str, str]) -> None:
    """Run one command after the other as they are asked for by name, until the other end of the link is closed."""
    requests = select.poll()
    requests.register(link, select.POLLIN)
    try:
        while requests.poll() and (message := messages.receive(link))[0]:  # which would hold the GIL while it waits
            _answer(link, message[1]["name"], commands)
    except OSError:
        pass  # the egress process is gone
    finally:
        os.close(link)


def _answer(link: int, name: str, commands: Mapping[str, str]) -> None:
    output = -1
    try:
        process, output = start(commands[name])
        await_end(process)
        messages.send(link, "value", {"name": name, "why": ""}, [output])
    except NoOutput as error:
        messages.send(link, "value", {"name": name, "why": str(error)})
    finally:
        if output >= 0:
            os.close(output)


def serve_in_thread(commands: Mapping[str, str]) -> int:
    """Run them in a thread of this process; return the link for the egress process."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    threading.Thread(target=serve, args=(ours.detach(), commands), name="cloche-secrets", daemon=True).start()
    return theirs.detach()


def serve_in_process(commands: Mapping[str, str], env: Mapping[str, str]) -> int:
    """Run them with this environment in a process that outlives this one; return the link for the egress process."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours:
        messages.send(theirs.fileno(), "commands", {"commands": dict(commands)})
        _processes[:] = [process for process in _processes if process.poll() is None]
        _processes.append(
            subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", RESET_SIGNALS + BOOT.format(path=_PATH)], stdin=ours.fileno(),
                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=dict(env), start_new_session=True,
            )
        )  # fmt: skip
    return theirs.detach()


def main(link: int) -> None:
    """Serve in a process of its own, whose first message has the commands."""
    _, settings, _ = messages.receive(link)
    serve(link, settings["commands"])
