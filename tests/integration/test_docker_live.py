"""Live sandboxes in one container: what is a container's own, on daemons of the tests' own."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import cloche
from cloche.core.errors import SandboxFileRefused, WorkspaceConflict
from cloche.sync import Process, Sandbox
from tests.harness.containers import Daemon

pytestmark = [pytest.mark.root, pytest.mark.usefixtures("settings_of_nobody")]

IMAGE = "cloche-test:sessions"
# Leaves its parent, its group, its session and its environment, tries to change its mark, and says which pid it has.
HIDES = textwrap.dedent("""
    import os, resource, time
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            for limit in (1 << 40, 0):
                try:
                    resource.setrlimit(resource.RLIMIT_RSS, (limit, limit))
                    print("changed", flush=True)
                except (OSError, ValueError):
                    pass
            print(os.getpid(), flush=True)
            os.execve("/bin/sh", ["sh", "-c", "trap '' TERM HUP; while :; do sleep 1000; done"], {})
        os._exit(0)
    os.wait()
    time.sleep(1000)
""")
REACHES = textwrap.dedent("""
    import ctypes, os, resource, signal
    prlimit = ctypes.CDLL(None, use_errno=True).prlimit
    found = []
    for number in (signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM, signal.SIGINT):
        os.kill(1, number)
    for name in ("fd/0", "fd/1", "mem", "environ", "root/etc"):
        try:
            os.open(f"/proc/1/{name}", os.O_RDONLY)
            found.append(name)
        except OSError:
            pass
    if prlimit(1, resource.RLIMIT_NOFILE, (ctypes.c_ulong * 2)(3, 3), None) == 0:
        found.append("limits")
    found
""")
SERVES = textwrap.dedent("""
    import socket
    server = socket.create_server(("127.0.0.1", 8000))
    print("up", flush=True)
    connection, _ = server.accept()
    connection.sendall(connection.recv(9)[::-1])
""")
CALLS = textwrap.dedent("""
    import cloche, sys
    with cloche.Sandbox(backend="docker", image=sys.argv[1], level="jail", live=True) as sandbox:
        sandbox.exec(["true"])
        print("up", flush=True)
        sandbox.exec(["sleep", "1000"])
""")
HOARDS = "held = []\nwhile True: held.append(bytearray(1 << 20))"
ECHOES = 'read line; echo "$line $0"'


def check_many_at_once(sandbox: Sandbox) -> None:
    """Runs, commands and processes go on beside each other, each with streams and an end of its own."""
    waiting = [sandbox.start(["sh", "-c", ECHOES, str(number)]) for number in range(8)]
    assert sandbox.run("6 * 7").value == 42
    assert sandbox.run("console.log(6 * 7)", language="javascript").stdout == "42\n"
    missing = sandbox.exec(["no-such-program"])
    assert (missing.exit_code, "no-such-program" in missing.stderr) == (127, True)
    for process in reversed(waiting):
        process.write("hello\n")
    assert [one.wait().stdout for one in waiting] == [f"hello {number}\n" for number in range(8)]
    assert sandbox.exec(shell="cat; exit 3", stdin=b"x" * 3_000_000).exit_code == 3


def check_sessions(sandbox: Sandbox) -> None:
    """Interpreters live beside commands and share files with them; what interrupts a cell leaves the state."""
    python, shell = sandbox.session(), sandbox.session("bash")
    assert python.run("x = 1; open('/tmp/x', 'w').write('1')").ok
    assert shell.run("x=$(cat /tmp/x)").ok
    assert python.run("print('up', flush=True)\nwhile True: pass", timeout=2).status == "timeout"
    assert (python.run("x").value, shell.run("echo $x").stdout) == (1, "1\n")
    trace = python.run("1 / 0").stderr
    assert trace.startswith('Traceback (most recent call last):\n  File "<cell ')
    assert "During handling" not in trace
    printing = "import asyncio\nasync def say(): print('said')\ntask = asyncio.create_task(say())\nprint('begun')"
    assert python.run(printing).stdout == "begun\n"
    assert python.run("print('next')").stdout == "said\nnext\n"
    assert python.run("import subprocess; subprocess.Popen(['sleep', '4321'])").ok
    python.close()
    assert not sandbox.exec(shell="cat /proc/[0-9]*/cmdline | tr '\\0' ' ' | grep 'sleep [4]321'").stdout
    with pytest.raises(cloche.BackendUnavailable, match="no checkpoints"):
        shell.checkpoint("a")


def check_functions_of_the_caller(backend: str, **options: Any) -> None:
    """Runs, cells and commands of a live sandbox call functions of the caller, and so does a run by itself."""

    def double(number: int) -> int:
        return 2 * number

    code = "import cloche_host, concurrent.futures\nwith concurrent.futures.ThreadPoolExecutor(4) as pool: "
    code += "found = list(pool.map(cloche_host.double, range(20)))\nopen('x', 'w').write('1')\nfound"
    expected = [2 * number for number in range(20)]
    with Sandbox(backend=backend, live=True, tools=[double], **options) as sandbox:
        assert sandbox.run(code).value == expected
        session = sandbox.session()
        assert session.run(code).value == expected
        assert session.run("cloche_host.double('a')").stderr.endswith("number must be an integer, not text\n")
        shell = """cloche_host double '{"number": 4}'"""
        assert sandbox.run(shell, language="bash").stdout == sandbox.session("bash").run(shell).stdout == "8\n"
    result = cloche.run(code, backend=backend, tools=[double], **options)
    assert (result.value, [file.path for file in result.files]) == (expected, ["x"])
    assert result.meta["tools"]["ok"] == 20


def check_ends_with_its_tree(sandbox: Sandbox, *, timeout_s: float = 2.0) -> None:
    """A time-out ends what hides from its command, and nobody else's."""
    other = sandbox.start(["cat"])
    hiding = sandbox.start(["python3", "-c", HIDES], timeout=timeout_s)
    said = next(iter(hiding.stdout)).split()
    assert hiding.wait().status == "timeout"
    assert said[0].isdigit(), said
    gone = sandbox.exec(shell=f"while [ -d /proc/{int(said[0])} ]; do sleep 0.05; done", timeout=20)
    assert gone.ok
    assert_answers(other)


def check_memory(sandbox: Sandbox) -> None:
    """Who uses too much is named; the sandbox and its other processes live on."""
    other = sandbox.start(["cat"])
    assert sandbox.run(HOARDS, timeout=20).status == "out_of_memory"
    assert_answers(other)


def check_terminal_and_port(sandbox: Sandbox) -> None:
    """A terminal has its size, and a server inside is reached from outside."""
    with sandbox.terminal(["sh", "-c", "stty size; read x; stty size"], rows=30, columns=90) as terminal:
        assert next(iter(terminal.stdout)).strip() == b"30 90"
        terminal.resize(31, 91)
        terminal.write("\n")
        assert b"".join(terminal.stdout).split()[-2:] == [b"31", b"91"]
    with sandbox.start(["python3", "-c", SERVES]) as server:
        assert next(iter(server.stdout)) == b"up\n"
        assert [one.port for one in sandbox.ports()] == [8000]
        with sandbox.connect(8000) as connection:
            connection.write(b"abc")
            assert connection.read() == b"cba"


def check_files(sandbox: Sandbox) -> None:
    """Files are as a process of the sandbox has them, also where it says that they can be written to."""
    data = bytes(range(256)) * 20_000
    for folder in sandbox.run("1").meta["writable"]:
        sandbox.write_file(f"{folder}/more/f", data)
        assert sandbox.read_file(f"{folder}/more/f") == data
        sandbox.remove(f"{folder}/more", recursive=True)
    with pytest.raises(SandboxFileRefused):
        sandbox.write_file("/usr/f", b"")


def check_folder_of_the_host(folder: Path, **options: Any) -> None:
    """A copy of it is the workspace: a scripted agent edits and tests it, and what is committed is what was shown.

    It is a worktree, which has a repository in the copy.
    """
    repository, folder = folder / "repository", folder / "project"
    for words in (
        ["init", "-q", os.fspath(repository)],
        ["-C", os.fspath(repository), "commit", "-q", "--allow-empty", "-m", "first"],
        ["-C", os.fspath(repository), "worktree", "add", "-q", os.fspath(folder)],
    ):
        subprocess.run(["git", "-c", "user.name=A", "-c", "user.email=a@b", *words], check=True)
    pointer = (folder / ".git").read_text()
    for path, text in {"b.py": "def f():\n    return 1\n", "old": "old\n", ".env": "KEY=1\n", "sub/x": "x"}.items():
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_text(text)
    with Sandbox(workspace=folder, **options) as sandbox:
        tests = "print(__import__('b').f())"
        edits = f'echo "def f(): return 2" > b.py; mv old new; rm -r sub; echo "{tests}" > t.py; ls; python3 t.py'
        result = sandbox.exec(["sh", "-c", edits], env={"PYTHONDONTWRITEBYTECODE": "1"})
        assert result.stdout.split() == ["b.py", "new", "t.py", "2"], result.stderr
        assert result.meta["workspace"]["how"] == "copy"
        assert sandbox.read_file(".git/HEAD") == b"ref: refs/heads/project\n"
        assert {"objects", "config"} < {one.name for one in sandbox.list_dir(".git")}
        diff = sandbox.diff()
        told = {(one.what, one.path) for one in diff.changes}
        assert told == {
            ("modified", "b.py"), ("renamed", "new"), ("removed", "sub"), ("removed", "sub/x"), ("added", "t.py")
        }  # fmt: skip
        (folder / "b.py").write_text("the host's\n")
        with pytest.raises(WorkspaceConflict, match=r"b\.py"):
            sandbox.commit()
        sandbox.discard(["b.py", "t.py"])
        assert sandbox.read_file("b.py") == b"the host's\n"
        assert set(sandbox.commit().written) == {"new", "sub", "sub/x"}
        assert sandbox.diff().changes == ()
    found = {path.name: path.read_text() for path in folder.iterdir()}
    assert found == {"b.py": "the host's\n", "new": "old\n", ".env": "KEY=1\n", ".git": pointer}


def assert_answers(process: Process) -> None:
    """Fail unless a `cat` still does what it is for; it ends with that."""
    process.write("there\n")
    process.close_stdin()
    assert process.wait().stdout == "there\n"


def test_programs_call_functions_of_the_caller(docker: Daemon) -> None:
    """In a container's live sandbox, which a run by itself gets, too."""
    check_functions_of_the_caller("docker", image=docker.image(IMAGE), level="jail")


@pytest.fixture
def sandbox(docker: Daemon) -> Iterator[Sandbox]:
    """Open a live sandbox in a container."""
    with Sandbox(backend="docker", image=docker.image(IMAGE), level="jail", live=True) as opened:
        yield opened


def test_one_container_holds_many_processes(sandbox: Sandbox, docker: Daemon) -> None:
    """All of it is in one container, which is gone with the sandbox, as the fixture of the daemon finds."""
    check_many_at_once(sandbox)
    check_files(sandbox)
    check_sessions(sandbox)
    assert len(docker.containers()) == 1


def test_each_command_ends_with_its_tree(sandbox: Sandbox) -> None:
    """There is no control group for each command, and no process can take its mark off."""
    check_ends_with_its_tree(sandbox)
    check_memory(sandbox)


def test_the_first_process_is_out_of_reach(sandbox: Sandbox) -> None:
    """It has the guest's id, and what signals, /proc and limits would do to it is refused."""
    assert sandbox.run(REACHES).value == []
    check_terminal_and_port(sandbox)


def test_a_sandbox_may_have_several_users(docker: Daemon) -> None:
    """Root has its own /etc and nine capabilities, and neither reaches the first process."""
    with Sandbox(backend="docker", image=docker.image(IMAGE), level="jail", live=True, users=True) as sandbox:
        made = "echo ann:x:1000:1000::/home/ann:/bin/sh >>/etc/passwd; mkdir /home/ann; chown ann /home/ann"
        assert sandbox.exec(shell=made, user="root").stderr == ""
        assert sandbox.exec(shell="cd; id -u; touch f; echo $HOME", user="ann").stdout == "1000\n/home/ann\n"
        assert not sandbox.exec(shell="touch /etc/f || touch /home/ann/g").ok
        refused = sandbox.exec(["mknod", "/dev/null2", "c", "1", "3"], user="root")
        assert "Operation not permitted" in refused.stderr
        reached = sandbox.exec(["python3", "-c", f"{REACHES}\nprint(found)"], user="root")
        assert reached.stdout == "[]\n"
        audit = "import socket\nsocket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 9)"
        assert "[Errno 93]" in sandbox.exec(["python3", "-c", audit], user="root").stderr
        with pytest.raises(cloche.InvalidRequest, match="user nobody-knows"):
            sandbox.exec(["true"], user="nobody-knows")
        assert sandbox.run("1").enforcement.controls["identity"].state == "partial"


def test_a_folder_of_the_host_is_copied_and_committed(docker: Daemon, tmp_path: Path) -> None:
    """No folder of the host is mounted for that."""
    check_folder_of_the_host(tmp_path, backend="docker", image=docker.image("cloche-test:python"), level="jail")


def test_a_container_that_is_gone_is_said_to_be(sandbox: Sandbox, docker: Daemon) -> None:
    """Who waits for a process is told at once, and so is who asks for another one."""
    process = sandbox.start(["cat"])
    docker.docker("kill", *docker.containers())
    with pytest.raises(cloche.OutcomeUnknown):
        process.wait()
    with pytest.raises(cloche.OutcomeUnknown):
        sandbox.exec(["true"])


def test_a_container_goes_with_its_caller(docker: Daemon) -> None:
    """Nothing is left of a caller that is killed."""
    words = [sys.executable, "-c", CALLS, docker.image(IMAGE)]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as caller:
        assert caller.stdout is not None
        assert caller.stdout.readline() == b"up\n"
        caller.kill()
    assert docker.is_clean()


@pytest.mark.timeout(120)
def test_on_gvisor_it_is_the_same(gvisor: Daemon) -> None:
    """Where the daemon has gVisor: marks, memory and terminals are those of its kernel."""
    with Sandbox(backend="docker", image=gvisor.image("cloche-test:python"), level="gvisor", live=True) as sandbox:
        check_ends_with_its_tree(sandbox)
        check_memory(sandbox)
