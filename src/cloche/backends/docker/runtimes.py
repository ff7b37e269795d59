"""Choice of a container's runtime: docker's own, or gVisor's, which is tested before it is used.

gVisor has two runtimes. `runsc` has its own network stack, which cannot be served from outside. `runsc-network` is the
same program with `--network=host`: a guest's sockets are sockets of the host's kernel, in the empty network namespace
that docker made for the container. The daemon reports the arguments of a runtime.

A daemon may list runsc although it lacks a privilege or a kernel feature. One container is therefore run on each,
within a bounded time, and the answer is cached for this process.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping
from typing import Any

from cloche.core.enforcement import Level
from cloche.core.errors import BackendUnavailable, ClocheError
from cloche.core.policy import Policy

from ..garbage_collection import owner
from ..network import SERVED
from .daemon import OWNER_LABEL, Daemon, explained
from .images import DockerImage
from .plan import GVISOR, MAPPED_ID, RUNC, RUNSC, RUNSC_NETWORK

PROBE_S = 20
REMEDY = 'install gVisor\'s runsc and register it with the daemon ("runsc install", then restart the daemon)'
REMEDY_NETWORK = (
    "register gVisor's runsc with the host's stack as a second runtime "
    f'("runsc install --runtime={RUNSC_NETWORK} -- --network=host", then restart the daemon)'
)
_NETWORK = re.compile(r"(?:^| )--?network[= ](\S+)")  # an option of runsc; the last one counts
_trying = threading.Lock()
_answers: dict[tuple[int, str], str] = {}  # by daemon and runtime: the failure, "" on success


def choose_runtime(
    daemon: Daemon, image: DockerImage | None, level: Level | None, *, is_served: bool = False
) -> tuple[str, Level]:
    """Return the runtime ("" for the daemon's default) and its level. `level` None takes the strongest available.

    With `is_served`, the network is served from outside. Raises BackendUnavailable if gVisor is required and does not
    work.
    """
    jail = (hosts_runtime(daemon) if is_served else ""), Level.JAIL
    if level is Level.JAIL:
        return jail
    why_not = why_no_gvisor(daemon, image, is_served=is_served)
    if not why_not:
        return gvisor_runtime(daemon, is_served=is_served), Level.GVISOR
    if level is None:
        return jail
    feature, remedy = ("gVisor with a network", REMEDY_NETWORK) if is_served else ("gVisor", REMEDY)
    raise BackendUnavailable(f"{feature} does not work on this daemon: {why_not}. To have it, {remedy}")


def own_runtime(daemon: Daemon) -> tuple[str, Level]:
    """Return docker's own runtime by name, independent of the daemon's default, and its level.

    Raises BackendUnavailable if the daemon does not have it.
    """
    runtimes = _runtimes(daemon)
    if RUNC not in runtimes:
        raise BackendUnavailable(
            f"this daemon does not know the runtime {RUNC}, which is demanded; it knows: "
            f"{', '.join(runtimes) or 'none'}.",
            remedy="Use a daemon that has it, or take runtime out of the settings.",
        )
    return RUNC, Level.JAIL


def hosts_runtime(daemon: Daemon) -> str:
    """Return a runtime whose guests use the host's kernel: "" (the daemon's default) unless the default is gVisor."""
    return RUNC if daemon.info.get("DefaultRuntime") in GVISOR else ""


def gvisor_runtime(daemon: Daemon, *, is_served: bool = False) -> str:
    """Return the name of gVisor's runtime, with the host's network stack if `is_served`; "" if there is none."""
    if not is_served:
        return RUNSC if RUNSC in _runtimes(daemon) else ""
    return next((name for name in (RUNSC_NETWORK, RUNSC) if has_hosts_stack(daemon, name)), "")


def has_hosts_stack(daemon: Daemon, runtime: str) -> bool:
    """Return whether guests of this gVisor runtime have sockets of the host's kernel."""
    arguments = _runtimes(daemon).get(runtime, {}).get("runtimeArgs") or ()
    return _NETWORK.findall(" ".join(map(str, arguments)))[-1:] == ["host"]


def why_no_gvisor(daemon: Daemon, image: DockerImage | None, *, is_served: bool = False) -> str:
    """Return why gVisor cannot be used, "" if a test succeeded. A test needs an image."""
    name = gvisor_runtime(daemon, is_served=is_served)
    if not name:
        return _why_unknown(daemon, is_served=is_served)
    with _trying:
        if (id(daemon), name) not in _answers:
            if image is None:
                return "it was not tried yet, for want of an image to try it with"
            _answers[id(daemon), name] = _try(daemon, image, name)
        return _answers[id(daemon), name]


def why_not_preferred(daemon: Daemon, policy: Policy, level: Level) -> str:
    """Return why a container does not use gVisor, which is preferred (C3); "" if it does or the policy chose otherwise.

    It is also "" if the daemon has no runtime of gVisor.
    """
    is_free = policy.level is None and policy.runtime is None and any(name in _runtimes(daemon) for name in GVISOR)
    if level is Level.GVISOR or not is_free:
        return ""
    if policy.network == "bridge":
        return "the network is docker's bridge, which gVisor's containers do not have here"
    return why_no_gvisor(daemon, None, is_served=policy.network in SERVED)


def is_ruled_out(daemon: Daemon, *, is_served: bool = False) -> bool:
    """Return whether it is known without a test that gVisor cannot be used."""
    name = gvisor_runtime(daemon, is_served=is_served)
    return not name or bool(_answers.get((id(daemon), name)))


def _runtimes(daemon: Daemon) -> Mapping[str, Mapping[str, Any]]:
    return daemon.info.get("Runtimes") or {}


def _why_unknown(daemon: Daemon, *, is_served: bool) -> str:
    runtimes = _runtimes(daemon)
    if not is_served:
        return f"the daemon does not know the runtime {RUNSC}"
    if RUNSC_NETWORK in runtimes:
        return f"the daemon has the runtime {RUNSC_NETWORK} without --network=host among its runtimeArgs"
    also = f"; its {RUNSC} has a network stack of its own, which nothing outside can serve" if RUNSC in runtimes else ""
    return f"the daemon does not know the runtime {RUNSC_NETWORK}{also}"


def _try(daemon: Daemon, image: DockerImage, runtime: str) -> str:
    """Run a test container on a runtime, and remove it; return the failure, "" on success."""
    body = {
        "Image": image.id,
        "Entrypoint": ["sh"],
        "Cmd": ["-c", "cat /proc/version"],
        "User": f"{MAPPED_ID}:{MAPPED_ID}",
        "Labels": {OWNER_LABEL: owner()},
        "HostConfig": {"Runtime": runtime, "NetworkMode": "none", "CapDrop": ["ALL"], "Memory": 1 << 29},
    }
    container = ""
    try:
        container = daemon.create(body)
        daemon.start(container)
        code = daemon.api.wait(container, timeout=PROBE_S)["StatusCode"]
    except ClocheError as error:
        return str(error)
    except Exception as error:  # a time-out or a lost connection is a failure of the runtime
        return f"a container did not run to its end within {PROBE_S} s ({explained(error)})"
    finally:
        if container:
            daemon.remove(container)
    return "" if code == 0 else f"a container ended with exit code {code}"
