"""What is on its way out, and what others left behind.

A container goes when its caller hangs up: the first process hears the end of its standard input, and the daemon
removes what has ended. That holds for a killed caller too. What is done here is to make sure of it, and to remove
workspaces, which the daemon only does for a container's own.
"""

from __future__ import annotations

import logging
import time
from typing import Protocol

from cloche.core.errors import BackendUnavailable

from ..containers.background import Background
from ..containers.owner import is_dead
from ..containers.way import way
from ..noting import noted
from .daemon import Daemon

log = logging.getLogger("cloche.docker")
PATIENCE_S, NAP_S, LISTENS_S = 5.0, 0.05, 5


class Leaving(Protocol):
    """Name what can be hung up on."""

    id: str
    daemon: Daemon

    def hang_up(self) -> None:
        """End the conversation; the container then ends by itself."""
        ...


_background = Background("cloche-docker-end", 2 * PATIENCE_S)
wait_for_all = _background.wait_for_all


def see_out(container: Leaving, volume: str = "") -> None:
    """Let a container go soon, and in the background make sure that it is gone, and its workspace with it."""
    try:
        _background.begin(lambda: _let_go(container, volume))
    except RuntimeError:  # there can be no thread any more, and it goes by itself
        container.hang_up()
        raise


def _let_go(container: Leaving, volume: str) -> None:
    way.make()
    container.hang_up()
    _make_sure(container, volume)


def _make_sure(container: Leaving, volume: str) -> None:
    with noted(log, "nobody is there to ask, and what is left goes when somebody is", BackendUnavailable):
        container.daemon.check_socket(LISTENS_S)
        if not _is_gone(container):
            container.daemon.remove(container.id)
        deadline = time.monotonic() + PATIENCE_S
        while volume and not container.daemon.remove_volume(volume) and time.monotonic() < deadline:
            time.sleep(NAP_S)


def _is_gone(container: Leaving) -> bool:
    """Wait a little until a container has been removed."""
    import docker.errors
    import requests

    try:
        container.daemon.api.wait(container.id, timeout=PATIENCE_S, condition="removed")
    except docker.errors.NotFound:
        return True
    except (docker.errors.DockerException, requests.exceptions.RequestException):
        return False
    return True


def clear(daemon: Daemon) -> list[str]:
    """Remove the containers and workspaces of processes that are dead; return a line for each."""
    import docker.errors
    import requests

    cleared = []
    with noted(log, "what is left over stays", docker.errors.DockerException, requests.exceptions.RequestException):
        for container, owner in daemon.owned():
            if is_dead(owner):
                daemon.remove(container)
                cleared.append(f"container {container[:12]}")
        for name, owner in daemon.dangling_volumes():
            if is_dead(owner) and daemon.remove_volume(name):
                cleared.append(f"volume {name[:12]}")
    return cleared
