"""What bodies of every shape cost the service, as `bench.bodies` measures it."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.bodies import measure

pytestmark = pytest.mark.soak


def test_no_body_holds_the_loop_or_takes_much_memory(tmp_path: Path) -> None:
    """On every route and the wire: the loop is held 50 ms at most, and memory is 5 times the body and 4 MiB at most."""
    rows = list(measure(tmp_path))
    assert len(rows) > 800
    assert [row for row in rows if row.is_above] == []
