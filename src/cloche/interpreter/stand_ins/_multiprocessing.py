"""Semaphores in files among the sandbox's temporary ones, with the class of the module that this one hides.

The C library makes named semaphores in /dev/shm alone. Each is a `sem_t` in shared memory, and the library accepts one
in any file.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import time
from threading import get_ident
from typing import Any

RECURSIVE_MUTEX, SEMAPHORE = 0, 1
SIZE = 32  # of the C library's largest sem_t
SEM_VALUE_MAX = (1 << 31) - 1
flags = {"HAVE_SEM_OPEN": 1, "HAVE_SEM_TIMEDWAIT": 1}
_names: Any = __import__("_posixshmem")
_library = ctypes.CDLL(None, use_errno=True)


class _Time(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def sem_unlink(name: str) -> None:
    """Remove the name of a semaphore."""
    _names.shm_unlink(_named(name))


class SemLock:
    """Hold a semaphore, or a lock that its owner may take again, which processes share."""

    SEM_VALUE_MAX = SEM_VALUE_MAX
    name: str | None

    def __init__(self, kind: int, value: int, maxvalue: int, name: str, unlink: bool) -> None:
        if kind not in (RECURSIVE_MUTEX, SEMAPHORE):
            raise ValueError("unrecognized kind")
        self._map(kind, maxvalue, name, os.O_CREAT | os.O_EXCL)
        try:
            self._call("sem_init", 1, value)
            if unlink:
                sem_unlink(name)
                self.name = None  # no other process opens it: forks have it
        except BaseException:
            sem_unlink(name)
            raise

    @classmethod
    def _rebuild(cls, _handle: int, kind: int, maxvalue: int, name: str) -> SemLock:
        lock = cls.__new__(cls)
        lock._map(kind, maxvalue, name, 0)
        return lock

    def _map(self, kind: int, maxvalue: int, name: str, how: int) -> None:
        fd: int = _names.shm_open(_named(name), os.O_RDWR | how, 0o600)
        try:
            if how:
                os.ftruncate(fd, SIZE)
            self._memory = ctypes.c_char.from_buffer(mmap.mmap(fd, SIZE))
        finally:
            os.close(fd)
        self.handle, self.kind, self.maxvalue = ctypes.addressof(self._memory), kind, maxvalue
        self.name = name
        self._at = ctypes.c_void_p(self.handle)
        self._held, self._owner = 0, 0

    def _call(self, function: str, *arguments: Any) -> None:
        if getattr(_library, function)(self._at, *arguments):
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))

    def acquire(self, block: bool = True, timeout: float | None = None) -> bool:
        """Take it, and tell whether that was possible: at once, within `timeout` seconds, or after waiting."""
        if self.kind == RECURSIVE_MUTEX and self._is_mine():
            self._held += 1
            return True
        end = _Time(*divmod(time.time_ns() + int(max(timeout or 0.0, 0.0) * 1e9), 10**9))
        waits = block and (timeout is None or timeout > 0)
        function = "sem_trywait" if not waits else "sem_wait" if timeout is None else "sem_timedwait"
        arguments = (ctypes.byref(end),) if function == "sem_timedwait" else ()
        while True:
            try:
                self._call(function, *arguments)
                break
            except OSError as error:
                if error.errno in (errno.EAGAIN, errno.ETIMEDOUT):
                    return False
                if error.errno != errno.EINTR:  # then a handler of a signal runs here, and may raise
                    raise
        self._held += 1
        self._owner = get_ident()
        return True

    def release(self) -> None:
        """Give it back."""
        if self.kind == RECURSIVE_MUTEX:
            if not self._is_mine():
                raise AssertionError("attempt to release recursive lock not owned by thread")
            if self._held > 1:
                self._held -= 1
                return
        elif self._get_value() >= self.maxvalue:
            raise ValueError("semaphore or lock released too many times")
        self._call("sem_post")
        self._held -= 1

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *about: object) -> None:
        self.release()

    def _count(self) -> int:
        return self._held

    def _is_mine(self) -> bool:
        return self._held > 0 and self._owner == get_ident()

    def _get_value(self) -> int:
        value = ctypes.c_int()
        self._call("sem_getvalue", ctypes.byref(value))
        return value.value

    def _is_zero(self) -> bool:
        return self._get_value() == 0

    def _after_fork(self) -> None:
        self._held = 0


def _named(name: str) -> str:
    return f"/sem.{name.lstrip('/')}"
