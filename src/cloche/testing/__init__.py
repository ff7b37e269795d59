"""Public aids for tests: a backend that answers from a script (`fake`), and the checks of any backend (`conformance`).

In: results to answer with, or a backend. Out: what was asked of the fake; one row per check with its outcome. A backend
is reached through `core.protocols`, so it may also be one from outside of Cloche. The names below, those of
`conformance` and the names of its checks are public; what a check does may be changed without asking.
"""

from __future__ import annotations

from .fake import FakeBackend, FakeSandbox

__all__ = ["FakeBackend", "FakeSandbox"]
