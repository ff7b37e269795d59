"""Frequency of the processor's time-stamp counter. No import of Cloche: a stand-in for Firecracker copies this file.

An emulated machine sees the counter and has no timer to calibrate it with, so its kernel needs the frequency as an
argument. The counter is read by the instruction RDTSC, which Python has no function for.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import re
import time
from pathlib import Path

GUESS_KHZ = 2_000_000
MEASURE_S = 0.05
READ_COUNTER = bytes.fromhex("0f31 48c1e220 4809d0 c3")  # rdtsc; both halves into one register; return
_MEGAHERTZ = re.compile(r"cpu MHz\s*: ([\d.]+)")


@functools.cache  # measuring takes MEASURE_S, and the frequency is constant
def counter_khz() -> int:
    """Return the counter's frequency in kHz: measured, else the kernel's figure in /proc/cpuinfo."""
    try:
        return _measure()
    except (OSError, ValueError):  # anonymous memory may not be executable here (SELinux execmem)
        return _by_kernel()


def _measure() -> int:
    with mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC) as page:
        page.write(READ_COUNTER)
        start = ctypes.c_char.from_buffer(page)
        read = ctypes.CFUNCTYPE(ctypes.c_uint64)(ctypes.addressof(start))
        before_s, before = time.perf_counter(), read()
        time.sleep(MEASURE_S)
        after_s, after = time.perf_counter(), read()
        del start  # mmap.close raises BufferError while a pointer into it exists
    khz = int((after - before) / (after_s - before_s) / 1000)
    if khz <= 0:
        raise ValueError("the counter stands still")
    return khz


def _by_kernel() -> int:
    try:
        match = _MEGAHERTZ.search(Path("/proc/cpuinfo").read_text())
    except OSError:
        match = None
    return round(float(match[1]) * 1000) if match else GUESS_KHZ
