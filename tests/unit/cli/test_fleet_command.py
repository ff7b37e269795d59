"""What `cloche fleet` refuses before an engine is asked."""

from __future__ import annotations

import pytest

from cloche.cli.app import root


def test_an_empty_id_drains_no_node(capsys: pytest.CaptureFixture[str]) -> None:
    """Each id begins with nothing: `cloche fleet drain "$NODE"` without the variable would take the only node."""
    code = root.main(["fleet", "drain", ""], standalone_mode=False)
    assert (code, "NODE is empty" in capsys.readouterr().err) == (2, True)
