"""The public conformance suite over virtual machines. Emulated, each takes seconds to boot."""

from __future__ import annotations

from pathlib import Path

import pytest

from cloche.backends.microvm.backend import MicroVMBackend
from cloche.testing.conformance import CHECKS, Outcome, run_conformance
from tests.harness.machines import monitors

# All checks are kept, and take ten minutes of emulation. The soak tries the first of each family, and whole families
# whose claims are a machine's own: that it says what is true of it, and that its walls stand. Those whose first check
# boots eight machines have another one try for them.
WHOLE = ("truth", "walls", "sessions")
# No checkpoints, and no Node.js on the disk.
SKIPPED = {"rollback", "fork", "session: javascript"}
INSTEAD = {"eight at once": "in parallel"}


def some_checks() -> list[str]:
    """Return the names of what the soak tries."""
    firsts = {check.family: check.name for check in reversed(CHECKS)}
    kept = [check.name for check in CHECKS if check.family in WHOLE or firsts[check.family] == check.name]
    return [INSTEAD.get(name, name) for name in kept]


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_microvm_conforms(microvm_image: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every check is kept, without a deviation, and no machine is left."""
    before = monitors()
    monkeypatch.setenv("CLOCHE_MICROVM_IMAGE", str(microvm_image))
    monkeypatch.setenv("XDG_CACHE_HOME", str(microvm_image.parents[2]))
    rows = run_conformance(MicroVMBackend(), only=some_checks(), deviations={}, at_once=2)
    broken = [f"{row.outcome}: {row.check.name}: {row.reason}" for row in rows if not row.ok]
    assert not broken, "\n".join(broken)
    assert {row.check.name for row in rows if row.outcome is Outcome.SKIPPED} == SKIPPED
    assert monitors() <= before


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_sandboxes_that_live_conform(microvm_image: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every check is kept, without a deviation, and no machine is left."""
    before = monitors()
    monkeypatch.setenv("CLOCHE_MICROVM_IMAGE", str(microvm_image))
    monkeypatch.setenv("XDG_CACHE_HOME", str(microvm_image.parents[2]))
    rows = run_conformance(MicroVMBackend(), deviations={}, at_once=2, is_live=True)
    broken = [f"{row.outcome}: {row.check.name}: {row.reason}" for row in rows if not row.ok]
    assert not broken, "\n".join(broken)
    assert {row.check.name for row in rows if row.outcome is Outcome.SKIPPED} == SKIPPED | {"session apart"}
    assert monitors() <= before
