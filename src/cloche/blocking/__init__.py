"""Blocking calls over asyncio: run a coroutine for a caller without an event loop, and return its result.

In: coroutine functions of `execution`, `agent` and others. Out: their results, in the caller's own thread if possible.
`calls` is the interface: it chooses the loop and the thread, and handles Ctrl-C. `loops` has the shared loop, which its
callers run one after the other, and the eager first step of a coroutine.

Must not change: Ctrl-C at any instruction leaves the loop free for the next caller and is raised once everything that
the call started is killed; callbacks run in the caller's thread; a forked child starts with no loop. The tests
interrupt at each instruction. The choice of a loop may be changed without asking, with figures from `make bench`.
"""
