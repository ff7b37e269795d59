"""The Linux jail: code of the helper, of pid 1, and of a guest before its program. Helpers import it as `jail`.

In: orders (`messages`) and set-up as data (`steps`). Out: the start, the end and the figures of a run (`messages`).

- The helper: `helper` opens sandboxes from outside and removes their control groups, also after a kill or the caller's
  death. `supervisor` supervises one run: clock, limits, kill, report. `ending` ends a sandbox without a process
  namespace. `accounting` sums its memory, the expensive part by `pss`. `sandbox_state` passes from one run to the next.
  `fork_server` forks helpers; `container_shim` starts and kills runsc.
- Pid 1: `reaper` for one run, `prefork` for one run after the other, `resident` for a live sandbox,
  `confined_resident` for one without namespaces; `pid1` has the code that they share.
- The guest before its program: `guest`, and `command_guest` in a live sandbox.
- Live sessions: `fork_tree` has the forks, `clone_namespaces` their ids, mounts and files; `pause` stops a session
  while its files are read.
- The kernel: `cgroups` has control groups; `user_namespaces` outside ids and id-mapped mounts, `subordinate_ids` the
  ranges of /etc/subuid; `shared_status` is memory that records runs in a prefork jail; `work_folder` replaces mounts by
  folders, and ends and removes the remains of a killed helper.
- The filter's notifications: `seccomp_notify` answers them. `answered_calls` makes calls in a guest's place:
  `metadata_calls` changes metadata, `network_calls` makes and connects sockets, `kill_calls` sends signals between
  commands, `task_count` counts new processes.

To be kept: import only these files and modules that are loaded already (`typing`, `dataclasses`, `ctypes` and friends
cost milliseconds in every cold run), and nothing of the caller's; the order of giving up privileges.
`setup/launch.py` names the modules of every helper. Helpers are compiled without docstrings: changing those is free.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

load: Any = None  # in a helper, returns a module of another package of ours by its name
archive: object = None  # in a helper, the finder of our modules: what a guest must not keep
