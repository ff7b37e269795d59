"""The agents that `cloche agent install` put into Cloche's data: one layer for each version, read-only.

A layer is the folder `agents/layers/NAME@VERSION.NONCE`, with these in it:

    bin/PROGRAM    starts the agent, and is the only program there
    agent/         its package with the dependencies
    node/          a Node of its own, where the host's is too old
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from cloche.core.errors import BackendUnavailable
from cloche.core.record import dataclass
from cloche.packages.folders import agents_store
from cloche.packages.store import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class Installed:
    """Name an installed agent: its version, its folder, and when it was installed."""

    agent: str
    version: str
    folder: str
    created: float


def installed_agents() -> Iterator[Installed]:
    """Yield all that are installed, the newest first."""
    try:
        layers = Store(agents_store()).layers()
    except BackendUnavailable:
        return
    for layer in sorted(layers, key=lambda layer: layer.created, reverse=True):
        name, at, version = layer.key.partition("@")
        if at:
            yield Installed(agent=name, version=version, folder=os.path.realpath(layer.folder), created=layer.created)


def newest(agent: str) -> Installed | None:
    """Return the version that was installed last; None if there is none."""
    return next((installed for installed in installed_agents() if installed.agent == agent), None)
