"""The HTTP service: REST below /api, and a page; `cloche serve` starts it.

In: HTTP requests with a key, or a browser's cookie. Out: JSON (errors as RFC 9457), server-sent events, web sockets and
HTML. Kept: nothing but what runs now; all else is in `records`. A caller gets at most what the operator configured.

- `command.py`: the command line's side; `service.py`: what one worker holds; `app.py`: routes and bounds together.
- `auth.py`: who asks, and for what; `guard.py`: hosts, sizes, headers; `bodies.py`: JSON that is counted before it is
  parsed; `problems.py`: errors.
- `below.py`: the service below a path of its host, by a proxy.
- `observe.py`: what each request leaves; `log.py`, `metrics.py`, `telemetry.py`, `debugging.py`: for the operator.
- `exec_options.py`: what a caller may ask of a run; `runs.py`: the queue; `places.py`: whose turn it is;
  `results.py`: results as the wire has them.
- `approvals.py`: who waits for approvals, with one poller for all; `streams.py`: answers that go on.
- `sandboxes.py`: sandboxes that live; `attachments.py`: what a worker has of one; `sandbox_use.py`: one request's use.
- `peers.py`: the other workers of the database; `forwarding.py`, `forwarded_sockets.py`: requests for what they have.
- `events.py`: what goes on, as server-sent events.
- The page: `pages.py`, what it shows; `html.py`, templates and static files; `terminal.py`, a guest's output as HTML.
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
            f"the service needs the extra \"server\" ({', '.join(missing)} is missing); pip install 'cloche[server]'"
        )
