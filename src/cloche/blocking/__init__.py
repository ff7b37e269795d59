"""Blocking calls over asyncio: a loop that callers run in turns; a coroutine's result becomes a return value.

In: coroutines of `execution`. Out: their results, in the caller's own thread where that is possible (`calls`).
`loops` holds the shared loop and the eager first step.

To be kept: Ctrl-C at any instruction leaves the loop free for the next caller; a fork starts with none. The tests
interrupt at each instruction.
"""
