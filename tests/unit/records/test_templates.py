"""Names of templates."""

from __future__ import annotations

import pytest

from cloche.core.errors import InvalidRequest
from cloche.records.ids import new_id
from cloche.records.templates import check_name


def test_a_name_is_not_an_id() -> None:
    """Another key cannot take the id of a template that will be deleted, which sandboxes still have."""
    row = new_id("tpl")
    for name in (row, row.removeprefix("tpl_")):
        with pytest.raises(InvalidRequest, match="form of an id"):
            check_name(name)
    assert check_name("code-interpreter-v1") == "code-interpreter-v1"
