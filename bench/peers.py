"""The peers: other projects' sandboxes, each called as its own documents say is fastest. None of them is required.

Theory of operation: a peer that is a command is run like any other command. One that is a library lives in an
interpreter of its own (`peer_process.py`, `srt_driver.mjs`), in the environment that scripts/bench_peers.sh made for
it, and measures the time itself; `Driver` speaks with that process line by line. A peer that is not there or fails is
left out, with its own message as the reason.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, cast

from cloche.bench import burst
from cloche.bench.harness import BenchmarkFailed, Case, Measurement, SkippedCase, drain_pool, reason_of, timed
from cloche.bench.scenarios import (
    CODE,
    PLAIN,
    WARM,
    Cases,
    Scenario,
    bubblewrap,
    cold,
    library_call,
    output_of,
    plain,
    warm,
)
from cloche.config.options import SandboxOptions
from cloche.core.record import dataclass, replace

from .commands import whole_command
from .sessions import cell
from .setting import Setting

ANSWER_S = 60.0
CLOSING_S = 30.0
DOCKER_RUN, DOCKER_RUN_GVISOR = "docker run", "docker run, gVisor"
LLM_DOCKER = ("llm-sandbox, docker", "llm-sandbox, docker pool")
DOCKER_COLD, DOCKER_WARM, GVISOR_WARM = "cloche, docker cold", "cloche, docker warm", "cloche, gVisor warm"
SLOTS = 4  # what a peer may keep ready ahead
HERE = Path(__file__).resolve().parent
IMAGE_NAME = "image.name"
NEED_IMAGE = ("kern-fresh", "kern-prewarmed", "kern-kernel", "llm-fresh", "llm-pooled")
SRT_PACKAGE = Path("npm/node_modules/@anthropic-ai/sandbox-runtime")
SRT_SETTINGS = {
    "network": {"allowedDomains": [], "deniedDomains": []},
    "filesystem": {"denyRead": [], "allowWrite": ["."], "denyWrite": []},
}
# The limits and restrictions that a run of Cloche has by default, as far as docker has them.
DOCKER_OPTIONS = (
    "--rm", "--pull=never", "--network=none", "--memory=256m", "--pids-limit=64", "--cap-drop=ALL", "--read-only",
    "--security-opt=no-new-privileges", "--tmpfs=/tmp", "--tmpfs=/workspace", "--workdir=/workspace",
)  # fmt: skip


class PeerFailed(Exception):
    """Report that a peer did not run, with its own error message."""


class Driver:
    """Start a driver program and give it orders; the stack that it is given ends it."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], stack: ExitStack) -> None:
        self._stderr = stack.enter_context(tempfile.TemporaryFile())  # noqa: SIM115 - the stack closes it
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-peer-"))
        self._link, theirs = socket.socketpair()
        stack.callback(self._link.close)
        self._answers = stack.enter_context(self._link.makefile("rb"))
        with theirs:
            self._process = subprocess.Popen(
                command, stdin=theirs.fileno(), stdout=theirs.fileno(), stderr=self._stderr, env=dict(env), cwd=folder
            )
        stack.callback(self._close)

    def wait_until_set_up(self) -> None:
        """Wait for the first answer. Raises PeerFailed with the peer's error message."""
        self._answer(ANSWER_S)

    def measure_checked(self) -> Measurement:
        """Let it run once; the time is its own measurement."""
        reply = self._ask("turn", ANSWER_S)
        return Measurement(reply["ms"], reply["output"].encode())

    def burst(self, runs: int, threads: int, limit_s: float) -> tuple[int, float]:
        """Let it run from several threads of its own; return runs and seconds."""
        reply = self._ask(f"burst {runs} {threads} {limit_s}", limit_s + ANSWER_S)
        return reply["runs"], reply["seconds"]

    def _ask(self, order: str, patience_s: float) -> dict[str, Any]:
        try:
            self._link.sendall(f"{order}\n".encode())
        except OSError:
            raise PeerFailed(self._stderr_tail()) from None
        return self._answer(patience_s)

    def _answer(self, patience_s: float) -> dict[str, Any]:
        self._link.settimeout(patience_s)
        try:
            line = self._answers.readline()
        except TimeoutError:
            raise PeerFailed(f"no answer within {patience_s:.0f} s") from None
        if not line:
            raise PeerFailed(self._stderr_tail())
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise PeerFailed(reply["error"])
        return reply

    def _stderr_tail(self) -> str:
        self._stderr.seek(0)
        return self._stderr.read().decode(errors="replace").strip()[-300:] or "ended without a word"

    def _close(self) -> None:
        """Close the connection, which ends the driver; one that goes on is killed."""
        self._link.shutdown(socket.SHUT_WR)
        try:
            self._process.wait(CLOSING_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """Describe one peer: `call` is for readers, `command` starts what runs it, or raises PeerFailed.

    `threads_reason` says why it cannot be measured from several threads.
    """

    name: str
    call: str
    command: Callable[[Setting], list[str]]
    is_driven: bool = True
    threads_reason: str = ""


def _python_driver(name: str, setting: Setting) -> list[str]:
    folder = _folder(setting)
    python = folder / "venv" / "bin" / "python"
    if not python.exists():
        raise PeerFailed(f"not installed in {folder}; scripts/bench_peers.sh does that")
    if name in NEED_IMAGE:
        _check_image(setting)
    shown = list(dict.fromkeys([sys.prefix, sys.base_prefix]))
    settings = {"python": sys.executable, "shown": shown, "image": setting.image, "slots": SLOTS,
                "burst": burst.__file__}  # fmt: skip
    return [str(python), str(HERE / "peer_process.py"), name, json.dumps(settings)]


def _srt_library(setting: Setting) -> list[str]:
    return [_program("node"), str(HERE / "srt_driver.mjs"), str(_srt(setting) / "dist" / "index.js"), sys.executable]


def _srt_command(setting: Setting) -> list[str]:
    settings = _folder(setting) / "srt-settings.json"
    program = _srt(setting) / "dist" / "cli.js"
    settings.write_text(json.dumps(SRT_SETTINGS), encoding="utf-8")
    return [_program("node"), str(program), "--settings", str(settings), "-c", f"'{sys.executable}' -c 'print(1)'"]


def _srt(setting: Setting) -> Path:
    package = _folder(setting) / SRT_PACKAGE
    if not package.exists():
        raise PeerFailed(f"not installed in {_folder(setting)}; scripts/bench_peers.sh does that")
    return package


def _docker(setting: Setting) -> list[str]:
    return [_docker_client(setting), "run", *DOCKER_OPTIONS, setting.image, "python3", "-c", CODE]


def _docker_on_gvisor(setting: Setting) -> list[str]:
    docker = _docker_client(setting)
    if "runsc" not in output_of([docker, "info", "--format", "{{json .Runtimes}}"]).decode():
        raise PeerFailed("this docker daemon does not know gVisor's runsc")
    return [docker, "run", "--runtime=runsc", *DOCKER_OPTIONS, setting.image, "python3", "-c", CODE]


def _docker_client(setting: Setting) -> str:
    """Return docker's client. Raises PeerFailed, or BenchmarkFailed with its words where no daemon answers it."""
    _check_image(setting)
    docker = _program("docker")
    output_of([docker, "version", "--format", "{{.Server.Version}}"])
    return docker


def _check_image(setting: Setting) -> None:
    """Raise PeerFailed when the image was never built here: nobody may go and look for it elsewhere."""
    kept = _folder(setting) / IMAGE_NAME
    if not kept.exists() or kept.read_text(encoding="utf-8").strip() != setting.image:
        raise PeerFailed(f"no image {setting.image} in {_folder(setting)}; scripts/bench_peers.sh builds one")


def _program(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        raise PeerFailed(f"{name} is not installed here")
    return found


def _folder(setting: Setting) -> Path:
    if setting.peers_folder is None:
        raise PeerFailed("no folder with peers was named")
    return setting.peers_folder


PEERS = (
    Peer(name=DOCKER_RUN, call=f"docker run {' '.join(DOCKER_OPTIONS)} IMAGE python3 -c 'print(1)'",
         command=_docker, is_driven=False),
    Peer(name="sandlock", call="sandlock.Sandbox(fs_readable=..., clean_env=True, max_memory='256M', max_processes=64)"
         ".run([python, '-c', 'print(1)'])", command=partial(_python_driver, "sandlock")),
    Peer(name="sandlock, fork", call="Sandbox(init_fn=..., work_fn=lambda _: exec('print(1)')).fork(1), then "
         "Sandbox.reduce(['cat']): a fork of the caller", command=partial(_python_driver, "sandlock-fork"),
         threads_reason="it forks its caller, which hangs in one with several threads"),
    Peer(name="kern, fresh box", call="kern_sandbox.run_code('print(1)', image=IMAGE, memory_mb=256, pids=64)",
         command=partial(_python_driver, "kern-fresh")),
    Peer(name="kern, prewarmed", call=f"run_code('print(1)') of one kern_sandbox.Sandbox(..., prewarm={SLOTS})",
         command=partial(_python_driver, "kern-prewarmed")),
    Peer(name="llm-sandbox, docker", call="SandboxSession(backend=DOCKER, image=IMAGE, skip_environment_setup=True, "
         "runtime_configs={..., 'stop_signal': 'SIGKILL'}).run('print(1)'), opened and closed",
         command=partial(_python_driver, "llm-fresh")),
    Peer(name="llm-sandbox, docker pool", call=f"SandboxSession(pool=a pool of {SLOTS} containers).run('print(1)'), "
         "opened and closed; containers are used again", command=partial(_python_driver, "llm-pooled")),
    Peer(name="llm-sandbox, bubblewrap", call="SandboxSession(backend=BUBBLEWRAP, skip_environment_setup=True)"
         ".run('print(1)'), opened and closed", command=partial(_python_driver, "llm-bubblewrap")),
    Peer(name="sandbox-runtime, command", call="srt --settings FILE -c \"python -c 'print(1)'\"",
         command=_srt_command, is_driven=False),
    Peer(name="sandbox-runtime, library", call="SandboxManager.wrapWithSandbox(\"python -c 'print(1)'\") and spawn, in "
         "a Node process that stays", command=_srt_library),
)  # fmt: skip


ON_GVISOR = Peer(
    name=DOCKER_RUN_GVISOR, call=f"docker run --runtime=runsc {' '.join(DOCKER_OPTIONS)} IMAGE python3 -c 'print(1)'",
    command=_docker_on_gvisor, is_driven=False,
)  # fmt: skip
CONTAINER_PEERS = tuple(
    peer for peer in (*PEERS, ON_GVISOR) if peer.name in (DOCKER_RUN, DOCKER_RUN_GVISOR, *LLM_DOCKER)
)
CELL_PEERS = (
    Peer(name="kern, warm kernel cell", call="run_code('x = 1; x') of one kern_sandbox.Sandbox(...).kernel()",
         command=partial(_python_driver, "kern-kernel")),
)  # fmt: skip


def peers(setting: Setting, stack: ExitStack) -> Cases:
    """Enter every peer beside the plain subprocess, bubblewrap and Cloche."""
    yield plain()
    yield bubblewrap()
    yield cold()
    yield warm()
    yield from _present(PEERS, setting, stack)


def containers(setting: Setting, stack: ExitStack) -> Cases:
    """Enter Cloche's containers, cold and warm, on the daemon's own runtime and on gVisor, beside others."""
    yield plain()
    present = list(_present(CONTAINER_PEERS, setting, stack))
    there = {one.name for one in present if isinstance(one, Case)}
    yield from present
    if DOCKER_RUN in there:
        stack.callback(drain_pool, "docker")
        yield whole_command(setting)
    for name, runtime, asked in (
        (DOCKER_COLD, DOCKER_RUN, {"backend": "docker", "level": "jail", "warm": False}),
        (DOCKER_WARM, DOCKER_RUN, {"backend": "docker", "level": "jail"}),
        (GVISOR_WARM, DOCKER_RUN_GVISOR, {"backend": "gvisor"}),
    ):
        if runtime not in there:
            yield SkippedCase(name=name, reason=f'"{runtime}", which it would be held against, cannot run here')
            continue
        words = "".join(f", {key}={value!r}" for key, value in asked.items())
        options = cast(SandboxOptions, {**asked, "image": setting.image})
        ours = library_call(name, f"cloche.run('print(1)', image=IMAGE{words})", CODE, b"1\n", options)
        yield replace(ours, is_optional=True)  # a daemon that goes away shall not cost what was measured without it


def peer_cells(setting: Setting, stack: ExitStack) -> Cases:
    """Enter every peer whose interpreter lives on between cells beside the plain subprocess and Cloche's session."""
    yield plain()
    yield cell(stack)
    yield from _present(CELL_PEERS, setting, stack)


def _present(known: tuple[Peer, ...], setting: Setting, stack: ExitStack) -> Cases:
    env = _env(setting)
    for peer in known:
        try:
            command = peer.command(setting)
            yield _driven(peer, command, env, stack) if peer.is_driven else _command(peer, command, env)
        except (PeerFailed, BenchmarkFailed, OSError, subprocess.TimeoutExpired) as error:
            yield SkippedCase(name=peer.name, reason=f"cannot run here: {reason_of(error)}")


PEERS_EVENT = Scenario(
    name="peers", title="print(1), peers side by side", enter=peers, share=0.5, least=5,
    at_full_speed=(PLAIN, WARM, *(peer.name for peer in PEERS)), speed_limit_s=8.0,
)  # fmt: skip
PEER_EVENTS = (
    PEERS_EVENT,
    Scenario(
        name="containers",
        title="print(1), containers of one image",
        enter=containers,
        reference=DOCKER_RUN,
        share=0.5,
        least=5,
    ),
    Scenario(name="peer cells", title="a cell of a live session, peers side by side", enter=peer_cells, least=5),
)


def _env(setting: Setting) -> dict[str, str]:
    """Let peers keep what they keep in the folder that they were installed in."""
    kept = {} if setting.peers_folder is None else {"XDG_CACHE_HOME": str(setting.peers_folder / "cache")}
    return {**os.environ, **kept}


def _command(peer: Peer, command: list[str], env: dict[str, str]) -> Case:
    return Case(name=peer.name, call=peer.call, measure=timed(partial(_in_own_folder, command, env)), is_optional=True)


def _in_own_folder(command: list[str], env: dict[str, str]) -> bytes:
    """Run where nothing else is: sandbox-runtime puts files into the folder it is called in, and takes them out."""
    with tempfile.TemporaryDirectory(prefix="bench-peer-") as folder:
        return output_of(command, env, folder)


def _driven(peer: Peer, command: list[str], env: dict[str, str], stack: ExitStack) -> Case:
    driver = Driver(command, env, stack)
    return Case(
        name=peer.name, call=peer.call, measure=driver.measure_checked, prepare=driver.wait_until_set_up,
        at_full_speed=_refusing(peer) if peer.threads_reason else driver.burst, is_optional=True,
    )  # fmt: skip


def _refusing(peer: Peer) -> Callable[[int, int, float], tuple[int, float]]:
    def refuse(_runs: int, _threads: int, _limit_s: float) -> tuple[int, float]:
        raise PeerFailed(peer.threads_reason)

    return refuse
