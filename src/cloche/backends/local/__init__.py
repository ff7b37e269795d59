"""The backend "local": the native Linux jail, or a lower level if requested, without a daemon, an image or root.

In: policy, limits, requests. Out: results and sessions (`sandbox`, `session`). `plan` builds the helper's orders and
the limits of a run: memory, processes, rlimits, control group. `helper_link` talks to the helper (`jail.helper`), which
kills a run and frees its control group; `helper_ends` waits for its end. `run_report` decides how the run ended.
`streams` reads the guest's output; `workspace` keeps and hashes its files. `prefork` chooses a warm start and holds the
pools. `fork_tree` has the clones of a session: checkpoints, rollbacks, forks. `font_cache` makes matplotlib's list of
fonts once. `backend` chooses the level.

Must not change: the precedence of reports in `run_report.RunEnd`; in `streams`, that a guest's socket cannot send;
walks of files by descriptor. Sizes, timers and caches may be changed without asking, if `make bench` is no worse.
"""

from __future__ import annotations

from .backend import LocalBackend

__all__ = ["LocalBackend"]
