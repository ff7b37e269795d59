"""The backend "docker": throwaway containers of a daemon, under runc or gVisor's runsc.

In: policy, limits, requests, a daemon that `daemon` finds. Out: results and sessions (`sandbox`), sandboxes that live
(`live`). `plan` decides the settings of a container, including its limits on memory, processors and processes; `images`
finds an image and lists its programs; `layers` keeps volumes with packages; `container` starts and kills one container;
`shell_container` does the same for images without a recent Python; `runtimes` chooses between runc and runsc; `network`
has a container's network served from outside; `daemon` also removes containers and volumes of killed callers.

Must not change: `plan` alone decides the content of requests to the daemon; the path of `seccomp.json`, which users
name; the label `cloche.owner`. Timeouts and remedies may change freely.
"""

from __future__ import annotations

from .backend import DockerBackend

__all__ = ["DockerBackend"]
