"""The backend "e2b": sandboxes of E2B's cloud, or of a self-hosted server with its API, by E2B's Python package.

In: an account, policy, limits, requests. Out: results, sessions, live sandboxes. `sdk` holds the package, its
connections and the mapping of its errors; `machine` creates one sandbox and starts processes in it; `wire` carries the
streams of a process; `launcher` is a program that is sent into the sandbox and makes a container; `sandbox` and `live`
are the objects that `backend` opens.

Must not change: the account alone decides where code is sent; the environment and files of the working folder do not.
Every wait for the provider has a bound.
"""

from __future__ import annotations

from .backend import E2BBackend

__all__ = ["E2BBackend"]
