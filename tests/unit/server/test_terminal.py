"""A program's output as HTML: whatever it holds, only escaped text and spans of ours come out, and soon."""

from __future__ import annotations

import html
import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloche.server.terminal import MOST_CHARS, MOST_SPANS, render_terminal

_TAG = re.compile(r"<[^>]*>?")
_OURS = re.compile(r'</span>|<span class="t-[a-z-]+(?: t-[a-z-]+)*">')
_PIECES = st.sampled_from([
    "\x1b[", "\x1b]", "\x9b", "\x9d", "\x1b", "31m", "1;4;99m", "38;5;1m", "38;2;1;2;3m", "0m", ";", "m", "\x07",
    "\x1b\\", "\r", "\n", "\x08", "<b>", "</span>", '"', "'", "&lt;", "\u202e", "\x00", "\ud800", "a", "\u0660m",
])  # fmt: skip


@given(st.lists(_PIECES | st.characters(), max_size=40).map("".join))
def test_only_escaped_text_and_spans_of_ours_come_out(text: str) -> None:
    """No tag but a span with our classes, each closed; no control character, and nothing invisible."""
    found = str(render_terminal(text))
    tags = _TAG.findall(found)
    assert all(_OURS.fullmatch(tag) for tag in tags)
    assert tags.count("</span>") * 2 == len(tags)
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]", html.unescape(_TAG.sub("", found)))


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[1;31mred\x1b[0m plain", '<span class="t-bold t-red">red</span> plain'),
        ("\x1b[38;5;9;4mline\x1b[24m", '<span class="t-underline">line</span>'),
        ("10 %\r50 %\r100 %\r\ndone", "100 %\ndone"),
        ("\x1b]0;title\x07\x1b]8;;http://a\x1b\\link\x1b]8;;\x1b\\", "link"),
        ("\x1b[2J\x1b[H\x1b[?25l\x1b(Bx\x1bc", "x"),
        ("abd\x08c", "abc"),
        ("\u202egnp", "\\u202egnp"),
        ("<script>&", "&lt;script&gt;&amp;"),
    ],
)
def test_colours_are_kept_and_what_steers_a_terminal_is_not(text: str, shown: str) -> None:
    """Colours and weights become classes; a line is shown as it was written last; titles, links and moves are gone."""
    assert str(render_terminal(text)) == shown


def test_however_much_there_is_it_is_bounded_and_quick() -> None:
    """Each of these is rendered within a second of processor time, and holds the beginning and the end."""
    texts = {
        "line": "M" * 3_000_000, "returns": "a\r" * 500_000, "breaks": "\n" * 500_000,
        "colours": "\x1b[31mx" * 500_000, "unended": "\x1b]" * 500_000, "strings": "\x9d" * 500_000,
        "erased": "a\x08" * 500_000,
        "escapes": "\x1b" * 500_000,
    }  # fmt: skip
    for name, text in texts.items():
        begun = time.process_time()
        found = str(render_terminal(f"first{text}\nlast"))
        assert time.process_time() - begun < 1, name
        assert len(_TAG.sub("", found)) <= MOST_CHARS + 100, name
        assert found.count("<span") <= MOST_SPANS, name
        assert found.startswith("first") or name == "returns", name
        assert found.endswith("last") or name in ("colours", "strings", "unended"), name


def test_after_many_sequences_of_any_kind_there_is_no_style() -> None:
    """Each sequence costs something, those that are left out too, so after a number of them all is plain."""
    assert str(render_terminal("\x1b7" * (MOST_SPANS - 1) + "\x1b[31mred")).startswith("<span")
    assert str(render_terminal("\x1b7" * MOST_SPANS + "\x1b[31mred\x1b7")) == "red"
