"""A server as a process: its log on standard error, and serving until a signal arrives."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
from collections.abc import Coroutine
from typing import Any

from cloche.core.escape import escape

EXIT_TIMEOUT_S = 8.0


def until_signal(serving: Coroutine[Any, Any, None], *, exit_timeout_s: float = EXIT_TIMEOUT_S) -> int:
    """Serve until the end or a signal. On a signal everything that runs is ended first."""
    signals: list[int] = []

    async def work() -> None:
        loop, task = asyncio.get_running_loop(), asyncio.ensure_future(serving)

        def end(number: int) -> None:
            signals.append(number)
            _leave_at_last(128 + number, exit_timeout_s)
            task.cancel()

        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:
                loop.add_signal_handler(number, end, number)
        try:
            await task
        except asyncio.CancelledError:
            if not signals:
                raise

    asyncio.run(work())
    return 128 + signals[0] if signals else 0


def _leave_at_last(code: int, after_s: float) -> None:
    """Exit after `after_s` in any case, even if a client does not read its output. No sandbox outlives the process."""
    timer = threading.Timer(after_s, os._exit, (code,))
    timer.daemon = True
    timer.start()


class _Plainly(logging.Formatter):
    """Escape control characters in messages and stack traces, which quote clients."""

    def format(self, record: logging.LogRecord) -> str:
        return escape(super().format(record))


def log_plainly() -> None:
    """Log warnings to standard error, unless logging is already configured."""
    handler = logging.StreamHandler()
    handler.setFormatter(_Plainly("cloche: %(name)s: %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
