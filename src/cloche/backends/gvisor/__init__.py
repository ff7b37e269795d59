"""The backend "gvisor": gVisor's runsc without a daemon or an image, around this host's toolchains.

If a docker daemon has runsc and the image, "gvisor" means `docker` on runsc instead.

In: policy, limits, requests. Out: results and sessions. `plan` decides the root, the OCI bundle, the rlimits and the
control group's limits (memory, processes, processors) of a container; `container` starts and kills one and talks to the
shim (`jail.container_shim`), which makes namespaces and the control group and removes them after a kill; `backend`
tests whether runsc works here and opens sandboxes.

Must not change: a container sees only those files of the host that the native jail would show; a killed caller leaves
nothing; the name runsc in log lines, the cached answer and CLOCHE_RUNSC, which users know.
"""

from __future__ import annotations

from .backend import RunscBackend

__all__ = ["RunscBackend"]
