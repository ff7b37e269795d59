"""Volumes, which are not here: a folder that several sandboxes write needs a bound that no mount of ours has."""

from __future__ import annotations

from starlette.responses import Response

from .calls import Call, Row
from .errors import E2BError


async def refuse(call: Call) -> Response:
    """Refuse, with what there is instead."""
    await call.caller()
    raise E2BError(
        501, "there are no volumes here; keep files in a snapshot (create_snapshot) or a template, or copy them with "
        "files.write and files.read",
    )  # fmt: skip


_PATHS = (
    ("POST", "/volumes"), ("GET", "/volumes"), ("GET", "/volumes/{volume_id}"), ("DELETE", "/volumes/{volume_id}"),
    *((method, f"/volumecontent/{{volume_id}}/{part}") for part, methods in (
        ("dir", ("GET", "POST")), ("file", ("GET", "PUT")), ("path", ("GET", "PATCH", "DELETE")),
    ) for method in methods),
)  # fmt: skip
ROWS = tuple(Row(method=method, path=path, handler=refuse) for method, path in _PATHS)
