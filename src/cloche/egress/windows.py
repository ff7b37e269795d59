"""The traffic of a network between two moments, for several runs at once that share it.

Theory of operation: the egress process counts from one report to the next. A window begins with the request for a
report, without waiting for it, and ends with an awaited one; it holds the sum of all reports requested in between. The
network's messages are read by the event loop, as long as this lives.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import weakref
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from cloche.core.errors import InvalidRequest
from cloche.core.record import asdict, dataclass

from .client import REPORT_S, SandboxNetwork, Traffic
from .ledger import Sum

if TYPE_CHECKING:
    from cloche.core.network import NetworkRules

log = logging.getLogger("cloche.egress")


@dataclass(frozen=True, slots=True, kw_only=True)
class HostAnswer:
    """Decide about a host. A yes that `is_once` is for the connections that wait; `why` is told to the guest with a no.

    Without `is_final` nobody has decided, and it is asked about when it is tried again.
    """

    is_allowed: bool
    is_final: bool = True
    is_once: bool = False
    why: str = ""


# Decides about a host and a port that no rule names. None is an answer that is not final.
Decide = Callable[[str, int], Awaitable[HostAnswer | bool | None]]


class Window(Sum):
    """Sum the traffic since a report, by its number."""

    def __init__(self, first: int):
        super().__init__()
        self.first = first

    def traffic(self, *, is_lost: bool) -> Traffic:
        return Traffic(rows=self.rows, unlisted=self.unlisted, is_lost=is_lost)


class SharedNetwork:
    """Be the network of a live sandbox, or of a session. Use from one event loop.

    That of a kept sandbox begins with the traffic `so_far`.
    """

    def __init__(self, network: SandboxNetwork, rules: NetworkRules, so_far: Sum | None = None):
        self.network, self.rules = network, rules
        self._decide: Decide | None = None
        self._deciding: dict[int, asyncio.Task[None]] = {}
        self._numbers = itertools.count(1)
        self._windows: weakref.WeakSet[Window] = weakref.WeakSet()  # not every process that is started is asked for it
        self._waiting: dict[int, asyncio.Future[str]] = {}
        self.total = so_far or Sum()
        self.lost = asyncio.Event()
        self._users = 1
        self._loop = asyncio.get_running_loop()
        network.on_message = self._take
        self._loop.add_reader(network.fileno(), self._read)

    def _read(self) -> None:
        if not self.network.take_messages():
            self._loop.remove_reader(self.network.fileno())
            self._lose()

    @property
    def is_lost(self) -> bool:
        """Tell whether its egress process is gone, or it was closed."""
        return self.lost.is_set()

    def _lose(self) -> None:
        self.lost.set()
        for number in list(self._waiting):
            self._end_wait(number)

    def _end_wait(self, number: int, error: str = "") -> None:
        waiting = self._waiting.pop(number, None)
        if waiting is not None and not waiting.done():
            waiting.set_result(error)

    def _take(self, tag: str, body: dict[str, Any]) -> None:
        if tag == "report":
            self.total.add(body)
            for window in self._windows:
                if body["number"] > window.first:
                    window.add(body)
            self._end_wait(body["number"])
        elif tag == "ask" and self._decide is not None:
            task = self._loop.create_task(self._answer(self._decide, **body))
            self._deciding[body["number"]] = task
            task.add_done_callback(lambda _: self._deciding.pop(body["number"], None))
        elif tag == "answered" and (deciding := self._deciding.get(body["number"])):  # by another one
            deciding.cancel()
        elif tag == "rules":  # somebody who uses the sandbox has changed them
            self.rules = type(self.rules).parse(**body["rules"])
            self._end_wait(body.get("number", 0), body.get("error", ""))

    def decide_by(self, decide: Decide) -> None:
        """Set the function that decides about hosts without a rule; before that the answer is no."""
        self._decide = decide
        if not self.is_lost:
            with suppress(OSError):  # the egress process is gone, as its link will say
                self.network.offer_to_decide()

    async def _answer(self, decide: Decide, number: int, host: str, port: int) -> None:
        """Send the decision of that function; any failure is a no."""
        answer = HostAnswer(is_allowed=False)
        try:
            answer = _as_answer(await decide(host, port))
        except Exception as error:
            log.warning("the decision about %s:%d failed, so it is refused: %s", host, port, error)
        finally:
            if self.network.fileno() >= 0 and not self.is_lost:
                with suppress(OSError):  # the egress process is gone, as its link will say
                    self.network.answer(number, **asdict(answer))

    def _ask(self) -> int:
        number = next(self._numbers)
        if not self.is_lost:
            try:
                self.network.ask_report(number, ends=False)
            except OSError:
                self.lost.set()
        return number

    def open_window(self) -> Window:
        """Begin to count, from now on."""
        window = Window(self._ask())
        self._windows.add(window)
        return window

    async def close_window(self, window: Window) -> Traffic:
        """Return all traffic since it was opened."""
        try:
            await self._await(self._ask())
        finally:
            self._windows.discard(window)
        return window.traffic(is_lost=self.is_lost)

    async def traffic(self) -> Traffic:
        """Return all that was carried since the sandbox was opened."""
        await self._await(self._ask())
        return Traffic(rows=self.total.rows, unlisted=self.total.unlisted, is_lost=self.is_lost)

    async def _await(self, number: int) -> str:
        """Return the answer to a request, by its number; nothing if the network is lost."""
        if self.is_lost:
            return ""
        waiting = self._waiting[number] = self._loop.create_future()
        try:
            await asyncio.wait((waiting,), timeout=REPORT_S)
            if not waiting.done():
                self.lost.set()
            return waiting.result() if waiting.done() else ""
        finally:
            self._waiting.pop(number, None)

    async def change(self, *, allow: Sequence[str] = (), deny: Sequence[str] = ()) -> None:
        """Decide by further rules, too, beside all that others have added meanwhile.

        Raises InvalidRequest where they are too many together, OSError where the egress process is gone.
        """
        await self._changed(partial(self.network.ask_change, allow=allow, deny=deny))

    async def replace(
        self, *, mode: str, allow: Sequence[str], deny: Sequence[str], headers: Mapping[str, Mapping[str, str]]
    ) -> None:
        """Decide by these rules in place of all others. Raises as `change`."""
        ask = partial(self.network.ask_replacement, mode=mode, allow=allow, deny=deny, headers=headers)
        await self._changed(ask)

    async def _changed(self, ask: Callable[[int], None]) -> None:
        number = next(self._numbers)
        ask(number)
        error = await self._await(number)
        if self.is_lost:
            raise ConnectionResetError("the egress process is gone")
        if error:
            raise InvalidRequest(error)

    def share(self) -> Self:
        """Return it for another user, which closes it as well."""
        self._users += 1
        return self

    def close(self) -> None:
        """Have all connections closed, for good, once its last user closes it."""
        self._users -= 1
        if self._users > 0:
            return
        for task in list(self._deciding.values()):
            task.cancel()
        self._lose()  # whoever still waits for a report
        if self.network.fileno() >= 0:
            self._loop.remove_reader(self.network.fileno())
        self.network.close()


def _as_answer(decision: HostAnswer | bool | None) -> HostAnswer:
    if isinstance(decision, HostAnswer):
        return decision
    return HostAnswer(is_allowed=decision is True, is_final=decision is not None)
