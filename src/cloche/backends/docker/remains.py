"""What is on its way out, and what others left behind.

A container goes when its caller hangs up: the first process hears the end of its standard input, and the daemon
removes what has ended. That holds for a killed caller too. What is done here is to make sure of it, and to remove
workspaces, which the daemon only does for a container's own.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
from typing import Protocol

from cloche.core.errors import BackendUnavailable

from ..containers.owner import is_dead
from .daemon import Daemon

PATIENCE_S, NAP_S, LISTENS_S = 5.0, 0.05, 5


class Leaving(Protocol):
    """Name what can be hung up on."""

    id: str
    daemon: Daemon

    def hang_up(self) -> None:
        """End the conversation; the container then ends by itself."""
        ...


_threads: set[threading.Thread] = set()
_turn = threading.Lock()


def see_out(container: Leaving, volume: str = "") -> None:
    """Let a container go, and in the background make sure that it is gone, and its workspace with it."""
    container.hang_up()
    thread = threading.Thread(target=_make_sure, args=(container, volume), name="cloche-docker-end", daemon=True)
    with _turn:  # whoever sees it there may join it
        thread.start()
        _threads.add(thread)


def _make_sure(container: Leaving, volume: str) -> None:
    try:
        container.daemon.check_socket(LISTENS_S)
        if not _is_gone(container):
            container.daemon.remove(container.id)
        deadline = time.monotonic() + PATIENCE_S
        while volume and not container.daemon.remove_volume(volume) and time.monotonic() < deadline:
            time.sleep(NAP_S)
    except BackendUnavailable:
        pass  # nobody is there to ask; what is left goes when somebody is
    finally:
        with _turn:
            _threads.discard(threading.current_thread())


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


def wait_for_all(patience_s: float = 2 * PATIENCE_S) -> None:
    """Wait until all that was let go is gone."""
    deadline = time.monotonic() + patience_s
    while True:
        with _turn:
            threads = list(_threads)
        if not threads or time.monotonic() > deadline:
            return
        threads[0].join(max(0.0, deadline - time.monotonic()))


def clear(daemon: Daemon) -> list[str]:
    """Remove the containers and workspaces of processes that are dead; return a line for each."""
    import docker.errors
    import requests

    cleared = []
    with contextlib.suppress(docker.errors.DockerException, requests.exceptions.RequestException):
        for container, owner in daemon.owned():
            if is_dead(owner):
                daemon.remove(container)
                cleared.append(f"container {container[:12]}")
        for name, owner in daemon.dangling_volumes():
            if is_dead(owner) and daemon.remove_volume(name):
                cleared.append(f"volume {name[:12]}")
    return cleared


def _forget_after_fork() -> None:
    global _turn
    _turn = threading.Lock()
    _threads.clear()


os.register_at_fork(after_in_child=_forget_after_fork)
atexit.register(wait_for_all)
