"""The backends "microvm" (QEMU) and "firecracker": a virtual machine of its own for every sandbox.

In: policy, limits, requests, an image that `image_build` made. Out: results and sessions (`sandbox`), sandboxes that
live (`live`). `plan` decides the size of a machine and the memory of a guest, and finds the image; `qemu` and
`firecracker` turn that into what the monitor takes; `machine` boots one, talks with it and kills it; `guest_init` is
pid 1 inside, which makes the control group, mounts and identity of each program; `backend` finds out whether KVM works,
`counter` how fast the processor's counter runs.

`jailer` and `cell` take power from the monitor and are run as files, without Cloche: standard library alone, and the
order of steps in them is the wall. `guest_init` is copied to the root disk: what older disks cannot do raises
`plan.FORMAT`. Sizes, words of the kernel's command line and timeouts may be changed if the machines still boot.
"""

from __future__ import annotations

from .backend import FirecrackerBackend, MicroVMBackend

__all__ = ["FirecrackerBackend", "MicroVMBackend"]
