"""The public conformance suite over virtual machines. Emulated, each takes seconds to boot."""

from __future__ import annotations

import pytest

from cloche.backends.microvm import MicroVMBackend
from cloche.testing.conformance import run_conformance
from tests.microvms import build_once, monitors


@pytest.mark.soak  # for its length
@pytest.mark.timeout(3600)
def test_microvm_conforms(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every check is kept, without a deviation, and no machine is left."""
    cache = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("CLOCHE_MICROVM_IMAGE", str(build_once(cache)))
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    rows = run_conformance(MicroVMBackend(), deviations={}, at_once=2)
    broken = [f"{row.outcome}: {row.check.name}: {row.reason}" for row in rows if not row.ok]
    assert not broken, "\n".join(broken)
    assert not monitors()
