"""A stream of changes is read in pieces of any size, and what is malformed or too much ends the reading."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cloche.workspace.snapshot import MOST_ROW_BYTES, SnapshotReader

END = (1 << 31).to_bytes(4, "big")


def row(path: Any = "a", kind: Any = "file", **more: Any) -> bytes:
    """Return the frame of a row."""
    text = json.dumps({"path": path, "kind": kind, "mode": 0o644, **more}).encode()
    return len(text).to_bytes(4, "big") + text


def content(data: bytes) -> bytes:
    """Return a frame of content."""
    return (1 << 31 | len(data)).to_bytes(4, "big") + data


def frame(text: bytes) -> bytes:
    """Return a frame of anything."""
    return len(text).to_bytes(4, "big") + text


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[SnapshotReader]:
    """Make a reader with small bounds."""
    made = SnapshotReader(tmp_path, max_bytes=10_000, entries=10)
    yield made
    made.close()


@pytest.mark.parametrize("size", [1, 3, 7, 10_000])
def test_a_stream_may_be_split_anywhere(reader: SnapshotReader, tmp_path: Path, size: int) -> None:
    """Contents, hashes, kinds and names are the same however the stream is cut, and no file has a name."""
    stream = b"".join([
        row("d", "directory", opaque=True), row("d/a"), content(b"one"), content(b"two\n"), END, row({"hex": "ff0a"},
        "link", target="d"),
        row("b", copied=True), content("ü".encode()[:1]), content("ü".encode()[1:]), END, row("c"), content(b"x"),
        frame(b'{"problem":"changed"}'), row("e"), content(b"\0"), END, row("f", "removed"), row("g"), END,
    ])  # fmt: skip
    for at in range(0, len(stream), size):
        reader.feed(stream[at : at + size])
    snapshot = reader.finish({"count": 8})
    try:
        entries = snapshot.entries
        assert list(entries) == [b"b", b"c", b"d", b"d/a", b"e", b"f", b"g", b"\xff\n"]
        assert [b"".join(snapshot.read(entries[path])) for path in (b"d/a", b"b", b"e", b"g")] == [
            b"onetwo\n", "ü".encode(), b"\0", b"",
        ]  # fmt: skip
        assert entries[b"d/a"].sha256 == hashlib.sha256(b"onetwo\n").hexdigest()
        assert [entries[path].is_text for path in (b"d/a", b"b", b"e", b"g")] == [True, True, False, True]
        assert entries[b"d"].is_opaque
        assert entries[b"b"].is_copied
        assert entries[b"c"].problem == "it was changed while it was read"
        assert entries[b"\xff\n"].target == b"d"
        assert not os.listdir(tmp_path)
    finally:
        snapshot.close()


@pytest.mark.parametrize(
    "stream",
    [
        row("/a"), row("a//b"), row("./a"), row("a/.."), row(".."), row(""), row("a/"), row("a\0b"), row(5), row(None),
        row({"hex": "2e2e2f61"}), row({"hex": "zz"}), row({"hex": "00"}), row("\ud800"), row("a" * 256),
        row("a/" * 2050 + "a"), row("a/" * 128 + "a"),
        row(kind="device"), row(kind=None), row(kind=[]), row(kind="unchanged"), row(mode=-1), row(mode=0o10000),
        row(mode=True), row(mode=1.5), row(kind="link"), row(kind="link", target=""), row(kind="link",
        target="x" * 5000),
        row(problem="<b>"), row(problem=5), row("a", "removed") + row("a", "removed"), row("a",
        "removed") + row("a/b", "removed"),
        row("a", "directory", problem="mount") + row("a/b", "removed"), row("a") + row("b"), row() + frame(b"{}"),
        content(b"x"), row("a", "directory") + content(b"x"),
        row() + content(b"x") * 10_001, row() + content(b"x" * 9_999) + content(b"xx"),
        frame(b""), frame(b"[]"), frame(b"{"), frame(b"[" * 60_000), frame(b"1" * 5000),
        (MOST_ROW_BYTES + 1).to_bytes(4, "big"),
        (1 << 31 | 1 << 30).to_bytes(4, "big"), b"".join(row(str(n), "directory") for n in range(11)),
    ],
)  # fmt: skip
def test_what_is_malformed_is_refused(reader: SnapshotReader, stream: bytes) -> None:
    """No path that leads out, second row, content of nothing, no unknown word and nothing beyond a bound is read."""
    reader.feed(stream)
    with pytest.raises(ValueError) as caught:
        reader.finish({"count": stream.count(b'"path"')})
    assert str(caught.value).isascii()


@pytest.mark.parametrize(
    ("stream", "answer"),
    [
        (row(), {"count": 1}), (row() + content(b"x"), {"count": 1}), (row("a", "directory"), {"count": 2}), (b"\0",
        {"count": 0}),
        (b"", {}), (row("a", "directory"), {"count": True}), (row() + content(b"xx")[:5], {"count": 1}),
    ],
)  # fmt: skip
def test_what_is_not_complete_is_refused(reader: SnapshotReader, stream: bytes, answer: dict[str, Any]) -> None:
    """A stream that ends inside of a file or a frame, or lacks rows, is no snapshot."""
    reader.feed(stream)
    with pytest.raises(ValueError):
        reader.finish(answer)


def test_a_snapshot_says_that_it_is_partial(reader: SnapshotReader) -> None:
    """What was cut or passed over at the other end makes it so."""
    snapshot = reader.finish({"count": 0, "too_many": True})
    snapshot.close()
    assert snapshot.is_partial
