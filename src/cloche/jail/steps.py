"""Set-up steps: named values that apply and describe themselves; the first that fails says which it was."""

from __future__ import annotations

import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class Step:
    """Name one piece of the set-up."""

    __slots__ = ("apply", "describe", "name")

    def __init__(self, name: str, description: str | Callable[[], str], apply: Callable[[], object]):
        self.name, self.apply = name, apply
        self.describe = description if callable(description) else lambda: description


class StepFailed(Exception):
    """Say which step failed, at which place of the list, and with which errno (0 when it was no system call)."""

    def __init__(self, step: Step, index: int, total: int, error: Exception):
        self.errno = getattr(error, "errno", None) or 0
        super().__init__(f"{step.describe()}: {error} (step {index + 1} of {total}, {step.name})")
        self.step, self.index = step.name, index


def perform(steps: Sequence[Step]) -> list[tuple[str, str, float]]:
    """Apply the steps in order; return name, description and seconds of each. Raises StepFailed."""
    done = []
    for index, step in enumerate(steps):
        started = time.perf_counter()
        try:
            step.apply()
        except Exception as error:
            raise StepFailed(step, index, len(steps), error) from error
        done.append((step.name, step.describe(), time.perf_counter() - started))
    return done
