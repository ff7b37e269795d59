"""Sandboxes with a name, which outlive their block and their caller; and operations on a sandbox as a whole.

Names, times and the process that holds such a sandbox are in `cloche.keeper`.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from functools import partial
from typing import Any

from cloche.config.state import DATABASE, records_file
from cloche.core.errors import BackendUnavailable, InvalidRequest
from cloche.core.limits import parse_duration
from cloche.core.protocols import Backend, OpenSandbox, SupportsNames
from cloche.core.record import replace
from cloche.keeper import attach
from cloche.keeper.attach import Kept, Terms

from .git_inside import variables_for
from .live import LiveOperations
from .prepare import Prepared
from .spares import current_pool

Duration = float | str
APPROVALS = "CLOCHE_APPROVALS"
_ENVIRONMENT = ("HOME", "XDG_RUNTIME_DIR", "XDG_STATE_HOME", APPROVALS, DATABASE, "DBUS_SESSION_BUS_ADDRESS")
_PACKAGES = ("cloche", "platformdirs")  # imported by that process


def read_terms(
    name: str | None, keep: Duration | None, lifetime: Duration | None, idle: Duration | None,
    at_end: str | None = None,
) -> Terms | None:  # fmt: skip
    """Read the arguments of a sandbox with a name; None if it has none. Raises InvalidRequest."""
    if name is not None:
        return attach.read_terms(name, keep=keep, lifetime=lifetime, idle=idle, at_end=at_end)
    for argument, value in (("keep", keep), ("lifetime", lifetime), ("idle", idle), ("at_end", at_end)):
        if value is not None:
            raise InvalidRequest(f"{argument} needs a sandbox with a name; give it one: name=...")
    return None


def _naming_backend(backend: Backend) -> SupportsNames:
    if not isinstance(backend, SupportsNames):
        raise BackendUnavailable(
            f"backend {backend.name!r} has no sandboxes with names.", remedy='Use backend "local", or give no name.'
        )
    return backend


def _asking(prepared: Prepared) -> dict[str, Any]:
    """Return the data for approvals while no client is attached: the network ceiling, and the audit log's folder."""
    ceiling, audit = prepared.settings.ceilings.get("network"), prepared.audit
    limits = {name: getattr(ceiling, name) for name in ("mode", "hosts", "networks")} if ceiling is not None else None
    return {"ceiling": limits, "audit": audit.folder if audit is not None else None}


def _stand_in(name: str) -> dict[str, Any] | None:
    """Return the command and environment of the process that queues approvals while no client is attached.

    It uses the approvals or records file of this process; None if there is none.
    """
    env = {variable: value for variable in _ENVIRONMENT if (value := os.environ.get(variable))}
    try:
        if DATABASE in env:
            env[DATABASE] = records_file()
    except InvalidRequest:  # the records are in a database server
        del env[DATABASE]
        if APPROVALS not in env:
            return None
    if APPROVALS in env:
        env[APPROVALS] = os.path.abspath(env[APPROVALS])
    packages = [spec for package in _PACKAGES if (spec := importlib.util.find_spec(package)) is not None]
    paths = [os.path.dirname(os.path.dirname(os.path.abspath(str(spec.origin)))) for spec in packages]
    boot = f"import sys; sys.path += {paths!r}; from cloche.agent.host_approvals import main; main(sys.argv[1])"
    return {"command": [sys.executable, "-I", "-c", boot, name], "env": env}


def _claim(terms: Terms, prepared: Prepared) -> attach.KeeperClaim:
    """Return what claims the name of a new sandbox, and describes it."""
    entry = attach.as_entry(prepared.backend.name, prepared.policy, prepared.limits)
    stand_in = None
    if prepared.policy.on_network == "ask":
        entry["asking"], stand_in = _asking(prepared), _stand_in(terms.name)
    if prepared.policy.host_folder is not None:
        entry["folder_environment"] = variables_for(prepared.policy.host_folder)
    return attach.KeeperClaim(terms, entry, stand_in)


class NameOperations(LiveOperations):
    """Open a sandbox with a name, or attach to one, and control a live sandbox as a whole."""

    _terms: Terms | None
    _name: str | None
    _existing: Kept | None

    def _opening(self) -> AbstractAsyncContextManager[OpenSandbox]:
        """Return the context manager that opens it. Raises BackendUnavailable if the backend has no such sandboxes."""
        prepared, name, existing = self._prepared, self._name, self._existing
        if name is not None and existing is not None:
            backend = _naming_backend(prepared.backend)
            return backend.attach_live(
                existing.policy,
                existing.limits,
                existing.enforcement,
                lambda: attach.connect(name),
                lambda greeting: attach.check_greeting(name, greeting),
                lambda: attach.join_network(name),
            )
        if self._terms is not None:
            keeping = _claim(self._terms, prepared)
            return _naming_backend(prepared.backend).open_kept(prepared.policy, prepared.limits, keeping)
        return super()._opening()

    async def _take_spare(self, stack: AsyncExitStack) -> OpenSandbox | None:
        """Return a spare sandbox with this one's name, rules and limits; None if there is none."""
        pool, before = current_pool(), self._prepared
        if pool is None or self._terms is None:
            return None
        spare = await pool.take(before, partial(_claim, self._terms))
        if spare is None:
            return None
        stack.push_async_callback(spare.close)
        self._prepared = replace(before, policy=spare.policy)
        stack.callback(setattr, self, "_prepared", before)
        return spare.sandbox

    async def kill(self) -> None:
        """End the sandbox for all clients, and wait until it is gone; its name is then free."""
        await self._require_live("kill").kill()

    async def pause(self, *, memory: bool = True) -> None:
        """Freeze all its processes and its clocks: time-outs, `keep` and the lifetime. Nothing starts until `resume`.

        With `memory=False` all processes are ended, and the files alone are kept. A paused sandbox has no bound of
        time, and its memory stays in use. `resume` also continues a process that had stopped itself.
        """
        await self._require_live("pause").ask("pause", **({} if memory else {"memory": False}))

    async def resume(self, *, memory: bool = True) -> None:
        """Continue all its processes; with `memory=False` they are ended instead, and it goes on with its files.

        The lifetime goes on, too. One that was over, so that the sandbox was paused, begins anew with its whole length.
        """
        await self._require_live("resume").ask("resume", **({} if memory else {"memory": False}))

    async def set_lifetime(
        self, time: Duration | None = None, *, at_end: str | None = None, only_extends: bool = False
    ) -> float | None:
        """Set the lifetime of a sandbox with a name to end in so many seconds, or what happens then, or both.

        With `only_extends` an end that is later stays. `at_end` is `end`, `pause`, or `pause-files` (without
        processes). Return the seconds that are left, None for no bound.
        """
        order: dict[str, Any] = {} if time is None else {"left_s": parse_duration(time, name="lifetime")}
        order |= {} if at_end is None else {"at_end": attach.check_at_end(at_end)}
        answer = await self._require_live("set_lifetime").ask("lifetime", only_extends=only_extends, **order)
        left_s: float | None = answer.get("left_s")
        return left_s

    async def logs(self, id: str) -> tuple[bytes, bytes]:  # noqa: A002 - named like the process's property
        """Return the last unread output of a process, standard output and standard error, without consuming it."""
        return await self._require_live("logs").read_output(id)

    async def keep(self, time: Duration) -> None:
        """Set how long a sandbox with a name is kept after its last client has left."""
        await self._require_live("keep").ask("keep", keep_s=parse_duration(time, name="keep"))
