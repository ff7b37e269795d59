"""Build a `Result` from the outcome of a run or cell, for all backends."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from cloche.core.enforcement import Enforcement, Level
from cloche.core.frames import MAX_VALUE_BYTES, is_small
from cloche.core.languages import Engine, limits_note
from cloche.core.limits import Limits
from cloche.core.record import replace
from cloche.core.result import TIMEOUT_NOTE, Output, Result, Status, Usage, Verdict

from .saved_files import Changes

MAX_TRACEBACK = 60_000

MOST_LOOKED_AT = 1 << 13  # bytes at the end of a program's output
MOST_OF_LAST = 1 << 11  # of these, for slower patterns
NO_TRACING = (
    "ptrace, which gdb and strace need, is refused here; backends gvisor and microvm allow it among the sandbox's own "
    "processes"
)
NO_ENSUREPIP = (
    "throwaway runs have no installers, which python3 -m venv needs; use a live sandbox (cloche exec, "
    "Sandbox), or name packages (--packages NAME, packages=[NAME])"
)

NO_OWN_FOLDERS = (
    "level confined has no /workspace and no /tmp of its own: name files relative to the working directory, or below "
    "$HOME and $TMPDIR (Python's tempfile and mktemp do)"
)
NO_OWN_DEVICES = (
    "level confined has no /dev/shm and no /dev/pts of its own: keep shared files below $TMPDIR, and have a terminal "
    "given (cloche exec -t, Sandbox.terminal)"
)
NO_PROCESSES = "level confined has no process namespace: children find no /proc/self, and ps finds nothing"
NO_SOCKETS = (
    "level confined has no servers and no connections within the sandbox: multiprocessing works by "
    "set_start_method('fork'), without Manager; network=\"allowlist\" has connections by name"
)
# Misleading messages at level confined, where programs see the host's own folders; the sandbox's may be in its /tmp.
_CONFINED = (
    (
        rb"(?m)^(?=.*(?:permission denied|no such file))(?=.*[ '\"](?:/tmp|/workspace)(?:/(?!cloche-)|['\": ]|$))",
        NO_OWN_FOLDERS,
    ),
    (
        rb"(?m)^(?=.*permission denied)(?=.*/dev/shm)|openpty\(|forkpty\(|out of pty devices|/dev/ptmx",
        NO_OWN_DEVICES,
    ),
    (
        rb"socket[^\n]*\n(?:[^\n]*\n){0,2}[^\n]*operation not permitted|socket: operation|listen eperm|/managers\.py",
        NO_SOCKETS,
    ),
    (rb"(?m)^(?=.*permission denied)(?=.*/proc/)|mount -t proc|fatal library error, (?:reap|lookup)", NO_PROCESSES),
)


def make_result(
    verdict: Verdict,
    *,
    stdout: bytes,
    stderr: bytes,
    is_truncated: bool,
    value: Any,  # noqa: ANN401 - any JSON
    value_is_repr: bool,
    outputs: tuple[Output, ...],
    usage: Usage,
    enforcement: Enforcement,
    changes: Changes,
    meta: Mapping[str, Any],
) -> Result:
    """Return a result; its `enforcement` also records which limits were hit."""
    if verdict.status is Status.TIMEOUT:
        stderr += (b"" if not stderr or stderr.endswith(b"\n") else b"\n") + TIMEOUT_NOTE.encode()
    return Result(
        stdout.decode("utf-8", "replace"),
        stderr.decode("utf-8", "replace"),
        verdict.exit_code,
        usage.wall_s,
        truncated=is_truncated,
        timed_out=verdict.status is Status.TIMEOUT,
        status=verdict.status,
        value=value,
        value_is_repr=value_is_repr,
        outputs=outputs,
        files=changes.records,
        usage=usage,
        enforcement=replace(enforcement, hits=verdict.hits) if verdict.hits else enforcement,
        stdout_bytes=stdout,
        stderr_bytes=stderr,
        save_files=changes.save,
        meta={**meta, **changes.meta(), **_advice(verdict.status, stdout, stderr, enforcement)},
    )


def _advice(status: Status, stdout: bytes, stderr: bytes, enforcement: Enforcement) -> dict[str, str]:
    """Return advice for a program that was refused something and printed a misleading message."""
    if status not in (Status.DENIED, Status.ERROR):
        return {}
    output = stdout[-MOST_LOOKED_AT:] + stderr[-MOST_LOOKED_AT:].lower()  # the guest's own: only searched
    if b"ptrace" in output and b"not permitted" in output:
        return {"advice": NO_TRACING}
    if b"ensurepip is not" in output or b"'ensurepip'" in output:
        return {"advice": NO_ENSUREPIP}
    if enforcement.level is Level.CONFINED:
        last = output[-MOST_OF_LAST:].lower()
        note = next((advice for pattern, advice in _CONFINED if re.search(pattern, last)), "")
        return {"advice": note} if note else {}
    return {}


def run_notes(
    engine: Engine | None, version: str, limits: Limits, enforcement: Enforcement, wall_s: float
) -> dict[str, Any]:
    """Return the entries of a result's `meta` that all backends share; a command has no engine."""
    notes: dict[str, Any] = {
        "runtime": engine.name if engine else "command",
        "versions": {engine.name: version} if engine else {},
        "limits": limits.as_dict(),
        "duration": wall_s,
        "level": str(enforcement.level),
    }
    if engine is not None and engine.stand_in:
        notes["stand_in"] = engine.stand_in
    if engine is not None and (advice := limits_note(engine, limits)):
        notes["advice"] = advice
    return notes


def error_notes(frame: Mapping[str, Any], *, has_traceback: bool = False) -> dict[str, Any]:
    """Return the entries of a result's `meta` about a cell's error, from its answer."""
    error = frame.get("error")
    if not isinstance(error, dict):
        return {}
    bounds = {"name": 2000, "message": 2000, **({"traceback": MAX_TRACEBACK} if has_traceback else {})}
    return {"error": {key: str(error[key])[:most] for key, most in bounds.items() if key in error}}


def value_of(frame: Mapping[str, Any]) -> tuple[Any, bool, bool]:
    """Return a cell's value, whether it is a repr, and whether it was cut: no driver of Cloche sends a larger value."""
    value, text = frame.get("value"), frame.get("value_repr")
    if value is not None or not isinstance(text, str):
        return (value, False, False) if is_small(value, MAX_VALUE_BYTES) else (None, False, True)
    return text[:MAX_VALUE_BYTES], True, len(text) > MAX_VALUE_BYTES
