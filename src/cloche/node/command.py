"""`cloche node` as a process: its surroundings, its state folder, its start and its end."""

from __future__ import annotations

import asyncio
import fcntl
import gc
import json
import logging
import os
import resource
import secrets
import signal
from contextlib import suppress

from cloche import __version__, hostfs
from cloche.config.options import SandboxOptions
from cloche.config.settings import load_settings
from cloche.config.sources import look_at_files_every
from cloche.core.errors import BackendUnavailable, ClocheError, InvalidRequest
from cloche.core.record import dataclass, field
from cloche.execution.concurrency import Slots, batch_slots
from cloche.execution.prepare import prepare
from cloche.execution.registry import collect_garbage
from cloche.fleets.signing import Verifier
from cloche.serving.certificate import make_certificate
from cloche.serving.process import log_plainly, until_signal

from .admission import Admission
from .amounts import MOST_RUNS
from .host import TTL_S, NodeHost
from .server import listen, serving

ENGINE_VARIABLES = ("RAY_", "KUBERNETES_")  # beginnings of variables that are the engine's own
MEASURE_S, CLEAR_S = 10.0, 20.0
CONFIG_LOOK_S = 1.0  # a changed configuration file counts from then on
log = logging.getLogger("cloche.fleet")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeCommand:
    """Hold the options of the command line.

    `state` is a private folder of this node; empty for none. A node that `waits` does not end before its first
    heartbeat. One that `is_everywhere` listens at all addresses of its machine, and tells `host`. `secrets_from` is a
    folder with secrets for callers; by default that of the configuration.
    """

    host: str
    port: int
    public_key: str
    state: str = ""
    ttl_s: float = TTL_S
    waits: bool = False
    is_everywhere: bool = False
    secrets_from: str = ""
    options: SandboxOptions = field(default_factory=SandboxOptions)


def run_node(command: NodeCommand) -> int:
    """Serve until a signal, and return the exit code. Raises InvalidRequest, BackendUnavailable."""
    log_plainly()
    leave_engine()
    return until_signal(_serve(command))


def leave_engine() -> None:
    """Undo what a worker of an engine passes on: blocked signals, its variables, its place at the OOM killer."""
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    for name in [name for name in os.environ if name.startswith(ENGINE_VARIABLES)]:
        del os.environ[name]
    with suppress(OSError, ValueError), open("/proc/self/oom_score_adj", "r+", encoding="ascii") as file:
        if int(file.read()) > 0:
            file.seek(0)
            file.write("0")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft != hard:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


async def _serve(command: NodeCommand) -> None:
    if command.host in ("", "0.0.0.0", "::"):  # noqa: S104 - compared, not bound
        raise InvalidRequest(
            f"--listen {command.host}:{command.port}: callers need one address; name the one at which they reach this "
            "machine"
        )
    look_at_files_every(CONFIG_LOOK_S)
    batch_slots.set(Slots(MOST_RUNS))  # leases bound the runs, and not the processors of the machine
    certificate = make_certificate(command.host)
    verifier = Verifier(command.public_key, certificate.sha256)
    held = open_state(command.state) if command.state else None
    every = "::" if ":" in command.host else "0.0.0.0"  # noqa: S104 - where the operator asks for it
    listener = listen(every if command.is_everywhere else command.host, command.port, Admission())
    try:
        await _clear()
        host = NodeHost(
            _without_audit(command.options), ttl_s=command.ttl_s, boot=secrets.token_hex(8), waits=command.waits,
            secrets_from=command.secrets_from or load_settings(dict(command.options)).secrets_from,
        )  # fmt: skip
        await asyncio.to_thread(host.secret_store.read)  # a wrong table is told at once
        await asyncio.gather(_measure(command.options), host.digests.refresh())
        async with serving(host, verifier, certificate, listener):
            shown = f"[{command.host}]" if ":" in command.host else command.host
            facts = {
                "address": f"https://{shown}:{listener.getsockname()[1]}", "certificate": certificate.sha256,
                "pid": os.getpid(), "boot": host.boot, "version": __version__,
            }  # fmt: skip
            _publish(facts, command.state)
            gc.freeze()
            await host.tend()
    finally:
        listener.close()
        if held is not None:
            os.close(held)


def _without_audit(options: SandboxOptions) -> SandboxOptions:
    """Return the options with an audit log only where the configuration asks for one: callers have their own."""
    return options if load_settings(dict(options)).audit is not None else {**options, "audit": False}


def _capabilities(options: SandboxOptions) -> None:
    prepare(**options).backend.capabilities()


async def _measure(options: SandboxOptions) -> None:
    """Measure the backend before the first run, and log why it is not available: the operator can mend that."""
    try:
        async with asyncio.timeout(MEASURE_S):
            await asyncio.to_thread(_capabilities, options)
    except (ClocheError, TimeoutError) as error:
        log.warning("runs with this node's own options fail: %s", str(error) or "the backend does not answer")


async def _clear() -> None:
    """Remove what dead processes left on this machine, such as an earlier node that was killed."""
    try:
        async with asyncio.timeout(CLEAR_S):  # a daemon may not answer
            removed = await asyncio.to_thread(collect_garbage)
    except (ClocheError, OSError, TimeoutError) as error:
        log.warning("leftovers of dead processes could not be removed: %s", str(error) or "it took too long")
        return
    if count := sum(map(len, removed.values())):
        log.warning("%d leftovers of dead processes were removed", count)


def open_state(folder: str) -> int:
    """Make the private state folder of a node and lock it; return the lock's descriptor. Raises BackendUnavailable."""
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
        status = os.stat(folder)
        if status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise BackendUnavailable(
                f"--state {folder}: the folder is not private.", remedy="Give a folder of yours with mode 0700."
            )
        descriptor = os.open(os.path.join(folder, "lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise BackendUnavailable(
            f"--state {folder}: {error.strerror}.", remedy="Give a folder that can be written."
        ) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise BackendUnavailable(
            f"--state {folder}: another node uses this folder.", remedy="End that one, or give another folder."
        ) from None
    return descriptor


def _publish(facts: dict[str, object], state: str) -> None:
    """Print where the node is, in one line; the state folder has the same, for a supervisor that starts again."""
    line = json.dumps(facts)
    if state:
        folder = hostfs.open_folder(state)
        try:
            hostfs.replace(folder, "node.json", line.encode(), mode=0o600)
        finally:
            os.close(folder)
    print(line, flush=True)  # noqa: T201
