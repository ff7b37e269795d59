"""Repair by a model: a failed program and its error go to a model, and the answer is run under the same rules.

In: a request that failed, its result, a fixer (`core.fixing`). Out: the last result, and a report of each round.
`loop` has the rounds: the prompt, the budgets of tokens and time, when to stop. `endpoint` is the HTTP client of
OpenAI-compatible servers: retries, server-sent events, limits, the key. `extract` finds the program in an answer and
applies diffs.

To be kept: an answer is hostile text and bounded before it is read; it changes the code of a request and nothing else;
the key is in no message. Prompts and heuristics may be changed without asking.
"""
