"""The keepers of the service's sandboxes: attach, end them, tell them that a service exists. All functions block."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
from collections.abc import Mapping, Sequence
from typing import Any

from cloche.config.options import SandboxOptions
from cloche.core.errors import InvalidRequest, OutcomeUnknown
from cloche.core.record import replace
from cloche.execution.prepare import prepare
from cloche.execution.sandbox import AsyncSandbox
from cloche.keeper import registry
from cloche.keeper.attach import visit

INFO_S, END_S = 2.0, 15.0  # for a keeper to answer, and to end its sandbox
log = logging.getLogger("cloche.service")


def come_back(name: str, options: SandboxOptions) -> AsyncSandbox:
    """Return a kept sandbox, not yet entered. The service's options apply to audit and ceilings."""
    sandbox = AsyncSandbox.attach(name)
    own: SandboxOptions = {**options, "backend": sandbox.backend}
    sandbox._options = own
    sandbox._prepared = replace(prepare(**own), policy=sandbox.policy, limits=sandbox.limits)
    return sandbox


def is_there(name: str) -> bool:
    """Tell whether a sandbox has this name."""
    return any(registry.is_taken(name, folder) for folder in registry.places())


def end(name: str) -> None:
    """End a sandbox by its keeper. A keeper that does not answer is killed, with everything that it keeps."""
    try:
        keeper = registry.find(name)
    except InvalidRequest:
        return
    try:
        visit(keeper, "end", timeout_s=END_S)
    except OutcomeUnknown as error:
        log.warning("the keeper of sandbox %s is killed: %s", name, error)
        for pid in registry.holders(name):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)


def own(keepers: Sequence[registry.Found], keep_s: float) -> dict[str, Mapping[str, Any]]:
    """Tell keepers that a service of their database exists; return what they say of themselves, by name."""
    infos: dict[str, Mapping[str, Any]] = {}
    for keeper in keepers:
        with contextlib.suppress(OutcomeUnknown):  # the keeper is busy, or about to end
            infos[keeper.name] = visit(keeper, "own", timeout_s=INFO_S, owner_s=keep_s)
    return infos
