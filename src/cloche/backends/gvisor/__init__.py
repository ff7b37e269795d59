"""The runsc backend: gVisor without a daemon."""

from __future__ import annotations

from .backend import RunscBackend

__all__ = ["RunscBackend"]
