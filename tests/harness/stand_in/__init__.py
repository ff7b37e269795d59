"""A stand-in for Firecracker where there is no KVM: its API and its vsock before an emulated machine of QEMU's.

It is a program of its own, packed into one file, and imports nothing of Cloche.
"""
