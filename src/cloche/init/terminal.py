"""Pseudo-terminals: a pair of ends, the size of the window, the foreground process group."""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import termios

MOST_LINES = 1 << 12  # rows or columns
TIOCSPTLCK, TIOCGPTPEER, TIOCGPTN = 0x40045431, 0x5441, 0x80045430


def open_pair(rows: int, columns: int) -> tuple[int, int]:
    """Return our end, which does not block, and the process's. Raises OSError."""
    master = os.open("/dev/ptmx", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        fcntl.ioctl(master, TIOCSPTLCK, struct.pack("i", 0))
        slave = _open_peer(master)
        resize(master, rows, columns)
        os.set_blocking(master, False)
    except BaseException:
        os.close(master)
        raise
    return master, slave


def _open_peer(master: int) -> int:
    flags = os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC
    try:
        return fcntl.ioctl(master, TIOCGPTPEER, flags)
    except OSError as error:
        if error.errno != errno.ENOTTY:  # which gVisor answers
            raise
    (number,) = struct.unpack("i", fcntl.ioctl(master, TIOCGPTN, bytes(4)))
    return os.open(f"/dev/pts/{number}", flags)


def resize(master: int, rows: int, columns: int) -> None:
    """Set the size of the window, which tells the foreground."""
    size = struct.pack("HHHH", min(max(rows, 1), MOST_LINES), min(max(columns, 1), MOST_LINES), 0, 0)
    fcntl.ioctl(master, termios.TIOCSWINSZ, size)


def take(slave: int) -> None:
    """Make it the terminal of this process, which leads a session."""
    fcntl.ioctl(slave, termios.TIOCSCTTY, 0)


def foreground(master: int) -> int:
    """Return the process group in the foreground, 0 for none."""
    try:
        group: int = struct.unpack("i", fcntl.ioctl(master, termios.TIOCGPGRP, bytes(4)))[0]
    except OSError:
        return 0
    return group
