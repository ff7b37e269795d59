"""Blocking calls over asyncio: a coroutine is run for a caller without an event loop, and its result returned.

In: coroutine functions of `execution`, `agent` and others. Out: their results, in the caller's own thread where that is
possible. `calls` is what callers use: which loop runs the coroutine, in which thread, and what Ctrl-C does. `loops` has
the shared loop, which its callers run one after the other, and the eager first step of a coroutine.

Must not change: Ctrl-C at any instruction leaves the loop free for the next caller and is raised once all that the call
started is killed; callbacks run in the caller's thread; a forked child starts with no loop. The tests interrupt at each
instruction. How a loop is chosen may be changed without asking, with figures from `make bench`.
"""
