"""What `cloche fleet` refuses before an engine is asked."""

from __future__ import annotations

import sys

import pytest

from cloche.cli.app import root
from cloche.cli.fleet import examined
from cloche.core.errors import InvalidRequest


def test_an_empty_id_drains_no_node(capsys: pytest.CaptureFixture[str]) -> None:
    """Each id begins with nothing: `cloche fleet drain "$NODE"` without the variable would take the only node."""
    code = root.main(["fleet", "drain", ""], standalone_mode=False)
    assert (code, "NODE is empty" in capsys.readouterr().err) == (2, True)


def test_the_doctor_looks_at_a_fleet_where_one_is_meant(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked for by name, or configured; what is missing has a remedy."""
    monkeypatch.setitem(sys.modules, "ray", None)
    assert examined(None) is None
    findings = examined("ray")
    assert findings is not None
    assert "package ray is not installed" in findings.problem
    assert "cloche[ray]" in findings.remedy
    monkeypatch.setenv("SANDBOX_TYPE", "ray")
    assert examined(None) == findings
    with pytest.raises(InvalidRequest, match="docker"):
        examined("docker")
