"""What a program may write to the caller's terminal, and what is set back when it has ended."""

from __future__ import annotations

import time

import pytest

from cloche.cli._terminal import TerminalFilter

DRAWS = (
    "\x1b]8;;http://x\x1b\\link\x1b]8;;\x07 é \x1b]11;?\x07\x1b[31mred\x1b[0m\x1b]133;A\x1b\\"
    "\x1bP$qm\x1b\\\x1bP0;1q#0!5~\x1b\\\x1b[2J\x1b7\x1b8 end\n"
).encode()
SETS = [
    "\x1b]52;c;aGk=\x07", "\x1b]52;c;aGk=\x1b\\", "\x1b]0;title\x07", "\x1b]2;title\x1b\\", "\x1b]1337;Copy=:aGk=\x07",
    "\x9d52;c;aGk=\x9c", "\x1bktitle\x1b\\", "\x1b_Gq\x1b\\", "\x1b^x\x1b\\", "\x1bP\x9d52;c;aGk=\x07\x1b\\",
    "\x1b]52;c;" + "A" * 100_000 + "\x07", "\x1bP1$r0m\x1b\\",
]  # fmt: skip


def passed(data: bytes, step: int, *, is_raw: bool = False) -> tuple[bytes, TerminalFilter]:
    """Return what is passed on of output that comes in pieces of `step` bytes."""
    found = TerminalFilter(is_raw=is_raw)
    return b"".join(found.feed(data[at : at + step]) for at in range(0, len(data), step)), found


@pytest.mark.parametrize("step", [1, 2, 3, 7, 1000])
def test_what_draws_or_asks_passes_as_it_is(step: int) -> None:
    """Colours, links, pictures and questions, to the byte, however they are cut."""
    assert passed(DRAWS, step)[0] == DRAWS


@pytest.mark.parametrize("text", SETS, ids=range(len(SETS)))
def test_what_sets_clipboard_or_title_is_dropped(text: str) -> None:
    """In each way in which it can be written; what comes before and after it is not; all of it passes raw."""
    data = f"before{text}after".encode()
    for step in (1, 5, len(data)):
        assert passed(data, step)[0] == b"beforeafter"
        assert passed(data, step, is_raw=True)[0] == data


def test_another_sequence_within_one_is_none_of_its_text() -> None:
    """A terminal ends a sequence at the next one: that hides nothing, also where it is handed on to another."""
    for hidden in (
        b"\x1bPtmux;\x1b\x1b]52;c;eA==\x07\x1b\\",
        b"\x1bP0q\x1b]52;c;eA==\x07\x1b\\",
        b"\x1b]8;\x1b]0;t\x07",
    ):
        for step in (1, 4, len(hidden)):
            found = passed(b"a" + hidden + b"b", step)[0]
            assert b"]52" not in found
            assert b"]0" not in found


@pytest.mark.parametrize(
    ("written", "reset"),
    [
        ("\x1b[?1049h\x1b[?1000;1006h\x1b[?2004h\x1b[?25l", "\x1b[?25h\x1b[?1000l\x1b[?1006l\x1b[?2004l\x1b[?1049l"),
        ("\x1b[?1049h\x1b[?25l\x1b[?25h\x1b[?1049l", ""), ("\x1b[1;31mred", "\x1b[0m"), ("\x1b[1;31mred\x1b[m", ""),
        ("\x1b=\x1b[?1h", "\x1b>\x1b[?1l"), ("\x1b[2;5r", "\x1b7\x1b[r\x1b8"), ("\x1b[4 q", "\x1b[0 q"),
        ("\x1b[>1u", "\x1b[=0u"), ("\x1b[>4;2m", "\x1b[>4m"), ("\x1b(0", "\x1b(B"), ("\x1b[?7l", "\x1b[?7h"),
        ("\x1b[?1049h\x1b=\x1bc", ""), ("\x1b[?99999999999h\x1b[?;h plain", ""),
    ],
)  # fmt: skip
def test_what_was_set_is_set_back(written: str, reset: str) -> None:
    """Modes that differ from the usual ones at the end, and no others; the alternate screen last."""
    for step in (1, 1000):
        for is_raw in (False, True):
            modes = passed(written.encode(), step, is_raw=is_raw)[1].modes
            assert modes.reset() == reset.encode()
            assert not modes.has_asked


@pytest.mark.parametrize(
    "query", ["\x1b[c", "\x1b[>c", "\x1b[6n", "\x1b]11;?\x07", "\x1b[?2004$p", "\x1bP+q544e\x1b\\", "\x05"]
)
def test_questions_are_noted(query: str) -> None:
    """What a terminal answers after the end must be known of."""
    for step in (1, 1000):
        assert passed(query.encode(), step)[1].modes.has_asked


@pytest.mark.parametrize("sequence", [b"\x1b]", b"\x1b]4;\x07", b"\x1bP\x1b\\"])
def test_sixteen_times_the_sequences_take_no_square_of_the_time(sequence: bytes) -> None:
    """Whatever comes at once, each byte is looked at a bounded number of times."""

    def seconds(size: int) -> float:
        data = sequence * (size // len(sequence))
        begun = time.process_time()
        TerminalFilter().feed(data)
        return time.process_time() - begun

    assert seconds(1 << 19) < 64 * min(seconds(1 << 15) for _ in range(3))


def test_notifications_pass_only_where_they_may() -> None:
    """Of an agent's terminal they do; other commands behind the same number never."""
    shown = [b"\x1b]9;done\x07", b"\x1b]9;4;1;50\x1b\\", b"\x1b]777;notify;done;text\x07", b"\x1b]99;i=1;done\x1b\\"]
    never = [b"\x1b]9;6;macro\x07", b"\x1b]777;precmd\x07", b"\x1b]52;c;aGk=\x07", b"\x1b]0;title\x07"]
    for sequence in (*shown, *never):
        assert TerminalFilter(notifies=True).feed(sequence) == (sequence if sequence in shown else b"")
        assert TerminalFilter().feed(sequence) == b""


def test_modes_are_set_in_another_terminal() -> None:
    """What a program has set is set there, and what set it and was set back is not."""
    first = TerminalFilter()
    first.feed(b"\x1b[?1049h\x1b[?2004h\x1b[?1000h\x1b[?25l\x1b[>1u\x1b[31m\x1b[?1000l")
    assert first.modes.entry() == b"\x1b[?1049h\x1b[?25l\x1b[?2004h\x1b[>1u"
    assert first.modes.is_alternate
    second = TerminalFilter()
    second.feed(first.modes.entry())
    assert second.modes.entry() == first.modes.entry()
    assert second.modes.reset() == b"\x1b[=0u\x1b[?25h\x1b[?2004l\x1b[?1049l"
