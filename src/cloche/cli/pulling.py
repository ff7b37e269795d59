"""A bar on the terminal for what takes long before a program can run: the pull of an image."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from cloche.core.plain import plain_line
from cloche.core.progress import Progress, watchers


@contextmanager
def progress_shown() -> Iterator[None]:
    """Show progress on stderr while the block runs, when that is a terminal; nothing is drawn before there is any."""
    if not sys.stderr.isatty():
        yield
        return
    bar = _Bar()
    watchers.append(bar.show)
    try:
        yield
    finally:
        watchers.remove(bar.show)
        bar.close()


class _Bar:
    """Draw one bar at a time."""

    def __init__(self) -> None:
        self._drawn: object = None

    def show(self, progress: Progress) -> None:
        """Draw how far it is."""
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, TextColumn
        from rich.progress import Progress as Drawing

        if progress.is_over:
            self.close()
            return
        if not isinstance(self._drawn, Drawing):
            columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn())
            self._drawn = Drawing(*columns, console=Console(stderr=True), transient=True)
            self._drawn.add_task(plain_line(progress.what), total=None)
            self._drawn.start()
        total = progress.total or None
        self._drawn.update(
            self._drawn.task_ids[0], description=plain_line(progress.what), completed=progress.done, total=total
        )

    def close(self) -> None:
        """Take the bar away."""
        drawn, self._drawn = self._drawn, None
        stop = getattr(drawn, "stop", None)
        if stop is not None:
            stop()
