"""Who was counted: the control of every attempt, run once, and the assertion that it was contained."""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tests.harness.escape.attempts import FORK, JAIL, LIVE, SESSION, Attempt, Verdict, key_of, run_check
from tests.harness.escape.cells import Cells, Kept, Origin, own_session
from tests.harness.escape.runners import Inside, Live, Outside
from tests.harness.escape.targets import Canaries


class Controls:
    """Hold the canaries, and for each attempt either the proof that it works outside or why it is not counted."""

    def __init__(self, canaries: Canaries) -> None:
        self.canaries = canaries
        self._origin, self._kept_origin = Origin(), Origin()
        self._kept = {SESSION: Kept(own_session), FORK: Kept(self._kept_origin.fork)}
        self._controls: dict[str, Verdict] = {}
        self._not_promised: dict[str, str] = {}

    def close(self) -> None:
        """Close what was opened for all attempts."""
        for one in (*self._kept.values(), self._kept_origin, self._origin):
            one.close()

    def runner(self, where: str) -> Inside | Cells:
        """Return a runner for one attempt: a sandbox of a level or, at level jail, a session, a fork, or what lives."""
        if where in (SESSION, FORK):
            return Cells(self.canaries, origin=self._origin if where == FORK else None, kept=self._kept[where])
        return Live(self.canaries, level=JAIL) if where == LIVE else Inside(self.canaries, level=where)

    def control(self, attempt: Attempt) -> Verdict:
        """Run the attempt outside, once per session; in throwaway namespaces if it is destructive or fails without."""
        key = key_of(attempt)
        if key not in self._controls:
            runners = (True,) if attempt.destructive else (False, True)
            for is_throwaway in runners:
                verdict = self._run_outside(attempt, is_throwaway=is_throwaway)
                if verdict.breach or key not in self._controls:
                    self._controls[key] = verdict
                if verdict.breach:
                    break
        return self._controls[key]

    def assert_contained(self, attempt: Attempt, where: str) -> None:
        """Run the control, then the attempt in a sandbox, and fail unless the sandbox held it."""
        self.control(attempt)
        runner = self.runner(where)
        try:
            verdict = run_check(attempt, runner, self.canaries)
        finally:
            runner.close()
        promised = runner.promises.get(attempt.promise, "enforced")
        if verdict.breach and promised != "enforced":
            self._not_promised[key_of(attempt)] = f"the result says that {attempt.promise} is {promised} here"
            return
        assert not verdict.breach, f"{attempt.family}/{attempt.name} escaped from {where}: {verdict.breach}"
        assert verdict.stopped_by, f"{attempt.family}/{attempt.name} broke instead of trying: {verdict.trace}"

    def counted(self, attempts: list[Attempt]) -> Iterator[Attempt]:
        """Yield the attempts that were shown to work outside."""
        return (
            a for a in attempts if a.has_control_here and key_of(a) not in self._not_promised and self.control(a).breach
        )

    def report(self) -> list[str]:
        """Return the table of families, and a line for each attempt that is not counted."""
        attempts = all_attempts()
        tried = [a for a in attempts if key_of(a) in self._controls]
        counts = Counter(attempt.family for attempt in self.counted(tried))
        lines = [f"{family:<12} {count:>4} counted" for family, count in sorted(counts.items())]
        lines.append(f"{'all':<12} {counts.total():>4} counted of {len(attempts)}")
        reasons = ((attempt, self._why_not_counted(attempt)) for attempt in attempts)
        lines += [f"not counted: {key_of(attempt)}: {reason}" for attempt, reason in reasons if reason]
        return lines

    def _why_not_counted(self, attempt: Attempt) -> str:
        if not attempt.has_control_here:
            return f"needs root: {attempt.root_only}"
        if key_of(attempt) in self._not_promised:
            return self._not_promised[key_of(attempt)]
        verdict = self._controls.get(key_of(attempt))
        if verdict is None or verdict.breach:
            return ""
        return f"does not work outside: {verdict.stopped_by or verdict.trace.strip().splitlines()[-1:]}"

    def _run_outside(self, attempt: Attempt, *, is_throwaway: bool) -> Verdict:
        runner = Outside(self.canaries.targets, is_throwaway=is_throwaway)
        try:
            return run_check(attempt, runner, self.canaries)
        finally:
            runner.close()
            self.canaries.harm()  # what a control did late is nobody else's doing


def all_attempts() -> list[Attempt]:
    """Return the attempts of every module of tests/escape, in order."""
    names = sorted(path.stem for path in (Path(__file__).parents[2] / "escape").glob("test_*.py"))
    modules = [importlib.import_module(f"tests.escape.{name}") for name in names]
    return [attempt for module in modules for attempt in getattr(module, "ATTEMPTS", ())]
