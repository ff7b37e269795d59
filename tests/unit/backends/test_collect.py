"""The quick look at a workspace: as it was given, or not."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cloche.backends.local.collect import is_as_given

CODE = b"print(1)"
GIVEN = {"main.py": CODE}


@pytest.fixture
def root(tmp_path: Path) -> Iterator[int]:
    """Return a folder that holds what was given."""
    (tmp_path / "main.py").write_bytes(CODE)
    fd = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    yield fd
    os.close(fd)


def test_what_was_given_is_recognised(root: int) -> None:
    """The same file, and no other."""
    assert is_as_given(root, GIVEN, entries=2)


def test_another_entry_is_noticed_by_the_count(root: int) -> None:
    """The file system counts what is there, found or not."""
    assert not is_as_given(root, GIVEN, entries=3)
    assert not is_as_given(root, GIVEN, entries=1)


def _replaced(make: Callable[[Path], object]) -> Callable[[Path], None]:
    def replace(path: Path) -> None:
        path.unlink()
        make(path)

    return replace


CHANGES: dict[str, Callable[[Path], object]] = {
    "other content": lambda path: path.write_bytes(b"print(2)"),
    "more content": lambda path: path.write_bytes(CODE * 2),
    "gone": lambda path: path.rename(path.with_name("other")),
    "a link": _replaced(lambda path: path.symlink_to("/etc/passwd")),
    "a link that leads nowhere": _replaced(lambda path: path.symlink_to("nowhere")),
    "a folder": _replaced(lambda path: path.mkdir()),
    "a fifo": _replaced(os.mkfifo),
    "large": lambda path: os.truncate(path, 1 << 30),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_a_change_is_noticed(root: int, tmp_path: Path, change: Callable[[Path], object]) -> None:
    """Whatever lies there in place of the file; nothing is followed, waited for, or read without end."""
    change(tmp_path / "main.py")
    assert not is_as_given(root, GIVEN, entries=2)


def test_folders_and_many_files_are_left_to_the_walk(root: int) -> None:
    """The quick look is for the quick case."""
    assert not is_as_given(root, {"folder/main.py": CODE}, entries=2)
    assert not is_as_given(root, {str(number): CODE for number in range(10)}, entries=11)
