"""The keys that detach a terminal, in each form in which terminals send them."""

from __future__ import annotations

import pytest

from cloche.cli._kept_terminal import DetachKeys
from cloche.core.errors import InvalidRequest


@pytest.mark.parametrize(
    ("typed", "passed"),
    [
        ([b"a\x10\x11b"], b"a"),
        ([b"a\x10", b"\x11"], b"a"),
        ([b"\x1b[112;5u\x1b[113;5u"], b""),
        ([b"\x1b[112;5:1u", b"\x1b[112;5:3u\x1b[113;5:1u"], b""),
        ([b"\x1b[27;5;112~\x11"], b""),
    ],
)
def test_the_keys_detach(typed: list[bytes], passed: bytes) -> None:
    """What comes before them is passed on, they are not."""
    keys, got = DetachKeys("ctrl-p,ctrl-q"), b""
    for data in typed:
        piece, is_detach = keys.feed(data)
        got += piece
    assert (got, is_detach) == (passed, True)


@pytest.mark.parametrize(
    "typed",
    [[b"\x10x\x11"], [b"\x10", b"x"], [b"\x1b[200~\x10\x11\x1b[201~"], [b"\x1b[200~", b"\x10\x11", b"\x1b[201~"]],
)
def test_other_keys_and_pasted_text_are_the_programs(typed: list[bytes]) -> None:
    """All of it is passed on, unchanged; what is held back goes when no other key comes."""
    keys, got = DetachKeys("ctrl-p,ctrl-q"), b""
    for data in typed:
        piece, is_detach = keys.feed(data)
        assert not is_detach
        got += piece
    assert got + keys.release() == b"".join(typed)


def test_keys_are_checked() -> None:
    """A name that is no key is an error that says what is one."""
    assert DetachKeys("ctrl-a,d").feed(b"\x01d") == (b"", True)
    for text in ("ctrl-", "ctrl-pp", "alt-x", ",", ""):
        with pytest.raises(InvalidRequest, match="ctrl-LETTER"):
            DetachKeys(text)
