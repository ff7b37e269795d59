"""State that all mixins of `AsyncSandbox` share: how it was opened, how it is opened, and whether it is live."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any, cast

from cloche.audit.log import Audit
from cloche.audit.recording import refusals
from cloche.core.errors import BackendUnavailable, ClocheError, InvalidRequest
from cloche.core.limits import Limits, parse_duration
from cloche.core.loops import become_task
from cloche.core.policy import Policy
from cloche.core.processes import no_life_of
from cloche.core.protocols import (
    Backend,
    OpenLiveSandbox,
    OpenSandbox,
    SupportsLanguageNames,
    SupportsLive,
    SupportsSessionNames,
)
from cloche.core.record import replace
from cloche.core.screen import Finding

from .accounts import account_of
from .prepare import Prepared, screen
from .run import check_fixer

if TYPE_CHECKING:
    from cloche.core.fixing import Fixer

log = logging.getLogger("cloche.live")
MOST_AT_ONCE, PLACES_LEFT = 256, 8  # runs and commands in one sandbox; processes reserved beside them


def most_at_once(pids: int) -> int:
    """Return the maximum of concurrent runs and commands in a live sandbox; further ones wait."""
    return min(MOST_AT_ONCE, max(1, pids - PLACES_LEFT))


@asynccontextmanager
async def in_time(time: float | str | None, late: Callable[[str], ClocheError]) -> AsyncIterator[None]:
    """Limit the body to `time`, if given. Raises the error that `late` makes from `not done in 3 s`."""
    if time is None:
        yield
        return
    seconds = parse_duration(time, name="timeout")
    await become_task()
    bound = asyncio.timeout(seconds)
    try:
        async with bound:
            yield
    except TimeoutError as error:
        if not bound.expired():
            raise
        raise late(f"not done in {seconds:g} s") from error


class LiveOperations:
    """State and checks that all mixins use."""

    _prepared: Prepared
    _env: Mapping[str, str]
    _opened: OpenSandbox | None
    _turns: asyncio.Semaphore
    _is_live: bool | None  # None until it is open, if it is live only when possible

    @property
    def is_live(self) -> bool:
        """Tell whether the sandbox is live, or its runs take turns. Raises InvalidRequest before it is open."""
        self._require_open()
        return bool(self._is_live)

    @property
    def limits(self) -> Limits:
        """Return the limits of each run."""
        return self._prepared.limits

    @property
    def policy(self) -> Policy:
        """Return the rules of each run."""
        return self._prepared.policy

    @property
    def backend(self) -> str:
        """Return the backend's name."""
        return self._prepared.backend.name

    def hide_package_managers(self) -> None:
        """Hide package managers from the sandbox, from its first run on."""
        policy = self.policy.with_changes(package_managers=False)
        self._prepared = replace(self._prepared, policy=policy)

    @property
    def languages(self) -> tuple[str, ...]:
        """Return the languages that the policy allows and that can run here, as far as is known before a run."""
        backend, allowed = self._prepared.backend, self.policy.languages
        if not isinstance(backend, SupportsLanguageNames):
            return allowed
        installed = backend.languages()
        return tuple(name for name in allowed if name in installed)

    @property
    def session_languages(self) -> tuple[str, ...]:
        """Return the languages that may have sessions here, as far as is known before one is opened."""
        backend = self._prepared.backend
        return backend.session_languages() if isinstance(backend, SupportsSessionNames) else ()

    @property
    def notes(self) -> Mapping[str, Any]:
        """Return the notes of results about the backend: `choice` for `auto`, `fallback`."""
        return self._prepared.notes

    @property
    def audit(self) -> Audit | None:
        """Return the log that records runs, None if auditing is off."""
        return self._prepared.audit

    async def screened(self, code: str, language: str) -> Sequence[Finding]:
        """Return the screen's findings in a session's cell. Raises PolicyDenied."""
        if self.policy.screen == "off":
            return ()
        with refusals(self._prepared.settings, language=language, code=code):
            return await screen(self.policy.screen, language, code)

    def checked_fixer(self, autofix: object, code: str | None) -> Fixer:
        """Check the value of `autofix` and return it. Raises InvalidRequest, also if a model's code must not run."""
        return check_fixer(autofix, self._prepared, code)

    def _require_open(self) -> OpenSandbox:
        if self._opened is None:
            raise InvalidRequest("this sandbox is not open; use it inside its with block, or open it by open()")
        return self._opened

    def _require_live(self, operation: str) -> OpenLiveSandbox:
        """Return the open sandbox. Raises InvalidRequest if it is not live."""
        opened = self._require_open()
        if not self._is_live:
            why = self._prepared.notes.get("not_live") or "it was opened with live=False; open it with live=True"
            raise InvalidRequest(f"{operation} needs a live sandbox, which this one is not: {why}")
        return cast("OpenLiveSandbox", opened)

    def _opening(self) -> AbstractAsyncContextManager[OpenSandbox]:
        """Return the context manager that opens it. Raises BackendUnavailable if it must be live and the backend has no
        live sandboxes.
        """
        backend, policy, limits = self._prepared.backend, self._prepared.policy, self._prepared.limits
        if self._is_live is False:
            return backend.open(policy, limits)
        if self._is_live is None and (account_of(backend) is None or not isinstance(backend, SupportsLive)):
            return self._open_either(backend)
        # A remote sandbox is always live: a refusal, for example of a full account, is an error.
        opening = _open_live(backend, policy, limits)
        self._is_live = True
        return opening

    @asynccontextmanager
    async def _open_either(self, backend: Backend) -> AsyncIterator[OpenSandbox]:
        """Open a live sandbox, or, if there is none at this level or on this host, one whose runs take turns."""
        policy, limits = self._prepared.policy, self._prepared.limits
        async with AsyncExitStack() as stack:
            stack.callback(setattr, self, "_is_live", None)  # the next opening decides again
            try:
                opened: OpenSandbox = await stack.enter_async_context(_open_live(backend, policy, limits))
                self._is_live = True
            except BackendUnavailable as error:
                log.info("runs of this sandbox take turns, because it is not live: %s", error)
                stack.callback(setattr, self, "_prepared", self._prepared)
                notes = {**self._prepared.notes, "not_live": str(error)}
                self._prepared = replace(self._prepared, notes=notes)
                opened = await stack.enter_async_context(self._prepared.backend.open(policy, limits))
                self._is_live = False
            yield opened


def _open_live(backend: Backend, policy: Policy, limits: Limits) -> AbstractAsyncContextManager[OpenLiveSandbox]:
    """Return the context manager of a live sandbox. Raises BackendUnavailable, at the latest when it is entered."""
    if isinstance(backend, SupportsLive):
        return backend.open_live(policy, limits)
    raise BackendUnavailable(
        f"{no_life_of(backend.name)}.",
        remedy='Use backend "local", "docker", "gvisor", "microvm" or "firecracker". Without live=True, runs take '
        "turns.",
    )
