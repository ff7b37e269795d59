"""The backend "daytona": sandboxes at Daytona, or at a self-hosted installation of it, by its Python clients.

In: an account, policy, limits, requests. Out: results, sessions, live sandboxes. `client` requests sandboxes and
terminals; `terminal` makes a byte stream of a terminal; `relay` is a program sent into the sandbox, at the other end of
that stream; `sandbox` runs Cloche's own first process there, as in any container; `backend` checks accounts and
policies.

Must not change: nothing that the clients could read by themselves is used (environment, files of the working directory,
proxies, .netrc); all received data is bounded; no message contains a key. The protocol of the relay may change freely.
"""

from __future__ import annotations

from .backend import DaytonaBackend

__all__ = ["DaytonaBackend"]
