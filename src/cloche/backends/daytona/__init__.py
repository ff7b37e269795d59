"""The backend "daytona": sandboxes at Daytona, or at an installation of it, reached by its Python clients.

In: an account, policy, limits, requests. Out: results, sessions, sandboxes that live. `client` asks the provider for
sandboxes and terminals; `terminal` makes a byte stream of a terminal; `relay` is sent into the sandbox, and is at the
other end of that stream; `sandbox` runs Cloche's own first process there, as in any container; `backend` checks.

To be kept: nothing of what the clients could find for themselves is used (environment, files of the working directory,
proxies, .netrc), everything that comes is bounded, and no key is in a message. How the relay is spoken to may be
changed freely.
"""

from __future__ import annotations

from .backend import DaytonaBackend

__all__ = ["DaytonaBackend"]
