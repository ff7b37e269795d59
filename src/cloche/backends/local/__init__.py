"""The native Linux jail, without a daemon, an image or root."""

from __future__ import annotations

from .backend import LocalBackend

__all__ = ["LocalBackend"]
