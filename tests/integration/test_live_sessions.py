"""Sessions in a live sandbox, through the public face: what they share, and those that have their own."""

from __future__ import annotations

import asyncio

import pytest

import cloche
from cloche.core.errors import InvalidRequest

pytestmark = [pytest.mark.user_soak, pytest.mark.usefixtures("settings_of_nobody")]

# Left behind by a command, and larger after a while than the sandbox may be.
HOARDS = "x = []\nfor _ in range(400): x.append(b'x' * 1_000_000)\nimport time; time.sleep(1000)"
WAITS = """
import os, time
def lives(pid):
    try:
        return open(f'/proc/{pid}/stat').read().rpartition(')')[2].split()[0] != 'Z'
    except OSError:
        return False
while lives(int(open('/tmp/pid').read())): time.sleep(0.01)
"""


def test_a_session_with_checkpoints_keeps_its_sandbox_until_it_is_closed() -> None:
    """It begins with a copy of the files, which a restart leaves as they are; a fork of it outlives it."""
    with cloche.Sandbox(live=True, files={"given": "given"}) as sandbox:
        session = sandbox.session(checkpoints=True)
        assert session.run("x = open('given').read(); open('given', 'w').write('own')").ok
        session.checkpoint("a")
        session.restart()
        assert session.read_file("given") == b"own"
        assert session.sandbox.list_files() == ("given",)
        assert sandbox.read_file("given") == b"given"
        session.run("y = 1")
        (fork,) = session.fork()
        session.close()
        with pytest.raises(InvalidRequest, match="closed"):
            session.read_file("given")
        assert fork.run("[y, open('given').read()]").value == [1, "own"]
        assert sandbox.session().run("open('given').read()").value == "given"


def test_many_sessions_and_commands_share_one_sandbox() -> None:
    """All that they print is their own, whatever the others do; a command finds what a session left in /tmp."""

    async def attempt() -> None:
        async with cloche.AsyncSandbox(live=True, pids=200) as sandbox:
            languages = ["python", "bash"] * 6
            sessions = await asyncio.gather(*(sandbox.session(language) for language in languages))

            async def use(number: int) -> None:
                word = f"session {number}\n"
                code = {"python": f"print({word!r}, end='')", "bash": f"printf %s '{word}'"}[languages[number]]
                for _ in range(10):
                    result = await sessions[number].run(code)
                    assert (result.stdout, result.stderr) == (word, "")

            await asyncio.gather(*(use(number) for number in range(len(sessions))))
            await sessions[1].run("echo left > /tmp/left")
            assert (await sandbox.exec(["cat", "/tmp/left"])).stdout == "left\n"
            await sessions[0].close()
            assert [session.is_alive for session in sessions] == [False] + [True] * 11

    asyncio.run(attempt())


def test_what_a_command_left_behind_is_ended_for_memory_and_a_session_lives() -> None:
    """The largest tree is, also one whose first process has ended, so that nobody is named for it."""
    with cloche.Sandbox(live=True, memory="128MiB") as sandbox:
        session = sandbox.session()
        session.run("x = 1")
        sandbox.write_file("/tmp/hoards", HOARDS)
        line = "setsid sh -c 'python3 /tmp/hoards; echo $? > /tmp/code' >/dev/null 2>&1 & echo $! > /tmp/pid"
        assert sandbox.exec(shell=line).ok
        result = session.run(f"{WAITS}\n[x, os.path.exists('/tmp/code')]", timeout=60)
        assert (str(result.status), result.value) == ("ok", [1, False])
