"""What a network carried between two moments, for as many runs at once as share it.

Theory of operation: the egress process counts from one report to the next. A window begins with a report that is asked
for and not waited for, and ends with one that is; it holds the sum of all reports that were asked for between. The
network's messages are read by the event loop, as long as this lives.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import weakref
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Self

from .client import REPORT_S, Network, Traffic
from .ledger import Sum

if TYPE_CHECKING:
    from cloche.core.network import NetworkRules

log = logging.getLogger("cloche.egress")
# Decides about a host and a port that no rule names.
Decide = Callable[[str, int], Awaitable[bool]]


class Window(Sum):
    """Sum what was carried since a report, by its number."""

    def __init__(self, first: int):
        super().__init__()
        self.first = first

    def traffic(self, *, is_lost: bool) -> Traffic:
        return Traffic(rows=self.rows, unlisted=self.unlisted, is_lost=is_lost)


class SharedNetwork:
    """Be the network of a sandbox that lives, or of a session. Use from one event loop.

    `decide` is asked about what no rule names, where it was opened to ask; without it the answer is no, for now.
    """

    def __init__(self, network: Network, rules: NetworkRules):
        self.network, self.rules = network, rules
        self.decide: Decide | None = None
        self._deciding: set[asyncio.Task[None]] = set()
        self._numbers = itertools.count(1)
        self._windows: weakref.WeakSet[Window] = weakref.WeakSet()  # not every process that is started is asked for it
        self._waiting: dict[int, asyncio.Future[None]] = {}
        self.total = Window(0)
        self.is_lost = False
        self._users = 1
        self._loop = asyncio.get_running_loop()
        network.on_message = self._take
        self._loop.add_reader(network.fileno(), self._read)

    def _read(self) -> None:
        if not self.network.take_messages():
            self._loop.remove_reader(self.network.fileno())
            self._lose()

    def _lose(self) -> None:
        self.is_lost = True
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_result(None)

    def _take(self, tag: str, body: dict[str, Any]) -> None:
        if tag == "report":
            for window in (self.total, *self._windows):
                if body["number"] > window.first:
                    window.add(body)
            waiting = self._waiting.pop(body["number"], None)
            if waiting is not None and not waiting.done():
                waiting.set_result(None)
        elif tag == "ask":
            task = self._loop.create_task(self._answer(body["number"], body["host"], body["port"]))
            self._deciding.add(task)
            task.add_done_callback(self._deciding.discard)
        elif tag == "rules":  # another one who uses the sandbox has changed them
            self.rules = type(self.rules).parse(**body)

    async def _answer(self, number: int, host: str, port: int) -> None:
        """Have somebody decide, and say what was decided; whatever fails there is a no."""
        is_allowed, is_final = False, self.decide is not None
        try:
            is_allowed = self.decide is not None and await self.decide(host, port) is True
        except Exception as error:
            log.warning("who decides about %s:%d failed, which is a no: %s", host, port, error)
        finally:
            if self.network.fileno() >= 0 and not self.is_lost:
                with suppress(OSError):  # the egress process is gone, as its link will say
                    self.network.answer(number, is_allowed=is_allowed, is_final=is_final)

    def _ask(self) -> int:
        number = next(self._numbers)
        if not self.is_lost:
            try:
                self.network.ask_report(number, ends=False)
            except OSError:
                self.is_lost = True
        return number

    def open_window(self) -> Window:
        """Begin to count for somebody, from now on."""
        window = Window(self._ask())
        self._windows.add(window)
        return window

    async def close_window(self, window: Window) -> Traffic:
        """Return what was carried since it was opened, by whomever."""
        try:
            await self._await(self._ask())
        finally:
            self._windows.discard(window)
        return window.traffic(is_lost=self.is_lost)

    async def traffic(self) -> Traffic:
        """Return all that was carried since the sandbox was opened."""
        await self._await(self._ask())
        return self.total.traffic(is_lost=self.is_lost)

    async def _await(self, number: int) -> None:
        if self.is_lost:
            return
        waiting = self._waiting[number] = self._loop.create_future()
        try:
            await asyncio.wait((waiting,), timeout=REPORT_S)
            if not waiting.done():
                self.is_lost = True
        finally:
            self._waiting.pop(number, None)

    def change(self, rules: NetworkRules) -> None:
        """Decide by other rules from now on. Raises OSError where the egress process is gone."""
        self.network.change(rules)
        self.rules = rules

    def share(self) -> Self:
        """Return it for one more user, who closes it as well."""
        self._users += 1
        return self

    def close(self) -> None:
        """Have all connections closed, for good, once its last user closes it."""
        self._users -= 1
        if self._users > 0:
            return
        for task in self._deciding:
            task.cancel()
        self._lose()  # whoever still waits for a report
        if self.network.fileno() >= 0:
            self._loop.remove_reader(self.network.fileno())
        self.network.close()
