"""Commands: in the foreground and background, their input, output, ends and signals."""

from __future__ import annotations

import time
from typing import Any

from e2b import (
    CommandExitException,
    InvalidArgumentException,
    NotFoundException,
    SandboxException,
    TimeoutException,
)

from .both import Both
from .rows import shows


@shows("commands.run")
async def foreground(sdk: Both) -> None:
    """Both outputs, the exit code, variables, the folder, the user; text is never cut inside a character."""
    sandbox = await sdk.shared()
    result = await sdk(sandbox.commands.run("echo out; echo err >&2"))
    assert (result.stdout, result.stderr, result.exit_code, result.error) == ("out\n", "err\n", 0, None)
    error = await sdk.raises(CommandExitException, lambda: sandbox.commands.run("echo o; echo e >&2; exit 7"))
    assert (error.exit_code, error.stdout, error.stderr) == (7, "o\n", "e\n")
    result = await sdk(sandbox.commands.run('echo "$A $HOME $(pwd) $(id -un)"', envs={"A": "x y"}, cwd="/tmp"))
    assert result.stdout == "x y /home/user /tmp user\n"
    assert (await sdk(sandbox.commands.run("pwd"))).stdout == "/home/user\n"
    assert (await sdk(sandbox.commands.run("id -un; echo $HOME", user="root"))).stdout == "root\n/root\n"
    text = "€ü😀" * 30_000
    out: list[str] = []
    result = await sdk(sandbox.commands.run("python3 -c \"print('€ü😀' * 30000, end='')\"", on_stdout=out.append))
    assert result.stdout == text == "".join(out)
    assert (await sdk(sandbox.commands.run("head -c 3000000 /dev/zero | tr '\\0' a | wc -c"))).stdout == "3000000\n"
    error = await sdk.raises(CommandExitException, lambda: sandbox.commands.run("no-such-program"))
    assert error.exit_code == 127
    error = await sdk.raises(SandboxException, lambda: sandbox.commands.run("true", cwd="/no/such/folder"))
    assert "/no/such/folder" in str(error)


@shows("commands.run", is_long=True)
async def late(sdk: Both) -> None:
    """A command that is late ends with the time-out, and does not live on."""
    sandbox = await sdk.shared()
    begin = time.monotonic()
    await sdk.raises(TimeoutException, lambda: sandbox.commands.run("sleep 765", timeout=1))
    assert time.monotonic() - begin < 20
    await sdk.until(lambda: _has_no(sdk, sandbox, "sleep 765"))


def _has_no(sdk: Both, sandbox: Any, what: str) -> Any:
    async def ask() -> bool:
        return not any(what in " ".join(process.args) for process in await sdk(sandbox.commands.list()))

    if sdk.is_async:
        return ask()
    return not any(what in " ".join(process.args) for process in sandbox.commands.list())


@shows(
    "commands.run", "commands.list", "commands.kill", "CommandHandle.wait", "CommandHandle.kill",
    "CommandHandle.disconnect", "commands.connect",
)  # fmt: skip
async def background(sdk: Both) -> None:
    """A command in the background is listed, can be left and found again, and is killed once."""
    sandbox = await sdk.shared()
    handle = await sdk(sandbox.commands.run("echo begun; sleep 777", background=True, envs={"MARK": "1"}))
    (process,) = [row for row in await sdk(sandbox.commands.list()) if row.pid == handle.pid]
    assert (process.cmd, process.args[-1]) == ("/bin/bash", "echo begun; sleep 777")
    assert process.envs["MARK"] == "1"
    await sdk(handle.disconnect())
    assert handle.pid in [row.pid for row in await sdk(sandbox.commands.list())]
    again = await sdk(sandbox.commands.connect(handle.pid))
    assert again.pid == handle.pid
    assert await sdk(sandbox.commands.kill(handle.pid)) is True
    error = await sdk.raises(CommandExitException, lambda: again.wait())
    assert (error.exit_code, "killed" in str(error.error)) == (-1, True)
    assert await sdk(sandbox.commands.kill(handle.pid)) is False
    second = await sdk(sandbox.commands.run("sleep 778", background=True))
    assert await sdk(second.kill()) is True
    await sdk.raises(CommandExitException, lambda: second.wait())
    assert await sdk(second.kill()) is False
    await sdk.raises(NotFoundException, lambda: sandbox.commands.connect(999_999))
    third = await sdk(sandbox.commands.run("echo one; echo two >&2; exit 3", background=True))
    error = await sdk.raises(CommandExitException, lambda: third.wait())
    assert (error.exit_code, error.stdout, error.stderr) == (3, "one\n", "two\n")


@shows(
    "commands.send_stdin", "commands.close_stdin", "CommandHandle.send_stdin", "CommandHandle.close_stdin"
)  # fmt: skip
async def stdin(sdk: Both) -> None:
    """What is sent arrives in order, also empty and long; the end of the input is one."""
    sandbox = await sdk.shared()
    handle = await sdk(sandbox.commands.run("cat", background=True, stdin=True))
    await sdk(sandbox.commands.send_stdin(handle.pid, "héllo "))
    await sdk(sandbox.commands.send_stdin(handle.pid, ""))
    await sdk(handle.send_stdin("x" * 100_000))
    await sdk(sandbox.commands.close_stdin(handle.pid))
    assert (await sdk(handle.wait())).stdout == "héllo " + "x" * 100_000
    second = await sdk(sandbox.commands.run("wc -c", background=True, stdin=True))
    await sdk(second.send_stdin("1234"))
    await sdk(second.close_stdin())
    assert (await sdk(second.wait())).stdout == "4\n"
    await sdk.raises(NotFoundException, lambda: sandbox.commands.send_stdin(999_999, "x"))
    assert (await sdk(sandbox.commands.run("cat", timeout=20))).stdout == ""  # without stdin it is empty, not open


@shows("commands.stream_input", "CommandInputHandle.send", "CommandInputHandle.close")
async def stream_input(sdk: Both) -> None:
    """Input in one stream."""
    sandbox = await sdk.shared()
    handle = await sdk(sandbox.commands.run("head -n 2", background=True, stdin=True))
    if sdk.is_async:
        async with sandbox.commands.stream_input(handle.pid) as stream:
            await stream.send("one\n")
            await stream.send(b"two\n")
            await stream.close()
    else:
        sandbox.commands.stream_input(handle.pid, ["one\n", b"two\n"])
    assert (await sdk(handle.wait())).stdout == "one\ntwo\n"
    if not sdk.is_async:
        await sdk.raises(InvalidArgumentException, lambda: sandbox.commands.stream_input(1, "text"))


@shows("commands.connect")
async def two_readers(sdk: Both) -> None:
    """Two readers of one command each get what it prints from then on, and its end."""
    sandbox = await sdk.shared()
    handle = await sdk(sandbox.commands.run("read line; echo got $line; exit 5", background=True, stdin=True))
    second = await sdk(sandbox.commands.connect(handle.pid))
    await sdk(sandbox.commands.send_stdin(handle.pid, "it\n"))
    for reader in (handle, second):
        error = await sdk.raises(CommandExitException, lambda reader=reader: reader.wait())
        assert (error.exit_code, error.stdout) == (5, "got it\n")


@shows("commands.run")
async def killed_sandbox(sdk: Both) -> None:
    """The end of the sandbox during a command is told as that."""
    sandbox = await sdk.create(timeout=100)
    handle = await sdk(sandbox.commands.run("sleep 100", background=True))
    await sdk(sandbox.kill())
    error = await sdk.raises(SandboxException, lambda: handle.wait())
    assert "sandbox was killed or reached its end of life" in str(error), error
