"""Rows of new sandboxes: the bounds of their number, and requests that come twice.

A row with an idempotency key is unique to the caller's key and project, in the database: so concurrent requests, also
of several workers, open one sandbox, and a request that is repeated after a restart finds it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from cloche.core.record import dataclass
from cloche.records import sandboxes as records
from cloche.records.sandboxes import ENDED, STARTING, RequestKey, SandboxFacts
from cloche.records.writer import Writer
from cloche.wire.problems import Refused

MOST_LIVING = 64  # of the service unless its operator says more, as each has processes and memory
AGAIN_S = 0.05  # until a sandbox that another request opens is there


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """Bound the live sandboxes: `most` in all; fewer of one key, so that others have room."""

    most: int = MOST_LIVING

    @property
    def most_of_key(self) -> int:
        """Return how many of them one key has."""
        return max(1, self.most - max(1, self.most // 8))

    @property
    def most_attached(self) -> int:
        """Return to how many keepers one worker is attached."""
        return max(1, self.most - max(1, self.most // 16))


async def begin_once(
    writer: Writer, read: Callable[[Any], Any], room: Room, row: Mapping[str, Any], document: Mapping[str, Any],
    key: RequestKey | None,
) -> SandboxFacts | None:  # fmt: skip
    """Add the row of a new sandbox; return the sandbox of the same earlier request instead if there is one.

    Raises Refused (409) for another request with the same key, Refused (429) for too many sandboxes.
    """
    beginning = partial(_begin, room=room, row=row, document=document, key=key)
    if key is None:
        await writer.write(beginning)
        return None
    finding = partial(records.find_repeated, project=row["project"], api_key=row["api_key"], key=key.text)
    while True:
        earlier = await asyncio.to_thread(read, finding)
        if earlier is None:
            try:
                await writer.write(beginning)
            except IntegrityError:  # at the same time, by another request
                continue
            return None
        facts: SandboxFacts = earlier[0]
        sha256: bytes | None = earlier[1]
        if sha256 != key.sha256:
            raise Refused(
                409, "idempotency-key-reused", "this Idempotency-Key was used with another request",
                remedy="use a new key",
            )  # fmt: skip
        if facts.status == ENDED and not facts.has_run:  # the worker that opened it is gone
            await writer.write(partial(records.give_key_back, sandbox_id=facts.id))
        elif facts.status != STARTING:
            return facts
        else:
            await asyncio.sleep(AGAIN_S)


def _begin(
    session: Session, *, room: Room, row: Mapping[str, Any], document: Mapping[str, Any], key: RequestKey | None
) -> None:
    _check_room(session, room, row["api_key"])
    records.begin(session, **row, document=document, key=key)


def _check_room(session: Session, room: Room, api_key: str | None) -> None:
    if api_key is not None and records.count_living(session, api_key) >= room.most_of_key:
        why = f"{room.most_of_key} sandboxes of this key are live already, the maximum of a key"
    elif records.count_living(session) >= room.most:
        why = f"{room.most} sandboxes are live already, the maximum of the service (--sandboxes)"
    else:
        return
    raise Refused(429, "too-many-sandboxes", why, remedy="end one: DELETE /api/sandboxes/{id}")
