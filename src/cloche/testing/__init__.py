"""Public aids for tests: a backend that answers from a script (`fake`), and checks for any backend (`conformance`).

Input: scripted results, or a backend. Output: the fake's recorded requests; one row per check with its outcome. A
backend is used through `core.protocols`, so it may come from outside of Cloche. Public are the names below, those of
`conformance`, and the names of its checks. The content of a check may change at any time.
"""

from __future__ import annotations

from .fake import FakeBackend, FakeSandbox

__all__ = ["FakeBackend", "FakeSandbox"]
