"""What comes out of a container is bounded, checked for its shape, and believed in nothing else."""

from __future__ import annotations

import errno
import gzip
import io
import os
import socket
import tarfile
import threading
from pathlib import Path

import pytest

from cloche.backends.archive import Spool, collected, pack, unpack
from cloche.backends.containers.container import MAX_FRAME_BYTES, Splitter
from cloche.backends.containers.inside import files
from cloche.backends.docker.container import AttachedWire, Demultiplexer
from cloche.backends.docker.daemon import _why_not
from cloche.backends.saved_files import Until
from cloche.core.request import InputFile, Request, source_of

FRAME = b"o" + (5).to_bytes(4, "big") + b"hello"


@pytest.mark.parametrize("size", [1, 3, 100])
def test_frames_come_in_any_pieces(size: int) -> None:
    """However the bytes are cut, the same frames come out."""
    data, splitter = FRAME * 3 + b"r" + bytes(4), Splitter()
    found = [frame for at in range(0, len(data), size) for frame in splitter.feed(data[at : at + size])]
    assert found == [(b"o", b"hello")] * 3 + [(b"r", b"")]


def test_streams_are_taken_apart() -> None:
    """Docker's own headers tell standard output from standard error."""
    data = b"\x01\0\0\0" + (2).to_bytes(4, "big") + b"ab" + b"\x02\0\0\0" + (1).to_bytes(4, "big") + b"c"
    streams = Demultiplexer()
    assert [piece for at in range(len(data)) for piece in streams.feed(data[at : at + 1])] == [(1, b"ab"), (2, b"c")]


def test_who_takes_nothing_is_not_sent_to_for_ever() -> None:
    """What comes is waited for as long as it takes all the same."""
    ours, theirs = socket.socketpair()
    with theirs:
        wire = AttachedWire(ours, stall_s=0.2)
        with pytest.raises(TimeoutError, match=r"did not read its input for 0\.2 s"):
            wire.send(bytes(10_000_000))
        timer = threading.Timer(0.5, theirs.sendall, (b"\x01\0\0\0" + (2).to_bytes(4, "big") + b"ab",))
        timer.start()
        assert next(wire.pieces()) == (1, b"ab")
        timer.join()
        wire.close()


@pytest.mark.parametrize("codec", [Splitter, Demultiplexer])
def test_a_frame_without_end_is_refused(codec: type[Splitter | Demultiplexer]) -> None:
    """A length that nobody could want is an error, not a buffer that grows."""
    with pytest.raises(ValueError, match="frame"):
        codec().feed(
            b"\x01\0\0\0" + (MAX_FRAME_BYTES + 1).to_bytes(4, "big") + (MAX_FRAME_BYTES + 1).to_bytes(4, "big")
        )


def spooled(data: bytes) -> Spool:
    """Return a spool that holds `data`."""
    spool = Spool(1 << 20)
    spool.add(data)
    return spool


def test_files_go_through_an_archive() -> None:
    """Names that are no text, empty files and nested ones come out as they went in."""
    given = (
        InputFile(path="a/b", data=b"1"),
        InputFile(path="\udce4 \n", data=b""),
        InputFile(path="c", data=bytes(2000)),
    )
    places, left_out = unpack(spooled(pack(given)), Until(60))
    assert {path: place.size for path, place in places.items()} == {"a/b": 1, "\udce4 \n": 0, "c": 2000}
    assert left_out == 0


def test_a_program_in_an_archive_is_no_file_of_the_users() -> None:
    """A session's files may be looked at while a run's program lies among them; what is deeper is the guest's own."""
    _, files = source_of(Request(code="1"), language="python", file_name="cloche-main.py")
    given = (*files, InputFile(path="d/cloche-main.py", data=b""))
    places, left_out = unpack(spooled(pack(given)), Until(60))
    assert (list(places), left_out) == (["d/cloche-main.py"], 0)


def test_files_that_do_not_match_are_not_collected() -> None:
    """What a sandbox says of its own accord is no file that was asked for, nor is a program, or what was given."""
    files = [InputFile(path=path, data=b"x") for path in ("a.csv", "Makefile", "b/c.csv", "cloche-main-7.py", "in.csv")]
    found = collected(spooled(pack(files)), ("*.csv", "*.py"), {"in.csv": b"x"}, {"partial": ["bytes", "x"]}, Until(60))
    assert [record.path for record in found.records] == ["a.csv"]
    assert (found.is_shared, found.partial) == (True, {"bytes"})


def test_a_hostile_archive_names_nothing_outside() -> None:
    """Links, devices, absolute paths and paths that climb are left out."""
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w") as archive:
        for name, kind in (
            ("link", tarfile.SYMTYPE), ("hard", tarfile.LNKTYPE), ("dev", tarfile.CHRTYPE), ("fifo", tarfile.FIFOTYPE),
            ("../out", tarfile.REGTYPE), ("/etc/x", tarfile.REGTYPE), ("a/../../x", tarfile.REGTYPE),
            ("d/" * 100 + "deep", tarfile.REGTYPE), ("good", tarfile.REGTYPE),
        ):  # fmt: skip
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, "/etc/passwd"
            archive.addfile(member)
    places, left_out = unpack(spooled(target.getvalue()), Until(60))
    assert (list(places), left_out) == (["good"], 8)


def header(name: str, kind: bytes = tarfile.REGTYPE, *, size: int = 0, rest: bytes = b"") -> bytes:
    """Return a header with any size, and with `rest` from byte 386 on, where the sparse kind says what it is."""
    made = bytearray(tarfile.TarInfo(name).tobuf(tarfile.GNU_FORMAT))
    made[124:136] = (size % (1 << 96) | (1 << 95)).to_bytes(12, "big")
    made[156:157] = kind
    made[386 : 386 + len(rest)] = rest
    made[148:156] = b" " * 8
    made[148:156] = b"%06o\0 " % sum(made)
    return bytes(made)


def compressed() -> bytes:
    """Return an archive of many zeros in few bytes."""
    many = header("big", size=1 << 20) + bytes(1 << 20)
    return gzip.compress(many)


def extended() -> bytes:
    """Return an extended header of many digits, for a member of another name."""
    records = b"22 GNU.sparse.size=1\n40010 x=" + b"1" * 40_000 + b"\n"
    padded = records + bytes(-len(records) % 512)
    return header("x", tarfile.XHDTYPE, size=len(records)) + padded + header("other")


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "hostile",
    [
        pytest.param(compressed(), id="compressed"),
        pytest.param(header("s", tarfile.GNUTYPE_SPARSE, rest=bytes(97) + b"77777777777\0"), id="sparse, of 8 GiB"),
        pytest.param(extended(), id="an extended header that is slow to read"),
        pytest.param(header("back", size=-1024), id="a size that leads back"),
        pytest.param(header("short", size=10**12), id="a size of more than came"),
        pytest.param(bytes(range(1, 256)) * 3, id="no archive"),
        pytest.param(header("cut")[:100], id="half a header"),
    ],
)
def test_an_archive_that_lies_costs_nothing(hostile: bytes) -> None:
    """What went before is there; nothing is unpacked, made up, read for ever or walked in circles."""
    good = header("good", size=1) + b"1".ljust(512, b"\0")
    places, left_out = unpack(spooled(good + hostile), Until(60))
    assert ({path: place.size for path, place in places.items()}, left_out) == ({"good": 1}, 1)
    assert unpack(spooled(hostile), Until(60)) == ({}, 1)


def test_long_names_are_read_whole() -> None:
    """As usual programs write them."""
    long = "a/" * 60 + "b" * 200
    given = (InputFile(path=long, data=b"1"), InputFile(path="short", data=b"22"))
    assert {path: place.size for path, place in unpack(spooled(pack(given)), Until(60))[0].items()} == {
        long: 1,
        "short": 2,
    }


class Breaking(io.BytesIO):
    """Give a piece, then fail."""

    def read(self, size: int | None = -1, /) -> bytes:
        data = super().read(size)
        if not data:
            raise OSError(errno.ENOSPC, "no room")
        return data


def test_a_file_that_could_not_be_written_leaves_nothing_open(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What is open keeps its room on the disk, though nobody sees it: one file too many would fill it for good."""
    monkeypatch.setattr(files, "WORKSPACE", str(tmp_path))
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="no room"):
        files.place_file("a/b", 0o644, Breaking(b"1"))
    assert len(os.listdir("/proc/self/fd")) == before
    assert [path.name for path in tmp_path.rglob("*")] == ["a"]


def test_more_than_the_disk_holds_is_refused() -> None:
    """What a container sends is bounded before it is looked at."""
    spool = Spool(0)
    for _ in range(10_000 * 8192 // (1 << 20)):
        spool.add(bytes(1 << 20))
    with pytest.raises(ValueError, match="more files"):
        spool.add(bytes(1 << 20))
    spool.file.close()


@pytest.mark.parametrize(
    ("number", "remedy"), [(errno.EACCES, "usermod -aG docker"), (errno.ENOENT, "systemctl start docker")]
)
def test_an_error_of_the_socket_has_its_remedy(number: int, remedy: str) -> None:
    """However deep a library wraps it, the kernel's answer decides what to do."""
    wrapped = Exception("while fetching", ConnectionError("aborted", OSError(number, "no")))
    assert remedy in _why_not(wrapped, "unix:///x")[1]
