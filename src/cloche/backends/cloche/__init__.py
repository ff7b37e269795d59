"""The backend `cloche`: sandboxes of another machine's `cloche serve`, over its wire (`docs/service/wire.md`).

| module | content |
|---|---|
| `backend` | the backend: its claims, and the sandboxes that it opens |
| `fields` | policy, limits and requests as fields of the wire; values that cannot be sent are refused |
| `sandbox` | throwaway sandboxes |
| `inputs` | files and input of a run that are too large for its fields |
| `live`, `process`, `files`, `session` | live sandboxes, and their contents |
| `calls` | calls about one sandbox |
| `results` | results of the wire, checked, as `Result` |
| `problems` | problems of the wire as our errors |
| `connections` | connections kept between calls, one list for each account and event loop |
| `wire` | one connection: calls, channels, credit |
| `websocket` | a web socket over TLS |
"""

from __future__ import annotations

from .backend import ClocheBackend

__all__ = ["ClocheBackend"]
