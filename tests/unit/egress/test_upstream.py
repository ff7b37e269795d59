"""What a look-up costs a sandbox: a thread of the egress process, for as long as the resolver keeps it."""

from __future__ import annotations

import asyncio
import socket
import threading
from contextlib import suppress
from typing import Any

import pytest

from cloche.core.network import NetworkRules
from cloche.egress.client import MOST_KEPT
from cloche.egress.errors import Failed, Refused
from cloche.egress.network import MOST_LOOKUPS
from cloche.egress.upstream import Proxies, connect


def test_a_lookup_that_was_given_up_still_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sandbox keeps no more threads busy than it may, also where nobody waits for what they look up."""
    begun, may_end = [], threading.Event()

    def look_up(name: bytes, *_: Any, **__: Any) -> list[Any]:
        begun.append(name)
        may_end.wait(30)
        raise socket.gaierror(socket.EAI_AGAIN, "no answer")

    async def main() -> None:
        lookups = asyncio.Semaphore(2)

        def start() -> asyncio.Task[Any]:
            rules = NetworkRules.parse(mode="open")
            work = connect("x.example", 443, rules=rules, rule=None, proxies=Proxies({}), lookups=lookups)
            return asyncio.create_task(work)

        for _ in range(6):
            task = start()
            await asyncio.sleep(0.05)
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        assert len(begun) == 2
        last = start()
        may_end.set()
        with pytest.raises(Failed):
            await last
        assert len(begun) == 3

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    try:
        asyncio.run(main())
    finally:
        may_end.set()


@pytest.mark.parametrize("word", ["sec/ret", "sec#ret", "sec[ret", "sec\u2100ret", "80/ret"])
def test_a_password_that_breaks_the_proxys_address_is_shown_to_nobody(word: str) -> None:
    """What is said of a refusal stands in results, and the guest reads it; nothing of the address is looked up."""

    async def main() -> None:
        proxies = Proxies({"https": f"http://me:{word}@proxy.example:8080"})
        rules = NetworkRules.parse(mode="open")
        await connect("x.example", 443, rules=rules, rule=None, proxies=proxies, lookups=asyncio.Semaphore(0))

    with pytest.raises(Refused) as refused:
        asyncio.run(asyncio.wait_for(main(), 5))
    assert "ret" not in str(refused.value)


def test_lookups_of_all_other_sandboxes_leave_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many sandboxes as one process serves may wait for all that they look up at once, and one more is answered."""
    begun, may_end = [], threading.Event()

    def look_up(name: bytes, *_: Any, **__: Any) -> list[Any]:
        begun.append(name)
        if name != b"answered.example":
            may_end.wait(30)
        raise socket.gaierror(socket.EAI_AGAIN, "no answer")

    async def main() -> None:
        def start(name: str, lookups: asyncio.Semaphore) -> asyncio.Task[Any]:
            rules = NetworkRules.parse(mode="open")
            work = connect(name, 443, rules=rules, rule=None, proxies=Proxies({}), lookups=lookups)
            return asyncio.create_task(work)

        floods = []
        for _ in range(MOST_KEPT - 1):
            lookups = asyncio.Semaphore(MOST_LOOKUPS)
            floods += [start("x.example", lookups) for _ in range(2 * MOST_LOOKUPS)]
        try:
            with pytest.raises(Failed, match="answered"):
                await start("answered.example", asyncio.Semaphore(MOST_LOOKUPS))
            assert len(begun) == (MOST_KEPT - 1) * MOST_LOOKUPS + 1
        finally:
            may_end.set()
            await asyncio.gather(*floods, return_exceptions=True)

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    asyncio.run(main())
