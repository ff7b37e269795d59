"""The lives of sandboxes: changes of their time, their pauses, and what happens to them without a request.

Theory of operation: the keeper of a sandbox (or the worker that holds it) counts its time, pauses it and ends it, also
while no service runs. The row has what it answered last: the status, and in the document `endsAt`, `atEnd`, `pausedAt`
and `hasMemory`. While a worker is attached, it hears of each change; of the others, it is told every few seconds, with
the sign that a service exists. `listeners` get the id of a sandbox that was paused or has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

from cloche.core.errors import ClocheError, InvalidRequest, OutcomeUnknown
from cloche.keeper import registry
from cloche.keeper.attach import visit
from cloche.records import sandboxes as records
from cloche.records.ids import moment
from cloche.records.sandboxes import ENDED, PAUSED, RUNNING, SandboxFacts
from cloche.records.writer import Writer
from cloche.wire.attachments import Attachment
from cloche.wire.held import change_held

CHANGE_S = 5.0  # for a keeper and its init to answer
CLOSE_ENOUGH_S = 1.0  # between an end in a row and that of the keeper, each told at another moment
Listener = Callable[[str, str], None]


def values_of(info: Mapping[str, Any], now: float) -> tuple[str, dict[str, Any]]:
    """Return the status and the part of the document that the facts of a keeper give, at a time."""
    left_s, is_paused = info.get("left_s"), bool(info.get("is_paused"))
    common = {"atEnd": info.get("at_end", "end"), "hasMemory": info.get("has_memory", True) is not False}
    if is_paused:
        return PAUSED, {**common, "endsAt": None, "secondsLeft": left_s}
    return RUNNING, {**common, "endsAt": None if left_s is None else moment(now + left_s), "pausedAt": None}


def is_same(facts: SandboxFacts, status: str, changes: Mapping[str, Any]) -> bool:
    """Tell whether a row has these values, but for a little time."""
    document = facts.document
    if facts.status != status or document.get("atEnd", "end") != changes["atEnd"]:
        return False
    before, after = document.get("endsAt"), changes["endsAt"]
    if before is None or after is None:
        return bool(before == after)
    difference_s: float = records.seconds_of(str(before)) - records.seconds_of(str(after))
    return -CLOSE_ENOUGH_S < difference_s < CLOSE_ENOUGH_S


class Lives:
    """Change the lives of sandboxes, and follow them."""

    def __init__(self, writer: Writer):
        self._writer = writer
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._paused: set[str] = set()  # which the listeners have been told
        self.listeners: list[Listener] = []

    def tell(self, sandbox_id: str, what: str) -> None:
        """Tell the listeners that a sandbox was `paused` or has `ended`, once."""
        if what == PAUSED and sandbox_id in self._paused:
            return
        (self._paused.add if what == PAUSED else self._paused.discard)(sandbox_id)
        for listener in self.listeners:
            listener(sandbox_id, what)

    async def change(
        self, facts: SandboxFacts, op: str, held: Attachment | None = None, **order: Any  # noqa: ANN401 - JSON
    ) -> Mapping[str, Any]:  # fmt: skip
        """Do one of the keeper's operations `pause`, `resume`, `lifetime` and `info`, and return the facts after it.

        `held` is this worker's attachment, if it has one. The row has the facts then. Raises OutcomeUnknown,
        InvalidRequest.
        """
        async with self._turns.setdefault(facts.id, asyncio.Lock()):
            info = await ask(facts.name, op, held, **order)
            await self._note(facts.id, info)
        self._note_pause(facts.id, is_paused=bool(info.get("is_paused")))
        return info

    def _note_pause(self, sandbox_id: str, *, is_paused: bool) -> None:
        if is_paused:
            self.tell(sandbox_id, PAUSED)
        else:
            self._paused.discard(sandbox_id)

    async def _note(self, sandbox_id: str, info: Mapping[str, Any]) -> None:
        status, changes = values_of(info, time.time())
        await self._writer.write(partial(records.change, sandbox_id=sandbox_id, status=status, changes=changes))

    async def follow(self, attachment: Attachment, facts: SandboxFacts) -> None:
        """Note each change that a keeper tells, until its connection ends."""
        was_paused = facts.status == PAUSED
        with contextlib.suppress(ClocheError):
            async for info in attachment.kept.life_events():
                is_paused = attachment.is_paused = bool(info.get("is_paused"))
                if is_paused is not was_paused:  # first in the row, as clients whose streams are cut look at once
                    await self.change(facts, "info", attachment)
                was_paused = is_paused
        if attachment.is_lost and not attachment.is_closed:
            self.tell(facts.id, ENDED)

    async def compare(self, rows: Mapping[str, SandboxFacts], infos: Mapping[str, Mapping[str, Any]]) -> None:
        """Note what keepers said, by their names, where rows differ."""
        for name, info in infos.items():
            facts = rows.get(name)
            if facts is not None and not is_same(facts, *values_of(info, time.time())):
                with contextlib.suppress(OutcomeUnknown, InvalidRequest):
                    await self.change(facts, "info")  # asked again, as it may have changed meanwhile


async def ask(name: str, op: str, held: Attachment | None, **order: Any) -> Mapping[str, Any]:  # noqa: ANN401 - JSON
    """Have a sandbox do an operation on its life: by the attachment to it, or by a visit to its keeper.

    Raises OutcomeUnknown, InvalidRequest.
    """
    if held is not None and held.is_held:
        return await change_held(held, op, **order)
    if held is None or held.is_lost:
        return await asyncio.to_thread(_visit, name, op, order)
    try:
        async with asyncio.timeout(CHANGE_S):
            return await held.live.ask(op, **order)
    except TimeoutError as error:
        raise OutcomeUnknown(f"the keeper of sandbox {name!r} does not answer") from error


def _visit(name: str, op: str, order: Mapping[str, Any]) -> dict[str, Any]:
    return visit(registry.find(name), op, timeout_s=CHANGE_S, **order)
