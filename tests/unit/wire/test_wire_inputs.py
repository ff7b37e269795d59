"""Archives of a run's files: what the client packs, and what the service accepts before anything runs."""

from __future__ import annotations

import asyncio
import io
import tarfile

import pytest

from cloche.backends.archive import archive_pieces, archive_size
from cloche.backends.live_streams import ByteStream
from cloche.core.errors import InvalidRequest, OutcomeUnknown
from cloche.core.limits import Limits
from cloche.core.request import InputFile
from cloche.init import wire
from cloche.wire import load
from cloche.wire.calls import IN, Call
from cloche.wire.inputs import check_archive

LIMITS = Limits(disk_bytes=10_000, inodes=3)


def archive_of(*members: tarfile.TarInfo, how: int = tarfile.GNU_FORMAT) -> bytes:
    """Return an archive of these entries, with zeros as content."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=how) as archive:
        for member in members:
            archive.addfile(member, io.BytesIO(bytes(member.size)))
    return packed.getvalue()


def entry(name: str, size: int = 0, kind: bytes = tarfile.REGTYPE) -> tarfile.TarInfo:
    """Return the header of an entry."""
    member = tarfile.TarInfo(name)
    member.size, member.type = size, kind
    return member


def check(archive: bytes) -> None:
    """Check an archive."""
    check_archive(io.BytesIO(archive), len(archive), LIMITS)


def test_an_archive_in_pieces_is_an_archive_and_is_accepted() -> None:
    """Content, names of any length and bytes, and modes are whole; the declared size is the true one."""
    names = ("a", "d/" + "n" * 200, "odd \udcff")
    files = [
        InputFile(path=name, data=bytes([i]) * size, mode=0o755)
        for i, (name, size) in enumerate(zip(names, (0, 512, 700), strict=True))
    ]
    archive = b"".join(map(bytes, archive_pieces(files, 100)))
    assert len(archive) == archive_size(files)
    with tarfile.open(fileobj=io.BytesIO(archive)) as opened:
        found = {member.name: (opened.extractfile(member).read(), member.mode) for member in opened}  # type: ignore[union-attr]
    assert found == {file.path: (file.data, 0o755) for file in files}
    check(archive)


@pytest.mark.parametrize(
    ("archive", "said"),
    [
        (archive_of(entry("../a")), "not a path below"),
        (archive_of(entry("/etc/passwd")), "not a path below"),
        (archive_of(entry("cloche-main.py")), "name under which Cloche runs"),
        (archive_of(entry("a", kind=tarfile.SYMTYPE)), "no regular file"),
        (archive_of(entry("a", kind=tarfile.CHRTYPE)), "no regular file"),
        (archive_of(entry("a" * 300), how=tarfile.PAX_FORMAT), "no regular file"),
        (archive_of(entry("d/" * 65 + "a")), "deeper than 64"),
        (archive_of(*(entry(f"{n}") for n in range(4))), "more than 3 files"),
        (archive_of(entry("a", 6000), entry("b", 6000)), "exceed the sandbox's disk of 10000"),
        (archive_of(entry("a", 6000))[:3000], "no tar archive"),
        (b"x" * 1024, "no tar archive"),
    ],
    ids=["above", "absolute", "program", "link", "device", "pax", "deep", "many", "large", "cut", "noise"],
)
def test_what_no_archive_of_files_is_is_refused(archive: bytes, said: str) -> None:
    """Names that leave the folder, other kinds, too many, too large, and what is cut."""
    with pytest.raises(InvalidRequest, match=said):
        check(archive)


def test_files_of_a_result_wait_for_room_on_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """They go on when others have given theirs back; what can never fit does not wait."""
    monkeypatch.setattr(load, "MOST_SPOOLED", 100)
    bounds = load.WireLoad()

    async def attempt() -> None:
        assert not await bounds.spool_later("key", 76)  # three quarters are the most of one key
        assert await bounds.spool_later("key", 50)
        waiting = asyncio.ensure_future(bounds.spool_later("key", 50))
        await asyncio.sleep(3 * load.LOOK_S)
        assert not waiting.done()
        bounds.spooled.give_back("key", 50)
        assert await waiting
        monkeypatch.setattr(load, "ROOM_S", 0.0)
        assert not await bounds.spool_later("key", 50)
        assert bounds.spooled.held == 50

    asyncio.run(attempt())


def test_a_large_result_waits_until_earlier_ones_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """One key has its share; a result beyond that is taken alone; without room in time it is dropped, with a reason."""
    monkeypatch.setattr(load, "MOST_RESULTS", 100)
    bounds = load.WireLoad()

    async def attempt() -> None:
        await bounds.hold_result("key", 1_000)
        waiting = asyncio.ensure_future(bounds.hold_result("key", 1))
        await asyncio.sleep(3 * load.LOOK_S)
        assert not waiting.done()
        bounds.results.give_back("key", 1_000)
        await waiting
        await bounds.hold_result("other", 75)
        monkeypatch.setattr(load, "ROOM_S", 0.0)
        with pytest.raises(OutcomeUnknown, match="are not read"):
            await bounds.hold_result("key", 75)
        assert bounds.results.held == 76

    asyncio.run(attempt())


def test_small_pieces_that_nobody_reads_take_no_more_memory_than_their_bytes() -> None:
    """A window of two-byte pieces would be 7 MiB of objects, and a lease may have 512 such streams on a node."""

    async def main() -> tuple[int, bytes]:
        call = Call(None, 1)  # type: ignore[arg-type]  # it sends nothing
        for number in range(30_000):
            call.take_data(IN, memoryview(number.to_bytes(2, "big")))
        call.take_data(IN, memoryview(bytes(wire.MOST_DATA)))
        call.take_end(IN)
        count = len(call._pieces[IN])
        return count, b"".join([piece async for piece in call.pieces(IN)])

    count, data = asyncio.run(main())
    assert count <= 17
    output = ByteStream(None, 1)  # type: ignore[arg-type]  # of a guest's process, that its caller does not read
    for _ in range(30_000):
        output.put(b"ab")
    assert len(output._pieces) <= 16
    assert data == b"".join(number.to_bytes(2, "big") for number in range(30_000)) + bytes(wire.MOST_DATA)
