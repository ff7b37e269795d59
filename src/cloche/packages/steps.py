"""The sandbox of one step. Code of a package runs in steps with `runs_code` alone, which have no network.

A step is a throwaway sandbox of backend `local` with its own limits: at the level of the program itself if the program
runs there, else a jail. A step that downloads has the network of the index alone. If the level isolates nothing
(process), neither does a step, except for a build: that is a jail, or an error.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from importlib.resources import files
from typing import Any

from cloche.core.enforcement import Control, Level
from cloche.core.errors import BackendUnavailable, StartFailed
from cloche.core.events import Event, OutputChunk, Sink, discard
from cloche.core.limits import GIB, MIB, Limits
from cloche.core.loops import with_sink
from cloche.core.policy import Policy
from cloche.core.protocols import Backend, OpenSandbox, SupportsStreaming
from cloche.core.record import dataclass, field, replace
from cloche.core.refusals import ALLOW_IT
from cloche.core.request import InputFile, Request
from cloche.core.result import Result, Status

CA_FILE = "ca.pem"
MOST_LAST_CHARS, MOST_REFUSALS = 2000, 4
DNS_PORT, HTTPS_PORT = 53, 443
LIMITS = Limits(
    timeout_s=900.0, memory_bytes=1 * GIB, cpus=4.0, pids=256, disk_bytes=512 * MIB, tmp_bytes=512 * MIB,
    output_bytes=64 * 1024, flood_bytes=8 * GIB,
)  # fmt: skip
NEVER_ABSENT = (Control.FILESYSTEM, Control.NETWORK, Control.SYSCALLS, Control.IDENTITY)  # where a stranger's code runs


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Describe one step: a command, or a program of `inside`; its network, its input, and the paths it is shown.

    `network_allow` are the rules of its network, empty for no network. `shown` are paths of the host. `returns` is a
    file of its workspace to be returned. `runs_code`: code of a package runs in it.
    """

    name: str
    argv: tuple[str, ...] = ()
    program: str = ""
    stdin: bytes = field(default=b"", repr=False)
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    files: tuple[InputFile, ...] = ()
    network_allow: tuple[str, ...] = ()
    shown: tuple[str, ...] = ()
    returns: str = ""
    most_bytes: int = 8 * MIB
    runs_code: bool = False
    limits: Limits = LIMITS


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """Hold the outcome of a step: its result, and the returned file, if it exists."""

    result: Result
    file: bytes = b""


def step_policy(policy: Policy, step: Step) -> Policy:
    """Return the rules of a step: those of the run, with the step's own network and without the program's settings."""
    isolates = policy.level is None or policy.level >= Level.CONFINED
    hosts = step.network_allow if isolates else ()
    if step.runs_code:
        best_effort = tuple(control for control in policy.best_effort if control not in NEVER_ABSENT)
        policy = replace(
            policy, level=Level.JAIL, best_effort=best_effort, seccomp=True, drop_capabilities=True, user=None
        )
        hosts = ()
    return policy.with_changes(
        network="allowlist" if hosts else "off", network_allow=hosts, network_ports=(), host_ports=(),
        on_network="refuse", packages=(), layers=step.shown, package_managers=True,
        writable_paths=("/workspace", "/tmp", "/dev/shm"), warm=False, preload=(), screen="off", trusted=False,
    )  # fmt: skip


async def run_step(backend: Backend, policy: Policy, step: Step, sink: Sink = discard) -> Done:
    """Run a step in a new sandbox. Raises the errors of opening one; the step's own end is in the result."""
    request = Request(
        code=_source(step.program) if step.program else None, argv=step.argv, stdin=step.stdin, env=step.env,
        files=step.files,
    )  # fmt: skip
    async with _opened(backend, step_policy(policy, step), step) as opened:
        if sink is not discard and isinstance(opened, SupportsStreaming):
            run = partial(opened.run_streaming, request)
            result = await with_sink(run, sink)  # which ends the run where the sink raises
        elif sink is not discard:
            raise BackendUnavailable(f"packages: backend {backend.name!r} cannot stream the output of a sandbox")
        else:
            result = await opened.run(request)
        file = b""
        if step.returns and result.ok:
            file = await opened.read_file(step.returns, max_bytes=step.most_bytes)
        return Done(result=result, file=file)


@asynccontextmanager
async def _opened(backend: Backend, policy: Policy, step: Step) -> AsyncIterator[OpenSandbox]:
    """Open the sandbox of a step. Raises BackendUnavailable with the remedy."""
    async with AsyncExitStack() as stack:
        try:
            opened = await stack.enter_async_context(backend.open(policy, step.limits))
        except BackendUnavailable as error:
            raise BackendUnavailable(
                f"packages: there is no sandbox to {step.name} them in: {error}.".replace("..", "."),
                remedy='Install them ahead where that works ("cloche packages install"): what is there is shown at '
                "every level.",
            ) from error
        yield opened


def on_stdout(take: Callable[[bytes], None]) -> Sink:
    """Return a sink that hands each piece of standard output on."""

    def deliver(event: Event) -> None:
        if isinstance(event, OutputChunk) and event.stream == "stdout":
            take(event.data)

    return deliver


def _source(program: str) -> str:
    return files("cloche.packages.inside").joinpath(f"{program}.py").read_text("utf-8")


def failed(step: Step, result: Result, hide: Callable[[str], str] = str) -> StartFailed:
    """Return the error for a failed step, with the end of its output after `hide` has removed secrets."""
    why = hide(last_words(result))
    if result.status is Status.TIMEOUT:
        why = f"it took longer than {step.limits.timeout_s:g} s"
    elif result.status not in (Status.OK, Status.ERROR, Status.DENIED):
        why = f"{result.status}{f': {why}' if why else ''}"
    return StartFailed(f"packages: cannot {step.name}: {why or f'exit code {result.exit_code}'}", step=step.name)


def last_words(result: Result) -> str:
    """Return the end of a step's standard error, in one line of bounded length, and the refusals of its network.

    Programs report a refusal only as a reset connection or an unknown name.
    """
    text = " ".join(line.strip() for line in result.stderr.splitlines() if line.strip())
    text = text if len(text) <= MOST_LAST_CHARS else f"{text[:MOST_LAST_CHARS]} ..."
    refused = list(dict.fromkeys(map(_refusal, result.network_refused)))[:MOST_REFUSALS]
    return "; ".join(filter(None, (text, *refused)))


def _refusal(row: Mapping[str, Any]) -> str:
    """Say why a host was refused, and who can open it: rules of the network are the step's own, not the caller's."""
    why, _, remedy = str(row["why"]).rpartition("; ")
    if not remedy.startswith(ALLOW_IT):
        return f"refused: {row['why']}"
    host = str(row["host"]) if row["port"] in (DNS_PORT, HTTPS_PORT) else f"{row['host']}:{row['port']}"
    return f"refused: {why}; if that is right, the operator can name {host} in packages_hosts"


def ca_files(bundle: bytes) -> tuple[InputFile, ...]:
    """Return the file of certificates that a step which downloads is given."""
    return (InputFile(path=CA_FILE, data=bundle),) if bundle else ()
