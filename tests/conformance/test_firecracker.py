"""The public conformance suite over Firecracker's stand-in: what depends on how a machine is talked to.

What a machine itself does is tried under QEMU (`test_microvm.py`): agent, disk and places are the same.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cloche.testing.conformance import run_conformance
from tests.harness.machines import pack_stand_in, programs_of, stand_in_backend

# Each boots one machine, emulated.
SOME = ("exact bytes", "timeout", "stdin of 1048576", "workspace lives", "streaming", "network is true")


LIVE = (
    "live: at once", "live: time-out", "live: large input", "live: terminal", "live: ports",
    "live files: content", "live files: stopped",
)  # fmt: skip


@pytest.mark.soak  # for its length
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("names", "is_live"), [(SOME, False), (LIVE, True)], ids=["runs", "live sandboxes"])
def test_firecracker_conforms(
    names: tuple[str, ...], is_live: bool, microvm_image: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """They are kept, without a deviation, and no machine is left."""
    monkeypatch.setenv("CLOCHE_MICROVM_IMAGE", str(microvm_image))
    monkeypatch.setenv("XDG_CACHE_HOME", str(microvm_image.parents[2]))
    backend = stand_in_backend(pack_stand_in(tmp_path))
    rows = run_conformance(backend, only=names, deviations={}, at_once=2, is_live=is_live)
    broken = [f"{row.outcome}: {row.check.name}: {row.reason}" for row in rows if not row.ok]
    assert not broken, "\n".join(broken)
    assert not programs_of(os.getpid())
