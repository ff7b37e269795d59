"""Results as the wire has them: the fields of `Result.as_dict` in camelCase, keys of mappings as they are."""

from __future__ import annotations

import base64
import os
import tempfile
from collections.abc import Mapping
from typing import Any

from cloche.core.errors import InvalidRequest
from cloche.core.events import Displayed, Event, NetworkRefused, OutputChunk, Started
from cloche.core.limits import format_size
from cloche.core.result import Result, output_as_dict

MOST_FILE_BYTES = 16 << 20  # of all files of a result together, where their contents are asked for


def camel(name: str) -> str:
    """Return a name of Python's as the wire has it."""
    first, *rest = name.split("_")
    return first + "".join(part.capitalize() for part in rest)


def result_as_wire(result: Result) -> dict[str, Any]:
    """Return a whole result; `enforcement` is by control, and the level in `meta`.

    The keys inside `meta` and `value` are a backend's and a guest's own.
    """
    plain = result.as_dict()
    document = {camel(name): value for name, value in plain.items()}
    document["usage"] = {camel(name): value for name, value in plain["usage"].items()}
    document["enforcement"], document["hits"] = plain["enforcement"]["controls"], plain["enforcement"]["hits"]
    if "fix" in plain:
        document["fix"] = _with_camel_keys(plain["fix"])
    return document


def _with_camel_keys(value: Any) -> Any:  # noqa: ANN401 - plain data
    if isinstance(value, Mapping):
        return {camel(str(name)): _with_camel_keys(one) for name, one in value.items()}
    return [_with_camel_keys(one) for one in value] if isinstance(value, list) else value


def read_files(result: Result) -> list[dict[str, Any]]:
    """Return the files of a result with their contents in base64. Blocks. Raises InvalidRequest for too much."""
    total = sum(file.size for file in result.files)
    if total > MOST_FILE_BYTES:
        raise InvalidRequest(
            f"returnFiles: the files of this run have {format_size(total)}, more than {format_size(MOST_FILE_BYTES)}; "
            "open a sandbox at /api/sandboxes and read them from there"
        )
    found = []
    with tempfile.TemporaryDirectory(prefix="cloche-files-") as folder:
        paths = result.save(folder) if result.files else ()
        for file, path in zip(result.files, paths, strict=True):
            with open(os.path.join(folder, path), "rb") as source:
                content = base64.b64encode(source.read()).decode()
            found.append({"path": file.path, "size": file.size, "sha256": file.sha256, "base64": content})
    return found


def event_as_wire(event: Event) -> tuple[str, dict[str, Any]] | None:
    """Return the name and the data of an event, None for one that clients do not get."""
    if isinstance(event, OutputChunk):
        try:
            text = {"text": event.data.decode()}
        except UnicodeDecodeError:  # a character that goes on in the next piece, or no text
            text = {"base64": base64.b64encode(event.data).decode()}
        return "output", {"stream": event.stream, **text}
    if isinstance(event, Displayed):
        return "display", output_as_dict(event.output)
    if isinstance(event, NetworkRefused):
        row = {"host": event.host, "port": event.port, "why": event.why, "connections": event.connections}
        return "networkRefused", row
    return ("started", {}) if isinstance(event, Started) else None
