"""The Linux jail: what runs in the helper, as pid 1, or before the program. A helper imports it as the package `jail`.

In: orders (`messages`) and set-up as data (`steps`). Out: the start, the end and the figures of a run (`messages`).
`helper` opens sandboxes from outside, and removes their control groups, also after a kill and when the caller has died;
`supervisor` supervises one run: clock, limits, kill, report; `ending` ends all that has no process namespace;
`accounting` sums its memory, the dear part by `pss`; `sandbox_state` is what one run leaves to the next. `reaper` is
pid 1 of one run, `prefork` of one run after the other, `resident` of a sandbox that lives, `confined_resident` of one
without namespaces, `pid1` what they share; `guest` becomes the program, `command_guest` one of `resident`.
`fork_server` forks helpers, `container_shim` starts and kills runsc. `fork_tree` has the forks of a live session,
`clone_namespaces` their ids, mounts and files; `pause` stops a session while its files are read. `cgroups` has what is
done with control groups; `user_namespaces` has outside ids and id-mapped mounts, `subordinate_ids` the ranges of
/etc/subuid; `seccomp_notify` answers the filter, `answered_calls` makes calls in a guest's place, `metadata_calls`
those that change metadata, `network_calls` those that make and connect sockets, `kill_calls` signals between commands;
`task_count` counts new processes;
`shared_status` is memory in which runs in a prefork jail are noted; `work_folder` stands in for mounts, and ends and
removes what a killed helper left.

To be kept: no import but these files and what is loaded already (`typing`, `dataclasses`, `ctypes` and friends cost
milliseconds in every cold run), and nothing of the caller's; the order in which a process gives things up. What every
helper loads is named in `setup/launch.py`. Helpers are compiled without docstrings: those may be changed freely.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

load: Any = None  # in a helper, returns a module of another package of ours by its name
archive: object = None  # in a helper, the finder of our modules: what a guest must not keep
