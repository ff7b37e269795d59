"""Repair by a model: a failed program goes to it with the error, and what comes back is run under the same rules.

In: a request that failed, its result, a fixer (`core.fixing`). Out: the last result, and a report of each round.
`loop` counts rounds, tokens and time; `endpoint` speaks with a server; `extract` takes a program out of an answer.

To be kept: an answer is a stranger's text, bounded before it is read; it changes the code of a request and nothing
else. Prompts and heuristics may be changed without asking.
"""
