"""The backend "microsandbox": a virtual machine of its own for every sandbox, by that project's Python package.

In: policy, limits, requests. Out: results and sessions (`sandbox`). `machine` decides what a machine is made of, with
its limits, and talks with the package; `backend` tries on this host whether it runs any.

To be kept: nothing of the host's is in a machine, no network, nobody is root there. It was never tried on a machine
with KVM (docs/limitations/microsandbox.md). How the package is called may be changed without asking.
"""

from __future__ import annotations

from .backend import MicrosandboxBackend

__all__ = ["MicrosandboxBackend"]
