"""The microvm backend: a virtual machine of its own for every sandbox, under QEMU or Firecracker."""

from __future__ import annotations

from .backend import FirecrackerBackend, MicroVMBackend

__all__ = ["FirecrackerBackend", "MicroVMBackend"]
