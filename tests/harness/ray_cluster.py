"""Ray nodes on one machine, each with an address, a process table, a `/tmp` and a share of the processors of its own.

Theory of operation: `RayCluster` starts this module as a process, the *switch*, which has a network namespace with a
bridge. A node is its child in new namespaces (network, process ids, mounts), joined to the bridge by a veth pair. To
kill a node is to kill its pid 1; to cut its cable is to set the bridge's end of the pair down. The switch lives as long
as its standard input is open, and every node dies with it, so a test that is killed leaves nothing that runs.
"""

from __future__ import annotations

import itertools
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .namespace_calls import ROOT, NamespaceCalls

PR_SET_PDEATHSIG = 1
SHARE, PERIOD_US = 0.5, 100_000  # a run may have no more than its node: the default of `cpus`
NETWORK, PORT, FIRST = "10.77.0.", 6379, 1
STARTED_S, JOINED_S = 120.0, 60.0
GROUPS = Path("/sys/fs/cgroup/cpu" if Path("/sys/fs/cgroup/cpu").is_dir() else "/sys/fs/cgroup")
USES = Path("/sys/fs/cgroup/cpuacct" if Path("/sys/fs/cgroup/cpuacct").is_dir() else "/sys/fs/cgroup")
# Failures are noticed within seconds; nothing is reported to anybody.
RAY_SETTINGS = {
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "2",
    "RAY_grpc_client_keepalive_time_ms": "2000",
    "RAY_grpc_client_keepalive_timeout_ms": "2000",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_SCHEDULER_EVENTS": "0",
    "RAY_AUTH_MODE": "token",
    "RAY_enable_metrics_collection": "false",
    "RAY_prestart_worker_first_driver": "false",
    "RAY_num_prestart_python_workers": "0",
}
QUIET = ("--disable-usage-stats", "--object-store-memory=80000000", "--num-cpus=2", "--memory=4000000000")


class RayCluster(NamespaceCalls):
    """Hold a cluster of Ray: `start`, `kill`, `cut`, `mend` nodes, and run programs on one of them.

    `variables` are those of `ray start`, `head` further words of it on the head. A `bare` node has no Ray at first.
    """

    first = FIRST

    def __init__(
        self,
        python: str = sys.executable,
        variables: Mapping[str, str] | None = None,
        *,
        head: Sequence[str] = (),
        bare: bool = False,
    ):
        self.folder = Path(tempfile.mkdtemp(prefix="cr-", dir="/tmp"))  # names of sockets are short
        self.python, self.pids = python, dict[int, int]()
        self._switch = subprocess.Popen(
            [sys.executable, "-m", __name__, str(self.folder), python, json.dumps([variables or {}, head, bare])],
            cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip

    def __enter__(self) -> RayCluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def address(self) -> str:
        """Return the address of Ray's head."""
        return f"{NETWORK}{FIRST}:{PORT}"

    def start(self, *numbers: int, variables: Mapping[str, str] | None = None) -> None:
        """Start nodes; the first is the head, without which the others do not start. They have further variables."""
        pids = self._ask("start", number=numbers, variables=variables or {})["pids"]
        self.pids |= dict(zip(numbers, pids, strict=True))

    def kill(self, number: int) -> None:
        """Send SIGKILL to everything on a node, at once."""
        self._ask("kill", number=number)
        del self.pids[number]

    def cut(self, number: int) -> None:
        """Take the cable out of a node: not a packet comes or goes."""
        self._ask("cable", number=number, state="down")

    def mend(self, number: int) -> None:
        """Put the cable back."""
        self._ask("cable", number=number, state="up")

    def kill_server(self, number: int) -> None:
        """Kill `cloche node` of a node, which its supervisor then starts again."""
        code = "from tests.harness.fleet_calls import kill_server; kill_server()"
        self.run([self.python, "-c", code], number, check=True)

    @property
    def groups(self) -> list[str]:
        """Return the control groups of the nodes that count their processor time."""
        return [str(USES / f"cloche-ray-{self._switch.pid}-{number}") for number in self.pids]

    def environment(self) -> dict[str, str]:
        """Return what a program on a node needs to join the cluster."""
        modules = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        return _environment(self.folder) | {"RAY_ADDRESS": self.address, "PYTHONPATH": modules}

    def command(self, words: Sequence[str], number: int = FIRST) -> list[str]:
        """Return the command that runs a program on a node."""
        return ["nsenter", f"--target={self.pids[number]}", "--net", "--mount", "--pid", "--", *words]

    def close(self) -> None:
        """End all nodes, and remove what they had."""
        if self._switch.stdin is not None:
            self._switch.stdin.close()
        self._switch.wait(60)
        if self._switch.stdout is not None:
            self._switch.stdout.close()

    def _ask(self, verb: str, **values: Any) -> dict[str, Any]:
        assert self._switch.stdin is not None
        assert self._switch.stdout is not None
        print(json.dumps({"do": verb, **values}), file=self._switch.stdin, flush=True)
        answer: dict[str, Any] = json.loads(self._switch.stdout.readline() or '{"error": "the switch has ended"}')
        if "error" in answer:
            raise AssertionError(answer["error"])
        return answer


def _environment(folder: Path) -> dict[str, str]:
    """Return the environment of all programs of a cluster: nothing of Ray's goes to this user's own folders."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "XDG_", "CLOCHE_"))}
    home = str(folder / "own" / "home")
    own = {"HOME": home, "XDG_STATE_HOME": f"{home}/state", "XDG_RUNTIME_DIR": f"{home}/runtime"}
    own |= {"RAY_TMPDIR": str(folder / "own"), "RAY_AUTH_TOKEN_PATH": str(folder / "token"), "TMPDIR": f"{home}/tmp"}
    return kept | RAY_SETTINGS | own


class _Node:
    """Hold a node on the side of the switch: its process, its pid 1, its cable and its control group."""

    def __init__(self, folder: Path, number: int, python: str, options: tuple[dict[str, str], list[str], bool]):
        self.number, self._folder, self._python = number, folder, python
        self.variables, self._head, self._is_bare = options
        self.cable = f"node{number}"
        self._group, self._use = (place / f"cloche-ray-{os.getpid()}-{number}" for place in (GROUPS, USES))
        self.outer = self.pid = self._told = 0
        self.namespace = ""

    def start(self) -> None:
        """Make the namespaces, plug in the cable, and let Ray start."""
        for group in (self._group, self._use):
            group.mkdir(exist_ok=True)
        ours, theirs = os.pipe()
        told, tell = os.pipe()
        if (outer := os.fork()) == 0:
            os.close(ours)
            os.close(tell)
            _guarded(lambda: self._make_namespaces(theirs, told))
        os.close(theirs)
        os.close(told)
        self.outer, self._told = outer, ours
        self.pid = int(os.read(ours, 20).split(b"\n")[0])
        self.namespace = os.readlink(f"/proc/{self.pid}/ns/pid").partition("[")[2].rstrip("]")
        _ip(f"link add {self.cable} type veth peer name eth0 netns {self.pid}", f"link set {self.cable} master bridge")
        self.cable_is("up")
        os.write(tell, b"x")
        os.close(tell)

    def wait(self) -> None:
        """Wait until Ray has started, then reduce the node to its share."""
        with os.fdopen(self._told) as lines:
            if (text := lines.read()) != "ready":
                raise AssertionError(f"node {self.number}: {text}")
        if (quota := self._group / "cpu.cfs_quota_us").exists():
            quota.write_text(str(int(SHARE * PERIOD_US)))
        else:
            (self._group / "cpu.max").write_text(f"{int(SHARE * PERIOD_US)} {PERIOD_US}")

    def cable_is(self, state: str) -> None:
        """Set the bridge's end of the cable up or down."""
        _ip(f"link set {self.cable} {state}")

    def kill(self) -> None:
        """Kill pid 1, with which all processes of the node die, and remove the groups."""
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.outer, 0)
        for folder, _, _ in itertools.chain(*(os.walk(group, topdown=False) for group in (self._group, self._use))):
            remove_group(Path(folder))

    def _make_namespaces(self, told: int, go: int) -> None:
        from cloche.jail.syscalls import CLONE_NEWNET, CLONE_NEWNS, CLONE_NEWPID, prctl, unshare

        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        for group in (self._group, self._use):
            (group / "cgroup.procs").write_text(str(os.getpid()))
        unshare(CLONE_NEWNET | CLONE_NEWNS | CLONE_NEWPID)
        if (pid := os.fork()) == 0:
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            self._be_first_process(told, go)
        os.write(told, f"{pid}\n".encode())
        os.close(told)
        os.waitpid(pid, 0)

    def _be_first_process(self, told: int, go: int) -> None:
        """Mount what is the node's own, start Ray, and reap."""
        os.read(go, 1)
        own = self._folder / "own"
        disk = self._folder / f"disk{self.number}"
        (disk / "home" / "tmp").mkdir(parents=True, exist_ok=True)
        (disk / "home" / "runtime").mkdir(mode=0o700, exist_ok=True)
        mounts = ["--make-rprivate /", f"--bind {disk} {own}", "-t proc proc /proc", "-t tmpfs tmpfs /dev/shm"]
        subprocess.run(["sh", "-ec", "\n".join(f"mount {words}" for words in mounts)], check=True)
        _ip("link set lo up", "link set eth0 up", f"address add {NETWORK}{self.number}/24 dev eth0")
        _ip(f"route add default via {NETWORK}254")  # nobody: with a route Ray finds this node's address by itself
        done = subprocess.run(
            ["true"] if self._is_bare else self._ray(), env=_environment(self._folder) | self.variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, timeout=STARTED_S,
        )  # fmt: skip
        os.write(told, b"ready" if done.returncode == 0 else f"ray start: {done.stdout}".encode()[-4000:])
        os.close(told)
        while True:
            try:
                os.wait()
            except ChildProcessError:
                time.sleep(1)

    def _ray(self) -> list[str]:
        own = f"--node-ip-address={NETWORK}{self.number}"
        words = [str(Path(self._python).parent / "ray"), "start", own, *QUIET, "--include-log-monitor=false"]
        if self.number == FIRST:
            return [
                *words,
                "--head",
                f"--port={PORT}",
                "--include-dashboard=false",
                f"--temp-dir={self._folder}/own/ray",
                *self._head,
            ]
        return [*words, f"--address={NETWORK}{FIRST}:{PORT}"]


def _guarded(action: Any) -> None:
    """Run the rest of a forked child, which never returns."""
    try:
        action()
    except BaseException as error:
        print(repr(error), file=sys.stderr)
    finally:
        os._exit(1)


def _ip(*lines: str) -> None:
    subprocess.run(["ip", "-batch", "-"], input="\n".join(lines), text=True, check=True)


def remove_group(folder: Path) -> None:
    """Remove a control group once its last process has ended."""
    ends = time.monotonic() + 10
    while folder.exists():
        try:
            folder.rmdir()
        except OSError:
            if time.monotonic() > ends:
                raise
            time.sleep(0.01)


def _remove_left(namespaces: Iterable[str]) -> None:
    """Remove the control groups of sandboxes of killed nodes, which have a pid namespace's number in their names."""
    marks = [f"-{namespace}-" for namespace in namespaces]
    for folder, _, _ in os.walk("/sys/fs/cgroup", topdown=False):
        name = os.path.basename(folder)
        if name.startswith("cloche-") and any(mark in name for mark in marks):
            remove_group(Path(folder))


def main(folder: str, python: str, options: str) -> None:
    """Be the switch until standard input ends."""
    from cloche.jail.syscalls import CLONE_NEWNET, unshare

    place, nodes, made = Path(folder), dict[int, _Node](), set[str]()

    def make(number: int) -> _Node:
        return _Node(place, number, python, json.loads(options))

    (place / "own").mkdir()
    (place / "token").write_text(secrets.token_hex(32))
    (place / "token").chmod(0o600)
    unshare(CLONE_NEWNET)
    _ip("link add bridge type bridge", "link set bridge up", "link set lo up")
    try:
        for line in sys.stdin:
            answer = _obey(nodes, make, json.loads(line))
            made |= {node.namespace for node in nodes.values() if node.namespace}
            print(json.dumps(answer), flush=True)
    finally:
        for node in nodes.values():
            node.kill()
        _remove_left(made)
        shutil.rmtree(place, ignore_errors=True)


def _obey(nodes: dict[int, _Node], make: Callable[[int], _Node], order: Mapping[str, Any]) -> dict[str, Any]:
    number = order["number"]
    try:
        match order["do"]:
            case "start":
                started = {each: make(each) for each in number}
                nodes |= started
                for node in started.values():
                    node.variables |= order["variables"]
                    node.start()
                for node in started.values():
                    node.wait()
                return {"pids": [node.pid for node in started.values()]}
            case "kill":
                nodes.pop(number).kill()
            case "cable":
                nodes[number].cable_is(order["state"])
    except Exception as error:
        return {"error": f"{order}: {error!r}"}
    return {}


if __name__ == "__main__":
    main(*sys.argv[1:])
