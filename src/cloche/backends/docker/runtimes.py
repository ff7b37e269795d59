"""Which runtime a container gets: runc, or gVisor's runsc where that really works.

That a daemon knows runsc says little: it may lack a right, or a part of the kernel. So a container is run once, within
a bounded time, and the answer kept for this process.
"""

from __future__ import annotations

import threading

from cloche.core.errors import BackendUnavailable, ClocheError
from cloche.core.levels import Level

from ..containers.owner import owner
from .daemon import OWNER_LABEL, Daemon, explained
from .images import Image
from .plan import MAPPED_ID, RUNC, RUNSC

PROBE_S = 20
REMEDY = 'install gVisor\'s runsc and register it with the daemon ("runsc install", then restart the daemon)'
_turn = threading.Lock()
_answers: dict[int, str] = {}  # by daemon: why not; empty when it works


def choose_runtime(daemon: Daemon, image: Image | None, wanted: Level | None) -> tuple[str, Level]:
    """Return the runtime, empty for the daemon's own, and the level that it gives; None takes the strongest.

    Raises BackendUnavailable when gVisor is wanted and does not work.
    """
    if wanted is Level.JAIL:
        return "", Level.JAIL
    why_not = why_no_gvisor(daemon, image)
    if not why_not:
        return RUNSC, Level.GVISOR
    if wanted is None:
        return "", Level.JAIL
    raise BackendUnavailable(f"gVisor does not work on this daemon: {why_not}. To have it, {REMEDY}")


def own_runtime(daemon: Daemon) -> tuple[str, Level]:
    """Return docker's own runtime by its name, whichever the daemon takes by itself, and the level that it gives.

    Raises BackendUnavailable where the daemon does not have it.
    """
    known = daemon.info.get("Runtimes") or {}
    if RUNC not in known:
        raise BackendUnavailable(
            f"this daemon does not know the runtime {RUNC}, which is demanded; it knows: {', '.join(known) or 'none'}.",
            remedy="Use a daemon that has it, or take runtime out of the settings.",
        )
    return RUNC, Level.JAIL


def why_no_gvisor(daemon: Daemon, image: Image | None) -> str:
    """Return why gVisor cannot be used, empty when it was tried and can; trying it takes an image."""
    if RUNSC not in (daemon.info.get("Runtimes") or {}):
        return "the daemon does not know the runtime runsc"
    with _turn:
        if id(daemon) not in _answers:
            if image is None:
                return "it was not tried yet, for want of an image to try it with"
            _answers[id(daemon)] = _try(daemon, image)
        return _answers[id(daemon)]


def is_ruled_out(daemon: Daemon) -> bool:
    """Tell whether it is known without a trial that gVisor cannot be used."""
    return RUNSC not in (daemon.info.get("Runtimes") or {}) or bool(_answers.get(id(daemon)))


def _try(daemon: Daemon, image: Image) -> str:
    """Run a container on it, and clean up whatever comes of that."""
    body = {
        "Image": image.id,
        "Entrypoint": ["sh"],
        "Cmd": ["-c", "cat /proc/version"],
        "User": f"{MAPPED_ID}:{MAPPED_ID}",
        "Labels": {OWNER_LABEL: owner()},
        "HostConfig": {"Runtime": RUNSC, "NetworkMode": "none", "CapDrop": ["ALL"], "Memory": 1 << 29},
    }
    container = ""
    try:
        container = daemon.create(body)
        daemon.start(container)
        code = daemon.api.wait(container, timeout=PROBE_S)["StatusCode"]
    except ClocheError as error:
        return str(error)
    except Exception as error:  # a time-out, or the connection: both are answers
        return f"a container did not run to its end within {PROBE_S} s ({explained(error)})"
    finally:
        if container:
            daemon.remove(container)
    return "" if code == 0 else f"a container ended with exit code {code}"
