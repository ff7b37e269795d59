"""The backend "microsandbox": one virtual machine per sandbox, by the Python package of that project.

In: policy, limits, requests. Out: results and sessions (`sandbox`). `machine` decides the settings and limits of a
machine and calls the package; `backend` tests whether it runs machines on this host.

Must not change: a machine has no files of the host, no network, and no root. Calls of the package may change freely. It
was never tested on a machine with KVM (docs/limitations/microsandbox.md).
"""

from __future__ import annotations

from .backend import MicrosandboxBackend

__all__ = ["MicrosandboxBackend"]
