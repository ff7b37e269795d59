"""The supervisor of a node: an actor of Ray that keeps one `cloche node` alive as a process of its own.

Ray sends this module's text to the node (`register_pickle_by_value`), so it is the standard library alone, and works
where Cloche is not installed. The server is not a child of the worker, which Ray kills: it is an orphan in a session of
its own. A file in the state folder says which process it is, so the next actor finds it again.
"""

from __future__ import annotations

import contextlib
import ipaddress
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SERVES_S, ENDS_S, LOOK_S, AGAIN_S = 60.0, 10.0, 0.5, 2.0
ABANDONED_S = 60.0  # the least time without a question of a coordinator after which all of the node ends
MOST_LOG = 1 << 20
BLOCK = "cloche-block:"  # names of placement groups begin with it
UNSEEN = ("RAY_", "CLOCHE_", "SANDBOX_TYPE")  # variables that no server of a node gets
# Runs in a fresh interpreter: become an orphan in its own session, without the worker's signal mask and OOM score.
STARTER = """
import os, signal, sys
if os.fork():
    os._exit(0)
os.setsid()
if os.fork():
    os._exit(0)
signal.pthread_sigmask(signal.SIG_SETMASK, [])
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD, signal.SIGPIPE):
    signal.signal(number, signal.SIG_DFL)
try:
    with open("/proc/self/oom_score_adj", "w") as score:
        score.write("0")
except OSError:
    pass
os.closerange(3, 1 << 16)
os.write(1, b"%d\\n" % os.getpid())
os.execv(sys.argv[1], sys.argv[1:])
"""


class NodeSupervisor:
    """Keep a node's server alive. `state` is what the coordinator asks for, and never waits.

    Once nobody has asked for `abandoned_s`, but `ABANDONED_S` at least, the server ends, with blocks and this actor.
    """

    def __init__(self, node: str, version: str, words: list[str], abandoned_s: float = 0.0):
        self._node, self._version, self._words = node, version, words
        self._abandoned_s = max(abandoned_s, ABANDONED_S)
        self._folder = state_folder(node)
        self._asked_at = time.monotonic()
        self._state: dict[str, object] = {}
        self._is_ended = threading.Event()
        self._thread = threading.Thread(target=self._supervise, daemon=True)
        self._thread.start()

    def state(self) -> dict[str, object]:
        """Return the server's address, certificate, boot and pid, or the reason why there is none."""
        self._asked_at = time.monotonic()
        return self._state

    def stop(self) -> None:
        """End the server, and do not start it again."""
        self._is_ended.set()
        self._thread.join(SERVES_S + ENDS_S)
        self._end_server()

    def _end_server(self) -> None:
        if running := self._running():
            end(running)
        (self._folder / "server.json").unlink(missing_ok=True)
        self._state = {"reason": "its server was ended"}

    def _supervise(self) -> None:
        while not self._is_ended.is_set():
            if time.monotonic() - self._asked_at > self._abandoned_s:
                self._end_server()
                leave(self._node)
                return
            try:
                self._state = self._look()
            except Exception as error:  # said to the coordinator, and tried again
                self._state = {"reason": f"its server does not start: {error}"}
            self._is_ended.wait(AGAIN_S if "reason" in self._state else LOOK_S)

    def _look(self) -> dict[str, object]:
        if reason := unfit(self._version):
            return {"reason": reason}
        return self._running() or self._start()

    def _running(self) -> dict[str, object]:
        """Return the server that an earlier actor or this one started, if it runs and has the same words."""
        try:
            server = json.loads((self._folder / "server.json").read_text())
        except (OSError, ValueError):
            return {}
        if server.get("began") != began(int(server["pid"])):
            return {}
        if server.get("words") != self._words:
            end(server)
            return {}
        return {name: value for name, value in server.items() if name != "words"} | {"hosts": addresses()}  # pyright: ignore[reportReturnType]

    def _start(self) -> dict[str, object]:
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        log = self._folder / "log"
        if log.exists() and log.stat().st_size > MOST_LOG:
            log.unlink()
        out = self._folder / "out"
        command = [sys.executable, "-I", "-S", "-c", STARTER, sys.executable, "-m", "cloche", "node", *self._words]
        command += ["--state", str(self._folder / "node")]
        with out.open("wb") as stdout, log.open("ab") as stderr:
            subprocess.run(
                command, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr, cwd=self._folder, check=True,
                env=environment(os.environ),
            )  # fmt: skip
        server = self._serving(out, log)
        server |= {"began": began(int(str(server["pid"])))}
        temporary = self._folder / "server.json.new"
        temporary.write_text(json.dumps(server | {"words": self._words}))
        temporary.rename(self._folder / "server.json")
        return server | {"hosts": addresses()}

    def _serving(self, out: Path, log: Path) -> dict[str, object]:
        """Wait for the line that the server prints once it serves; its process id is the line before."""
        ends = time.monotonic() + SERVES_S
        while time.monotonic() < ends and not self._is_ended.is_set():
            lines = out.read_text().split("\n")[:-1]
            if len(lines) > 1:
                server: dict[str, object] = json.loads(lines[1])
                return server
            if lines and not began(int(lines[0])):
                break
            time.sleep(0.05)
        said = log.read_text(errors="replace").strip().splitlines()
        raise RuntimeError(said[-1] if said else f"nothing was printed within {SERVES_S:g} s")


def unfit(version: str) -> str:
    """Return why this Python cannot serve for that version of Cloche, empty if it can."""
    from importlib import metadata

    try:
        installed = metadata.version("cloche")
    except metadata.PackageNotFoundError:
        installed = ""
    if installed == version:
        return ""
    has = f"has Cloche {installed}" if installed else "has no Cloche"
    return (
        f"its Python ({sys.executable}) {has}, and the fleet has {version}: install cloche[ray]=={version} in the "
        "node's image, or start the coordinator with a runtime_env that brings it"
    )


def environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a node's server: nothing of Ray's, no account of Cloche's."""
    return {name: value for name, value in variables.items() if not name.startswith(UNSEEN)}


def addresses() -> list[str]:
    """Return this machine's addresses, which no guest of any node may reach."""
    here = set()
    lines = Path("/proc/net/fib_trie").read_text().splitlines()
    for before, line in itertools.pairwise(lines):
        if "host LOCAL" in line:
            here.add(before.split()[-1])
    with contextlib.suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            here.add(str(ipaddress.IPv6Address(bytes.fromhex(line.split()[0]))))
    return sorted(text for text in here if not ipaddress.ip_address(text).is_loopback)


def leave(node: str) -> None:
    """Remove the blocks of a node, and end the actor that this runs in, for good."""
    import ray  # pyright: ignore[reportMissingImports]

    with contextlib.suppress(Exception):  # Ray's head may be gone, too
        for row in ray.util.placement_group_table().values():
            if row["name"].startswith(BLOCK) and node in (row["bundles_to_node_id"] or {}).values():
                ray.util.remove_placement_group(group_of(row))
    ray.kill(ray.get_runtime_context().current_actor, no_restart=True)


def group_of(row: Mapping[str, Any]) -> Any:  # noqa: ANN401 - a class of Ray's
    """Return the placement group of a row of Ray's table."""
    from ray._raylet import PlacementGroupID  # pyright: ignore[reportMissingImports]
    from ray.util.placement_group import PlacementGroup  # pyright: ignore[reportMissingImports]

    return PlacementGroup(PlacementGroupID.from_hex(row["placement_group_id"]))


def state_folder(node: str) -> Path:
    """Return the folder that remembers the server of a node; homes may be shared by machines, so it names this boot."""
    state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    boot = Path("/proc/sys/kernel/random/boot_id").read_text()[:8]
    return state / "cloche" / "fleet" / f"{boot}-{node}"


def began(pid: int) -> int:
    """Return when a process began, in clock ticks since the boot, 0 for one that is gone or dead."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return 0 if fields[0] in "ZX" else int(fields[19])


def end(server: Mapping[str, object]) -> None:
    """Ask a server to end, and kill it if it does not."""
    pid, since = int(str(server["pid"])), server["began"]
    for number in (signal.SIGTERM, signal.SIGKILL):
        if began(pid) != since:
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
        ends = time.monotonic() + ENDS_S
        while began(pid) == since and time.monotonic() < ends:
            time.sleep(0.05)
