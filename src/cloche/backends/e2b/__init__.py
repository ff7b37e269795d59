"""The backend "e2b": a sandbox of E2B's cloud, or of a server of one's own that speaks its wire, by its Python package.

In: an account, policy, limits, requests. Out: results, sessions, sandboxes that live. `sdk` holds the package, its
connections and what its errors mean; `machine` makes one sandbox there and the programs in it, whose streams `wire`
carries; `launcher` is sent into it and makes a container; `sandbox` and `live` are what is opened; `backend` says what
can be had.

To be kept: where code is sent is what the account says, whatever the environment or a file in the working folder says.
Nothing waits for the provider without a bound.
"""

from __future__ import annotations

from .backend import E2BBackend

__all__ = ["E2BBackend"]
