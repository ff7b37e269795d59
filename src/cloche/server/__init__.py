"""The HTTP service: REST below /api and a web page. `cloche serve` starts it.

Input: HTTP requests with a key or a browser's cookie. Output: JSON (errors as RFC 9457), server-sent events, web
sockets and HTML. A worker keeps only current work in memory; everything else is in `records`. A caller gets at most
the operator's configured limits.

- `command.py`: `cloche serve`; `service.py`: the state of one worker; `app.py`: the application with its middleware.
- `auth.py`: authentication and scopes; `guard.py`: host names, body sizes, headers; `bodies.py`: routes with JSON;
  `problems.py`: errors as responses.
- `below.py`: serving below a root path, behind a proxy.
- `observe.py`: the log line, metrics and span of each request; `log.py`, `metrics.py`, `telemetry.py`, `debugging.py`:
  observability for the operator.
- `run_rows.py`: the rows of runs; their queue, like all that the routes share with the wire, is in `cloche.wire`.
- `approvals.py`: one database poller for all clients that wait for approvals; `streams.py`: streamed responses.
- `sandboxes.py`: sandboxes that outlive a request; `sandbox_use.py`: the use of one by one request.
- `peers.py`: the other workers of the database; `forwarding.py`, `forwarded_sockets.py`: requests forwarded to them.
- `events.py`: requests that wait for runs, and server-sent events; `sockets.py`: web sockets.
- The page: `pages.py`, values for the templates; `html.py`, templates and static files; `terminal.py`, a guest's output
  as HTML.
- `routes/`: one file for each group of paths.

Needs the extra `server`.
"""

from __future__ import annotations

_PACKAGES = (
    "fastapi", "uvicorn", "sqlalchemy", "alembic", "structlog", "jinja2", "prometheus_client", "python_multipart",
    "httpx", "websockets",
)  # fmt: skip


def require_extra() -> None:
    """Raise InvalidRequest where the packages of the service are not installed."""
    from importlib import util

    from cloche.core.errors import InvalidRequest

    missing = [name for name in _PACKAGES if util.find_spec(name) is None]
    if missing:
        raise InvalidRequest(
            f"the service needs the extra \"server\" (missing: {', '.join(missing)}); pip install 'cloche[server]'"
        )
