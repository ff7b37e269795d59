"""Interpreters kept between calls: one for each language of a toolbox, in a pool with a least-recently-used policy.

Definitions of one call exist in the next one. Where the interpreter is gone (memory, a crash, idle for too long,
evicted), the call starts a new one, and its answer gives the reason. Files stay.

Theory of operation: `choose_eviction` is pure. Given the entries of the pool and the owner of a new one, it returns the
entry to evict: of those that are not busy, the least recently used one of the owner with most interpreters. So an owner
within an equal share loses no interpreter to another. All waiting, and ending an interpreter, happens afterwards.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from typing import Protocol, TypeVar

from cloche.core.errors import BackendUnavailable, InvalidRequest, StartFailed
from cloche.core.record import dataclass
from cloche.core.result import Result
from cloche.execution.sandbox import AsyncSandbox, AsyncSession

from .answers import KEPT, LOST, NEW, CallResult, clip

MOST_INTERPRETERS = 16
IDLE_S = 1800.0
log = logging.getLogger("cloche.agent")
MOST_REASON_CHARS = 300


class PoolEntry(Protocol):
    """Be an entry of the pool. `used_at` is the time of the last call, in seconds."""

    owner: str | None
    is_busy: bool
    used_at: float

    @property
    def is_alive(self) -> bool:
        """Tell whether it holds anything; an entry that does not is dropped."""
        ...

    async def evict(self, why: str) -> None:
        """End it, unless it became busy meanwhile; its next call reports `why`."""
        ...


T = TypeVar("T", bound=PoolEntry)


def choose_eviction(entries: Sequence[T], owner: str | None) -> T | None:
    """Return which entry to evict for a new one of `owner`; None where all that could be evicted are busy."""
    counts = Counter(entry.owner for entry in entries)
    own = counts[owner]
    counts[owner] += 1

    def may_go(entry: T) -> bool:
        return not entry.is_busy and (entry.owner == owner or own == 0 or counts[entry.owner] > own + 1)

    return min(filter(may_go, entries), key=lambda entry: (-counts[entry.owner], entry.used_at), default=None)


class Room:
    """The pool: bound the number of live interpreters, over all toolboxes that share it, in one event loop.

    There are at most `most`, and one that was not used for `idle_s` seconds is ended. Raises InvalidRequest for invalid
    numbers.
    """

    def __init__(self, *, most: int = MOST_INTERPRETERS, idle_s: float = IDLE_S):
        if most < 1:
            raise InvalidRequest(f"most: {most!r} is not a number of interpreters; give 1 or more")
        if not 0 < idle_s < math.inf:
            raise InvalidRequest(f"idle_s: {idle_s!r} is not a time to wait; give seconds, such as 1800")
        self.most, self.idle_s = most, float(idle_s)
        self._entries: list[PoolEntry] = []
        self._waiting: list[asyncio.Future[None]] = []

    def share_of(self, owner: str | None) -> Share:
        """Return what an owner's toolbox takes as `interpreters`: in a full pool owners have equal shares."""
        return Share(room=self, owner=owner)

    @asynccontextmanager
    async def hold_entry(self, entry: PoolEntry) -> AsyncIterator[None]:
        """Add an entry to the pool while it works; if it is alive afterwards, it stays until it is evicted.

        Waits while everything that could be evicted is busy.
        """
        evicted = await self._claim(entry)
        try:
            if evicted is not None:
                await self._evict(evicted)
            yield
        finally:
            entry.is_busy, entry.used_at = False, time.monotonic()
            self._prune()

    def remove_entry(self, entry: PoolEntry) -> None:
        """Remove an entry from the pool."""
        if entry in self._entries:
            self._entries.remove(entry)
            self._wake()

    async def _claim(self, entry: PoolEntry) -> PoolEntry | None:
        """Add an entry, waiting while the pool is full; return the one to evict for it."""
        while True:
            self._entries = [entry for entry in self._entries if entry.is_busy or entry.is_alive]
            is_new = entry not in self._entries
            evicted = (
                choose_eviction(self._entries, entry.owner) if is_new and len(self._entries) >= self.most else None
            )
            if not is_new or evicted is not None or len(self._entries) < self.most:
                break
            await self._wait_for_change()
        if evicted is not None:
            self._entries.remove(evicted)
        if is_new:
            self._entries.append(entry)
        entry.is_busy = True
        return evicted

    async def _evict(self, entry: PoolEntry) -> None:
        try:
            await entry.evict(
                f"it was put away as the one that was used least recently, to make room: at most {self.most} are kept"
            )
        except Exception:  # this call goes on; the other one's sandbox closes the interpreter in the end
            log.exception("an interpreter could not be put away")

    async def _wait_for_change(self) -> None:
        changed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(changed)
        await changed

    def _prune(self) -> None:
        self._entries = [entry for entry in self._entries if entry.is_busy or entry.is_alive]
        self._wake()

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, []
        for waiter in waiting:
            if not waiter.done():
                waiter.set_result(None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """Say where a toolbox keeps its interpreters, and under which owner."""

    room: Room
    owner: str | None = None


class PooledInterpreter:
    """The interpreter of one language, as an entry of the pool."""

    def __init__(self, language: str, *, owner: str | None, idle_s: float):
        self.language, self.owner, self._idle_s = language, owner, idle_s
        self.is_busy, self.used_at = False, 0.0
        self._session: AsyncSession | None = None
        self._has_state = False  # state whose loss was not reported to the model
        self._end_reason = self._unreported_reason = ""
        self._changing = asyncio.Lock()

    @property
    def is_alive(self) -> bool:
        """Tell whether there is one."""
        return self._session is not None and self._session.is_alive

    @property
    def was_started(self) -> bool:
        """Tell whether there ever was one."""
        return self._session is not None

    async def make_ready(self, sandbox: AsyncSandbox, *, restart: bool) -> tuple[bool, str]:
        """Make the interpreter ready for a call; return whether it is new, and why earlier state was lost.

        The reason is returned again until a call has an answer to report it in: a cancelled or refused one has no
        answer.
        """
        async with self._changing:
            session = self._session
            if session is None:
                self._session = await sandbox.session(self.language, idle_timeout=self._idle_s)
                return True, ""
            if self.is_alive and not restart:
                return False, self._unreported_reason
            why = self._end_reason or session.why_ended or "it has ended"
            await session.restart()
            self._unreported_reason = "" if restart else why if self._has_state else self._unreported_reason
            self._has_state, self._end_reason = False, ""
            return True, self._unreported_reason

    async def run(self, code: str, timeout_s: float, collect: Sequence[str]) -> Result:
        """Run the code of one call. Raises what `AsyncSession.run` does."""
        session = self._session
        if session is None:
            raise AssertionError("begin comes before run")
        self._has_state = True
        try:
            result = await session.run(code, timeout=timeout_s, collect=collect)
        except asyncio.CancelledError:
            if not self.is_alive:
                self._end_reason = "a call that was given up did not let itself be interrupted, and was killed"
            raise
        self._unreported_reason = ""
        if result.meta.get("state") == LOST:  # which this answer says
            self._has_state = False
        return result

    async def evict(self, why: str) -> None:
        """End it, unless a call uses it; see `PoolEntry`."""
        async with self._changing:
            if self._session is not None and not self.is_busy:
                self._end_reason = why
                await self._session.end()


class Interpreters:
    """Run the code of one toolbox, one call at a time; those of `languages` run in an interpreter that keeps state."""

    def __init__(self, share: Share, languages: Collection[str], collect: Sequence[str]):
        self._share, self._languages, self._collect = share, frozenset(languages), collect
        self._by_language: dict[str, PooledInterpreter] = {}
        self._without_interpreter: dict[str, str] = {}  # languages whose interpreter could not be started, and why
        self._run_lock = asyncio.Lock()

    async def run(
        self, sandbox: AsyncSandbox, code: str, language: str, *, timeout_s: float, is_kept: bool, restart: bool
    ) -> CallResult:
        """Run code; with `is_kept` in the language's interpreter, where it has one that keeps state."""
        async with self._run_lock:
            why_not = self._without_interpreter.get(language, "") if is_kept and not restart else ""
            if is_kept and language in self._languages and not why_not:
                try:
                    return await self._run_in_interpreter(sandbox, code, language, timeout_s, restart=restart)
                except _NoInterpreter as error:
                    why_not = str(error.__cause__)
            result = await sandbox.run(code, language=language, timeout=timeout_s, collect=self._collect)
            if why_not:
                self._without_interpreter[language] = (
                    why_not  # now that runs work: a backend that is gone may come back
                )
            return CallResult(result=result, note=_no_interpreter_note(language, why_not) if why_not else "")

    async def _run_in_interpreter(
        self, sandbox: AsyncSandbox, code: str, language: str, timeout_s: float, *, restart: bool
    ) -> CallResult:
        session = self._by_language.get(language)
        if session is None:
            session = PooledInterpreter(language, owner=self._share.owner, idle_s=self._share.room.idle_s)
            self._by_language[language] = session
        async with self._share.room.hold_entry(session):
            try:
                is_new, why = await session.make_ready(sandbox, restart=restart)
            except (BackendUnavailable, StartFailed) as error:
                if session.was_started:  # what earlier calls defined would be given up without a word
                    raise
                raise _NoInterpreter from error
            result = await session.run(code, timeout_s, self._collect)
        state = LOST if result.meta.get("state") == LOST else NEW if is_new else KEPT
        return CallResult(result=result, state=state, note=_lost_state_note(language, why) if why else "")

    def forget(self) -> None:
        """Begin anew with the next call; what there is ends with its sandbox."""
        for session in self._by_language.values():
            self._share.room.remove_entry(session)
        self._by_language.clear()
        self._without_interpreter.clear()


class _NoInterpreter(Exception):
    """Report that a language has no interpreter that keeps state; the cause says why."""


def _lost_state_note(language: str, why: str) -> str:
    return (
        f"[The {language} interpreter of the earlier calls is gone: {why}. This call ran in a new one: what they "
        "defined is not there, files are.]"
    )


def _no_interpreter_note(language: str, why: str) -> str:
    reason = clip(why, most=MOST_REASON_CHARS)
    return (
        f"[No {language} interpreter can be kept here, so each call begins anew; files are still there. "
        f"({reason} Or try again with restart.)]"
    )
