"""Do what a helper that was killed could not: remove what it made outside of the namespaces.

Its reaper and guest die with it, and a process namespace takes everything else along. Without one, what the guest
left in the background is found by its control group; without that as well, it is out of reach.
"""

from __future__ import annotations

import os
import time

from .cgroups import Cgroup
from .workfolder import WorkFolder

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .spec import Spec

SIGKILL = 9
PATIENCE_S = 5.0


def clear_remains(spec: Spec) -> None:
    """Kill what is left in the sandbox's control group, then remove the group and the folders."""
    if spec.cgroup is not None:
        cgroup = Cgroup(spec.cgroup["version"], spec.cgroup["folders"])
        _empty(cgroup)
        cgroup.remove()
    if spec.folder:
        try:
            WorkFolder(spec.folder, spec.workspace, spec.tmp, None).remove()
        except FileNotFoundError:
            pass  # the helper never came to make it


def _empty(cgroup: Cgroup) -> None:
    deadline = time.monotonic() + PATIENCE_S
    cgroup.lift_quota()
    while (pids := cgroup.members()) and time.monotonic() < deadline:
        for pid in pids:
            try:
                os.kill(pid, SIGKILL)
            except ProcessLookupError:
                pass  # it ended while we looked
        time.sleep(0.002)
