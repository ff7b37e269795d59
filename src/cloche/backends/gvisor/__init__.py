"""The backend "gvisor": gVisor's runsc without a daemon or an image, around this host's toolchains.

Where a docker daemon has runsc and the image, "gvisor" means `docker` on runsc instead.

In: policy, limits, requests. Out: results and sessions. `plan` decides what a container is made of: root, OCI bundle,
rlimits, and the amounts of its control group (memory, processes, processors); `container` starts and kills one, and
talks with the shim (`jail.container_shim`) that makes namespaces and control group and removes them after a kill;
`backend` tries whether runsc works here, and opens sandboxes.

To be kept: no container sees a file of the host's that the native jail would not show; a caller that is killed leaves
nothing. Log lines, the kept answer and CLOCHE_RUNSC are called after runsc, since users know them by these names.
"""

from __future__ import annotations

from .backend import RunscBackend

__all__ = ["RunscBackend"]
