"""Auto-fix, seen from the runtime: somebody else decides on code, and only code can be decided on.

Theory of operation: request, policy and limits are settled before the first run and stay. What a fixer may call takes
text and runs it in the place of the first program's; there is no way to pass anything else.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from os import PathLike
from typing import TYPE_CHECKING

from cloche.core.errors import InvalidRequest
from cloche.core.levels import Level
from cloche.core.result import Result
from cloche.core.screen import apply_screen
from cloche.core.tiers import ON_HOST

from .audit import sha256_of

if TYPE_CHECKING:
    from cloche.core.fixing import Fixer

    from .execute import Job, Prepared


def check_fixer(fixer: object, prepared: Prepared, code: str | None) -> Fixer:
    """Return what was given as `autofix`, or raise InvalidRequest, also where a model's code must not run."""
    from cloche.core.fixing import Fixer

    if not isinstance(fixer, Fixer):
        raise InvalidRequest(
            f"autofix: give an AutoFix, not {type(fixer).__name__}: "
            "from cloche.agent.autofix import AutoFix; autofix=AutoFix(...)"
        )
    if code is None:
        raise InvalidRequest("autofix repairs code; a command in argv alone has none")
    policy = prepared.policy
    if policy.trusted:
        raise InvalidRequest("trusted: what a model wrote is never the operator's own; leave it out for auto-fix")
    is_weak = policy.level is not None and policy.level < Level.CONFINED
    if is_weak or prepared.settings.backend in ON_HOST:
        raise InvalidRequest(
            "auto-fix runs what a model answers, so it needs a sandbox; drop --no-sandbox, or use a backend "
            "that isolates (cloche backends)"
        )
    return fixer


async def run_fixing(
    fixer: Fixer,
    prepared: Prepared,
    job: Job,
    run: Callable[[Job], Awaitable[Result]],
    out: str | PathLike[str] | None,
) -> Result:
    """Let `fixer` run the job with its own code and with other code; the files of the last run go to `out`."""
    from .execute import copy_out

    request, tried = job.request, 0

    async def attempt(code: str) -> Result:
        nonlocal tried
        if not isinstance(code, str):
            raise InvalidRequest(f"code: give text, not {type(code).__name__}")
        findings = apply_screen(prepared.policy.screen, request.language, code)
        notes = {name: value for name, value in job.notes.items() if name != "screen"}
        if findings:
            notes["screen"] = [str(finding) for finding in findings]
        result = await run(replace(job, request=replace(request, code=code), notes=notes))
        if prepared.audit is not None and tried:
            prepared.audit.note(
                "fix_round",
                round=tried,
                code_sha256=sha256_of(code),
                status=str(result.status),
                is_fixed=result.ok,
            )
        tried += 1
        return result

    limits = prepared.limits.with_changes(timeout_s=request.timeout_s)
    notes = {"network": prepared.policy.network}
    from cloche.core.fixing import FixTask

    task = FixTask(code=request.code or "", language=request.language, limits=limits, notes=notes)
    result = await fixer.fix(task, attempt)
    if out is not None:
        await copy_out(result, out)
    return result
