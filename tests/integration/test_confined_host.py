"""A host that refuses user namespaces, made for real in the two ways that hosts do it (see `refusing.py`)."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import pytest

REFUSING = Path(__file__).parents[1] / "harness/programs/refusing.py"
WAYS = ("seccomp", "sysctl")
DATAGRAMS = (socket.AF_UNIX, socket.SOCK_DGRAM)

RUN = """
import json, sys, cloche
try:
    result = cloche.run(**json.loads(sys.argv[1]))
    report = {"stdout": result.stdout, "status": str(result.status), "enforcement": result.enforcement.as_dict()}
except cloche.ClocheError as error:
    report = {"error": type(error).__name__, "message": str(error)}
print(json.dumps(report))
"""


def refused(way: str, *command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a Python command where user namespaces are refused."""
    words = [sys.executable, str(REFUSING), way, sys.executable, *command]
    return subprocess.run(words, capture_output=True, text=True, check=False, timeout=60, cwd=cwd)


def run(way: str, cwd: Path, **keywords: object) -> dict[str, Any]:
    """Call `cloche.run` there and return its report."""
    done = refused(way, "-c", RUN, json.dumps(keywords), cwd=cwd)
    report: dict[str, Any] = json.loads(done.stdout or "null") or {"failed": done.stderr}
    return report


@pytest.mark.parametrize("way", WAYS)
def test_user_namespaces_really_are_refused_there(way: str, tmp_path: Path) -> None:
    """The premise: no process there can make one."""
    code = "from cloche.jail.syscalls import clone, unshare; unshare(0x10000000)"
    assert "Error" in refused(way, "-c", code, cwd=tmp_path).stderr


@pytest.mark.parametrize("way", WAYS)
def test_a_plain_run_works_and_says_what_held(way: str, tmp_path: Path) -> None:
    """Code runs at level confined, and the result says so with what is less than at level jail."""
    report = run(way, tmp_path, code="print(6 * 7)")
    assert (report.get("stdout"), report.get("status")) == ("42\n", "ok"), report
    assert report["enforcement"]["level"] == "confined"
    rows = report["enforcement"]["controls"]
    assert (rows["network"]["state"], rows["syscalls"]["state"]) == ("enforced", "enforced")
    assert rows["filesystem"]["state"] == "partial"
    assert rows["filesystem"]["reason"]


MOVES = (
    "import os; os.mkdir('a'); os.mkdir('b'); open('a/x', 'w').close(); os.link('a/x', 'b/y'); os.rename('a/x', 'b/x')"
)


@pytest.mark.parametrize("way", WAYS)
def test_files_move_between_folders_there(way: str, tmp_path: Path) -> None:
    """A guest renames and links from one folder of its own to another, as uv and git do."""
    report = run(way, tmp_path, code=f"{MOVES}; print(sorted(os.listdir('b')))")
    assert report.get("stdout") == "['x', 'y']\n", report


@pytest.mark.parametrize("way", WAYS)
def test_requiring_a_jail_is_refused_with_the_remedy(way: str, tmp_path: Path) -> None:
    """Less than what is required is an error that says why and what to do, never a silent fallback."""
    report = run(way, tmp_path, code="print(1)", require="jail")
    assert report.get("error") == "BackendUnavailable", report
    assert "namespaces are refused" in report["message"]
    assert "To fix it:" in report["message"]
    if way == "sysctl":
        assert "user.max_user_namespaces" in report["message"]


@pytest.mark.parametrize("way", WAYS)
def test_the_doctor_reports_confined_with_the_remedy(way: str, tmp_path: Path) -> None:
    """The level is measured, the reason is the kernel's answer, and the exit code is 0: code can run."""
    done = refused(way, "-m", "cloche", "doctor", "--json", cwd=tmp_path)
    data = json.loads(done.stdout)
    assert (done.returncode, data["level"]) == (0, "confined")
    assert "namespaces are refused" in data["reason"]
    assert data["remedy"]
    statuses = {trial["level"]: trial["status"] for trial in data["trials"]}
    assert statuses == {"jail": "refused", "confined": "ok", "process": "ok"}
    features = {feature["name"]: feature for feature in data["features"]}
    assert not features["user namespace"]["works"]
    assert features["user namespace"]["remedy"] == data["remedy"]
    assert features["landlock"]["works"]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("attempt", "code"),
    [
        ("read the host's files", "open('/proc/1/status').read()"),
        ("open a socket", "import socket; socket.socket()"),
        ("write outside", "open('/var/tmp/cloche-was-here', 'w')"),
        ("list the host's root", "import os; os.listdir('/')"),
        ("signal the parent's parent", "import os; os.kill(1, 0)"),
    ],
)
def test_what_confined_promises_holds_there(way: str, attempt: str, code: str, tmp_path: Path) -> None:
    """Without namespaces, Landlock and the filter still refuse this."""
    report = run(way, tmp_path, code=f"try:\n    {code}\nexcept OSError as e:\n    print('refused', e.errno)")
    assert report.get("stdout", "").startswith("refused"), f"{attempt}: {report}"


ROOT_OF_NOTHING = f"""
import os, sys
sys.path.insert(0, {str(REFUSING.parent)!r})
import refusing
refusing.enter_namespace("0 0 1", "0 0 1")
os.execvp(sys.executable, [sys.executable, "-c", {RUN!r}, sys.argv[1]])
"""


@pytest.mark.root
@pytest.mark.parametrize(("keywords", "error"), [({}, "BackendUnavailable"), ({"level": "process"}, None)])
def test_no_level_below_confined_is_taken_by_itself(
    keywords: dict[str, str], error: str | None, tmp_path: Path
) -> None:
    """Where root can neither make a jail nor give up its id, code runs at level process by name, or not at all."""
    words = [sys.executable, "-c", ROOT_OF_NOTHING, json.dumps({"code": "print(1)", **keywords})]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60, cwd=tmp_path)
    assert json.loads(done.stdout).get("error") == error, done.stderr


@pytest.mark.parametrize("level", ["confined", "process"])
def test_a_workspace_needs_no_locks(level: str, tmp_path: Path) -> None:
    """Some file systems have none; then nobody takes the folder for one that was left."""
    assert run("locks", tmp_path, code="print(1)", level=level)["stdout"] == "1\n"


BY_SOCKETS = """
import contextlib, fcntl, os, socket, sys
from cloche.jail import seccomp_notify
from cloche.jail.setup import privileges, seccomp
from cloche.jail.steps import perform_calls

path, name = sys.argv[1], "\\0" + sys.argv[2]
datagrams = lambda kind: socket.socketpair(socket.AF_UNIX, kind)[0]
ways = {
    "a path": lambda: datagrams(socket.SOCK_DGRAM).sendto(b"?", path),
    "a path, raw": lambda: datagrams(socket.SOCK_RAW).sendto(b"?", path),
    "a path, with flags": lambda: datagrams(socket.SOCK_DGRAM | socket.SOCK_NONBLOCK).sendmsg([b"?"], [], 0, path),
    "an abstract name": lambda: datagrams(socket.SOCK_DGRAM).sendto(b"?", name),
    "a name of its own": lambda: socket.socketpair()[0].bind(name + "-taken"),
    "a file of its own": lambda: socket.socketpair()[0].bind(path + "-taken"),
    "interfaces": lambda: fcntl.ioctl(socket.socketpair()[0], 0x8912, bytes(16)),
    "a signal about a file": lambda: fcntl.fcntl(0, fcntl.F_SETOWN, os.getppid()),
}
if sys.argv[3] == "inside":
    perform_calls([privileges.forbid_new_privileges()])
    seccomp_notify.install(seccomp.build_filter(os.uname().machine, confined=True))
near, far = socket.socketpair()
near.sendall(b"pairs work")
assert far.recv(64) == b"pairs work"
for what, way in ways.items():
    with contextlib.suppress(PermissionError):
        way()
        print(what)
"""


@pytest.mark.both_users
def test_the_filter_alone_lets_no_pair_of_sockets_reach_anybody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where Landlock has no scopes (before Linux 6.12), the filter holds what works without it."""
    path, name = tmp_path / "service", f"cloche-test-{uuid.uuid4().hex}"
    with socket.socket(*DATAGRAMS) as by_path, socket.socket(*DATAGRAMS) as by_name:
        monkeypatch.chdir(tmp_path)  # a path of a socket is short
        by_path.bind(path.name)
        by_name.bind(f"\0{name}")
        found = {}
        for where in ("outside", "inside"):
            words = [sys.executable, "-c", BY_SOCKETS, path.name, name, where]
            done = subprocess.run(
                words, capture_output=True, text=True, check=True, timeout=60, stdin=subprocess.DEVNULL
            )
            found[where] = done.stdout.splitlines()
            (tmp_path / "service-taken").unlink(missing_ok=True)
    assert (len(found["outside"]), found["inside"]) == (8, [])


WITH_A_LISTENER = """
import os, resource, sys
from cloche.jail import seccomp_notify
from cloche.jail.setup import privileges
from cloche.jail.steps import perform_calls
import cloche
perform_calls([privileges.forbid_new_privileges()])
listener, _ = seccomp_notify.install((0x7FFF0000_00_00_0006).to_bytes(8, "little"))
assert listener >= 0
result = cloche.run(sys.argv[1], level="confined")
print(result.stdout, result.stderr, end="")
"""
FORKS = """
import os, resource, subprocess
if os.fork() == 0:
    os._exit(3)
print(os.wait()[1] >> 8, subprocess.run(["true"]).returncode)
assert 0 < resource.getrlimit(resource.RLIMIT_NPROC)[0] < 1 << 31
"""


@pytest.mark.both_users
def test_where_somebody_else_answers_seccomp_a_guest_forks_and_the_kernel_counts(tmp_path: Path) -> None:
    """As in some container runtimes: a filter can have one listener, so nobody asks there before a fork."""
    done = subprocess.run(
        [sys.executable, "-c", WITH_A_LISTENER, FORKS], capture_output=True, text=True, check=False, timeout=60,
        cwd=tmp_path,
    )  # fmt: skip
    assert (done.stdout.split(), done.stderr) == (["3", "0"], ""), done


def test_without_descriptors_of_processes_there_is_no_level(tmp_path: Path) -> None:
    """As in gVisor: the error names the call and what to do, and is no failure in the middle of a run."""
    report = run("pidfd", tmp_path, code="print(1)")
    assert report.get("error") == "BackendUnavailable", report
    assert "processes cannot be waited for: pidfd_open: " in report["message"]
    assert "use Linux 5.3 or later" in report["message"]
