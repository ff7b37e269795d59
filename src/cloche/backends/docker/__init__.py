"""The docker backend: throwaway containers of a daemon."""

from __future__ import annotations

from .backend import DockerBackend

__all__ = ["DockerBackend"]
