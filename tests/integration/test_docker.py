"""The docker backend on a real daemon of the tests' own, through the library and the command line."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import cloche
from cloche.agent.container import container_arguments
from cloche.backends.docker.backend import DockerBackend
from cloche.backends.docker.daemon import connect
from cloche.backends.docker.sandbox import DockerOpenSandbox
from cloche.core.languages import LANGUAGES
from cloche.core.result import Status
from tests.escape.test_first_process import all_that_is_refused
from tests.harness.containers import ROOT, Daemon, open_daemon
from tests.harness.environments import run_as_user
from tests.harness.processes import fill_pool
from tests.harness.texts import NAMES_AND_A_LITERAL, PROGRAMS

pytestmark = pytest.mark.root


@pytest.fixture
def python_image(docker: Daemon) -> str:
    """Give an image with Python and the usual tools."""
    return docker.image("cloche-test:python")


@pytest.fixture
def small_image(docker: Daemon) -> str:
    """Give an image of busybox and Ruby, as the small official ones are."""
    return docker.image("cloche-test:small")


def command(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run the command line."""
    return subprocess.run(
        [sys.executable, "-m", "cloche", *words], capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False,
        env={**os.environ, **env},
    )  # fmt: skip


def inspected(docker: Daemon, image: str, **options: object) -> Mapping[str, object]:
    """Return what the daemon says of a container while a program runs in it."""
    code = "print('here', flush=True); import time; time.sleep(100)"
    asked: dict[str, Any] = {"backend": "docker", "image": image, "warm": False, "timeout": 100, **options}

    async def look() -> Mapping[str, object]:
        begun = asyncio.Event()
        running = asyncio.ensure_future(cloche.arun(code, on_output=lambda *_: begun.set(), **asked))
        await asyncio.wait_for(begun.wait(), 60)
        seen: list[Mapping[str, object]] = json.loads(docker.docker("inspect", *docker.containers()))
        running.cancel()
        await asyncio.wait([running])
        return seen[0]

    return asyncio.run(look())


def test_the_command_line_runs_a_program(docker: Daemon, python_image: str) -> None:
    """Output and exit code pass through; the image is an option, or a variable for its language."""
    done = command("run", "--backend", "docker", "--image", python_image, "-c", "print(1); raise SystemExit(3)")
    assert (done.returncode, done.stdout, done.stderr) == (3, "1\n", "")
    done = command("run", "--backend", "docker", "-c", "print(2)", CLOCHE_IMAGE_PYTHON=python_image)
    assert (done.returncode, done.stdout) == (0, "2\n")


def test_images_are_configured_by_language(docker: Daemon, python_image: str, tmp_path: Path) -> None:
    """`images` in a file says what runs a language; the result says what ran."""
    file = tmp_path / "settings.yaml"
    file.write_text(f"sandbox:\n  backend: docker\n  images:\n    python: {python_image}\n")
    result = cloche.run("print(1)", config=file, warm=False)
    assert (result.stdout, result.meta["image"], result.meta["backend"]) == ("1\n", python_image, "docker")


def test_the_container_is_hardened(docker: Daemon, python_image: str) -> None:
    """The daemon itself says so, of the container in which a program runs (M6b, S10)."""
    told = inspected(docker, python_image, memory="64m", cpus=0.5, pids=20)
    host = told["HostConfig"]
    assert isinstance(host, dict)
    assert (host["Privileged"], host["ReadonlyRootfs"], host["NetworkMode"]) == (False, True, "none")
    assert (host["CapDrop"], host["CapAdd"], host["Binds"]) == (["ALL"], None, None)
    assert (host["NanoCpus"], host["PidsLimit"], host["AutoRemove"]) == (500_000_000, 21, True)
    assert host["Memory"] == host["MemorySwap"]
    assert "no-new-privileges" in host["SecurityOpt"]
    assert any(option.startswith("seccomp={") for option in host["SecurityOpt"])


LOOK = """
import os, json
PLACES = ("/", "/etc", "/usr", "/root", "/run", "/dev", "/sys", "/proc/sys", "/tmp", "/workspace")
status = dict(line.split(":", 1) for line in open("/proc/self/status").read().splitlines())
def can_write(path):
    try: open(path + "/probe", "w").close()
    except OSError: return False
    return True
print(json.dumps({
    "uid": os.getuid(), "capabilities": status["CapBnd"].strip() + status["CapEff"].strip(),
    "no_new_privs": status["NoNewPrivs"].strip(), "seccomp": status["Seccomp"].strip(),
    "interfaces": sorted(os.listdir("/sys/class/net")),
    "writable": [path for path in PLACES if can_write(path)],
    "groups": os.getgroups(), "parent": os.getppid(),
}))
"""


def test_the_program_sees_the_walls(docker: Daemon, python_image: str) -> None:
    """Not root, no capabilities, no way to gain any, a filter, no network, and two places to write."""
    seen = json.loads(cloche.run(LOOK, backend="docker", image=python_image, warm=False).stdout)
    assert seen.pop("uid") >= 1_950_000_000
    assert set(seen.pop("capabilities")) == {"0"}
    seen.pop("groups")
    assert seen == {
        "no_new_privs": "1", "seccomp": "2", "interfaces": ["lo"], "writable": ["/tmp", "/workspace"], "parent": 1,
    }  # fmt: skip


def test_a_network_by_name_is_served_from_outside(docker: Daemon, python_image: str) -> None:
    """In runs, in a live sandbox, in a session where runs take turns."""
    rules: dict[str, Any] = {
        "backend": "docker", "image": python_image, "network": "allowlist", "network_allow": ["good.example"],
    }  # fmt: skip
    result = cloche.run(NAMES_AND_A_LITERAL, **rules)
    assert result.stdout.split("\n", 2)[:2] == ["198.18.1.0", "403"], result.stderr
    assert [row["host"] for row in result.network_refused] == ["198.51.100.7", "bad.example"]
    assert (result.status, result.enforcement.hits["network"]) == ("denied", 2)
    with cloche.Sandbox(**rules) as sandbox:
        sandbox.network.allow("new.example")
        assert sandbox.exec(["python3", "-c", "import socket; socket.gethostbyname('new.example')"]).ok
        assert sandbox.run(NAMES_AND_A_LITERAL).status == "denied"
    with cloche.Sandbox(live=False, **rules) as sandbox:
        cell = sandbox.session().run("import socket; socket.gethostbyname('bad.example')")
        assert [row["host"] for row in cell.network_refused] == ["bad.example"]


BY_A_MEMBER = """
import json, cloche
from cloche.backends.docker.backend import DockerBackend
result = cloche.run(PROGRAM, backend="docker", image=IMAGE, network="allowlist", network_allow=["good.example"])
DockerBackend().drain()
print(json.dumps([result.status, result.stdout, [row["host"] for row in result.network_refused]]))
"""


@pytest.mark.root
def test_a_member_of_the_docker_group_has_it_by_a_container_beside(docker: Daemon, python_image: str) -> None:
    """Who cannot enter the container's namespace has its sockets made from inside, and nothing is left."""
    os.chmod(docker.folder, 0o755)
    os.chmod(docker.folder / "socket", 0o666)  # as for a member
    told = f"PROGRAM, IMAGE = {NAMES_AND_A_LITERAL!r}, {python_image!r}\n"
    found = run_as_user(told + BY_A_MEMBER, env={"DOCKER_HOST": docker.url, "CLOCHE_RUNSC": "none"})
    assert found == ["denied", "198.18.1.0\n403\n", ["198.51.100.7", "bad.example"]]
    assert docker.is_clean()


REACH = """
import os
for path in ("mem", "environ", "fd/1", "fd/0", "maps"):
    for mode in ("rb", "wb"):
        try: open(f"/proc/1/{path}", mode).close()
        except OSError: continue
        print("reached", path, mode)
for fd in range(3, 1024):
    try: os.fstat(fd)
    except OSError: continue
    print("has", fd, os.readlink(f"/proc/self/fd/{fd}"))
os.write(1, b"r\\x00\\x00\\x00\\x02{}" * 3)
try: os.kill(1, 9); os.kill(1, 15)
except OSError: pass
"""


def test_the_first_process_is_out_of_reach(docker: Daemon, python_image: str) -> None:
    """A program can neither read it nor write its frames, nor end it."""
    result = cloche.run(REACH, backend="docker", image=python_image, warm=False)
    lines = [line for line in result.stdout_bytes.split(b"\n") if line.startswith((b"reached", b"has"))]
    assert [line for line in lines if b"pipe:" not in line] == []
    assert result.status is Status.OK
    assert b"r\x00\x00\x00\x02{}" * 3 in result.stdout_bytes


def test_the_first_process_is_not_the_guests_to_change(docker: Daemon, python_image: str) -> None:
    """What would limit it, read it or slow it down is refused, as in the jail."""
    result = cloche.run(all_that_is_refused(), backend="docker", image=python_image, warm=False)
    assert (result.stdout, result.stderr) == ("[]\n", "")


OWN = """
import ctypes, os, subprocess, threading
ids, stay = [0, os.getpid(), subprocess.Popen(["sleep", "600"]).pid], threading.Event()
nice = os.getpriority(os.PRIO_PROCESS, 0)
def wait():
    ids.append(threading.get_native_id())
    stay.wait()
for _ in range(2):
    threading.Thread(target=wait, daemon=True).start()
while len(ids) < 5: pass
for number in ids:
    os.setpriority(os.PRIO_PROCESS, number, nice + 1)
    os.sched_setaffinity(number, {min(os.sched_getaffinity(number))})
    os.sched_setscheduler(number, os.SCHED_BATCH, os.sched_param(0))
os.setpriority(os.PRIO_PGRP, 0, nice + 2)
"""


def test_a_program_schedules_its_own(docker: Daemon, python_image: str) -> None:
    """Itself, each of its threads and its children by number, as libraries that pin their threads do."""
    result = cloche.run(OWN, backend="docker", image=python_image, warm=False)
    assert result.ok, result.stderr


WATCH_QUOTA = """
import os, time
ROWS = ("cpu/cpu.cfs_quota_us", "cpu.max"), ("pids/pids.max", "pids.max", "memory/memory.limit_in_bytes", "memory.max")
def read(names):
    return [open(path).read() for path in (f"/sys/fs/cgroup/{name}" for name in names) if os.path.exists(path)]
quota, others = map(read, ROWS)
while read(ROWS[0]) == quota: time.sleep(0.01)
time.sleep(0.1)  # the others would be written next
print(read(ROWS[0])[0].split()[0], read(ROWS[1]) == others)
"""


def test_what_is_killed_has_a_whole_processor_to_die(
    docker: Daemon, python_image: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the first process does not answer at once, a small share does not delay it; no other limit is lifted."""
    monkeypatch.setattr("cloche.backends.containers.container.KILL", b"?")
    result = cloche.run(WATCH_QUOTA, backend="docker", image=python_image, warm=False, cpus=0.5, timeout=1)
    assert (result.status, result.stdout) == (Status.TIMEOUT, "100000 True\n"), result.stderr


def test_a_timeout_ends_the_container(docker: Daemon, python_image: str) -> None:
    """Not the program alone: when the call returns, nothing of it runs, and soon nothing is left."""
    result = cloche.run("while True: pass", backend="docker", image=python_image, timeout=1, warm=False)
    assert (result.status, result.exit_code, result.timed_out) == (Status.TIMEOUT, -1, True)
    assert docker.is_clean()


def test_a_first_process_that_does_not_answer_is_killed_with_the_container(
    docker: Daemon, python_image: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A time-out rests on the daemon in the end, not on what is inside."""
    monkeypatch.setattr("cloche.backends.containers.container.KILL", b"?")
    monkeypatch.setattr("cloche.backends.containers.run.GUEST_KILL_S", 0.5)
    started = time.monotonic()
    result = cloche.run("while True: pass", backend="docker", image=python_image, timeout=1, warm=False)
    assert result.status is Status.TIMEOUT
    assert time.monotonic() - started < 60


def test_the_second_run_is_warm(docker: Daemon, python_image: str) -> None:
    """A container that waits takes the next run, once, and none is left when the backend cools down."""
    first = cloche.run("print(1)", backend="docker", image=python_image)
    assert first.meta["start"] == "cold"
    fill_pool()
    second = cloche.run("import os; print(os.listdir('/tmp'), os.listdir('.'))", backend="docker", image=python_image)
    assert (second.meta["start"], second.stdout) == ("pooled", "[] ['cloche-main.py']\n")
    DockerBackend().drain()
    assert docker.is_clean()


def test_one_workspace_for_images_of_two_kinds(docker: Daemon, python_image: str, small_image: str) -> None:
    """A sandbox keeps its files from run to run, whichever image runs."""
    backend = DockerBackend({"python": python_image, "ruby": small_image})
    with cloche.Sandbox(live=False, backend=backend) as sandbox:
        assert sandbox.run("open('f', 'w').write('from python')").ok
        result = sandbox.run("puts File.read('f'); File.write('g', 'from ruby')", language="ruby")
        assert (result.stdout, [record.path for record in result.files]) == ("from python\n", ["g"])
        result = sandbox.run("print(open('g').read())")
        assert (result.stdout, result.files) == ("from ruby\n", ())
        assert sandbox.list_files() == ("f", "g")


def test_a_workspace_that_was_killed_is_said_to_be_gone(docker: Daemon, python_image: str) -> None:
    """Its files went with the last container that had them; no run goes on without them as if nothing were."""
    with cloche.Sandbox(live=False, backend="docker", image=python_image) as sandbox:
        for number in range(2):
            assert sandbox.run(f"open('f{number}', 'w')").ok
        held, deadline = sandbox._sandbox._opened, time.monotonic() + 60
        assert isinstance(held, DockerOpenSandbox)
        while held._fresh is None or held._used is None:  # the next container comes in the background
            assert time.monotonic() < deadline
            time.sleep(0.05)
        both = (held._used, held._fresh)
        docker.docker("kill", *(one.id for one in both))
        while not all(one.is_lost for one in both):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        for call in (lambda: sandbox.run("print(open('f0'))"), lambda: sandbox.read_file("f0"), sandbox.session):
            with pytest.raises(cloche.StartFailed, match="workspace is gone"):
                call()


def test_a_reading_that_was_cancelled_answers_nobody_else(docker: Daemon, python_image: str) -> None:
    """What it would have been told is not taken for the answer to the next question."""

    async def scenario() -> None:
        async with cloche.AsyncSandbox(live=False, backend="docker", image=python_image, warm=False) as sandbox:
            await sandbox.write_file("big", bytes(100 << 20))
            reading = asyncio.ensure_future(sandbox.read_file("big", max_bytes=200 << 20))
            await asyncio.sleep(0.05)
            reading.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reading
            assert await sandbox.list_files() == ("big",)

    asyncio.run(scenario())


def test_an_image_without_python_needs_but_a_shell(docker: Daemon, small_image: str) -> None:
    """Files in and out, standard input, exit codes, signals, and what is left behind dies."""
    with cloche.Sandbox(live=False, backend="docker", image=small_image) as sandbox:
        sandbox.write_file("d/in", b"given")
        code = "cat d/in -; echo err >&2; (sleep 300 &); echo new > out; exit 3"
        result = sandbox.run(code, language="bash", stdin=b" and piped\n")
        assert (result.stdout, result.stderr, result.exit_code) == ("given and piped\n", "err\n", 3)
        assert ([record.path for record in result.files], sandbox.read_file("out")) == (["out"], b"new\n")
        assert result.meta["stand_in"] == "sh stands in for Bash"
        assert sandbox.run("kill -9 $$", language="bash").status is Status.SIGNALED
        assert sandbox.run("no-such-program", language="bash").exit_code == 127
        with pytest.raises(cloche.SandboxFileError):
            sandbox.read_file("none")


@pytest.mark.parametrize(
    ("code", "status", "limits"),
    [
        ("sleep 60", Status.TIMEOUT, {"timeout": 1}),
        ("cat /dev/zero | tail", Status.OUT_OF_MEMORY, {"memory": "64m"}),
        ("dd if=/dev/zero of=big bs=1M", Status.DISK_LIMIT, {"disk": "8m"}),
        ("i=0; while [ $i -lt 99 ]; do sleep 9 & i=$((i+1)); done; exit 3", Status.PIDS_LIMIT, {"pids": 16}),
    ],
    ids=["timeout", "memory", "disk", "pids"],
)
def test_limits_hold_with_a_shell_too(
    docker: Daemon, small_image: str, code: str, status: Status, limits: dict[str, object]
) -> None:
    """Each limit ends in its own status."""
    result = cloche.run(code, language="bash", backend="docker", image=small_image, warm=False, **limits)  # type: ignore[arg-type]
    assert result.status is status, result


@pytest.mark.soak  # its image takes a while
@pytest.mark.toolchain
@pytest.mark.timeout(600)
def test_all_eight_languages(docker: Daemon) -> None:
    """Each language of the table runs in a container whose image has it."""
    programs = [Path(__file__).parents[2] / ".toolchains" / "bin" / "deno"]
    image = docker.image("cloche-test:all", [program for program in programs if program.exists()])
    for language in LANGUAGES:
        result = cloche.run(
            PROGRAMS[language].talk, language=language, argv=["a", "b c"], stdin="x\n", backend="docker", image=image,
            languages=list(LANGUAGES), warm=False, memory="512m", cpus=2, timeout=120, pids=128,
        )  # fmt: skip
        assert (result.stdout, result.ok) == ("hello\na|b c\nX\n", True), (language, result)


def test_a_missing_image_is_named_with_the_remedy(docker: Daemon) -> None:
    """No image: one sentence, exit code 125, and nothing ran."""
    done = command("run", "--backend", "docker", "--image", "no-such-image:here", "-c", "print(1)")
    assert (done.returncode, done.stdout) == (125, "")
    assert "no-such-image:here" in done.stderr
    assert "Dockerfile.sandbox" in done.stderr


def test_an_image_without_the_language_says_so(docker: Daemon, small_image: str) -> None:
    """The error names the image, the language, and how to name another one."""
    with pytest.raises(cloche.BackendUnavailable, match=r"cloche-test:small.*javascript.*CLOCHE_IMAGE_JAVASCRIPT"):
        cloche.run("1", language="javascript", backend="docker", image=small_image)


def test_what_a_dead_process_left_is_removed(docker: Daemon, python_image: str) -> None:
    """By `cloche gc`, and by the next start; what a living one has stays."""
    from cloche.backends.garbage_collection import owner

    words = owner().split(":")
    dead, living = ":".join([*words[:4], "1"]), owner()
    for name in (dead, living):
        docker.docker(
            "run", "--detach", "--network=none", "--label", f"cloche.owner={name}", python_image, "sleep", "300"
        )
    docker.docker("volume", "create", "--label", f"cloche.owner={dead}")
    done = command("gc")
    left = docker.containers()
    docker.docker("rm", "--force", *left)
    assert (done.returncode, done.stdout.count("docker: removed "), len(left)) == (0, 2, 1)
    assert json.loads(command("gc", "--json").stdout)["docker"] == []  # of other backends, others leave something


def test_a_daemon_that_goes_away_leaves_no_one_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped in the middle of a run: the outcome is said to be unknown, within seconds."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with open_daemon() as daemon:
        image = daemon.image("cloche-test:python")
        script = (
            "import cloche, sys\n"
            "try: cloche.run('print(1, flush=True); import time; time.sleep(60)', backend='docker', image=sys.argv[1],"
            " warm=False, on_output=lambda *_: print('up', flush=True))\n"
            "except cloche.ClocheError as error: print(type(error).__name__, flush=True)\n"
        )
        caller = subprocess.Popen(
            [sys.executable, "-c", script, image], stdout=subprocess.PIPE, env={**os.environ, "DOCKER_HOST": daemon.url}
        )
        assert caller.stdout is not None
        assert caller.stdout.readline() == b"up\n"
        started = time.monotonic()
        daemon.stop()
        assert caller.stdout.readline() == b"OutcomeUnknown\n"
        assert time.monotonic() - started < 60
        caller.stdout.close()
        caller.wait()


IN_WORKSPACE = """
import json, os
status = dict(line.split(":", 1) for line in open("/proc/self/status").read().splitlines())
open("made", "w").write("by the agent")
def refuses(path):
    try: open(path, "w")
    except OSError as error: return error.strerror
print(json.dumps([
    os.getcwd(), os.getuid(), os.getgid(), status["CapBnd"].strip("\t0"), status["Seccomp"].strip(),
    os.environ["TOKEN"], sorted(os.listdir("/sys/class/net")), refuses("/etc/x"), open("given").read(),
]))
"""


def test_a_daemon_takes_the_argument_list_of_an_agents_container(
    docker: Daemon, python_image: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent works in the folder as its owner, behind the walls of a run's container (C15)."""
    (folder := tmp_path / 'odd, "folder"').mkdir()
    (folder / "given").write_text("by the host")
    os.chown(folder, 1234, 5678)
    monkeypatch.chdir(tmp_path)
    words = container_arguments(folder, python_image, ["python3", "-c", IN_WORKSPACE], env={"TOKEN": None})
    done = subprocess.run(
        docker.words(*words[1:]), capture_output=True, text=True, check=False, env={**os.environ, "TOKEN": "secret"}
    )
    assert done.returncode == 0, done.stderr
    assert "secret" not in " ".join(words)
    assert json.loads(done.stdout) == [
        "/workspace", 1234, 5678, "", "2", "secret", ["lo"], "Read-only file system", "by the host"
    ]  # fmt: skip
    made = folder / "made"
    assert (made.read_text(), made.stat().st_uid, made.stat().st_gid) == ("by the agent", 1234, 5678)


def test_the_image_of_sandboxes_can_be_built(docker: Daemon, python_image: str, tmp_path: Path) -> None:
    """`Dockerfile.sandbox` builds on any image with a shell; what it adds comes from that image's packages."""
    (tmp_path / "Dockerfile").write_bytes((ROOT / "Dockerfile.sandbox").read_bytes())
    words = ["build", "--quiet", "--network=none", "--build-arg", f"BASE={python_image}", "--build-arg", "PACKAGES="]
    subprocess.run(
        docker.words(*words, "--tag", "cloche-test:built", str(tmp_path)), check=True, capture_output=True,
        env={**os.environ, "DOCKER_BUILDKIT": "0"},
    )  # fmt: skip
    result = cloche.run("import os; print(os.getcwd())", backend="docker", image="cloche-test:built", warm=False)
    assert result.stdout == "/workspace\n"


def test_the_caller_may_change_its_environment_meanwhile(docker: Daemon) -> None:
    """No request reads it."""
    api, is_over = connect().api, threading.Event()

    def change() -> None:
        while not is_over.is_set():
            os.environ["SOMETHING_ELSE"] = "1"
            del os.environ["SOMETHING_ELSE"]

    thread, interval = threading.Thread(target=change), sys.getswitchinterval()
    thread.start()
    sys.setswitchinterval(1e-6)  # so that they meet often
    try:
        assert all(api.ping() for _ in range(200))
    finally:
        sys.setswitchinterval(interval)
        is_over.set()
        thread.join()
