"""The tables in docs/e2b.md are what the SDKs have, what the programs show, and the states of the code."""

from __future__ import annotations

import pytest

from scripts import e2b_table


@pytest.mark.parametrize("title", e2b_table.TABLES)
def test_a_table_in_the_document_is_that_of_the_code(title: str) -> None:
    """After a change run scripts/e2b_table.py."""
    assert e2b_table.TABLES[title]() in e2b_table.DOCUMENT.read_text()
