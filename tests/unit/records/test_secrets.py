"""Secrets of a service: what is stored of them, and who gets a value out again."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import select, update

from cloche.core.errors import BackendUnavailable, Conflict, InvalidRequest, NotFound
from cloche.core.secrets import Secret
from cloche.records import secrets
from cloche.records.database import Database
from cloche.records.secrets import list_secrets, open_secrets, read_key, remove_secret, store_secret
from cloche.records.tables import StoredSecret
from cloche.sealing import SealingKey

VALUE = "sk-proj-RealValue0123456789abcdefXYZ"
SECRET = Secret(value=VALUE, hosts=["api.openai.com"], format="Bearer {}", foreign="allow")
KEY, OTHER_KEY = SealingKey(bytes(32)), SealingKey(bytes([1]) * 32)


@pytest.fixture
def database(location: str) -> Iterator[Database]:
    """Yield a database with one secret of the project `default`."""
    database = Database(location)
    with database.writing() as session:
        store_secret(session, KEY, "API_KEY", SECRET, project="default", by="key_1")
    yield database
    database.close()


def opened(database: Database, key: SealingKey | None = KEY, project: str = "default") -> dict[str, Secret]:
    """Return what a project gets for two names."""
    with database.reading() as session:
        return open_secrets(session, key, ["API_KEY", "OTHER"], project=project)


def test_a_value_is_opened_for_its_project_with_the_key(database: Database) -> None:
    """It is as it was stored, and no other project has it; a replaced one counts at once, a removed one no more."""
    assert opened(database) == {"API_KEY": SECRET}
    assert opened(database, project="other") == {}
    with database.writing() as session:
        later = Secret(value="v" * 12, hosts=["a.example"])
        _, is_new = store_secret(session, KEY, "API_KEY", later, project="default", by="b")
        assert not is_new
        with pytest.raises(NotFound):
            remove_secret(session, "API_KEY", project="other")
    assert opened(database)["API_KEY"].value == "v" * 12
    with database.writing() as session:
        remove_secret(session, "API_KEY", project="default")
    assert opened(database) == {}


def test_another_key_and_a_changed_row_open_nothing(database: Database) -> None:
    """Without the key, with another one, and for a row whose hosts or project somebody changed in the database."""
    for key in (None, OTHER_KEY):
        with pytest.raises(BackendUnavailable, match="was stored with another key than this service has"):
            opened(database, key)
    with database.reading() as session:
        row = session.scalars(select(StoredSecret)).one()
    for terms, project in (({"hosts": ["evil.example"]}, "default"), ({}, "other")):
        with database.writing() as session:
            session.execute(update(StoredSecret).values(terms={**row.terms, **terms}, project=project))
        with pytest.raises(BackendUnavailable, match="was changed by something else"):
            opened(database, project=project)


def test_the_value_is_in_no_file_and_no_list(database: Database, tmp_path: Path) -> None:
    """Nor is a text that could be one; the list has names, hosts and times, and tells which key is missing."""
    with database.reading() as session:
        (facts,) = list_secrets(session, project="default")
    assert (facts.as_dict(KEY.mark)["usable"], facts.as_dict(OTHER_KEY.mark)["usable"]) == (True, False)
    assert VALUE not in repr(facts)
    assert "RealValue" not in repr(facts.as_dict(KEY.mark))
    contents = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert not any(VALUE.encode() in content or VALUE[8:].encode() in content for content in contents)


def test_a_project_has_only_so_many(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another one is refused; one that is there may be replaced."""
    monkeypatch.setattr(secrets, "MOST_STORED", 1)
    with database.writing() as session:
        store_secret(session, KEY, "API_KEY", SECRET, project="default", by="key_1")
        with pytest.raises(Conflict, match="this project has 1 secrets"):
            store_secret(session, KEY, "MORE", SECRET, project="default", by="key_1")


def test_a_key_is_32_bytes_in_base64(tmp_path: Path) -> None:
    """A shorter text, such as a password, is no key; a missing file is named with the way to make one."""
    file = tmp_path / "key"
    file.write_bytes(base64.b64encode(bytes(32)) + b"\n")
    assert read_key(str(file)).mark == KEY.mark
    file.write_text("correct horse battery staple")
    with pytest.raises(InvalidRequest, match="does not have 32 bytes in base64; make one with"):
        read_key(str(file))
    with pytest.raises(InvalidRequest, match="secrets_key: the file cannot be read"):
        read_key(str(tmp_path / "none"))
