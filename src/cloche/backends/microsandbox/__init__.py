"""The microsandbox backend: a virtual machine of its own for every sandbox, by that project's Python package."""

from __future__ import annotations

from .backend import MicrosandboxBackend

__all__ = ["MicrosandboxBackend"]
