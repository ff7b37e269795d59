"""Server-sent events of an endpoint: the same ones however the bytes arrive."""

import pytest

from cloche.autofix.endpoint import _Events

STREAM = ': a comment\n\nevent: named\ndata: {"é": 1}\n\ndata:two\ndata: lines\nid: 7\n\nid: 8\n\ndata: not ended'
EVENTS = ['{"é": 1}', "two\nlines"]


@pytest.mark.parametrize("end", ["\n", "\r", "\r\n"])
@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_events_do_not_depend_on_pieces_or_line_ends(size: int, end: str) -> None:
    """Pieces of any size and each way to end a line give the same data; what is not ended gives none."""
    events, data = _Events(), STREAM.replace("\n", end).encode()
    pieces = [data[at : at + size] for at in range(0, len(data), size)]
    assert [event for piece in pieces for event in events.feed(piece)] == EVENTS
