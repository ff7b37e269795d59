"""Warm starts, the caller's side: jails that were built ahead and wait for code. Standard library only.

In: a jail to build (`pool.Jail`) and the figures of the run that used it. Out: a slot, which is a helper that the fork
server (`jail/fork_server.py`) forked, with a jail built ahead and often with a guest that waits. `pool` decides in the
pure `plan` how many slots there are, keeps them, and hands one out for a run. `slot` has one slot, the client of the
fork server (`Template`), and the handoff socket (`HandoffSocket`), where a guest in a prefork jail takes its orders.

To be kept: no wait while a lock is held, since threads and event loops share one pool; a jail is used once, or by the
runs of one sandbox; only the methods of `Slot` change a slot. Numbers of the plan (how many slots, for how long, in how
much memory) may change freely, with the rows in `bench/` beside it.
"""
