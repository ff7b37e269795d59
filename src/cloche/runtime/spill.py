"""Write the full output of a run to files of the host while it runs; the result itself keeps head and tail."""

from __future__ import annotations

import os
from types import TracebackType
from typing import BinaryIO, Self

from cloche.core.errors import InvalidRequest
from cloche.core.events import Event, OutputChunk, Sink, Stream
from cloche.hostfs import open_in_place_of

NAMES: dict[Stream, str] = {"stdout": "stdout.txt", "stderr": "stderr.txt"}


class Spill:
    """Hold the two files open during one run; a sink of its own, in front of another."""

    def __init__(self, folder: str | os.PathLike[str], behind: Sink | None):
        self._paths: dict[Stream, str] = {stream: os.path.join(folder, name) for stream, name in NAMES.items()}
        self._behind = behind
        self._files: dict[Stream, BinaryIO] = {}
        try:
            os.makedirs(folder, exist_ok=True)
        except OSError as error:
            raise InvalidRequest(f"spill: cannot make the folder {os.fspath(folder)!r}: {error.strerror}") from error

    def __enter__(self) -> Self:
        path = ""
        try:
            for stream, path in self._paths.items():
                self._files[stream] = open_in_place_of(*os.path.split(path))
        except OSError as error:
            self._close()
            raise InvalidRequest(f"spill: cannot write {path!r}: {error.strerror}") from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def __call__(self, event: Event) -> None:
        """Write output down, then hand the event on."""
        if isinstance(event, OutputChunk):
            self._files[event.stream].write(event.data)
        if self._behind is not None:
            self._behind(event)

    def paths(self) -> dict[str, str]:
        """Return the file of each stream, for the result's meta."""
        return {str(stream): path for stream, path in self._paths.items()}

    def _close(self) -> None:
        for file in self._files.values():
            file.close()
