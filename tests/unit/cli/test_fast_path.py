"""What `cloche exec NAME` makes of a sandbox that answers what it likes."""

from __future__ import annotations

import json
import socket
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from cloche.cli import _fast_path
from cloche.core.limits import Limits
from cloche.init import wire
from cloche.keeper.registry import Found

STARTED = {"event": "started", "id": "1", "pid": 7}
WAITING = {"event": "waiting"}
DATA = wire.data_frame(1, wire.STDOUT, b"x" * wire.MOST_DATA)


def event(**said: object) -> bytes:
    """Return a frame of the command's channel."""
    return wire.json_frame(wire.EVENT, 1, **said)


def close(**said: object) -> bytes:
    """Return the last frame of the command's channel."""
    return wire.json_frame(wire.CLOSE, 1, **said)


def run(answer: bytes, folder: str = "") -> _fast_path.FastRun:
    """Run a command in a sandbox that answers so, and then nothing more."""
    controls = {"controls": {"time": {"state": "enforced"}}, "level": "jail"}
    entry = {"limits": Limits().as_dict(), "policy": {"network": "off"}, "enforcement": controls}
    ours, theirs = socket.socketpair()

    def send() -> None:
        with suppress(OSError):  # who has heard enough reads no more
            theirs.sendall(answer)
            theirs.shutdown(socket.SHUT_WR)

    sending = threading.Thread(target=send)
    sending.start()
    with ours:
        made = _fast_path.FastRun(Found(name="x", path="/", entry=entry), ours, ["true"], {}, "/workspace", folder)
        found = made.run()
        assert found is made
    sending.join()
    theirs.close()
    return made


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"", "closed from inside"),
        (event(**STARTED), "closed from inside"),
        (close(), "the operation has ended"),
        (event(**STARTED) + close(error={"kind": "other", "message": "no"}), "no"),
        (close(error="x"), "the operation has ended"),
        (event(**STARTED) + DATA * 5, "data exceeds its window"),
        (event(**STARTED) + wire.frame(wire.DATA, 1), "a piece of 0 bytes"),
        (event(**STARTED) + wire.data_frame(1, 3, b"x"), "stream 3 has no content"),
        (event(**WAITING) * 40, "too many events"),
        (wire.frame(wire.EVENT, 1, b"[" * 60_000), "protocol"),
        (wire.frame(wire.EVENT, 1, b"[]"), "no JSON object"),
        (wire.frame(wire.EVENT, 1, b'{"x": ' + b"1" * 60_000 + b"}"), "protocol"),
        (wire.frame(wire.ASK, 1, b"{}"), "a frame of kind"),
        (wire.HEADER.pack(1 << 31, 1, wire.EVENT), "bytes"),
    ],
)
def test_what_breaks_the_protocol_is_a_loss(
    answer: bytes, reason: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Nothing that comes is waited for without an end, and nothing is an error of ours."""
    monkeypatch.setattr(wire, "GRANTED_AT_ONCE", 1 << 30)
    found = run(answer)
    assert found.code is None
    assert reason in str(found.failure), found.failure
    capfd.readouterr()


@pytest.mark.parametrize("wall_s", [None, "x", [], float("nan"), float("inf"), 10**400, -(10**300), True])
def test_figures_that_are_none_are_not_recorded(wall_s: Any, tmp_path: Path) -> None:
    """An end is an end, whatever the sandbox says of the time that it took."""
    ended = {"event": "exit", "status": 0, "usage": {"wall_s": wall_s}}
    answer = event(**STARTED) + wire.frame(wire.EVENT, 1, json.dumps(ended).encode()) + close()
    found = run(answer, str(tmp_path / "audit"))
    assert (found.code, found.failure) == (0, None)
    line = json.loads((tmp_path / "audit" / "audit.jsonl").read_text().splitlines()[-1])
    assert (line["kind"], line["status"], line["duration_s"]) == ("execution", "ok", 1.0 if wall_s is True else 0.0)


def test_strays_do_not_keep_it_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Frames of other channels are no answer: who sends nothing else is late."""
    monkeypatch.setattr(_fast_path, "START_S", -_fast_path.LATE_S)
    found = run(wire.frame(wire.WINDOW, 9) * 1000)
    assert "did not answer" in str(found.failure)
