"""Terminals."""

from __future__ import annotations

from typing import Any

from e2b import CommandExitException, NotFoundException, PtySize

from .both import Both
from .rows import shows


async def _open(sdk: Both, sandbox: Any, **options: Any) -> tuple[Any, list[bytes]]:
    """Return a terminal and what it will have printed: at once in the asynchronous SDK, after `wait` in the other."""
    out: list[bytes] = []
    size = PtySize(rows=24, cols=80)
    if sdk.is_async:
        return await sandbox.pty.create(size, on_data=out.append, **options), out
    return sandbox.pty.create(size, **options), out


async def _wait(sdk: Both, handle: Any, out: list[bytes]) -> None:
    await sdk(handle.wait() if sdk.is_async else handle.wait(on_pty=out.append))


@shows("pty.create", "pty.send_stdin", "pty.resize")
async def terminal(sdk: Both) -> None:
    """A shell of the user on a terminal of that size, which changes; Ctrl-C is a signal, Ctrl-D the end."""
    sandbox = await sdk.shared()
    handle, out = await _open(sdk, sandbox, cwd="/tmp", envs={"MARK": "here"}, timeout=60)
    await sdk(sandbox.pty.send_stdin(handle.pid, b"tput cols; tty; echo $MARK-$(id -un)-$TERM-$(pwd)\n"))
    await sdk(sandbox.pty.send_stdin(handle.pid, b"sleep 500\n"))
    await sdk.until(lambda: _runs(sdk, sandbox, "sleep 500"))
    await sdk(sandbox.pty.send_stdin(handle.pid, b"\x03"))
    await sdk.until(lambda: _runs_not(sdk, sandbox, "sleep 500"))
    await sdk(sandbox.pty.resize(handle.pid, PtySize(rows=30, cols=123)))
    await sdk(sandbox.pty.send_stdin(handle.pid, b"stty size; exit 0\n"))
    await _wait(sdk, handle, out)
    text = b"".join(out).decode()
    for piece in ("80", "/dev/pts/", "here-user-xterm-256color-/tmp", "30 123"):
        assert piece in text, text


def _runs(sdk: Both, sandbox: Any, what: str) -> Any:
    async def ask() -> bool:
        return "1" in (await sdk(sandbox.commands.run(f"pgrep -fx '{what}' >/dev/null && echo 1 || echo 0"))).stdout

    if sdk.is_async:
        return ask()
    return "1" in sandbox.commands.run(f"pgrep -fx '{what}' >/dev/null && echo 1 || echo 0").stdout


def _runs_not(sdk: Both, sandbox: Any, what: str) -> Any:
    async def ask() -> bool:
        return not await sdk(_runs(sdk, sandbox, what))

    return ask() if sdk.is_async else not _runs(sdk, sandbox, what)


@shows("pty.connect", "pty.kill")
async def reconnect(sdk: Both) -> None:
    """A terminal that was left goes on, and is killed once."""
    sandbox = await sdk.shared()
    handle, _ = await _open(sdk, sandbox, timeout=0)
    await sdk(handle.disconnect())
    out: list[bytes] = []
    if sdk.is_async:
        again = await sandbox.pty.connect(handle.pid, on_data=out.append)
    else:
        again = sandbox.pty.connect(handle.pid)
    await sdk(sandbox.pty.send_stdin(handle.pid, b"echo still-$((40+2)); exit 4\n"))
    error = await sdk.raises(CommandExitException, lambda: _wait(sdk, again, out))
    assert error.exit_code == 4
    assert b"still-42" in b"".join(out)
    second, _ = await _open(sdk, sandbox, timeout=0)
    assert await sdk(sandbox.pty.kill(second.pid)) is True
    await sdk.raises(CommandExitException, lambda: second.wait())
    assert await sdk(sandbox.pty.kill(second.pid)) is False
    await sdk.raises(NotFoundException, lambda: sandbox.pty.send_stdin(999_999, b"x"))


@shows("pty.stream_input")
async def stream_input(sdk: Both) -> None:
    """Input in one stream."""
    sandbox = await sdk.shared()
    handle, out = await _open(sdk, sandbox, timeout=60)
    if sdk.is_async:
        async with sandbox.pty.stream_input(handle.pid) as stream:
            await stream.send(b"echo one-$((1+1))\n")
            await stream.send(b"exit 0\n")
    else:
        sandbox.pty.stream_input(handle.pid, [b"echo one-$((1+1))\n", b"exit 0\n"])
    await _wait(sdk, handle, out)
    assert b"one-2" in b"".join(out)
