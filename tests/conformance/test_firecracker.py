"""The public conformance suite over Firecracker's stand-in: what depends on how a machine is talked to.

What a machine itself does is tried under QEMU (`test_microvm.py`): agent, disk and places are the same.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cloche.testing.conformance import CHECKS, run_conformance
from tests.harness.machines import pack_stand_in, programs_of, stand_in_backend

# Each boots one machine, emulated.
SOME = ("exact bytes", "timeout", "stdin of 1048576", "workspace lives", "streaming", "network is true")


@pytest.mark.soak  # for its length
@pytest.mark.timeout(600)
def test_firecracker_conforms(microvm_image: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """They are kept, without a deviation, and no machine is left."""
    monkeypatch.setenv("CLOCHE_MICROVM_IMAGE", str(microvm_image))
    monkeypatch.setenv("XDG_CACHE_HOME", str(microvm_image.parents[2]))
    assert {check.name for check in CHECKS} >= set(SOME)
    rows = run_conformance(stand_in_backend(pack_stand_in(tmp_path)), only=SOME, deviations={}, at_once=2)
    broken = [f"{row.outcome}: {row.check.name}: {row.reason}" for row in rows if not row.ok]
    assert not broken, "\n".join(broken)
    assert not programs_of(os.getpid())
