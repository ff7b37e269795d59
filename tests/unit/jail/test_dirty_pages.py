"""What memory a process writes to after a fork, and having it copied at once."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable

import pytest

from cloche.jail import shared_status

PAGES, WRITTEN = 64, (3, 4, 5, 20, 63)
Memory = tuple[mmap.mmap, int]


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Memory:
    """Return memory of this process's own, all written to, with its address; all of the process is looked through."""
    monkeypatch.setattr(shared_status, "MOST_BYTES", 1 << 46)
    monkeypatch.setattr(shared_status, "MOST_RANGES", 1 << 20)
    found = mmap.mmap(-1, PAGES * shared_status.PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for page in range(PAGES):
        found[page * shared_status.PAGE] = 1
    return found, ctypes.addressof(ctypes.c_char.from_buffer(found))


def in_child(work: Callable[[], bytes]) -> bytes:
    """Return what `work` returns in a fork of this process."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(writing, work())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        data = pipe.read()
    assert os.waitpid(pid, 0)[1] == 0
    return data


def own_pages(ranges: bytes, address: int) -> set[int]:
    """Return which pages of the memory are in ranges as `shared_status.find_dirty_pages` returns them."""
    total, *numbers = (int.from_bytes(ranges[at : at + 8], "little") for at in range(0, len(ranges), 8))
    assert total == sum(numbers[1::2])
    pages = set()
    for start, length in zip(numbers[::2], numbers[1::2], strict=True):
        first = (start - address) // shared_status.PAGE
        pages |= set(range(first, first + length // shared_status.PAGE))
    return pages & set(range(PAGES))


def dirty_pages_of(found: bytes) -> tuple[int, bytes]:
    """Return what was found as it is passed on."""
    dirty_pages = shared_status.read_dirty_pages(found)
    assert dirty_pages is not None
    return dirty_pages


def write(memory: Memory) -> None:
    """Write to some pages."""
    for page in WRITTEN:
        memory[0][page * shared_status.PAGE] = 2


def test_what_a_fork_has_written_to_is_found(memory: Memory) -> None:
    """Those pages, and no other ones: they are still shared."""

    def work() -> bytes:
        write(memory)
        return shared_status.find_dirty_pages()

    assert own_pages(in_child(work), memory[1]) == set(WRITTEN)


def test_what_was_found_can_be_had_at_once(memory: Memory) -> None:
    """The next fork has those pages as its own before it writes to them, with their content."""

    def find() -> bytes:
        write(memory)
        return shared_status.find_dirty_pages()

    # Only these pages: a worker that has run many tests has more holes than are looked behind.
    starts = [memory[1] + page * shared_status.PAGE for page in sorted(own_pages(in_child(find), memory[1]))]
    dirty_pages = pack_uints(
        len(starts) * shared_status.PAGE, *(number for start in starts for number in (start, shared_status.PAGE))
    )

    def work() -> bytes:
        shared_status.populate(dirty_pages_of(dirty_pages))
        assert all(memory[0][page * shared_status.PAGE] == 1 for page in range(PAGES))
        return shared_status.find_dirty_pages()

    assert own_pages(in_child(work), memory[1]) == (set(WRITTEN) if shared_status.is_possible() else set())


def pack_uints(*values: int) -> bytes:
    """Return values as the kernel reads them."""
    return b"".join([value.to_bytes(8, "little") for value in values])


@pytest.mark.parametrize("hole_at", [0, 1, 2])
def test_what_is_not_there_keeps_nothing_else_away(memory: Memory, hole_at: int) -> None:
    """A hole before, between or behind the ranges; nor does a note without any ranges do harm."""
    _, address = memory
    pages = [address + 3 * shared_status.PAGE, address + 20 * shared_status.PAGE]
    starts = [*pages[:hole_at], 1 << 46, *pages[hole_at:]]
    dirty_pages = pack_uints(
        len(starts) * shared_status.PAGE, *(number for start in starts for number in (start, shared_status.PAGE))
    )

    def work() -> bytes:
        shared_status.populate((0, b""))
        shared_status.populate(dirty_pages_of(dirty_pages))
        return shared_status.find_dirty_pages()

    assert own_pages(in_child(work), address) == ({3, 20} if shared_status.is_possible() else set())


def test_the_next_child_has_it_as_its_first_deed(memory: Memory) -> None:
    """That one alone, and not its children; nothing is wanted where nothing was found."""
    _, address = memory
    copying = shared_status.Copying()
    copying.wanted = dirty_pages_of(
        pack_uints(shared_status.PAGE, address + 5 * shared_status.PAGE, shared_status.PAGE)
    )

    def work() -> bytes:
        copying._populate()  # as the hook does, which could not be taken back
        assert copying.wanted is None
        return shared_status.find_dirty_pages()

    assert own_pages(in_child(work), address) == ({5} if shared_status.is_possible() else set())
    assert shared_status.read_dirty_pages(b"") is None


def test_large_spans_are_not_looked_through() -> None:
    """A guest that notes its pages has said that it is ready: an order may be waiting."""
    large = mmap.mmap(-1, 2 * shared_status.MOST_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    large[0] = 1
    spans = shared_status._writable()
    assert sum(last - first for first, last in spans) <= shared_status.MOST_BYTES
    assert len(spans) > 3
    large.close()


def test_the_shared_status_passes_it_on() -> None:
    """Nothing at first; then what the first guest left, whatever the shared status is used for meanwhile."""
    file, timer = shared_status.make()
    try:
        assert shared_status.dirty_pages(file) == b""
        shared_status.note_dirty_pages(file, b"x" * 32)
        shared_status.note_order(file, 7, 1.0, rebuilds=True, is_under_load=True)
        shared_status.note_taken(file, 7)
        shared_status.note_start(file, 7, 3.0, 0)
        shared_status.note_end(file, 7)
        assert shared_status.dirty_pages(file) == b"x" * 32
        state = shared_status.PreforkState(file)
        assert (state.ordered, state.timeout_s, state.rebuilds, state.started, state.ended) == (7, 1.0, True, 7, 7)
        assert shared_status.is_under_load(file)
        assert shared_status.rebuilds(file)
        shared_status.note_order(file, 8, 1.0, rebuilds=False, is_under_load=False)
        assert not shared_status.is_under_load(file)
        assert not shared_status.rebuilds(file)
    finally:
        os.close(file)
        os.close(timer)
