"""The blocks of ids of sandboxes with several users."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from cloche.backends.local.users import claim_block
from cloche.core.errors import BackendUnavailable

FIRST, USUAL = 100_000, 65_536  # what useradd gives a user


def test_the_usual_range_is_enough_for_many_sandboxes(tmp_path: Path) -> None:
    """Their blocks are apart and in the upper half; one more is refused with what to do."""
    host = cast("Any", SimpleNamespace(owns_ids=False, ids=SimpleNamespace(first=FIRST, count=USUAL)))
    specs = [cast("Any", SimpleNamespace(ids=(0, 0, [str(tmp_path)]), users=None, outside=None)) for _ in range(33)]
    claims = [claim_block(spec, host) for spec in specs[:32]]
    ids = [number for spec in specs[:32] for number in range(spec.users[0], sum(spec.users))]
    assert sorted(ids) == list(range(FIRST + USUAL // 2, FIRST + USUAL))
    with pytest.raises(BackendUnavailable, match=r"32 sandboxes have all ids.*/etc/subuid.*2,048 for each sandbox"):
        claim_block(specs[32], host)
    claims.pop().forget()
    claim_block(specs[32], host).forget()
    for claim in claims:
        claim.forget()
