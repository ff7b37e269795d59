"""The public calls against the real local jail: what a user of the library relies on."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from pathlib import Path

import pytest

import cloche
from cloche.core.events import Ended, OutputChunk, Started

pytestmark = pytest.mark.usefixtures("settings_of_nobody")


# The named tests of the sandbox abstraction.


def test_local_default() -> None:
    """With nothing set, code runs in the local backend, isolated, with this interpreter."""
    sandbox = cloche.get_sandbox()
    assert isinstance(sandbox, cloche.LocalSandbox)
    assert isinstance(sandbox, cloche.CodeSandbox)
    result = sandbox.execute("import sys; print('hello', sys.version_info[:2])")
    assert (result.exit_code, result.stderr, result.timed_out) == (0, "", False)
    assert result.stdout.startswith("hello (3")
    assert result.meta["backend"] == "local"
    assert result.enforcement.level >= cloche.Level.CONFINED


def test_docker_opt_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SANDBOX_TYPE chooses docker, in any case, and never falls back to something else."""
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none")
    for word in ("docker", "DOCKER"):
        monkeypatch.setenv("SANDBOX_TYPE", word)
        with pytest.raises(cloche.BackendUnavailable, match="docker"):
            cloche.get_sandbox()


def test_missing_docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a daemon every call of a docker sandbox is an error before anything runs, with what would do."""
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none")
    marker = tmp_path / "ran"
    for start in (cloche.DockerSandbox, lambda: cloche.run(f"open({str(marker)!r}, 'w')", backend="docker")):
        with pytest.raises(cloche.BackendUnavailable) as refused:
            start()
        assert f"{tmp_path}/none" in str(refused.value)
        assert 'use the default backend "local"' in str(refused.value)
    assert not marker.exists()


def test_timeout() -> None:
    """A run over its time is stopped, keeps its output, and says so."""
    started = time.monotonic()
    result = cloche.get_sandbox().execute("print('before', flush=True)\nimport time; time.sleep(100)", timeout=10)
    assert time.monotonic() - started < 60
    assert (result.timed_out, result.exit_code, result.status) == (True, -1, cloche.Status.TIMEOUT)
    assert result.stdout == "before\n"
    assert result.stderr.endswith("Execution timed out")


def test_non_zero_exit() -> None:
    """The program's own exit code and stderr are the result's."""
    result = cloche.get_sandbox().execute("import sys; print('bad', file=sys.stderr); sys.exit(3)")
    assert (result.exit_code, result.stderr, result.status) == (3, "bad\n", cloche.Status.ERROR)


def test_output_truncation() -> None:
    """Output over the limit keeps head and tail, and changes neither status nor exit code."""
    result = cloche.run("print('A' * 100_000 + 'Z' * 100_000)", output_limit="2k")
    assert (result.truncated, result.exit_code, result.status) == (True, 0, cloche.Status.OK)
    assert result.stdout.startswith("AAA")
    assert result.stdout.endswith("ZZZ\n")
    assert len(result.stdout_bytes) < 4096


def test_unknown_type(monkeypatch: pytest.MonkeyPatch) -> None:
    """An unknown SANDBOX_TYPE is an error that lists the known ones."""
    monkeypatch.setenv("SANDBOX_TYPE", "chroot")
    with pytest.raises(cloche.InvalidRequest, match=r"chroot.*local"):
        cloche.get_sandbox()


# The rest of the face.


def test_dot_env_chooses_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SANDBOX_TYPE may stand in the working directory's .env."""
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none")
    (tmp_path / ".env").write_text("SANDBOX_TYPE=docker\n")
    with pytest.raises(cloche.BackendUnavailable, match="docker"):
        cloche.get_sandbox()


def test_e2b_says_what_is_missing() -> None:
    """A backend this version does not have is an error at construction."""
    with pytest.raises(cloche.BackendUnavailable, match="e2b"):
        cloche.E2BSandbox()


def test_what_is_no_text_goes_in_and_is_told_as_python_tells_it() -> None:
    """Arguments are bytes, as file names are; code with half a character in it is the program's own mistake."""
    assert cloche.run("import os, sys; print(os.fsencode(sys.argv[1]))", argv=["\udcff"]).stdout == "b'\\xff'\n"
    with cloche.Sandbox(live=False) as sandbox:
        for result in (sandbox.run("x = '\ud800'"), sandbox.session().run("x = '\ud800'")):
            assert (result.status, "Error" in result.stderr) == ("error", True)


def test_arguments_stdin_environment_and_files_go_in() -> None:
    """Everything a program can be given reaches it."""
    code = "import os, sys; print(sys.argv[1:], sys.stdin.read(), os.environ['K'], open('a/b.txt').read())"
    result = cloche.run(code, argv=["x y", "-z"], stdin="in", env={"K": "v"}, files={"a/b.txt": "ä"})
    assert result.stdout == "['x y', '-z'] in v ä\n"


def test_files_come_out(tmp_path: Path) -> None:
    """What the run wrote is listed and copied to the directory that was named."""
    result = cloche.run("open('new.txt', 'w').write('n')", files={"old.txt": "o"}, out=tmp_path / "out")
    assert [(record.path, record.size) for record in result.files] == [("new.txt", 1)]
    assert (tmp_path / "out" / "new.txt").read_text() == "n"
    assert not (tmp_path / "out" / "old.txt").exists()


def test_output_streams_while_the_code_runs() -> None:
    """The callback sees the first line while the program still runs, and in the end all of them."""

    async def scenario() -> None:
        seen = asyncio.Queue[bytes]()
        code = "import time; print('a', flush=True); time.sleep(100)"
        running = asyncio.create_task(cloche.arun(code, on_output=lambda _stream, data: seen.put_nowait(data)))
        async with asyncio.timeout(60):
            assert (await seen.get(), running.done()) == (b"a\n", False)
        running.cancel()
        await asyncio.wait({running})

    asyncio.run(scenario())
    parts: list[bytes] = []
    cloche.run("print('a', flush=True); print('b')", on_output=lambda _stream, data: parts.append(data))
    assert b"".join(parts) == b"a\nb\n"


def test_async_calls_run_side_by_side() -> None:
    """Three in one loop have all begun before any of them ends."""

    async def scenario() -> None:
        begun = asyncio.Queue[bytes]()
        code = "import time; print('begun', flush=True); time.sleep(100)"
        running = [
            asyncio.create_task(cloche.arun(code, on_output=lambda _stream, data: begun.put_nowait(data)))
            for _ in range(3)
        ]
        async with asyncio.timeout(60):
            assert [await begun.get() for _ in running] == [b"begun\n"] * 3
        assert not any(one.done() for one in running)
        for one in running:
            one.cancel()
        await asyncio.wait(running)

    asyncio.run(scenario())


def test_cancelling_kills_the_run(marker: str) -> None:
    """A cancelled call has killed everything by the time it ends."""

    async def scenario() -> None:
        task = asyncio.create_task(cloche.arun(_sleeper(marker)))
        await asyncio.to_thread(_wait_for, marker)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(scenario())
    assert not _is_running(marker)


def test_ctrl_c_kills_the_run_and_is_raised(marker: str) -> None:
    """KeyboardInterrupt arrives once nothing of the run is left."""

    def interrupt() -> None:
        _wait_for(marker)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        cloche.run(_sleeper(marker))
    assert not _is_running(marker)
    thread.join()


def test_fifty_threads_get_their_own_answers() -> None:
    """Fifty callers share the queue and the machine."""
    got: dict[int, str] = {}

    def one(number: int) -> None:
        got[number] = cloche.run(f"print({number})", timeout=60).stdout

    threads = [threading.Thread(target=one, args=(number,)) for number in range(50)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert got == {number: f"{number}\n" for number in range(50)}


def test_a_sandbox_keeps_its_workspace_and_nothing_else() -> None:
    """Files outlive a run; processes and variables do not; another sandbox sees none of it."""
    with cloche.Sandbox(live=False, timeout=20) as sandbox:
        sandbox.write_file("in.txt", "data")
        assert sandbox.run("print(open('in.txt').read()); open('out.txt', 'w').write('x')").stdout == "data\n"
        assert sandbox.read_file("out.txt", max_bytes=10) == b"x"
        assert set(sandbox.list_files()) >= {"in.txt", "out.txt"}
        assert sandbox.run(argv=["cat", "out.txt"]).stdout == "x"
        with pytest.raises(cloche.SandboxFileError):
            sandbox.read_file("missing", max_bytes=1)
    assert cloche.run("import os; print(os.path.exists('in.txt'))").stdout == "False\n"


def test_files_of_a_short_cell_are_looked_at_on_every_python() -> None:
    """Stopping the session meanwhile has a time-out, which from Python 3.12 on only a task may have."""
    with cloche.Sandbox(live=False) as sandbox, sandbox.session() as session:
        for _ in range(5):
            assert session.run("for i in range(300): open(f'f{i}', 'w').close()").ok


def test_a_stream_yields_events_in_order() -> None:
    """Start, output as it comes, and the result at the end."""

    async def scenario() -> list[object]:
        async with cloche.AsyncSandbox(live=False) as sandbox:
            return [event async for event in sandbox.stream("print('a')")]

    events = asyncio.run(scenario())
    assert isinstance(events[0], Started)
    assert b"".join(event.data for event in events if isinstance(event, OutputChunk)) == b"a\n"
    assert isinstance(events[-1], Ended)


def test_a_stream_left_early_kills_its_run(marker: str) -> None:
    """Closing the iterator ends the program."""

    async def scenario() -> None:
        async with cloche.AsyncSandbox(live=False) as sandbox:
            stream = sandbox.stream(_sleeper(marker))
            await anext(stream)
            await asyncio.to_thread(_wait_for, marker)
            await stream.aclose()  # type: ignore[attr-defined]  # an async generator in truth
            assert not _is_running(marker)
            assert (await sandbox.run("print(1)")).stdout == "1\n"

    asyncio.run(scenario())


def test_subprocess_is_level_process_and_says_so() -> None:
    """Running without isolation is explicit, and the result tells the truth about it."""
    with pytest.raises(cloche.PolicyDenied, match="import of os"):
        cloche.run("import os; print(1)", backend="subprocess")
    result = cloche.run("import os; print(1)", backend="subprocess", screen="off")
    assert (result.stdout, str(result.enforcement.level)) == ("1\n", "process")


def test_requiring_more_than_there_is_is_refused() -> None:
    """No silent fallback: a level out of reach is an error with a reason."""
    with pytest.raises(cloche.BackendUnavailable, match="vm"):
        cloche.run("print(1)", require="vm")


def test_a_network_takes_a_jail_and_a_bridge_takes_docker() -> None:
    """What cannot be had is refused, not ignored."""
    with pytest.raises(cloche.BackendUnavailable, match=r"network 'open'.*only at levels jail and confined"):
        cloche.run("print(1)", network="open", level="process")
    with pytest.raises(cloche.InvalidRequest, match="network 'bridge' is docker's own"):
        cloche.run("print(1)", network="bridge")


def test_the_global_override_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    """SANDBOX_TIMEOUT_SEC beats the argument."""
    monkeypatch.setenv("SANDBOX_TIMEOUT_SEC", "1")
    assert cloche.get_sandbox().execute("import time; time.sleep(20)", timeout=30).timed_out


@pytest.fixture
def marker() -> str:
    """Return an argument by which a run's processes can be found on the host."""
    return f"marker-{os.getpid()}-{time.monotonic_ns()}"


def _sleeper(marker: str) -> str:
    nap = f"[sys.executable, '-c', 'import time; time.sleep(60)', {marker!r}]"
    return f"import subprocess, sys; subprocess.run({nap})"


def _is_running(marker: str) -> bool:
    for entry in os.listdir("/proc"):
        try:
            if entry.isdigit() and marker.encode() in Path(f"/proc/{entry}/cmdline").read_bytes():
                return True
        except OSError:
            continue
    return False


def _wait_for(marker: str) -> None:
    deadline = time.monotonic() + 60
    while not _is_running(marker):
        assert time.monotonic() < deadline, "the run never began"
        time.sleep(0.02)


def test_full_output_can_be_spilled(tmp_path: Path) -> None:
    """The result keeps head and tail; the folder gets every byte of both streams."""
    code = "import sys; print('a' * 300_000); print('b', file=sys.stderr)"
    result = cloche.run(code, output_limit="4k", spill=tmp_path / "full")
    assert result.truncated
    assert (tmp_path / "full" / "stdout.txt").read_text() == "a" * 300_000 + "\n"
    assert (tmp_path / "full" / "stderr.txt").read_text() == "b\n"
    assert result.meta["spilled"]["stdout"] == str(tmp_path / "full" / "stdout.txt")


def test_run_python_code_is_a_function_whose_text_a_model_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Standard output, else `Error (exit_code=N): `, standard error and a hint, bounded; refusals are text (R6)."""
    assert cloche.run_python_code("print('one'); print(2)") == "one\n2\n"
    assert cloche.run_python_code("import sys; print('why', file=sys.stderr); sys.exit(3)").startswith(
        "Error (exit_code=3): why\n"
    )
    late = cloche.run_python_code("while True: pass", 1)
    assert late.startswith("Error (exit_code=-1): Execution timed out")
    assert late.endswith("after 1 s; split the work or raise timeout.")
    assert len(cloche.run_python_code("print('x' * 60_000)")) < 9_000
    assert asyncio.run(asyncio.to_thread(cloche.run_python_code, "print(1)")) == "1\n"
    with pytest.raises(cloche.InvalidRequest, match="timeout"):
        cloche.run_python_code("print(1)", timeout=0)
    assert cloche.run_python_code("print(1)", "5s") == "1\n"  # type: ignore[arg-type]  # as a model may say it
    monkeypatch.setenv("CLOCHE_SCREEN", "block")
    assert cloche.run_python_code("import socket").startswith("Error (PolicyDenied): the screen refuses this code")
    monkeypatch.setenv("SANDBOX_TYPE", "docker")
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere")
    with pytest.raises(cloche.BackendUnavailable, match="docker"):
        cloche.run_python_code("print(1)")


def test_cells_of_a_sandbox_that_runs_in_turns_have_tasks_for_their_timeouts() -> None:
    """From Python 3.12 on a time-out of asyncio needs a task, and a blocking call's first step has none."""
    with cloche.Sandbox(live=False) as sandbox, sandbox.session() as session:
        for _ in range(5):  # answers may come at once, or be waited for
            assert session.run("6 * 7").value == 42
