"""twine with a secret, unmodified, as docs/secrets.md has it."""

from __future__ import annotations

import pytest

from tests.harness.internet.sites import wheels
from tests.harness.world import open_world
from tests.integration.test_secrets_clients import BLOCKS, TABLE, WHEEL, in_bash, run

pytestmark = [pytest.mark.soak, pytest.mark.timeout(300)]


def test_twine_uploads_with_a_token() -> None:
    """The index takes the file from whom shows the value, in Basic credentials."""
    (line,) = [line for line in BLOCKS["pip"].splitlines() if line.startswith("twine")]
    with open_world(TABLE) as world:
        files = {f"dist/{WHEEL}": wheels()[WHEEL]}
        result = run(world, in_bash(line), ("PYPI_TOKEN", "pypi.example"), files=files)
        assert result["exit"] == 0, result
        assert "POST" in {row["method"] for one in world.seen().arrivals for row in one["requests"]}
