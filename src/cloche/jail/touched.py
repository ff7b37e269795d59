"""Which memory a guest writes to, so that the next one has it as its own at once and not page by page.

Theory of operation: a forked process shares its memory with its parent, and the kernel copies each page when one of the
two first writes to it. Every such moment costs a trap, and a guest has some four hundred of them. They are nearly the
same for all guests of a nursery. So the first one that has the time notes, when it is ready, which pages are its own by
then; those after it have the kernel copy all of them in one call. What is noted are places in one's own memory, which
is laid out alike in all of them. Where that guest's memory had grown there is a hole for the others, at which the
kernel stops; it is asked again for what lies behind.
"""

from __future__ import annotations

import posix

from .syscalls import attempt

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TypeAlias

    Noted: TypeAlias = tuple[int, bytes]

PIDFD_SELF, MADV_POPULATE_WRITE = -10000, 23
ENOMEM = 12
PAGE: int = posix.sysconf("SC_PAGE_SIZE")
MOST_RANGES = 1024  # what the kernel takes in one call
MOST_HOLES = 16
MOST_BYTES = 32 << 20  # of one span, and of all, that are looked through for pages that one has written to
_PRESENT, _OWN = 1 << 63, 1 << 56
_ENTRY, _WORD, _RANGE = 8, 8, 16


def is_possible() -> bool:
    """Tell whether this kernel takes such a call from a process about itself."""
    return attempt("process_madvise", PIDFD_SELF, None, 0, MADV_POPULATE_WRITE, 0) == 0


class Copying:
    """Have what is `wanted` copied in the next child as its first deed, before anything else in it writes to memory."""

    def __init__(self) -> None:
        self.wanted: Noted | None = None

    def serve_children(self) -> None:
        """Begin; hooks of modules that are loaded later come after this one."""
        posix.register_at_fork(after_in_child=self._have)

    def _have(self) -> None:
        wanted, self.wanted = self.wanted, None  # a guest's own children have nothing to do with it
        if wanted is not None:
            have(wanted)


copying = Copying()


def read(found: bytes) -> Noted | None:
    """Return what `find` has written: the sum and the ranges; None where nothing was found."""
    return (int.from_bytes(found[:_WORD], "little"), found[_WORD:]) if found else None


def have(noted: Noted) -> None:
    """Have the kernel copy all pages now that another process has found to be written to."""
    left, ranges = noted
    for _ in range(MOST_HOLES):
        if not left:
            return
        done = attempt("process_madvise", PIDFD_SELF, ranges, len(ranges) // _RANGE, MADV_POPULATE_WRITE, 0)
        if done == left or (done < 0 and done != -ENOMEM):
            return  # what an older kernel does not copy now, it copies when it is written to
        left, ranges = _behind_hole(left, ranges, max(done, 0))


def _behind_hole(left: int, ranges: bytes, done: int) -> tuple[int, bytes]:
    """Return what is left to do, in bytes and as ranges, behind the one at which the kernel stopped."""
    at = 0
    while at < len(ranges):
        length = int.from_bytes(ranges[at + _WORD : at + _RANGE], "little")
        at, left, done = at + _RANGE, left - length, done - length
        if done < 0:
            break
    return left, ranges[at:]


def find() -> bytes:
    """Return which pages are this process's own: their sum in bytes, then ranges as the kernel reads them.

    All are words of eight bytes; a range is an address and a length.
    """
    found = _own_ranges()[:MOST_RANGES]
    words = [sum(length for _, length in found), *(word for one in found for word in one)]
    return b"".join([word.to_bytes(_WORD, "little") for word in words])


def _own_ranges() -> list[tuple[int, int]]:
    ranges: list[tuple[int, int]] = []
    pages = posix.open("/proc/self/pagemap", posix.O_RDONLY | posix.O_CLOEXEC)
    try:
        spans = _writable()
        found = [posix.pread(pages, (last - first) // PAGE * _ENTRY, first // PAGE * _ENTRY) for first, last in spans]
    finally:
        posix.close(pages)
    for (first, _), entries in zip(spans, found, strict=True):
        for at in range(0, len(entries), _ENTRY):
            entry = int.from_bytes(entries[at : at + _ENTRY], "little")
            if not (entry & _PRESENT and entry & _OWN):
                continue
            start = first + at // _ENTRY * PAGE
            if ranges and sum(ranges[-1]) == start:
                ranges[-1] = (ranges[-1][0], ranges[-1][1] + PAGE)
            else:
                ranges.append((start, PAGE))
    return ranges


def _writable() -> list[tuple[int, int]]:
    """Return the spans of memory to look through; large ones, of which a run writes to little, are left out."""
    file = posix.open("/proc/self/maps", posix.O_RDONLY | posix.O_CLOEXEC)
    text = b""
    try:
        while data := posix.read(file, 1 << 16):
            text += data
    finally:
        posix.close(file)
    found, left = [], MOST_BYTES
    for line in text.splitlines():
        span, mode, *_ = line.split(None, 2)
        first, last = (int(word, 16) for word in span.split(b"-"))
        if mode == b"rw-p" and last - first <= left:
            found.append((first, last))
            left -= last - first
    return found
