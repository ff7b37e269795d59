"""The backend "docker": throwaway containers of a daemon, under runc or gVisor's runsc.

In: policy, limits, requests, a daemon that `daemon` finds. Out: results and sessions (`sandbox`). `plan` decides what a
container is made of, its limits of memory, processors and processes too; `images` finds an image and what it holds;
`layers` has volumes with packages; `container` starts and kills one; `shell_container` does so for images without a
recent Python; `runtimes` chooses between runc and runsc; `network` has one served from outside; `daemon` also removes
containers and volumes of callers that were killed.

To be kept: `plan` alone decides what is in a request to the daemon; the path of `seccomp.json`, which users name; the
label `cloche.owner`. Timeouts and remedies may be changed without asking.
"""

from __future__ import annotations

from .backend import DockerBackend

__all__ = ["DockerBackend"]
