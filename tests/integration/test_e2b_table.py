"""The table of methods in docs/e2b.md is what the SDKs have and the programs show."""

from __future__ import annotations

from scripts import e2b_table


def test_the_table_in_the_document_is_the_programs() -> None:
    """After a change run scripts/e2b_table.py."""
    assert e2b_table.render() in e2b_table.DOCUMENT.read_text()
