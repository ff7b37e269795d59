"""The caller's functions that a guest may call: what they are, and how its calls are served.

In: functions of the caller, or `Tool`s; bytes from a guest. Out: checked calls of these functions, frames for the
guest, text for a model's prompt. A guest reaches nothing but the given names: its messages are JSON within bounds, and
each argument is checked against the function's annotations before the function sees it.

- `tool.py`: `Tool`, `Tools` (a set of them with its limits), stubs.
- `schemas.py`: tools that other libraries describe, by a JSON Schema or by an object.
- `annotations.py`: what a value must be, by the annotation of its parameter.
- `json_text.py`: results as JSON within bounds.
- `threads.py`: daemon threads for functions that block.
- `calls.py`: the calls of one guest, on an event loop.
"""
