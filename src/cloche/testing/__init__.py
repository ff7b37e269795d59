"""Public aids for testing code that uses Cloche, and for checking a backend."""

from __future__ import annotations

from .fake import FakeBackend, FakeSandbox

__all__ = ["FakeBackend", "FakeSandbox"]
