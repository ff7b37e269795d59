"""The caller's end of a template process: start it, let it fork helpers, end it.

Everything here is a message that does not wait, so it may be called from any thread and any event loop.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

from cloche.jail import wire
from cloche.jail.launch import start_template

log = logging.getLogger("cloche.zygote")

MOST_FORKS = 5_000
OLDEST_S = 3600.0
LEAST_LIFE_S = 1.0


class Template:
    """Hold one template. `failed` says, once it is ready, which modules could not be loaded and why."""

    def __init__(self, settings: Mapping[str, Any], executable: str = sys.executable, namespace: int = -1):
        self._process, self._link = start_template(settings, executable, namespace=namespace)
        self._link.setblocking(False)
        self._is_ready = self._is_gone = False
        self._forks = 0
        self._born_at = time.monotonic()
        self.reason = ""
        self.failed: Mapping[str, str] = {}

    def is_ready(self) -> bool:
        """Tell whether it can fork by now; once `is_gone`, never."""
        if not self._is_ready and not self._is_gone:
            with contextlib.suppress(BlockingIOError):
                self._hear(*wire.receive(self._link.fileno()))
        return self._is_ready and not self._is_gone

    @property
    def is_gone(self) -> bool:
        """Tell whether it has ended, or must not be used; `reason` says why."""
        return self._is_gone

    @property
    def was_well(self) -> bool:
        """Tell whether it had been of use, so that its end was an accident and another one may be started at once."""
        return self._is_ready and time.monotonic() - self._born_at > LEAST_LIFE_S

    @property
    def is_worn(self) -> bool:
        """Tell whether it should be replaced: all its children share the layout of its memory."""
        return self._forks >= MOST_FORKS or time.monotonic() - self._born_at > OLDEST_S

    def _hear(self, tag: str, body: Mapping[str, Any], _fds: list[int]) -> None:
        if tag != "ready":
            self._is_gone, self.reason = True, "the template process ended while it was loading"
        elif body["threads"] != 1:
            self._is_gone, self.reason = True, f"loading started {body['threads'] - 1} threads, which no fork survives"
        else:
            self._is_ready = True
            self.failed = body["failed"]
            for name, reason in self.failed.items():
                log.warning("preload: %s cannot be loaded ahead: %s", name, reason)

    def fork_helper(self, version: int, folders: Mapping[str, str]) -> socket.socket:
        """Return our end of a new helper's socket; the helper says `here` on it. Raises OSError."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            wire.send(self._link.fileno(), "fork", {"version": version, "folders": dict(folders)}, [theirs.fileno()])
        except OSError as error:
            if not isinstance(error, BlockingIOError):
                self._is_gone, self.reason = True, f"the template process cannot be reached: {error}"
            ours.close()
            raise
        finally:
            theirs.close()
        self._forks += 1
        ours.setblocking(False)
        return ours

    def close(self) -> subprocess.Popen[bytes]:
        """Let it end, and return its process to be waited for; helpers that it forked live on."""
        if not self._is_ready:
            self._process.kill()  # it is still loading, and would not hear us
        self._is_gone = True
        with contextlib.suppress(OSError):
            self._link.shutdown(socket.SHUT_WR)  # a forked child of ours may hold it, too
        self._link.close()
        return self._process

    def forget(self) -> None:
        """Let go of it in a forked child, whose it is not."""
        self._is_gone = True
        self._link.close()
        self._process.returncode = 0  # nobody's child here: there is nothing to wait for
