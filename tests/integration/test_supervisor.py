"""The supervisor of a node without Ray: its server outlives it, is found again, and ends when nobody asks any more."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

import cloche
from cloche.fleets.ray import supervisor
from cloche.fleets.ray.supervisor import NodeSupervisor, began, unfit
from cloche.fleets.signing import Signer

PATIENCE_S = 60.0


def until(condition: Callable[[], Any]) -> Any:
    """Wait until something is true, and return it."""
    ends = time.monotonic() + PATIENCE_S
    while not (answer := condition()):
        assert time.monotonic() < ends
        time.sleep(0.05)
    return answer


def words() -> list[str]:
    """Return the words of a server with a key of its own."""
    return ["--public-key", Signer().public_key, "--listen", "127.0.0.1:0", "--backend", "local"]


@pytest.fixture(autouse=True)
def left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Keep state in a folder of the test, and note the nodes whose supervisor ended its actor."""
    names: list[str] = []
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(supervisor, "leave", names.append)
    return names


def test_a_python_without_this_cloche_is_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another version and none at all: what it has, what the fleet has, and what to install where."""
    assert unfit(cloche.__version__) == ""
    for installed, text in (("0.0.1", "has Cloche 0.0.1"), (None, "has no Cloche")):

        def version(_: str, installed: str | None = installed) -> str:
            if installed is None:
                raise metadata.PackageNotFoundError
            return installed

        monkeypatch.setattr(metadata, "version", version)
        reason = unfit("9.9")
        assert f"{text}, and the fleet has 9.9: install cloche[ray]==9.9 in the node's image" in reason
        assert "runtime_env" in reason
    node = NodeSupervisor("other", "9.9", words())
    until(lambda: "has no Cloche" in str(node.state().get("reason")))
    node.stop()


def test_a_server_is_found_again_and_ends_when_nobody_asks(left: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The next supervisor finds it, one with another key replaces it, and an abandoned one ends it and its actor."""
    key = words()
    first = NodeSupervisor("here", cloche.__version__, key)
    server = until(lambda: first.state() if "pid" in first.state() else None)
    first._is_ended.set()  # as Ray kills an actor: its server goes on
    second = NodeSupervisor("here", cloche.__version__, key)
    assert until(second.state)["pid"] == server["pid"]
    os.kill(server["pid"], signal.SIGKILL)
    again = until(lambda: second.state() if second.state().get("pid") not in (None, server["pid"]) else None)
    assert again["boot"] != server["boot"]
    second._is_ended.set()
    monkeypatch.setattr(supervisor, "ABANDONED_S", 1.0)
    third = NodeSupervisor("here", cloche.__version__, words())
    other = until(lambda: third.state() if "pid" in third.state() else None)
    assert not began(int(again["pid"]))
    until(lambda: left == ["here"])
    assert not began(int(other["pid"]))
