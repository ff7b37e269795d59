"""Keys: what a rotation takes over; nothing is done that the audit log does not take."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import insert, select

from cloche.audit.log import Audit
from cloche.core.errors import AuditFailed, Conflict
from cloche.records.database import Database
from cloche.records.keys import create_key, find_key, list_keys, revoke_key, rotate_key, store_key
from cloche.records.tables import APPROVALS


@pytest.fixture
def database(location: str) -> Iterator[Database]:
    """Give a database."""
    database = Database(location)
    yield database
    database.close()


def test_a_rotated_key_has_the_old_ones_scopes_and_end(database: Database) -> None:
    """A key for an hour does not become one for ever, and the old text no longer valid."""
    old, text = create_key(database, name="agent", scopes=("run",), lifetime_s=3_600)
    new, other = rotate_key(database, old.id)
    assert (new.name, new.scopes, new.expires_at) == ("agent", ("run",), old.expires_at)
    with database.reading() as session:
        found = [find_key(session, one) for one in (text, other)]
    assert [one is not None and one.is_valid for one in found] == [False, True]


def test_a_key_has_the_form_that_e2bs_sdks_accept(database: Database) -> None:
    """A new key and a rotated one are valid."""
    key, text = create_key(database, name="agent", scopes=["run"], is_e2b=True)
    _, rotated = rotate_key(database, key.id, is_e2b=True)
    assert all(re.fullmatch(r"e2b_[0-9a-f]+", form) for form in (text, rotated))
    with database.reading() as session:
        assert find_key(session, rotated).is_valid  # type: ignore[union-attr]


def test_what_holds_no_more_does_not_come_back_by_a_rotation(database: Database) -> None:
    """Neither a revoked key nor one whose time is over; no further key is made."""
    revoked, _ = create_key(database, name="revoked", scopes=("run",))
    revoke_key(database, revoked.id)
    over, _ = create_key(database, name="over", scopes=("run",), lifetime_s=-1)
    for key in (revoked, over):
        with pytest.raises(Conflict, match="no longer valid"):
            rotate_key(database, key.id)
    assert len(list_keys(database)) == 2


def test_a_rotated_key_is_the_same_asker(database: Database) -> None:
    """What it asked for is its own request afterwards, which it does not decide about."""
    old, _ = create_key(database, name="agent", scopes=("run", "approve"))
    with database.writing() as session:
        row = {"asked_by": old.id, "asked_at": 0, "expires_at": 1, "request": "{}"}
        session.execute(insert(APPROVALS).values(row))
    new, _ = rotate_key(database, old.id)
    with database.reading() as session:
        assert session.scalar(select(APPROVALS.c.asked_by)) == new.id


def test_what_the_audit_log_does_not_take_is_not_done(database: Database, tmp_path: Path) -> None:
    """No key is made, none is replaced, and none ends, where the log cannot be written."""
    (tmp_path / "audit.jsonl").symlink_to("/dev/null")
    broken = Audit(str(tmp_path))
    kept, _ = create_key(database, name="agent", scopes=("run",))
    for act in (
        lambda: create_key(database, name="new", scopes=("run",), audit=broken),
        lambda: rotate_key(database, kept.id, audit=broken),
        lambda: revoke_key(database, kept.id, audit=broken),
    ):
        with pytest.raises(AuditFailed):
            act()
    assert [(one.id, one.is_valid) for one in list_keys(database)] == [(kept.id, True)]


def test_a_key_that_its_owner_has_made_is_stored_by_its_hash(database: Database) -> None:
    """Its text never came here, and it is valid all the same; the same hash is stored once."""
    digest = hashlib.sha256(b"cloche_made-elsewhere").digest()
    key = store_key(database, digest, name="outside", scopes=("run",))
    with database.reading() as session:
        assert find_key(session, "cloche_made-elsewhere") == key
    with pytest.raises(Conflict, match="there is a key with this SHA-256"):
        store_key(database, digest, name="again", scopes=("run",))
