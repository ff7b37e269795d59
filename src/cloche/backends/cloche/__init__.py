"""The backend `cloche`: sandboxes of another machine's `cloche serve`, by its wire (`docs/service/wire.md`).

| module | what it holds |
|---|---|
| `backend` | the backend: what it claims, and what it opens |
| `fields` | policy, limits and requests as fields of the wire; what cannot be sent is refused |
| `sandbox` | throwaway sandboxes |
| `live`, `process`, `files`, `session` | sandboxes that live, and what is in them |
| `calls` | calls about one sandbox |
| `results` | results of the wire, checked, as `Result` |
| `problems` | problems of the wire as our errors |
| `connections` | connections that are kept between calls, one list for each account and event loop |
| `wire` | one connection: calls, channels, credit |
| `websocket` | a web socket over TLS |
"""

from __future__ import annotations

from .backend import ClocheBackend

__all__ = ["ClocheBackend"]
