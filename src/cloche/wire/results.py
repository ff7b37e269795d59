"""File contents and events of a run, in the wire's format."""

from __future__ import annotations

import base64
import os
import tempfile
from typing import Any

from cloche.core.errors import InvalidRequest
from cloche.core.events import Cleared, Displayed, Event, NetworkRefused, OutputChunk, Started
from cloche.core.limits import format_size
from cloche.core.result import Result, output_as_dict

MOST_FILE_BYTES = 16 << 20  # of all files of a result, if their contents are requested


def read_files(result: Result) -> list[dict[str, Any]]:
    """Return the files of a result with base64 contents. Blocks. Raises InvalidRequest if they are too large."""
    total = sum(file.size for file in result.files)
    if total > MOST_FILE_BYTES:
        raise InvalidRequest(
            f"returnFiles: the files of this run have {format_size(total)}, more than {format_size(MOST_FILE_BYTES)}; "
            "open a sandbox at /api/sandboxes and read them from there"
        )
    files = []
    with tempfile.TemporaryDirectory(prefix="cloche-files-") as folder:
        paths = result.save(folder) if result.files else ()
        for file, path in zip(result.files, paths, strict=True):
            with open(os.path.join(folder, path), "rb") as source:
                content = base64.b64encode(source.read()).decode()
            files.append({"path": file.path, "size": file.size, "sha256": file.sha256, "base64": content})
    return files


def event_as_wire(event: Event) -> tuple[str, dict[str, Any]] | None:
    """Return the name and data of an event, None for an internal one."""
    if isinstance(event, OutputChunk):
        try:
            text = {"text": event.data.decode()}
        except UnicodeDecodeError:  # a character continues in the next piece, or it is not text
            text = {"base64": base64.b64encode(event.data).decode()}
        return "output", {"stream": event.stream, **text}
    if isinstance(event, Displayed):
        replaced = {} if event.replaces is None else {"replaces": event.replaces}
        value = {"isValue": True} if event.is_value else {}
        return "display", {**output_as_dict(event.output), **replaced, **value}
    if isinstance(event, Cleared):
        return "cleared", {}
    if isinstance(event, NetworkRefused):
        row = {"host": event.host, "port": event.port, "why": event.why, "connections": event.connections}
        return "networkRefused", row
    return ("started", {}) if isinstance(event, Started) else None
