"""Sandboxes with a name: what keeps one beyond its block and its caller; and what is done to a sandbox as a whole.

The name, the times and the process that holds it are `cloche.keeper`.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from contextlib import AbstractAsyncContextManager
from typing import Any

from cloche.config.state import DATABASE, records_file
from cloche.core.errors import BackendUnavailable, InvalidRequest
from cloche.core.limits import parse_duration
from cloche.core.protocols import Backend, OpenSandbox, SupportsNames
from cloche.keeper import attach
from cloche.keeper.attach import Kept, Terms

from .git_inside import variables_for
from .live import LiveOperations
from .prepare import Prepared

Duration = float | str
APPROVALS = "CLOCHE_APPROVALS"
_ENVIRONMENT = ("HOME", "XDG_RUNTIME_DIR", "XDG_STATE_HOME", APPROVALS, DATABASE)
_PACKAGES = ("cloche", "platformdirs")  # that are imported there


def read_terms(
    name: str | None, keep: Duration | None, lifetime: Duration | None, idle: Duration | None
) -> Terms | None:
    """Read the arguments of a sandbox with a name; None where it has none. Raises InvalidRequest."""
    if name is not None:
        return attach.read_terms(name, keep=keep, lifetime=lifetime, idle=idle)
    for argument, value in (("keep", keep), ("lifetime", lifetime), ("idle", idle)):
        if value is not None:
            raise InvalidRequest(f"{argument} is for a sandbox with a name, which is kept; give it one: name=...")
    return None


def _naming_backend(backend: Backend) -> SupportsNames:
    if not isinstance(backend, SupportsNames):
        raise BackendUnavailable(
            f"backend {backend.name!r} has no sandboxes with names.", remedy='Use backend "local", or give no name.'
        )
    return backend


def _asking(prepared: Prepared) -> dict[str, Any]:
    """Return what who asks needs to know while nobody is attached: the ceiling on a yes, where decisions are noted."""
    ceiling, audit = prepared.settings.ceilings.get("network"), prepared.audit
    limits = {name: getattr(ceiling, name) for name in ("mode", "hosts", "networks")} if ceiling is not None else None
    return {"ceiling": limits, "audit": audit.folder if audit is not None else None}


def _stand_in(name: str) -> dict[str, Any] | None:
    """Return the command and environment of who asks the queue of approvals while nobody is attached.

    That is the file which is this process's own; None where there is none.
    """
    env = {variable: value for variable in _ENVIRONMENT if (value := os.environ.get(variable))}
    try:
        if DATABASE in env:
            env[DATABASE] = records_file()
    except InvalidRequest:  # it is a server's
        del env[DATABASE]
        if APPROVALS not in env:
            return None
    if APPROVALS in env:
        env[APPROVALS] = os.path.abspath(env[APPROVALS])
    packages = [spec for package in _PACKAGES if (spec := importlib.util.find_spec(package)) is not None]
    paths = [os.path.dirname(os.path.dirname(os.path.abspath(str(spec.origin)))) for spec in packages]
    boot = f"import sys; sys.path += {paths!r}; from cloche.agent.host_approvals import main; main(sys.argv[1])"
    return {"command": [sys.executable, "-I", "-c", boot, name], "env": env}


class NameOperations(LiveOperations):
    """Open a sandbox that has a name, or come back into one, and do what concerns one that lives as a whole."""

    _terms: Terms | None
    _name: str | None
    _existing: Kept | None

    def _opening(self) -> AbstractAsyncContextManager[OpenSandbox]:
        """Return what opens it. Raises BackendUnavailable where the backend has none like that."""
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
            entry = attach.as_entry(prepared.backend.name, prepared.policy, prepared.limits)
            stand_in = None
            if prepared.policy.on_network == "ask":
                entry["asking"], stand_in = _asking(prepared), _stand_in(self._terms.name)
            if prepared.policy.host_folder is not None:
                entry["folder_environment"] = variables_for(prepared.policy.host_folder)
            keeping = attach.Keeping(self._terms, entry, stand_in)
            return _naming_backend(prepared.backend).open_kept(prepared.policy, prepared.limits, keeping)
        return super()._opening()

    async def kill(self) -> None:
        """End the sandbox for everybody, and wait until nothing of it is left; its name is free then."""
        await self._require_live("kill").kill()

    async def pause(self) -> None:
        """Stop all its processes, and the clocks of their time-outs; nothing can be started until `resume`.

        Its lifetime goes on. A process that had stopped itself is continued by `resume` as well.
        """
        await self._require_live("pause").ask("pause")

    async def resume(self) -> None:
        """Let its processes go on."""
        await self._require_live("resume").ask("resume")

    async def logs(self, id: str) -> tuple[bytes, bytes]:  # noqa: A002 - as the process's own property
        """Return the last output of a process that nobody has read, of standard output and error; it stays there."""
        return await self._require_live("logs").read_output(id)

    async def keep(self, time: Duration) -> None:
        """Set how long a sandbox with a name is kept without a client, counted from the last one's end."""
        await self._require_live("keep").ask("keep", keep_s=parse_duration(time, name="keep"))
