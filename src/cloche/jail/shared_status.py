"""The shared record of a run in a prefork jail, which saves waking the helper for a short run.

The shared status is a memory file and a timer. The caller writes an order to it and sets the timer; the guest writes
when it starts the program, and pid 1 of its jail that it has ended. The helper sleeps until the timer goes off or a
message comes, and then reads the state. So the time limit holds if the caller dies, and the end of a short run needs no
message. No program ever holds the file: the guest closes it before.

After that record, the file lists the pages of memory that a guest writes to (`find_dirty_pages`, `populate`), so that
the next one gets copies of these pages at once and not one by one.

Theory of operation: a forked process shares its memory with its parent, and the kernel copies each page when one of the
two first writes to it. Each copy costs a page fault, and a guest has some four hundred of them. They are nearly the
same for all guests of a prefork jail. So the first one that has the time notes, when it is ready, which pages are its
own by then; those after it have the kernel copy all of them in one call. The notes are addresses, and all guests have
the same memory layout. Where that guest's memory had grown the others have a hole, at which the kernel stops; the call
is repeated for the ranges behind it.
"""

from __future__ import annotations

import posix

from .syscalls import attempt, call

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TypeAlias

CLOCK_MONOTONIC = 1
TFD_NONBLOCK, TFD_CLOEXEC = posix.O_NONBLOCK, posix.O_CLOEXEC
_ORDERED_AT, _STARTED_AT, _ENDED_AT, _SIZE = 0, 64, 128, 192  # each has one writer, and a cache line of its own
_DIRTY_PAGES_AT, _DIRTY_PAGES_BYTES = 4096, 1 << 15
_UNDER_LOAD_AT, _SHARES_WORKSPACE_AT, _AGAIN_AT = _ORDERED_AT + 24, _ORDERED_AT + 32, _ORDERED_AT + 40
_TAKEN_AT = _STARTED_AT + 32
_NS = 10**9


def make() -> tuple[int, int]:
    """Return the descriptors of a new shared status: its memory file, and its timer."""
    file = posix.memfd_create("cloche", posix.MFD_CLOEXEC)
    try:
        posix.ftruncate(file, _SIZE)
        return file, call("timerfd_create", CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC)
    except BaseException:
        posix.close(file)
        raise


def set_timer(timer: int, seconds: float) -> None:
    """Let the timer go off once, `seconds` from now."""
    ns = max(1, int(seconds * _NS))
    call("timerfd_settime", timer, 0, bytes(16) + _pack_uints(ns // _NS, ns % _NS), None)


def clear_timer(timer: int) -> None:
    """Read the timer, which has gone off."""
    try:
        posix.read(timer, 8)
    except BlockingIOError:
        pass  # it was set again meanwhile


def note_order(
    file: int,
    number: int,
    timeout_s: float,
    *,
    rebuilds: bool,
    is_under_load: bool = False,
    shares_workspace: bool = False,
) -> None:
    """Write down that run `number` is ordered; with its number at both ends, so that half of it is recognized."""
    order = number, int(timeout_s * _NS), rebuilds, is_under_load, shares_workspace, number
    posix.pwrite(file, _pack_uints(*order), _ORDERED_AT)


def rebuilds(file: int) -> bool:
    """Tell whether the last run that was ordered is the only one of its sandbox."""
    return bool(_read_uint(posix.pread(file, 8, _ORDERED_AT + 16), 0))


def is_under_load(file: int) -> bool:
    """Tell whether the caller's other runs kept all processors busy when the last one was ordered."""
    return bool(_read_uint(posix.pread(file, 8, _UNDER_LOAD_AT), 0))


def shares_workspace(file: int) -> bool:
    """Tell whether a live session works in the same files as the last run that was ordered."""
    return bool(_read_uint(posix.pread(file, 8, _SHARES_WORKSPACE_AT), 0))


def note_taken(file: int, number: int) -> None:
    """Write down, in a guest, that it has the orders of run `number`."""
    posix.pwrite(file, _pack_uints(number), _TAKEN_AT)


def read_taken(file: int) -> int:
    """Return the number of the run whose orders were taken last, 0 before the first."""
    return _read_uint(posix.pread(file, 8, _TAKEN_AT), 0)


def note_start(file: int, number: int, started_at: float, device: int) -> None:
    """Write down that the program of run `number` starts, and the device number of its guest's workspace."""
    posix.pwrite(file, _pack_uints(number, int(started_at * _NS), device, number), _STARTED_AT)


def note_end(file: int, number: int) -> None:
    """Write down that the guest of run `number` has ended."""
    posix.pwrite(file, _pack_uints(number), _ENDED_AT)


def note_dirty_pages(file: int, ranges: bytes) -> None:
    """Write the list of pages that later guests will write to."""
    posix.pwrite(file, ranges, _DIRTY_PAGES_AT)


def dirty_pages(file: int) -> bytes:
    """Return the pages that guests write to; empty until a guest has noted them."""
    return posix.pread(file, _DIRTY_PAGES_BYTES, _DIRTY_PAGES_AT)


def start_of(file: int, number: int) -> tuple[float, int]:
    """Return when the program of run `number` started, 0.0 if it has not, and the device number of its workspace."""
    data = posix.pread(file, 32, _STARTED_AT)
    has_started = _read_uint(data, 0) == number == _read_uint(data, 24)
    return (_read_uint(data, 8) / _NS, _read_uint(data, 16)) if has_started else (0.0, 0)


class PreforkState:
    """Tell how things stand with the runs of a prefork jail: their numbers, 0 before the first; times in seconds."""

    def __init__(self, file: int):
        data = _read_whole(file)
        self.ordered, self.timeout_s, self.rebuilds = (
            _read_uint(data, 0),
            _read_uint(data, 8) / _NS,
            bool(_read_uint(data, 16)),
        )
        self.started, self.started_at = _read_uint(data, _STARTED_AT), _read_uint(data, _STARTED_AT + 8) / _NS
        self.ended = _read_uint(data, _ENDED_AT)


def _read_whole(file: int) -> bytes:
    while True:
        data = posix.pread(file, _SIZE, 0)
        if _read_uint(data, 0) == _read_uint(data, _AGAIN_AT) and _read_uint(data, _STARTED_AT) == _read_uint(
            data, _STARTED_AT + 24
        ):
            return data


def _pack_uints(*values: int) -> bytes:
    return b"".join([value.to_bytes(8, "little") for value in values])


def _read_uint(data: bytes, offset: int) -> int:
    return int.from_bytes(data[offset : offset + 8], "little")


if TYPE_CHECKING:
    DirtyPages: TypeAlias = tuple[int, bytes]

PIDFD_SELF, MADV_POPULATE_WRITE = -10000, 23
ENOMEM = 12
PAGE: int = posix.sysconf("SC_PAGE_SIZE")
MOST_RANGES = 1024  # the kernel's limit (UIO_MAXIOV) for one call
MOST_HOLES = 16
MOST_BYTES = 32 << 20  # of one span, and of all, that are looked through for pages that one has written to
_PRESENT, _OWN = 1 << 63, 1 << 56
_ENTRY, _UINT_BYTES, _RANGE = 8, 8, 16


def is_possible() -> bool:
    """Tell whether this kernel takes such a call from a process about itself."""
    return attempt("process_madvise", PIDFD_SELF, None, 0, MADV_POPULATE_WRITE, 0) == 0


class Copying:
    """Copy the `wanted` pages first in the next child, before other code in it writes to memory."""

    def __init__(self) -> None:
        self.wanted: DirtyPages | None = None

    def register_at_fork(self) -> None:
        """Register it; hooks of modules that are loaded later come after this one."""
        posix.register_at_fork(after_in_child=self._populate)

    def _populate(self) -> None:
        wanted_pages, self.wanted = self.wanted, None  # a guest's own children have nothing to do with it
        if wanted_pages is not None:
            populate(wanted_pages)


copying = Copying()


def read_dirty_pages(data: bytes) -> DirtyPages | None:
    """Read the output of `find_dirty_pages`: the sum and the ranges; None if it is empty."""
    return (int.from_bytes(data[:_UINT_BYTES], "little"), data[_UINT_BYTES:]) if data else None


def populate(dirty_pages: DirtyPages) -> None:
    """Have the kernel copy all pages now that another process has found to be written to."""
    left_bytes, ranges = dirty_pages
    for _ in range(MOST_HOLES):
        if not left_bytes:
            return
        copied_bytes = attempt("process_madvise", PIDFD_SELF, ranges, len(ranges) // _RANGE, MADV_POPULATE_WRITE, 0)
        if copied_bytes == left_bytes or (copied_bytes < 0 and copied_bytes != -ENOMEM):
            return  # an older kernel copies each page at its first write
        left_bytes, ranges = _behind_hole(left_bytes, ranges, max(copied_bytes, 0))


def _behind_hole(left_bytes: int, ranges: bytes, copied_bytes: int) -> tuple[int, bytes]:
    """Return the remaining bytes and ranges, behind the range at which the kernel stopped."""
    offset = 0
    while offset < len(ranges):
        length = int.from_bytes(ranges[offset + _UINT_BYTES : offset + _RANGE], "little")
        offset, left_bytes, copied_bytes = offset + _RANGE, left_bytes - length, copied_bytes - length
        if copied_bytes < 0:
            break
    return left_bytes, ranges[offset:]


def find_dirty_pages() -> bytes:
    """Return which pages are this process's own: their sum in bytes, then ranges as the kernel reads them.

    All are integers of eight bytes; a range is an address and a length.
    """
    dirty_ranges = _own_ranges()[:MOST_RANGES]
    numbers = [
        sum(length for _, length in dirty_ranges),
        *(number for dirty_range in dirty_ranges for number in dirty_range),
    ]
    return b"".join([number.to_bytes(_UINT_BYTES, "little") for number in numbers])


def _own_ranges() -> list[tuple[int, int]]:
    ranges: list[tuple[int, int]] = []
    pages = posix.open("/proc/self/pagemap", posix.O_RDONLY | posix.O_CLOEXEC)
    try:
        spans = _writable()
        page_entries = [
            posix.pread(pages, (last - first) // PAGE * _ENTRY, first // PAGE * _ENTRY) for first, last in spans
        ]
    finally:
        posix.close(pages)
    for (first, _), entries in zip(spans, page_entries, strict=True):
        for offset in range(0, len(entries), _ENTRY):
            entry = int.from_bytes(entries[offset : offset + _ENTRY], "little")
            if not (entry & _PRESENT and entry & _OWN):
                continue
            start = first + offset // _ENTRY * PAGE
            if ranges and sum(ranges[-1]) == start:
                ranges[-1] = (ranges[-1][0], ranges[-1][1] + PAGE)
            else:
                ranges.append((start, PAGE))
    return ranges


def _writable() -> list[tuple[int, int]]:
    """Return the spans of memory to look through, except large ones: a run writes to little of these."""
    file = posix.open("/proc/self/maps", posix.O_RDONLY | posix.O_CLOEXEC)
    text = b""
    try:
        while data := posix.read(file, 1 << 16):
            text += data
    finally:
        posix.close(file)
    spans, left_bytes = [], MOST_BYTES
    for line in text.splitlines():
        span, mode, *_ = line.split(None, 2)
        first, last = (int(address, 16) for address in span.split(b"-"))
        if mode == b"rw-p" and last - first <= left_bytes:
            spans.append((first, last))
            left_bytes -= last - first
    return spans
