"""One command on the host itself: no sandbox, limited by its time-out alone.

Only tier 4 has it, and only when a human has approved and confirmed the call.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import shutil
import signal
import time
from collections.abc import Mapping

from cloche.core.bounded import HeadTail
from cloche.core.errors import BackendUnavailable, InvalidRequest, StartFailed
from cloche.core.limits import Limits
from cloche.core.outcome import KillCause, Observed, decide
from cloche.core.result import Result, Status, Usage

CHUNK_BYTES = 65_536
DRAIN_S = 0.5
_ARGUMENTS: Mapping[str, tuple[str, ...]] = {
    "bash": ("-c",), "sh": ("-c",), "cmd": ("/c",), "powershell": ("-NoProfile", "-NonInteractive", "-Command"),
}  # fmt: skip


async def run_on_host(shell: str, command: str, limits: Limits) -> Result:
    """Run `command` by `shell` in the caller's own folder and environment, and return what came of it.

    At its time-out, or when the call is cancelled, its whole process group is killed. Raises BackendUnavailable,
    InvalidRequest for a command that no process can be given, StartFailed.
    """
    path = shutil.which(shell)
    if path is None:
        raise BackendUnavailable(f"this host has no {shell}.", remedy="Name another shell.")
    begun = time.monotonic()
    process = await _started(path, *_ARGUMENTS[shell], command)
    kept = [HeadTail(limits.output_bytes), HeadTail(limits.output_bytes)]
    streams = zip((process.stdout, process.stderr), kept, strict=True)
    reading = [asyncio.ensure_future(_read(stream, into)) for stream, into in streams if stream is not None]
    timed_out = False
    try:
        await asyncio.wait_for(process.wait(), limits.timeout_s)
    except TimeoutError:
        timed_out = True
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
        await asyncio.wait(reading, timeout=DRAIN_S)
        for one in reading:
            one.cancel()
    return _result(process.returncode or 0, kept, time.monotonic() - begun, timed_out=timed_out)


async def _started(*argv: str) -> asyncio.subprocess.Process:
    """Start a process; cancelled meanwhile, with all that it may have started itself by then."""
    starting = asyncio.ensure_future(_start(*argv))
    try:
        return await asyncio.shield(starting)
    except asyncio.CancelledError:
        await asyncio.wait({starting})
        if not starting.cancelled() and starting.exception() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(starting.result().pid, signal.SIGKILL)
            await starting.result().wait()
        raise


async def _start(*argv: str) -> asyncio.subprocess.Process:
    try:
        return await asyncio.create_subprocess_exec(
            *argv,
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )  # fmt: skip
    except ValueError as error:  # a NUL, or half of a character pair
        raise InvalidRequest(f"the command cannot be passed to a process: {error}") from None
    except OSError as error:
        if error.errno == errno.E2BIG:
            raise InvalidRequest("the command is too long for a process; put it into a file in parts") from None
        raise StartFailed(f"the command could not be started: {error.strerror}", errno=error.errno) from error


async def _read(stream: asyncio.StreamReader, into: HeadTail) -> None:
    while data := await stream.read(CHUNK_BYTES):
        into.add(data)


def _result(code: int, kept: list[HeadTail], duration: float, *, timed_out: bool) -> Result:
    out, err = kept[0].kept(), kept[1].kept()
    cause = KillCause.TIMEOUT if timed_out else None
    seen = Observed(exit_code=code if code >= 0 else None, signal=-code if code < 0 else None, cause=cause)
    verdict = decide(seen)
    return Result(
        out.decode("utf-8", "replace"),
        err.decode("utf-8", "replace"),
        verdict.exit_code,
        duration,
        status=verdict.status,
        timed_out=verdict.status is Status.TIMEOUT,
        truncated=any(one.is_truncated for one in kept),
        usage=Usage(wall_s=duration),
        stdout_bytes=out,
        stderr_bytes=err,
        meta={"backend": "host"},
    )
