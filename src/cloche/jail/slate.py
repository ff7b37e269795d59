"""What is written down of a run in a nursery, so that nobody has to wake the helper of one that is soon over.

A slate is a memory file and a timer. The caller writes an order down and winds the timer; the guest writes down when
it starts the program, and its nursery that it has ended. The helper sleeps until the timer goes off or somebody
speaks to it, and then reads how things stand. So a clock is kept whatever happens to the caller, and the end of a
short run needs no word. No program ever holds a slate: the guest lets go of it before.

Behind all that a guest leaves to those after it what it has found out of their memory: see `touched`.
"""

from __future__ import annotations

import posix

from .syscalls import call

CLOCK_MONOTONIC = 1
TFD_NONBLOCK, TFD_CLOEXEC = posix.O_NONBLOCK, posix.O_CLOEXEC
_ORDERED_AT, _STARTED_AT, _ENDED_AT, _SIZE = 0, 64, 128, 192  # each has one writer, and a cache line of its own
_TOUCHED_AT, _TOUCHED_BYTES = 4096, 1 << 15
_CROWDED_AT, _COMPANY_AT, _AGAIN_AT = _ORDERED_AT + 24, _ORDERED_AT + 32, _ORDERED_AT + 40
_TAKEN_AT = _STARTED_AT + 32
_NS = 10**9


def make() -> tuple[int, int]:
    """Return the descriptors of a new slate: its memory file, and its timer."""
    file = posix.memfd_create("cloche", posix.MFD_CLOEXEC)
    try:
        posix.ftruncate(file, _SIZE)
        return file, call("timerfd_create", CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC)
    except BaseException:
        posix.close(file)
        raise


def wind(timer: int, seconds: float) -> None:
    """Let the timer go off once, `seconds` from now."""
    ns = max(1, int(seconds * _NS))
    call("timerfd_settime", timer, 0, bytes(16) + _words(ns // _NS, ns % _NS), None)


def unwind(timer: int) -> None:
    """Take note that the timer has gone off."""
    try:
        posix.read(timer, 8)
    except BlockingIOError:
        pass  # it was wound again meanwhile


def note_order(
    file: int, number: int, timeout_s: float, *, rebuilds: bool, is_crowded: bool = False, has_company: bool = False
) -> None:
    """Write down that run `number` is ordered; with its number at both ends, so that half of it is told apart."""
    order = number, int(timeout_s * _NS), rebuilds, is_crowded, has_company, number
    posix.pwrite(file, _words(*order), _ORDERED_AT)


def rebuilds(file: int) -> bool:
    """Tell whether the last run that was ordered is the only one of its sandbox."""
    return bool(_word(posix.pread(file, 8, _ORDERED_AT + 16), 0))


def is_crowded(file: int) -> bool:
    """Tell whether the caller's other runs kept all processors busy when the last one was ordered."""
    return bool(_word(posix.pread(file, 8, _CROWDED_AT), 0))


def has_company(file: int) -> bool:
    """Tell whether a live session works in the same files as the last run that was ordered."""
    return bool(_word(posix.pread(file, 8, _COMPANY_AT), 0))


def note_taken(file: int, number: int) -> None:
    """Write down, in a guest, that it has the orders of run `number`."""
    posix.pwrite(file, _words(number), _TAKEN_AT)


def taken(file: int) -> int:
    """Return the number of the run whose orders were taken last, 0 before the first."""
    return _word(posix.pread(file, 8, _TAKEN_AT), 0)


def note_start(file: int, number: int, at: float) -> None:
    """Write down that the program of run `number` starts."""
    posix.pwrite(file, _words(number, int(at * _NS), number), _STARTED_AT)


def note_end(file: int, number: int) -> None:
    """Write down that the guest of run `number` has ended."""
    posix.pwrite(file, _words(number), _ENDED_AT)


def note_touched(file: int, ranges: bytes) -> None:
    """Leave to the guests after this one what memory they will write to."""
    posix.pwrite(file, ranges, _TOUCHED_AT)


def touched(file: int) -> bytes:
    """Return what memory guests write to; nothing where none of them has told yet."""
    return posix.pread(file, _TOUCHED_BYTES, _TOUCHED_AT)


def start_of(file: int, number: int) -> float:
    """Return when the program of run `number` started, 0.0 if it has not."""
    data = posix.pread(file, 16, _STARTED_AT)
    return _word(data, 8) / _NS if _word(data, 0) == number else 0.0


class State:
    """Tell how things stand with the runs of a nursery: their numbers, 0 before the first; times in seconds."""

    def __init__(self, file: int):
        data = _read_whole(file)
        self.ordered, self.timeout_s, self.rebuilds = _word(data, 0), _word(data, 8) / _NS, bool(_word(data, 16))
        self.started, self.started_at = _word(data, _STARTED_AT), _word(data, _STARTED_AT + 8) / _NS
        self.ended = _word(data, _ENDED_AT)


def _read_whole(file: int) -> bytes:
    while True:
        data = posix.pread(file, _SIZE, 0)
        if _word(data, 0) == _word(data, _AGAIN_AT) and _word(data, _STARTED_AT) == _word(data, _STARTED_AT + 16):
            return data


def _words(*values: int) -> bytes:
    return b"".join([value.to_bytes(8, "little") for value in values])


def _word(data: bytes, place: int) -> int:
    return int.from_bytes(data[place : place + 8], "little")
