"""Which memory a guest writes to, so that the next one has it as its own at once and not page by page.

Theory of operation: a forked process shares its memory with its parent, and the kernel copies each page when one of the
two first writes to it. Every such moment costs a trap, and a guest has some four hundred of them. They are nearly the
same for all guests of a nursery. So the first one that has the time notes, when it is ready, which pages are its own by
then; those after it have the kernel copy all of them in one call. What is noted are places in one's own memory, which
is laid out alike in all of them; one that is not there is skipped. A kernel that cannot do it is asked in vain, once
for each guest.
"""

from __future__ import annotations

import posix

from .syscalls import call

PIDFD_SELF, MADV_POPULATE_WRITE = -10000, 23
PAGE = 4096
MOST_RANGES = 1024  # what the kernel takes in one call
_PRESENT, _OWN = 1 << 63, 1 << 56
_ENTRY, _RANGE = 8, 16


def have(ranges: bytes) -> None:
    """Have the kernel copy all pages of these ranges now."""
    if ranges:
        try:
            call("process_madvise", PIDFD_SELF, ranges, len(ranges) // _RANGE, MADV_POPULATE_WRITE, 0)
        except OSError:
            pass  # they are copied when they are written to


def find() -> bytes:
    """Return which pages are this process's own, as the kernel reads ranges: address and length, eight bytes each."""
    found = _own_ranges()[:MOST_RANGES]
    return b"".join([start.to_bytes(8, "little") + length.to_bytes(8, "little") for start, length in found])


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
    file = posix.open("/proc/self/maps", posix.O_RDONLY | posix.O_CLOEXEC)
    text = b""
    try:
        while data := posix.read(file, 1 << 16):
            text += data
    finally:
        posix.close(file)
    found = []
    for line in text.splitlines():
        span, mode, *_ = line.split(None, 2)
        if mode == b"rw-p":
            first, _, last = span.partition(b"-")
            found.append((int(first, 16), int(last, 16)))
    return found
