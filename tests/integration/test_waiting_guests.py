"""Guests that are forked ahead in warm containers: nothing tells them from others, and losing one loses nothing."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from typing import Any

import pytest

import cloche
from cloche.core.result import Result, Status
from tests.harness.containers import Daemon
from tests.harness.processes import fill_pool

pytestmark = [pytest.mark.root, pytest.mark.usefixtures("settings_of_nobody")]
# How old the process is, and no older than any other in a container that did not wait.
AGE = """
import os
started = int(open("/proc/self/stat").read().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
age_s = float(open("/proc/uptime").read().split()[0]) - started
"""
LEAST_AGE_S, WAITED_S = 2.5, 6.0
MOST_CPU_S = 0.2
LOOK = f"""
{AGE}
import ctypes, gc, json, resource, signal, stat, sys
status = dict(line.split(":", 1) for line in open("/proc/self/status").read().splitlines())
def kind(fd):
    try: return stat.S_IFMT(os.fstat(fd).st_mode)
    except OSError: return None
streams = (sys.stdin, sys.stdout, sys.stderr)
print(json.dumps({{
    "age": age_s, "argv": sys.argv, "cwd": os.getcwd(), "umask": os.umask(0), "env": dict(os.environ, CLOCHE_OUTPUT=""),
    "flags": repr(sys.flags), "path": sys.path, "main": sorted(globals()), "modules": sorted(sys.modules),
    "finders": [getattr(one, "__name__", type(one).__name__) for one in sys.meta_path],
    "folders looked into": sorted(sys.path_importer_cache), "collects": [gc.isenabled(), gc.get_threshold()],
    "streams": [(one.name, one.encoding, one.errors, one.line_buffering, one.mode, one.isatty()) for one in streams],
    "descriptors": {{fd: kind(fd) for fd in range(1024) if kind(fd) is not None}}, "input": sys.stdin.read(),
    "signals": [str(signal.getsignal(number)) for number in range(1, 32)],
    "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    "limits": [resource.getrlimit(number) for number in range(16)], "is traceable": ctypes.CDLL(None).prctl(3),
    "leads": [os.getsid(0) == os.getpid(), os.getpgid(0) == os.getpid()], "parent": os.getppid(),
    "sacrificed": open("/proc/self/oom_score_adj").read(), "groups": os.getgroups() == [os.getgid()],
    "walls": [status.get(name) for name in ("NoNewPrivs", "Seccomp", "CapEff", "CapBnd", "Threads")],
    "open to": oct(os.stat(".").st_mode), "files": sorted(os.listdir("."))
}}))
open("out", "w").write(sys.argv[1])
6 * 7
"""


def awaited(code: str, *, warms_up: bool = True, waited_s: float = 0.5, **options: Any) -> Result:
    """Run in a container that was made ahead, and has waited."""
    if warms_up:
        cloche.run("1", **options)
    fill_pool(settle_s=waited_s)
    result = cloche.run(code, **options)
    assert result.meta["start"] == "pooled"
    return result


def looks_the_same(options: dict[str, Any], stdin: bytes) -> None:
    """Run the same program cold and in a guest that waited, and compare all that it sees."""
    asked = {**options, "argv": ["a", "b c"], "env": {"A": "b"}, "files": {"in": b"1"}, "stdin": stdin}
    cold = cloche.run(LOOK, **asked)
    warm = awaited(LOOK, warms_up=False, waited_s=WAITED_S, **asked)
    seen, expected = json.loads(warm.stdout), json.loads(cold.stdout)
    assert (cold.meta["start"], seen.pop("age") > LEAST_AGE_S > expected.pop("age")) == ("cold", True)
    assert seen == expected
    assert "Archive" not in seen["finders"]  # which finds our own modules
    assert (warm.value, warm.status, [one.path for one in warm.files]) == (42, "ok", ["out"])
    assert (seen["input"], warm.stderr, warm.enforcement) == (stdin.decode(), "", cold.enforcement)
    assert warm.usage is not None
    assert (warm.usage.cpu_user_s or 0.0) < warm.duration + MOST_CPU_S  # of the run alone; gVisor counts what could run


def test_a_program_cannot_tell_that_it_was_awaited(docker: Daemon) -> None:
    """Its interpreter was there before it, and has nothing more, nothing less, and no other state than a new one."""
    looks_the_same({"backend": "docker", "level": "jail", "image": docker.image("cloche-test:python")}, b"")


@pytest.mark.soak  # for its length; the next one is on gVisor too
def test_a_program_on_gvisor_cannot_either(gvisor: Daemon) -> None:
    """There it is worth most."""
    looks_the_same({"backend": "gvisor", "image": gvisor.image("cloche-test:python")}, b"said")


@pytest.mark.soak
@pytest.mark.usefixtures("gvisor_alone")
def test_a_program_on_gvisor_alone_cannot_either() -> None:
    """Nor without a daemon."""
    looks_the_same({"backend": "gvisor"}, b"said")


@pytest.fixture
def options(docker: Daemon) -> dict[str, Any]:
    """Say where the other tests run."""
    return {"backend": "docker", "level": "jail", "image": docker.image("cloche-test:python")}


def kill_waiting(docker: Daemon, container: str) -> bool:
    """Kill the guest that waits in a container, where there is nothing but that and the first process."""
    try:
        user = docker.docker("inspect", "--format", "{{.Config.User}}", container).strip()
    except subprocess.CalledProcessError:
        return False  # it is gone
    words = docker.words("exec", "--user", user, container, "sh", "-c", "kill -9 -1")
    return subprocess.run(words, capture_output=True, check=False).returncode == 0


def test_a_guest_that_was_killed_is_not_missed(docker: Daemon, options: dict[str, Any]) -> None:
    """Its run is another guest's, forked when it comes; standard input and files are there."""
    cloche.run("1", **options)
    fill_pool(settle_s=3)
    killed = [kill_waiting(docker, container) for container in docker.containers()]
    assert any(killed)  # the first container may still be there
    result = cloche.run(f"{AGE}\nprint(age_s, input(), open('in').read())", stdin=b"x\n", files={"in": b"y"}, **options)
    age_s, *said = result.stdout.split()
    assert (result.meta["start"], result.status, said) == ("pooled", "ok", ["x", "y"])
    assert float(age_s) < LEAST_AGE_S


def test_siblings_have_random_numbers_of_their_own(options: dict[str, Any]) -> None:
    """Those of modules that were loaded before they were forked, too, and hashes."""
    asked = {**options, "preload": ["random", "ssl", "uuid"]}
    code = "import os, random, ssl, uuid\nprint(random.random(), ssl.RAND_bytes(8), uuid.uuid4(), hash('a'), sep='\\n')"
    drawn = [awaited(code, warms_up=not number, **asked).stdout.splitlines() for number in range(2)]
    drawn.append(cloche.run(code, warm=False, **asked).stdout.splitlines())
    assert all(len(set(kind)) == len(drawn) for kind in zip(*drawn, strict=True)), drawn


def test_limits_hold_for_a_guest_that_waited(docker: Daemon, options: dict[str, Any]) -> None:
    """Time and memory end it with what it said, as its own signal does; what it may use it can use."""
    asked = {**options, "memory": "64m"}
    endless = f"{AGE}\nprint(age_s > {LEAST_AGE_S}, flush=True)\nimport time; time.sleep(60)"
    late = awaited(endless, timeout=10, waited_s=WAITED_S, **asked)
    assert (late.status, late.stdout, late.exit_code) == (Status.TIMEOUT, "True\n", -1)
    greedy = awaited("print(1, flush=True)\ndata = bytearray(100 << 20)", warms_up=False, **asked)
    assert (greedy.status, greedy.stdout) == (Status.OUT_OF_MEMORY, "1\n")
    killed = awaited("import os; data = bytearray(40 << 20); os.kill(os.getpid(), 9)", warms_up=False, **asked)
    assert (killed.status, killed.exit_code) == (Status.SIGNALED, 137)


def test_what_a_waiting_guest_cannot_run_starts_anew(options: dict[str, Any]) -> None:
    """Another language, a bare command, and variables that take effect when an interpreter starts."""
    cloche.run("1", **options)
    of_a_shell = awaited("ls -d /proc/[0-9]*; exit 3", language="bash", warms_up=False, **options)
    assert (of_a_shell.stdout.count("/proc/"), of_a_shell.exit_code) == (2, 3)  # the first process and the shell
    code, env = "print(hash('a'))", {"PYTHONHASHSEED": "0"}
    outside = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert awaited(code, env=env, **options).stdout == outside.stdout
    with cloche.Sandbox(live=False, **options) as sandbox:
        sandbox.run("open('f', 'w').write('1')")
        for pause_s in (2, 4, 8, 16):  # its next container comes in the background
            time.sleep(pause_s)
            said = sandbox.run(f"{AGE}\nprint(age_s > {LEAST_AGE_S}, open('f').read())").stdout
            if said == "True 1\n":
                break
        assert said == "True 1\n"
        assert sandbox.session().run("open('f').read()").value == "1"


REACH = """
import os
for path in ("mem", "environ", "fd/0", "fd/1", "maps"):
    for mode in ("rb", "wb"):
        try: open(f"/proc/1/{path}", mode).close()
        except OSError: continue
        print("reached", path, mode)
for fd in range(3, 1024):
    try: print(fd, os.write(fd, b'[0.0, 0.0]'))
    except OSError: pass
os.write(1, b"r\\x00\\x00\\x00\\x02{}")
"""


def test_a_guest_that_waited_reaches_nothing_of_the_first_process(options: dict[str, Any]) -> None:
    """Where its order came from, and where it said that it had begun, are closed; the value's pipe is what is left."""
    result = awaited(REACH, **options)
    assert (result.status, result.stdout_bytes) == (Status.OK, b"1023 10\nr\x00\x00\x00\x02{}")
