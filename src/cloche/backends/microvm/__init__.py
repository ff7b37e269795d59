"""The backends "microvm" (QEMU) and "firecracker": one virtual machine per sandbox.

In: policy, limits, requests, an image made by `image_build`. Out: results and sessions (`sandbox`), sandboxes that live
(`live`). `plan` decides the size of a machine and a guest's memory, and finds the image; `qemu` and `firecracker`
translate the plan for the monitor; `machine` boots a machine, talks to it and kills it; `guest_init` is pid 1 inside,
which makes each program's control group, mounts and identity; `backend` tests whether KVM works; `counter` measures the
processor's time-stamp counter.

Must not change without review: `jailer` and `cell` drop the monitor's privileges and run as files without Cloche
(standard library only); their order of steps is a security boundary. `guest_init` is copied to the root disk: a change
that older disks do not support increments `plan.FORMAT`. Sizes, kernel arguments and timeouts may change if machines
still boot.
"""

from __future__ import annotations

from .backend import FirecrackerBackend, MicroVMBackend

__all__ = ["FirecrackerBackend", "MicroVMBackend"]
