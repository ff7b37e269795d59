"""Interpreters that go on from call to call: one for each language of a toolbox, begun when it is first needed.

What a call defined is there in the next one. Where it is not (memory, a crash, too long unused, put away for another
one), the call begins in a new interpreter, and its answer says so and why; files are not touched by any of that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import dataclass

from cloche.core.errors import BackendUnavailable, StartFailed
from cloche.core.result import Result
from cloche.runtime.sandbox import AsyncSandbox
from cloche.runtime.session import AsyncSession

from .room import Share
from .wording import clip

MOST_REASON_CHARS = 300
NONE, NEW, KEPT, LOST = "none", "new", "kept", "lost"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """Hold what came of one call. `note` is for the model.

    `state` is `none` where nothing is kept; else the call began in a `new` interpreter, went on in one that was `kept`,
    or was the end of it: `lost`.
    """

    result: Result
    state: str = NONE
    note: str = ""


class Interpreter:
    """Keep the interpreter of one language, as a tenant of a room."""

    def __init__(self, language: str, *, owner: str | None, idle_s: float):
        self.language, self.owner, self._idle_s = language, owner, idle_s
        self.is_busy, self.used_at = False, 0.0
        self._session: AsyncSession | None = None
        self._has_state = False  # that a model was not told to be gone
        self._gone = self._untold = ""
        self._changing = asyncio.Lock()

    @property
    def is_alive(self) -> bool:
        """Tell whether there is one."""
        return self._session is not None and self._session.is_alive

    @property
    def has_begun(self) -> bool:
        """Tell whether there ever was one."""
        return self._session is not None

    async def begin(self, sandbox: AsyncSandbox, *, restart: bool) -> tuple[bool, str]:
        """Be ready for a call; return whether by beginning anew, and why what earlier calls defined is gone.

        That is said until a call has an answer to say it in: one that is cancelled or refused has none.
        """
        async with self._changing:
            session = self._session
            if session is None:
                self._session = await sandbox.session(self.language, idle_timeout=self._idle_s)
                return True, ""
            if self.is_alive and not restart:
                return False, self._untold
            why = self._gone or session.why_ended or "it has ended"
            await session.restart()
            self._untold = "" if restart else why if self._has_state else self._untold
            self._has_state, self._gone = False, ""
            return True, self._untold

    async def run(self, code: str, timeout_s: float) -> Result:
        """Run the code of one call. Raises what `AsyncSession.run` does."""
        session = self._session
        if session is None:
            raise AssertionError("begin comes before run")
        self._has_state = True
        try:
            result = await session.run(code, timeout=timeout_s)
        except asyncio.CancelledError:
            if not self.is_alive:
                self._gone = "a call that was given up did not let itself be interrupted, and was killed"
            raise
        self._untold = ""
        if result.meta.get("state") == LOST:  # which this answer says
            self._has_state = False
        return result

    async def put_away(self, why: str) -> None:
        """End it, unless a call has come back to it; see room.Tenant."""
        async with self._changing:
            if self._session is not None and not self.is_busy:
                self._gone = why
                await self._session.end()


class Interpreters:
    """Run the code of one toolbox: calls take turns, and those of `languages` go on where the last one ended."""

    def __init__(self, share: Share, languages: Collection[str]):
        self._share, self._languages = share, frozenset(languages)
        self._kept: dict[str, Interpreter] = {}
        self._lacking: dict[str, str] = {}  # languages that turned out to have no interpreters here, and why
        self._turn = asyncio.Lock()

    async def run(
        self, sandbox: AsyncSandbox, code: str, language: str, *, timeout_s: float, is_kept: bool, restart: bool
    ) -> Ran:
        """Run code; with `is_kept` in the interpreter that goes on, where its language has one."""
        async with self._turn:
            why_not = self._lacking.get(language, "") if is_kept and not restart else ""
            if is_kept and language in self._languages and not why_not:
                try:
                    return await self._go_on(sandbox, code, language, timeout_s, restart=restart)
                except _NoneHere as error:
                    why_not = str(error.__cause__)
            result = await sandbox.run(code, language=language, timeout=timeout_s)
            if why_not:
                self._lacking[language] = why_not  # now that runs work: a backend that is gone may come back
            return Ran(result=result, note=_nothing_kept(language, why_not) if why_not else "")

    async def _go_on(self, sandbox: AsyncSandbox, code: str, language: str, timeout_s: float, *, restart: bool) -> Ran:
        one = self._kept.get(language)
        if one is None:
            one = Interpreter(language, owner=self._share.owner, idle_s=self._share.room.idle_s)
            self._kept[language] = one
        async with self._share.room.stay(one):
            try:
                is_new, why = await one.begin(sandbox, restart=restart)
            except (BackendUnavailable, StartFailed) as error:
                if one.has_begun:  # what earlier calls defined would be given up without a word
                    raise
                raise _NoneHere from error
            result = await one.run(code, timeout_s)
        state = LOST if result.meta.get("state") == LOST else NEW if is_new else KEPT
        return Ran(result=result, state=state, note=_gone(language, why) if why else "")

    def forget(self) -> None:
        """Begin anew with the next call; what there is ends with its sandbox."""
        for one in self._kept.values():
            self._share.room.leave(one)
        self._kept.clear()
        self._lacking.clear()


class _NoneHere(Exception):
    """Say that a language has no interpreters that go on; the cause says why."""


def _gone(language: str, why: str) -> str:
    return (
        f"[The {language} interpreter of the earlier calls is gone: {why}. This call ran in a new one: what they "
        "defined is not there, files are.]"
    )


def _nothing_kept(language: str, why: str) -> str:
    told = clip(why, most=MOST_REASON_CHARS)
    return (
        f"[No {language} interpreter can be kept here, so each call begins anew; files are still there. "
        f"({told} Or try again with restart.)]"
    )
