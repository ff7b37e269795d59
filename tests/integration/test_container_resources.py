"""Memory and processes at level `confined`, in a plain container with docker's defaults: as root and as a user.

One container for each of them tries everything, beside one in which the same user has many processes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.harness.containers import Daemon, lay_out, run_inside

pytestmark = pytest.mark.root
# Whom nobody else on the machine is.
USERS = {"root": "0:0", "user": f"{64_300 + os.getpid() % 200}:61234"}
SLEEPERS, OTHERS = 200, "cloche-test-sleepers"
SLEEPS = f"""
import os, time
for _ in range({SLEEPERS}):
    if os.fork() == 0:
        time.sleep(600)
time.sleep(600)
"""
# 40 MiB that forks share, a file of 60 MiB that all of them map, 10 MiB that are meant to be shared: a tree has 50 MiB
# of its own then, and resident sizes that come to 700.
SHARES = """
import ctypes, mmap, os, signal, sys, time
print(ctypes.CDLL(None).prctl(4, 0) if "undumpable" in sys.argv else 0)
held = b"x" * (40 << 20)
with open("file", "wb") as file:
    for _ in range(60):
        file.write(bytes(1 << 20))
mapped = mmap.mmap(os.open("file", os.O_RDONLY), 60 << 20, prot=mmap.PROT_READ)
shared = mmap.mmap(-1, 10 << 20)
shared.write(bytes(10 << 20))
ours, theirs = os.pipe()
for _ in range(6):
    if os.fork() == 0:
        sum(mapped[at] + held[at % (40 << 20)] + shared[at % (10 << 20)] for at in range(0, 60 << 20, 4096))
        os.write(theirs, b"x")
        signal.pause()
[os.read(ours, 1) for _ in range(6)]
time.sleep(0.3)  # in which it is looked at many times: that nothing happens has no event
print("lived", flush=True)
more = b"x" * (60 << 20) if "more" in sys.argv else b""
if more:
    signal.pause()
"""
# Ten times 60 MiB, in a container that has 256.
RUNS_OUT = """
import os, signal
pipes = []
for _ in range(10):
    ours, theirs = os.pipe()
    if os.fork() == 0:
        held = b"x" * (60 << 20)
        os.write(theirs, b"x")
        signal.pause()
    os.close(theirs)
    pipes.append(ours)
print([os.read(ours, 1) for ours in pipes].count(b""))
"""
FORKS = """
import os, signal, sys, threading
children = 0
try:
    while children < 100:
        if os.fork() == 0:
            signal.pause()
        children += 1
except OSError as error:
    print(children, error.errno)
try:
    threading.Thread(target=signal.pause).start()
except RuntimeError:
    print("no thread")
os._exit(3 if sys.stdout.flush() is None else 0)
"""
TRIES = """
import json, os, sys, cloche
programs = json.loads(sys.argv[1])
held = os.urandom(1 << 20) * 110  # the caller would be worth its end

def tell(name, **options):
    result = cloche.run(programs[name], timeout=60, **options)
    controls = result.enforcement.as_dict()["controls"]
    return {"stdout": result.stdout.split(), "status": result.status, "exit_code": result.exit_code,
            "hits": dict(result.enforcement.hits), "level": str(result.enforcement.level), "pids": controls["pids"],
            "peak": result.usage.peak_memory_bytes >> 20, "stderr": result.stderr[-200:]}

found = {"runs out": tell("runs out", memory="1g")}
held = b""
if "all" in sys.argv:
    for word in ("shares", "undumpable", "more"):
        found[word] = tell("shares", memory="80m", argv=[word])
    found["forks"] = tell("forks", memory="128m", pids=16)
    found["one after the other"] = tell("one after the other", memory="128m", pids=16)
print(json.dumps(found))
"""
PROGRAMS = {
    "shares": SHARES, "runs out": RUNS_OUT, "forks": FORKS,
    "one after the other": "import subprocess\nfor _ in range(40): subprocess.run(['true'], check=True)",
}  # fmt: skip


def tried(docker: Daemon, project: Path, user: str, *what: str) -> dict[str, Any]:
    """Return what a container's caller lived to tell."""
    words = ["python3", "-c", TRIES, json.dumps(PROGRAMS), *what]
    options = [f"--user={USERS[user]}", "--memory=256m", "--memory-swap=256m"]
    image = docker.image("cloche-test:host")
    done = run_inside(docker, project, words, image=image, options=options, timeout_s=300)
    assert done.returncode == 0, (done.returncode, done.stderr[-2000:])
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give what is shown to a container."""
    return lay_out(tmp_path_factory.mktemp("project"))


@pytest.fixture(scope="module")
def both(docker_daemon: Daemon, project: Path) -> Iterator[dict[str, dict[str, Any]]]:
    """Give what the runs of both came to, beside a container with many processes of the same user."""
    image = docker_daemon.image("cloche-test:host")
    words = ["run", "--detach", "--rm", f"--name={OTHERS}", f"--user={USERS['user']}", image]
    docker_daemon.docker(*words, "python3", "-c", SLEEPS)
    try:
        with ThreadPoolExecutor() as pool:
            found = pool.map(lambda user: tried(docker_daemon, project, user, "all"), USERS)
            yield dict(zip(USERS, found, strict=True))
    finally:
        docker_daemon.docker("rm", "--force", OTHERS)


@pytest.fixture(params=USERS)
def found(request: pytest.FixtureRequest, both: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Give what the runs of one of them came to."""
    return {**both[request.param], "user": request.param}


def assert_guest_was_killed(told: dict[str, Any]) -> None:
    """Check that only processes of the guest's were, of which the first lives: 256 MiB have room for two more."""
    assert (told["level"], told["status"]) == ("confined", "ok"), told
    assert int(told["stdout"][0]) >= 6


def test_the_guest_is_killed_when_the_container_runs_out_of_memory(found: dict[str, Any]) -> None:
    """Those of its processes that are too many: neither the caller, which has more, nor what builds the sandbox."""
    assert_guest_was_killed(found["runs out"])


@pytest.mark.soak
@pytest.mark.parametrize("user", USERS)
def test_the_guest_is_killed_each_time(docker_daemon: Daemon, project: Path, user: str) -> None:
    """The same, twenty times as root and as a user."""
    for _ in range(20):
        assert_guest_was_killed(tried(docker_daemon, project, user)["runs out"])


@pytest.mark.parametrize("way", ["shares", "undumpable"])
def test_no_run_is_killed_for_memory_that_it_does_not_have(found: dict[str, Any], way: str) -> None:
    """What forks share counts once, and files that are mapped do not; a guest that hides is told that it does."""
    assert (found[way]["status"], found[way]["stdout"]) == ("ok", ["0", "lived"]), found[way]


def test_a_run_is_killed_for_the_memory_that_it_has(found: dict[str, Any]) -> None:
    """The sum is kept by PSS: 60 MiB more are too much, beside the same shared and mapped memory."""
    assert (found["more"]["status"], found["more"]["stdout"]) == ("out_of_memory", ["0", "lived"]), found["more"]


def test_processes_are_counted_in_the_tree(found: dict[str, Any]) -> None:
    """Not over the user's others, 200 in another container: there is room for all that a run may have, and no more."""
    told = found["forks"]
    assert told["stdout"] == ["15", "11", "no", "thread"], told
    assert (told["status"], told["exit_code"]) == ("pids_limit", 3)
    assert told["pids"]["state"] == {"root": "enforced", "user": "partial"}[found["user"]]


def test_what_has_ended_makes_room(found: dict[str, Any]) -> None:
    """More processes than the limit, one after the other."""
    assert found["one after the other"]["status"] == "ok", found["one after the other"]
