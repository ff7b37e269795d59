"""Sessions in containers: what is a container's own, on daemons of the tests' own. The rest is in conformance."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import cloche
from cloche.backends.docker.backend import DockerBackend
from cloche.sync import Sandbox, Session
from tests.harness.containers import Daemon, open_daemon
from tests.harness.escape.hostile import LINGERING, OPTIONS
from tests.harness.processes import children
from tests.integration import test_session_drivers as drivers
from tests.integration import test_sessions as jail

pytestmark = [pytest.mark.root, pytest.mark.usefixtures("settings_of_nobody")]

FOR_EVER = "print('up', flush=True)\nimport time\nwhile True: time.sleep(0.01)"


@pytest.fixture
def image(docker: Daemon) -> str:
    """Give an image with Python, Node.js and Bash."""
    return docker.image("cloche-test:sessions")


@pytest.fixture
def sandbox(image: str) -> Iterator[Sandbox]:
    """Open a sandbox whose sessions are in containers."""
    with Sandbox(live=False, backend="docker", image=image, level="jail") as opened:
        yield opened


@pytest.fixture
def session(sandbox: Sandbox) -> Session:
    """Return a session of Python."""
    return sandbox.session()


@pytest.fixture
def gvisor_sandbox(gvisor: Daemon) -> Iterator[Sandbox]:
    """The same on gVisor."""
    with Sandbox(live=False, backend="gvisor", image=gvisor.image("cloche-test:sessions")) as opened:
        yield opened


def check_interrupts(sandbox: Sandbox, language: str) -> None:
    """Show that each loop can be interrupted, and its state kept."""
    session = sandbox.session(language)
    session.run(drivers.SET_KEPT[language])
    for number, loop in enumerate(drivers.LOOPS[language]):
        watch = jail.Watch()
        wait = jail.in_a_thread(lambda loop=loop, watch=watch: session.run(loop, on_output=watch))
        assert watch.has_begun.wait(60)
        session.interrupt()
        result = wait()
        assert (result.status, result.meta["state"]) == ("signaled", "kept"), loop
        after = session.run(drivers.SHOW_KEPT[language])
        assert after.stdout.splitlines()[-1] == str(42 + number), loop


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("language", drivers.BOTH)
def test_whatever_a_cell_does_it_can_be_interrupted(sandbox: Sandbox, language: str) -> None:
    """The loops are those that the drivers are held to outside of any container."""
    check_interrupts(sandbox, language)


def check_expiry(sandbox: Sandbox) -> None:
    """Show the end of a session that nobody uses."""
    with sandbox.session(idle_timeout="4s") as session:
        session.run("open('f', 'w').write('kept')")
        deadline = time.monotonic() + 60
        while session.is_alive and time.monotonic() < deadline:
            time.sleep(0.05)
        with pytest.raises(cloche.InvalidRequest, match="has expired"):
            session.run("1")
        assert sandbox.read_file("f") == b"kept"
        session.restart()
        assert session.run("open('f').read()").value == "kept"


@pytest.mark.soak  # for its length
def test_an_unused_session_expires_and_leaves_the_files(sandbox: Sandbox) -> None:
    """It ends by itself, says why, and can be begun anew."""
    check_expiry(sandbox)


def test_two_sessions_share_files_and_nothing_else(docker: Daemon, sandbox: Sandbox) -> None:
    """Each is in a container of its own; the files outlive both, and files go in and out while a cell runs."""
    first, second = sandbox.session(), sandbox.session("bash", env={"NAME": "second"})
    first.run("x = 1; open('f', 'w').write('f')")
    assert second.run("echo $(cat f) $NAME; ps 2>/dev/null | grep -c python").stdout.startswith("f second\n")
    assert docker.has_containers(2)
    watch = jail.Watch()
    wait = jail.in_a_thread(lambda: first.run(FOR_EVER, on_output=watch))
    assert watch.has_begun.wait(60)
    sandbox.write_file("g", os.urandom(1 << 20))
    assert len(sandbox.read_file("g")) == 1 << 20
    first.interrupt()
    result = wait()
    assert (result.status, result.exit_code, result.meta["state"]) == ("signaled", 130, "kept")
    assert (watch.chunks[0], "KeyboardInterrupt" in result.stderr) == (("stdout", b"up\n"), True)
    assert result.meta["image"] == "cloche-test:sessions"
    first.close()
    assert second.run("wc -c < g").stdout.strip() == str(1 << 20)
    second.close()
    assert sandbox.run("print(open('f').read())").stdout == "f\n"
    assert sandbox.list_files()[:2] == ("f", "g")


@pytest.mark.soak  # for its length
def test_no_checkpoints_and_no_forks(session: Session) -> None:
    """That is refused, with who has them."""
    for call in (lambda: session.checkpoint("a"), lambda: session.rollback("a"), session.fork):
        with pytest.raises(cloche.BackendUnavailable, match=r"'docker' has no checkpoints and no forks.*local"):
            call()
    assert session.run("1").value == 1


@pytest.mark.soak  # for its length
def test_what_cannot_hold_a_session_says_so(docker: Daemon, sandbox: Sandbox) -> None:
    """A language without sessions, and an image without what a session needs: with what to do."""
    with (
        Sandbox(live=False, backend="docker", languages=["ruby"]) as other,
        pytest.raises(cloche.BackendUnavailable, match=r"no sessions of ruby.*use run"),
    ):
        other.session("ruby")
    with Sandbox(live=False, backend="docker", image=docker.image("cloche-test:small"), level="jail") as small:
        for language in ("python", "bash"):
            with pytest.raises(cloche.BackendUnavailable, match=r"no Python 3\.11.*Dockerfile\.sandbox"):
                small.session(language)
        assert small.run("echo 1", language="bash").stdout == "1\n"
    with pytest.raises(cloche.InvalidRequest, match="PYTHON"):
        sandbox.session(env={"PYTHONHASHSEED": "0"})


def test_a_container_that_is_killed_is_a_lost_state(docker: Daemon, session: Session) -> None:
    """In the middle of a cell and between two: told as any end of an interpreter is."""
    watch = jail.Watch()
    wait = jail.in_a_thread(lambda: session.run(FOR_EVER, on_output=watch))
    assert watch.has_begun.wait(60)
    docker.docker("kill", *docker.containers())
    result = wait()
    assert (result.status, result.exit_code, result.meta["state"]) == ("signaled", 137, "lost")
    assert "for an unknown reason" in result.meta["lost"]
    assert not session.is_alive
    with pytest.raises(cloche.InvalidRequest, match=r"has ended.*signaled.*restart"):
        session.run("1")
    with pytest.raises(cloche.StartFailed, match="workspace is gone"):
        session.restart()


def test_a_time_out_before_its_cell_began_is_for_that_cell(docker: Daemon, session: Session) -> None:
    """The first process signals an interpreter that has not heard of its cell yet: it ends that one, not the next."""
    (container,) = docker.containers()
    (interpreter,) = children(int(docker.docker("inspect", "--format", "{{.State.Pid}}", container)))
    jail.stop(interpreter)
    code = f"{jail.TRACED['python']}\n{jail.ENDLESS['python']}"
    wait = jail.in_a_thread(lambda: session.run(code, timeout=0.1))
    jail.await_signal(interpreter, signal.SIGINT)
    os.kill(interpreter, signal.SIGCONT)
    result = wait()
    assert (result.status, result.meta["state"], result.stdout) == ("timeout", "kept", "")
    assert session.run(jail.TRACED["python"]).stdout == "begun\n"


HOSTILE = {
    "closes its link": "import os; os.close(1023)",
    "leaves others behind": "import os\nif os.fork(): os._exit(3)\nimport time; time.sleep(600)",
    "says what nobody understands": "import os; os.write(1023, b'\\xff' * 100)",
    "says too much": "import os\ntext = b'{\"a\": \"' + b'x' * 90_000 + b'\"}'\n"
    "while True: os.write(1023, len(text).to_bytes(4, 'big') + text)",
    "stops its first process": "import os, signal\nos.kill(1, signal.SIGSTOP)\nos.kill(1, 9)\nos._exit(3)",
}


def hostile() -> Iterator[Any]:
    """Yield one of them for every test run, and the others as soak."""
    for number, (name, code) in enumerate(HOSTILE.items()):
        yield pytest.param(code, id=name.replace(" ", "_"), marks=[pytest.mark.soak] if number > 0 else [])


def check_hostile(session: Session, code: str, *, within_s: float = 60) -> None:
    """Show that a cell costs its session within some time, and nothing else."""
    session.run("open('f', 'w').write('f')")
    started = time.monotonic()
    result = session.run(code, timeout=10)
    assert (result.meta["state"], result.ok) == ("lost", False)
    assert time.monotonic() - started < within_s
    session.restart()
    assert session.run("open('f').read()").value == "f"


@pytest.mark.parametrize("code", list(hostile()))
def test_a_hostile_cell_harms_its_session_only(session: Session, code: str) -> None:
    """The session is lost, within seconds, and the sandbox goes on with its files."""
    check_hostile(session, code)


def check_no_descriptors(session: Session) -> None:
    """Show that nothing takes a descriptor that a guest sends."""
    assert session.run(f"{LINGERING}send_everywhere(30)", timeout=30).value == []


def test_the_first_process_takes_no_descriptors(session: Session, gvisor_sandbox: Sandbox) -> None:
    """What a guest can write to are pipes, so nobody closes for it a socket that lingers; nor does one linger."""
    check_no_descriptors(session)
    assert session.run(f"{OPTIONS}[lingers(lingering(30)[0]), settings]").value == [[0, 0], [[0, 0], True, True]]
    check_no_descriptors(gvisor_sandbox.session())


MOVES = """
import os, threading
def move():
    n = 0
    while True:
        n += 1
        try:
            os.makedirs(f'd{n % 5}/e', exist_ok=True)
            open(f'd{n % 5}/e/f', 'w').write('x' * (n % 5000))
            os.truncate(f'd{n % 5}/e/f', 0)
            os.rename(f'd{n % 5}', f'd{(n + 1) % 5}/g{n}')
            os.symlink('/etc', f'd{n % 5}')
            os.unlink(f'd{n % 5}')
        except OSError:
            pass
threading.Thread(target=move, daemon=True).start()
"""


def check_moving_files(session: Session, rounds: int) -> None:
    """Show that a workspace may change while it is looked at; links in it lead nowhere."""
    session.run(MOVES)
    for number in range(rounds):
        result = session.run(f"{number}", timeout=60)
        assert (result.value, result.meta["state"]) == (number, "kept")
        assert all(not record.path.endswith("passwd") for record in result.files)


@pytest.mark.soak
def test_files_that_change_while_they_are_looked_at(session: Session) -> None:
    """What a thread of the guest's does meanwhile costs nobody anything; links lead nowhere."""
    check_moving_files(session, 20)


ENDS_BY_ITSELF = """
import cloche, sys
sandbox = cloche.Sandbox(live=False, backend="docker", image=sys.argv[1], level="jail").__enter__()
sessions = [sandbox.session(language) for language in ("python", "bash")]
sessions[0].run("open('f', 'w')")
"""


@pytest.mark.soak
def test_a_caller_that_ends_without_closing_leaves_nothing(docker: Daemon, image: str) -> None:
    """No container, and after `gc` no volume."""
    subprocess.run([sys.executable, "-c", ENDS_BY_ITSELF, image], check=True)
    deadline = time.monotonic() + 30
    while docker.containers() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert docker.containers() == []
    subprocess.run([sys.executable, "-m", "cloche", "gc"], check=True, capture_output=True)
    assert docker.is_clean()


@pytest.mark.soak  # for its length
def test_a_cancelled_cell_is_interrupted(image: str, docker: Daemon) -> None:
    """Cancelling the call ends the cell and keeps the session; cancelling its start leaves nothing."""

    async def scenario() -> None:
        async with cloche.AsyncSandbox(live=False, backend="docker", image=image, level="jail") as sandbox:
            starting = asyncio.ensure_future(sandbox.session())
            await asyncio.sleep(0.1)
            starting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await starting
            session = await sandbox.session()
            begun = asyncio.Event()
            running = asyncio.ensure_future(session.run(FOR_EVER, on_output=lambda *_: begun.set()))
            await asyncio.wait_for(begun.wait(), 60)
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            assert (await session.run("1 + 1")).value == 2

    asyncio.run(scenario())
    assert docker.is_clean()


@pytest.mark.soak  # for its length
def test_a_daemon_that_goes_away_ends_the_session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within seconds, with the state said to be lost; and closing what is left does not hang."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    script = (
        "import cloche, json, sys\n"
        "with cloche.Sandbox(live=False, backend='docker', image=sys.argv[1], level='jail') as sandbox:\n"
        "    session = sandbox.session()\n"
        "    result = session.run('import time; print(1, flush=True); time.sleep(99)', "
        "on_output=lambda *_: print('up', flush=True))\n"
        "    print(json.dumps([result.status, result.meta['state'], session.is_alive]), flush=True)\n"
        "print('closed', flush=True)\n"
    )
    with open_daemon() as daemon:
        words = [sys.executable, "-c", script, daemon.image("cloche-test:python")]
        caller = subprocess.Popen(words, stdout=subprocess.PIPE, env={**os.environ, "DOCKER_HOST": daemon.url})
        assert caller.stdout is not None
        assert caller.stdout.readline() == b"up\n"
        started = time.monotonic()
        daemon.stop()
        assert json.loads(caller.stdout.readline()) == ["signaled", "lost", False]
        assert caller.stdout.readline() == b"closed\n"
        assert time.monotonic() - started < 60
        caller.stdout.close()
        caller.wait(60)


@pytest.mark.soak  # for its length
def test_the_command_line_has_sessions_in_containers(docker: Daemon, image: str) -> None:
    """Cells that are piped in, with the words of any other backend."""
    done = subprocess.run(
        [sys.executable, "-m", "cloche", "session", "--backend", "docker", "--image", image, "--language", "bash"],
        input="x=20\n# %%\necho $((x + 1))\n# %%\nexit 7\n", capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (7, "21\n", "")


@pytest.mark.soak  # for its length
def test_sessions_on_gvisor(gvisor_sandbox: Sandbox) -> None:
    """They are on gVisor's own kernel, say so, and are interrupted as any other."""
    session = gvisor_sandbox.session()
    result = session.run("open('/proc/version').read()")
    assert (result.value[:19], str(result.enforcement.level)) == ("Linux version 4.4.0", "gvisor")
    jail.check_interrupt(session)


@pytest.mark.soak  # for its length
def test_a_backend_object_has_sessions_too(image: str) -> None:
    """Images by language hold for sessions: each runs in its language's own."""
    with Sandbox(
        live=False, backend=DockerBackend({"python": image, "bash": image}), level="jail", warm=False
    ) as sandbox:
        result = sandbox.session("bash").run("echo $BASH_VERSION")
        assert (result.ok, result.meta["start"], result.meta["image"]) == (True, "cold", image)
