"""The microvm backend: a virtual machine of its own for every sandbox, under QEMU."""

from __future__ import annotations

from .backend import MicroVMBackend

__all__ = ["MicroVMBackend"]
