"""The file of a kept login: for its owner, of one key, replaced as a whole; and its lock."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from cloche.core.errors import BackendUnavailable, InvalidRequest
from cloche.egress.login_file import Login, LoginFile, begin_exchange, end_exchange

FIELDS = {"access_token": ("mark-of-the-token", "the-value-of-the-token")}
LOGIN = Login(fields=FIELDS, answer="{}")


@pytest.fixture
def file(tmp_path: Path) -> LoginFile:
    """Return a file in a folder that is not there yet."""
    return LoginFile(str(tmp_path / "logins" / "claude"), bytes(32))


def test_a_login_is_read_as_it_was_written(file: LoginFile) -> None:
    """Each time it is another version, in another file; its values are in it encrypted."""
    assert file.read() is None
    first = file.write(LOGIN)
    state = file.state()
    second = file.write(LOGIN)
    assert file.read() == second
    assert second.version != first.version
    assert file.state() != state
    data = Path(file.path).read_text()
    assert FIELDS["access_token"][0] in data
    assert FIELDS["access_token"][1] not in data
    assert os.listdir(os.path.dirname(file.path)) == ["claude"]


def test_another_key_and_another_placeholder_open_nothing(file: LoginFile) -> None:
    """Who can write the file cannot have a value stand for another placeholder."""
    file.write(LOGIN)
    with pytest.raises(BackendUnavailable, match="another key"):
        LoginFile(file.path, b"1" * 32).read()
    row = json.loads(Path(file.path).read_text())
    row["placeholders"]["access_token"] = "mine"
    Path(file.path).write_text(json.dumps(row))
    with pytest.raises(BackendUnavailable, match="changed by something else"):
        file.read()


@pytest.mark.parametrize("part", ["file", "folder", "lock", "link"])
def test_what_others_may_read_or_make_is_refused(file: LoginFile, part: str) -> None:
    """Then somebody else may know the tokens, or have put them there."""
    file.write(LOGIN)
    folder = os.path.dirname(file.path)
    if part == "file":
        os.chmod(file.path, 0o644)
    elif part == "folder":
        os.chmod(folder, 0o750)
    elif part == "lock":
        os.close(os.open(f"{file.path}.lock", os.O_CREAT, 0o666))
        os.chmod(f"{file.path}.lock", 0o666)
    else:
        os.rename(file.path, f"{folder}/real")
        os.symlink("real", file.path)
    with pytest.raises(InvalidRequest):
        _read_and_write(file)


def _read_and_write(file: LoginFile) -> None:
    with file.locked():
        file.read()
        file.write(LOGIN)


def test_an_interrupted_exchange_is_known_to_the_next_one(file: LoginFile) -> None:
    """One that has ended is not."""
    with file.locked() as lock:
        assert begin_exchange(lock) == ""
    with file.locked() as lock:
        assert begin_exchange(lock).startswith("20")
        end_exchange(lock)
    with file.locked() as lock:
        assert begin_exchange(lock) == ""
