"""`cloche agent shell`: run a command of an agent on the host in the project's sandbox."""

from __future__ import annotations

import os
import signal
import stat
from collections.abc import Mapping, Sequence

from ._agents import agent
from .options import option, sandbox_options
from .output import exit_code_of, say


@agent.command("shell")
@option("-c", "command", metavar="COMMAND", required=True, help="The command, for bash.")
@option("--allow", metavar="HOST", multiple=True, help="A new sandbox may reach this host. Repeatable.")
@sandbox_options("secrets")
def _shell(command: str, allow: tuple[str, ...], options: Mapping[str, Sequence[str]]) -> int:
    """Run a command in the project's sandbox.

    An agent that runs on this host gets it by `cloche agent hook`. The command sees the project's current files, and
    its harmless changes are written to them when it has ended. Dangerous ones stay in the sandbox, with a sentence on
    standard error.
    """
    import asyncio

    _check_sockets()
    return asyncio.run(_until_signal(command, allow, options.get("secrets") or ()))


def _check_sockets() -> None:
    """Raise BackendUnavailable where a filter of system calls forbids what an event loop needs: it would only wait."""
    import socket

    from cloche.core.errors import BackendUnavailable

    try:
        first, second = socket.socketpair()
        with first, second:
            first.send(b"1")
    except PermissionError as error:
        raise BackendUnavailable(
            "agent shell: the agent's own sandbox keeps this command from reaching Cloche, so it was not run.",
            remedy="Switch it off: codex --sandbox danger-full-access.",
        ) from error


async def _until_signal(command: str, allow: Sequence[str], secrets: Sequence[str]) -> int:
    """Run the command; a signal ends it inside first."""
    import asyncio

    signals: list[int] = []
    running = asyncio.ensure_future(_run(command, allow, secrets))

    def end(number: int) -> None:
        signals.append(number)
        running.cancel()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            asyncio.get_running_loop().add_signal_handler(number, end, number)
    try:
        return await running
    except asyncio.CancelledError:
        if not signals:
            raise
        return 128 + signals[0]


async def _run(command: str, allow: Sequence[str], secrets: Sequence[str]) -> int:
    from cloche.coding_agents import host_shell

    from ._attached import run_in

    launch = host_shell.prepare(os.getcwd(), hosts=allow, secrets=secrets)
    async with (
        host_shell.opened_once(launch, say) as sandbox,
        host_shell.sharing(sandbox, launch.place) as sentences,
    ):
        result = await run_in(
            sandbox, ["bash", "-c", command], cwd=launch.cwd, env=launch.environment(), has_terminal=False,
            reads=_has_input(),
        )  # fmt: skip
    for sentence in sentences:
        say(sentence)
    return exit_code_of(result)


def _has_input() -> bool:
    """Return whether standard input may have anything: a pipe, a socket or a file."""
    mode = os.fstat(0).st_mode
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode) or stat.S_ISSOCK(mode)
