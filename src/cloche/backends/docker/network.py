"""Creation of the sockets of a container's network: directly as root, through a helper container for the docker group.

The helper container shares only the network namespace of the served container. It runs our code alone, with an image's
Python and two capabilities in that namespace. Its only folder of the host contains one socket with a secret name, over
which it sends the sockets that it created.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import socket
import tempfile
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from cloche import hostfs
from cloche.core.errors import StartFailed
from cloche.egress.client import SandboxNetwork
from cloche.jail import messages

from ..garbage_collection import owner
from ..network import serve_namespace
from .daemon import OWNER_LABEL, Daemon
from .runtimes import hosts_runtime

if TYPE_CHECKING:
    from cloche.core.network import NetworkRules

    from .images import DockerImage

FOLDER = "/run/cloche"
HAND_OUT_S = 60.0
MEMORY_BYTES, PIDS, MOST_SOCKETS = 64 << 20, 16, 128


def serve_container(
    daemon: Daemon, container: str, image: DockerImage, rules: NetworkRules, network: SandboxNetwork
) -> None:
    """Make a network's sockets in the network namespace of a started container. Blocks. Raises StartFailed."""
    if os.geteuid() == 0:
        serve_namespace(daemon.pid_of(container), container, rules, network)
        return
    if not image.has_reaper:
        raise StartFailed(
            f"the network of a container of {image.name!r} cannot be served: it has no Python 3.11, which a member of "
            "the docker group needs for that; run as root, or use another image",
            step="network",
        )
    sockets = _made_by_container(daemon, container, image, rules)
    try:
        body = {"ports": list(rules.served_ports), "jail": 0}
        messages.send(network.jail_end, "sockets", body, sockets)
    except OSError as error:
        raise StartFailed(f"the egress process takes no sockets: {error}", step="network") from error
    finally:
        for fd in sockets:
            os.close(fd)


def _made_by_container(daemon: Daemon, container: str, image: DockerImage, rules: NetworkRules) -> list[int]:
    """Return the sockets that a helper container created in another container's network namespace."""
    above, link_name = hostfs.temporary_folder(), secrets.token_hex(16)
    folder = tempfile.mkdtemp(prefix="cloche-", dir=above)
    helper = ""
    try:
        # The helper's root may be another id here and has no CAP_DAC_OVERRIDE, so it needs x. Others cannot list names.
        os.chmod(folder, 0o711)  # noqa: S103
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(f"{folder}/{link_name}")
            os.chmod(f"{folder}/{link_name}", 0o666)  # noqa: S103 - its name is secret
            listener.listen(1)
            listener.settimeout(HAND_OUT_S)
            body = _container(container, image, rules, folder, link_name)
            body["HostConfig"]["Runtime"] = hosts_runtime(daemon)  # gVisor cannot send its sockets to the host
            helper = daemon.create(body)
            daemon.start(helper)
            with listener.accept()[0] as link:
                link.settimeout(HAND_OUT_S)
                message, sockets, _, _ = socket.recv_fds(link, 64, MOST_SOCKETS)
        if message != b"sockets" or len(sockets) != len(rules.served_ports) + 2:
            for fd in sockets:
                os.close(fd)
            raise StartFailed("the container that makes a network's sockets sent others", step="network")
        return sockets
    except TimeoutError as error:
        raise StartFailed(
            f"the container that makes a network's sockets did not send them within {HAND_OUT_S:g} s; is the daemon on "
            "another machine?",
            step="network",
        ) from error
    except OSError as error:
        raise StartFailed(f"a container's network cannot be served: {error}", step="network") from error
    finally:
        if helper:
            daemon.remove(helper)
        shutil.rmtree(folder, ignore_errors=True)


def _container(beside: str, image: DockerImage, rules: NetworkRules, folder: str, link_name: str) -> dict[str, Any]:
    """Return the request body that creates the helper container."""
    program = files("cloche.backends.containers.inside").joinpath("network.py").read_text("utf-8")
    ports = json.dumps(list(rules.served_ports))
    return {
        "Image": image.id,
        "Entrypoint": ["python3"],
        "Cmd": ["-I", "-c", program, ports, f"{FOLDER}/{link_name}"],
        "User": "0:0",
        "Labels": {OWNER_LABEL: owner()},
        "HostConfig": {
            "NetworkMode": f"container:{beside}",
            "CapDrop": ["ALL"],
            "CapAdd": ["NET_ADMIN", "NET_BIND_SERVICE"],
            "ReadonlyRootfs": True,
            "SecurityOpt": ["no-new-privileges"],
            "Memory": MEMORY_BYTES,
            "PidsLimit": PIDS,
            "LogConfig": {"Type": "none", "Config": {}},
            "Mounts": [{"Type": "bind", "Source": folder, "Target": FOLDER, "ReadOnly": True}],
        },
    }
