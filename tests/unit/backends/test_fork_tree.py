"""A session's fork tree on the caller's side, over a helper and an interpreter that only answer."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, cast

import pytest

from cloche.backends.local.fork_tree import CLONE_TIMEOUT_S, ORIGIN, ForkTree, Node
from cloche.backends.local.helper_link import HelperConnection
from cloche.backends.local.session import LocalTransport
from cloche.backends.local.streams import SessionPipes
from cloche.backends.local.workspace import Workspace
from cloche.backends.session import SessionLink
from cloche.backends.session_languages import JsonCodec
from cloche.core.errors import StartFailed
from cloche.core.limits import Limits
from cloche.jail.messages import Spec


class _Pipes:
    """Stand for an interpreter that clones itself at once, and is ready some turns after it may go on, if ever."""

    def __init__(self, *, is_ever_ready: bool = True):
        loop = asyncio.get_running_loop()
        self.cloned: asyncio.Future[dict[str, Any]] = loop.create_future()
        self.link = SessionLink(JsonCodec(), lambda: None)
        self.is_ever_ready = is_ever_ready
        self.has_gone_on = False

    async def ask_for_clone(self, _number: int, clone: _Pipes, _timeout_s: float) -> asyncio.Future[dict[str, Any]]:
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        answer.set_result({})
        clone.cloned.set_result({})
        return answer

    def go(self, *, is_fork: bool) -> None:
        assert not is_fork
        self.has_gone_on = True
        if self.is_ever_ready:
            asyncio.get_running_loop().call_later(0.05, self.link.ready.set_result, {})

    def holds(self) -> list[str]:
        return []

    def kept(self, _stream: str) -> bytes:
        return b""

    def close_guest_ends(self) -> None: ...

    def catch_up(self) -> None: ...

    def close(self) -> None: ...


class _Connection:
    """Stand for a helper that takes longer to give clones their mounts than cloning may take."""

    async def ask(self, tag: str, _payload: Mapping[str, Any] | None = None, **_body: int) -> list[int]:
        if tag != "set_up":
            return []
        _move_on(CLONE_TIMEOUT_S + 10)
        return [os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)]

    def notify(self, *_tags: str, **_body: object) -> None: ...


def _move_on(seconds: float) -> None:
    """Let time pass at once, by the clock of the loop."""
    loop = asyncio.get_running_loop()
    now = loop.time
    loop.time = lambda: now() + seconds  # type: ignore[method-assign]


async def _clone(pipes: _Pipes) -> Node:
    spec = cast("Spec", type("_Spec", (), {"cgroup": None, "mounts": [], "workspace": "/workspace"})())
    first = Node(ORIGIN, None, cast("SessionPipes", _Pipes()), Workspace(Limits(), ""), is_fork=False)
    fork_tree = ForkTree(cast("HelperConnection", _Connection()), spec, first, CLONE_TIMEOUT_S)
    fork_tree._clone_steps = {}
    node = await fork_tree.clone(first, lambda: cast("SessionPipes", pipes))
    node.workspace.drop()
    return node


def test_a_clone_has_its_time_after_its_mounts_were_long_in_coming() -> None:
    """A large workspace takes longer to copy than cloning may take: the clone that lives is waited for all the same."""

    async def clone() -> None:
        pipes = _Pipes()
        assert (await _clone(pipes)).number == ORIGIN + 1
        assert pipes.has_gone_on

    asyncio.run(clone())


def test_a_clone_that_never_begins_is_not_waited_for_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its mounts are there, and it does not report that it is ready."""
    monkeypatch.setattr("cloche.backends.local.fork_tree.CLONE_TIMEOUT_S", 0.1)

    async def clone() -> None:
        with pytest.raises(StartFailed, match="a clone of the session did not start in time"):
            await _clone(_Pipes(is_ever_ready=False))

    asyncio.run(clone())


@pytest.mark.parametrize("turns", range(4))
def test_a_cell_that_is_cancelled_as_the_helper_answers_is_cancelled(turns: int) -> None:
    """In whichever turn of the loop the cancellation comes, the cell that waits for the helper is not sent."""

    async def main() -> bool:
        connection = HelperConnection(Spec(), "")
        connection._is_attended = True
        transport: Any = SimpleNamespace(fork_tree=SimpleNamespace(connection=connection))
        waiting = asyncio.ensure_future(LocalTransport._await_signals(transport, transport.fork_tree))
        for _ in range(4):  # until it has asked
            await asyncio.sleep(0)
        connection._take_answer({"id": 1}, [])
        for _ in range(turns):
            await asyncio.sleep(0)
        is_in_time = waiting.cancel()
        await asyncio.wait([waiting])
        return waiting.cancelled() is is_in_time

    assert asyncio.run(main())
