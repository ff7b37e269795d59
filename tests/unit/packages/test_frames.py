"""Frames of a sandbox: read in pieces of any size; whatever is not as it should be ends it."""

from __future__ import annotations

import pytest

from cloche.packages.frames import FRAME, Bounds, Reader, WrongFrame, check_path


class Kept:
    """Keep what came."""

    def __init__(self) -> None:
        self.files: list[list[object]] = []
        self.closed = 0

    def begin(self, kind: int, name: str, size: int) -> Kept:
        self.files.append([kind, name, size, b""])
        return self

    def write(self, data: bytes) -> None:
        self.files[-1][3] = bytes(self.files[-1][3]) + data  # type: ignore[arg-type]

    def close(self) -> None:
        self.closed += 1


def _frame(kind: int, name: bytes, data: bytes, size: int | None = None) -> bytes:
    return FRAME.pack(kind, len(name), len(data) if size is None else size) + name + data


@pytest.mark.parametrize("piece", [1, 2, 7, 1000])
def test_frames_are_read_in_pieces_of_any_size(piece: int) -> None:
    """Empty files and empty names, too."""
    data = _frame(1, b"a/b.py", b"x" * 20) + _frame(2, b"", b"") + _frame(3, "ä".encode(), b"") + _frame(1, b"c", b"y")
    kept = Kept()
    reader = Reader(kept.begin, Bounds(files=10, total_bytes=100))
    for start in range(0, len(data), piece):
        reader.feed(data[start : start + piece])
    assert kept.files == [[1, "a/b.py", 20, b"x" * 20], [2, "", 0, b""], [3, "ä", 0, b""], [1, "c", 1, b"y"]]
    assert kept.closed == 4
    assert reader.is_between


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (_frame(1, b"a", b"") * 4, "more than 3 files"),
        (_frame(1, b"a", b"", 101), "more than 100 bytes"),
        (_frame(1, b"a", b"", 1 << 63), "more than 100 bytes"),
        (_frame(1, b"a", b"x" * 60) + _frame(1, b"b", b"", 60), "more than 100 bytes"),
        (_frame(1, b"a" * 2000, b""), "2000 bytes"),
        (_frame(1, b"\xff\xfe", b""), "not UTF-8"),
    ],
)
def test_what_is_beyond_the_bounds_ends_it(data: bytes, why: str) -> None:
    """Before any of that is passed on."""
    with pytest.raises(WrongFrame, match=why):
        Reader(Kept().begin, Bounds(files=3, total_bytes=100)).feed(data)


def test_a_frame_that_is_cut_shows() -> None:
    """In its head, its name or its content."""
    whole = _frame(1, b"name", b"content")
    for length in range(1, len(whole)):
        reader = Reader(Kept().begin, Bounds(files=3, total_bytes=100))
        reader.feed(whole[:length])
        assert not reader.is_between


@pytest.mark.parametrize(
    "path", ["", "/", "/a", "a/", "a//b", ".", "..", "../a", "a/../b", "a/./b", "a\0b", "a" * 300, "a/" * 50 + "b"]
)
def test_a_path_that_leads_elsewhere_is_refused(path: str) -> None:
    """So is one that no file system takes."""
    with pytest.raises(WrongFrame):
        check_path(path)


def test_a_path_is_taken_apart() -> None:
    """Whatever else is in its names."""
    assert check_path("a/b c/...py") == ("a", "b c", "...py")
