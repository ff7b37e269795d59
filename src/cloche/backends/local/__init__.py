"""The backend "local": the native Linux jail, or less where that was asked for, without a daemon, an image or root.

In: policy, limits, requests. Out: results and sessions (`sandbox`, `session`). What the helper builds from is decided
in `plan`, also limits of a run: memory, processes, rlimits, control group. `helper_link` talks with the helper
(`jail.helper`), which kills a run and frees its control group; `run_report` decides how the run ended; `streams` reads
what a guest prints; `workspace` keeps and hashes its files; `prefork` chooses a warm start and holds the pools;
`fork_tree` has the clones of a session: checkpoints, rollbacks, forks; `font_cache` makes matplotlib's list of fonts
once; `backend` chooses the level.

To be kept: the order in which `run_report.RunEnd` believes reports; in `streams`, that a guest's socket cannot send;
walks of files by descriptor. Sizes, timers and caches may be changed without asking, if `make bench` is no worse.
"""

from __future__ import annotations

from .backend import LocalBackend

__all__ = ["LocalBackend"]
