"""Record each run: two events in the audit log, a span and a metric.

Theory of operation: `start` is written before the code runs; if that fails, nothing runs. `execution` is written
afterwards, however the run ended. A run cannot be undone, so a failure to write `execution` is logged as critical and
noted in the result. A `start` without an `execution` means that Cloche itself was killed during the run. If auditing is
off and OpenTelemetry is not imported, nothing here is called.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any

from cloche.core.errors import AuditFailed, ClocheError, PolicyDenied
from cloche.core.limits import Limits
from cloche.core.policy import Policy
from cloche.core.processes import Detached
from cloche.core.record import dataclass, field
from cloche.core.remote import RemoteAccount
from cloche.core.result import Result

from .chain import sha256_of
from .log import Audit, audit_for, log

if TYPE_CHECKING:
    from cloche.config.keys import Settings

    from .redaction import Redactor

_RECORDED = "is_in_audit_log"  # attribute of an exception
_EXTRA = "opentelemetry.trace"  # spans can only be collected if it is imported


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """A run about to start. `kind` is run, cell, host, exec, start or terminal.

    `account` is the account at a remote provider, None on this host.
    """

    kind: str
    backend: str
    language: str
    code: str | None
    argv: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    limits: Limits
    timeout_s: float | None = None
    policy: Policy | None = None
    account: RemoteAccount | None = None

    def facts(self) -> dict[str, Any]:
        """Return the fields that both events have."""
        return {
            "run": os.urandom(8).hex(),
            "what": self.kind,
            "backend": self.backend,
            "language": self.language,
            "code_sha256": None if self.code is None else sha256_of(self.code),
            "argv_sha256": sha256_of("\0".join(self.argv)) if self.argv else None,
            "network": None if self.policy is None else self.policy.network,
            **({"remote": self.account.as_dict()} if self.account is not None else {}),
        }

    def limited(self) -> dict[str, float | int]:
        """Return the limits of the run."""
        limits = self.limits.as_dict()
        if self.timeout_s is not None:
            limits["timeout_s"] = min(self.timeout_s, self.limits.timeout_s)
        return limits


def is_wanted(audit: Audit | None) -> bool:
    """Tell whether runs are audited or traced."""
    return audit is not None or is_traced()


def is_traced() -> bool:
    """Tell whether spans or metrics are collected in this process; some frameworks import only the API."""
    if _EXTRA not in sys.modules:
        return False
    from .telemetry import is_collected

    return is_collected()


async def recorded(run: Callable[[], Awaitable[Result]], audit: Audit | None, execution: Execution) -> Result:
    """Run, and record the run. Raises AuditFailed, without running, if the start cannot be recorded."""
    if not is_traced():
        return await _audited(run, audit, execution)
    from .telemetry import execution_span

    about = {"kind": execution.kind, "backend": execution.backend, "language": execution.language}
    with execution_span(**about) as ended:
        result = await _audited(run, audit, execution)
        ended(result)
        return result


async def _audited(run: Callable[[], Awaitable[Result]], audit: Audit | None, execution: Execution) -> Result:
    if audit is None:
        return await run()
    from .redaction import Redactor

    redactor, facts = Redactor(execution.env), execution.facts()
    if execution.code is not None:
        facts["code_artifact_sha256"] = audit.store("code", execution.code, redactor)
    audit.record("start", redactor=redactor, **facts)
    started = time.monotonic()
    try:
        result = await run()
    except BaseException as error:
        duration_s = round(time.monotonic() - started, 6)
        setattr(error, _RECORDED, True)
        audit.note("execution", redactor=redactor, **facts, **failure(error), duration_s=duration_s)
        raise
    conclude(audit, redactor, {**facts, "limits": execution.limited()}, result)
    return result


def failure(error: BaseException) -> dict[str, Any]:
    """Return the event's fields for a run without a result."""
    if isinstance(error, Detached):
        return {"status": "detached", "error": None, "reason": "it continues without the caller that started it"}
    is_cancelled = isinstance(error, asyncio.CancelledError | KeyboardInterrupt | SystemExit | GeneratorExit)
    reason = str(error) if isinstance(error, ClocheError) else None
    return {"status": "cancelled" if is_cancelled else "failed", "error": type(error).__name__, "reason": reason}


def conclude(audit: Audit, redactor: Redactor, facts: Mapping[str, Any], result: Result) -> None:
    """Record how a run ended, and note the event in the result."""
    lost = ""
    artifacts: dict[str, Any] = {}
    for row in result.network_refused:
        about = {"host": row["host"], "port": row["port"], "count": row["connections"]}
        audit.note("denial", redactor=redactor, by="network", run=facts["run"], reason=row["why"], **about)
    try:
        for stream, data in (("stdout", result.stdout_bytes), ("stderr", result.stderr_bytes)):
            artifacts[f"{stream}_artifact_sha256"] = audit.store("output", data, redactor) if data else None
    except AuditFailed as error:
        lost = str(error)
        log.critical("output is not stored beside the audit log: %s", error)
    try:
        link = audit.record("execution", redactor=redactor, **facts, **_outcome(result), **artifacts)
    except AuditFailed as error:
        lost = str(error)
        log.critical("run %s has ended, but its end is not in the audit log: %s", facts["run"], error)
        result.meta["audit"] = {"run": facts["run"], "lost": lost}
        return
    result.meta["audit"] = {"run": facts["run"], "seq": link.seq, "hash": link.hash, **({"lost": lost} if lost else {})}


def _outcome(result: Result) -> dict[str, Any]:
    controls = result.enforcement.controls
    return {
        "status": str(result.status),
        "exit_code": result.exit_code,
        "duration_s": round(result.duration, 6),
        "level": str(result.enforcement.level),
        "enforcement": {str(control): str(measure.state) for control, measure in controls.items()},
        "stdout_bytes": len(result.stdout_bytes),
        "stderr_bytes": len(result.stderr_bytes),
        "is_truncated": result.truncated,
        "files": len(result.files),
        **({"cost": remote["cost"]} if (remote := result.meta.get("remote") or {}).get("cost") is not None else {}),
    }


class refusals:  # noqa: N801 - a context manager, like suppress; a generator-based one is slower
    """Record a PolicyDenied that the block raises, before anything runs."""

    __slots__ = ("_code", "_language", "_settings")

    def __init__(self, settings: Settings, *, language: str | None = None, code: str | None = None) -> None:
        self._settings, self._language, self._code = settings, language, code

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, PolicyDenied) and (audit := audit_for(self._settings)) is not None:
            note_denial(audit, error, by="policy", language=self._language, code=self._code)


def note_denial(
    audit: Audit,
    error: BaseException,
    *,
    reason: str | None = None,
    code: object = None,
    **fields: Any,  # noqa: ANN401 - JSON
) -> None:
    """Record a refusal, once per error, even if several callers handle it."""
    if not getattr(error, _RECORDED, False):
        setattr(error, _RECORDED, True)
        sha256 = sha256_of(code) if isinstance(code, str) else None
        audit.note("denial", reason=reason or str(error), **fields, code_sha256=sha256)


def note_fallback(audit: Audit | None, notes: Mapping[str, Any]) -> None:
    """Record that a run uses a fallback, if it does. Raises AuditFailed."""
    fallback = notes.get("fallback")
    if audit is not None and fallback is not None:
        audit.record("fallback", **fallback)
