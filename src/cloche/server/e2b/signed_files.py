"""`/files` for URLs that name no sandbox, as SDKs make them with `E2B_SANDBOX_URL`: the signature tells which one."""

from __future__ import annotations

from .calls import Row
from .envd.files import download, plain, upload

ROWS = (
    Row(method="GET", path="/files", handler=plain(download)),
    Row(method="POST", path="/files", handler=plain(upload)),
)
