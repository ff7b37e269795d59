"""Errors of requests to a sandbox's ports, as E2B's proxy answers: JSON, or a page for browsers.

Scripts of any origin may read them.
"""

from __future__ import annotations

import re
from html import escape
from http import HTTPStatus

from starlette.datastructures import Headers
from starlette.responses import HTMLResponse, Response

from .errors import answer, as_e2b

_BROWSER = re.compile(r"mozilla|chrome|safari|firefox|edge|opera|msie", re.IGNORECASE)
_OF_SCRIPTS = ("cors", "no-cors", "same-origin", "websocket")
ANY_ORIGIN = {"Access-Control-Allow-Origin": "*"}
PREFLIGHT_S = 86_400
_PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>
<style>body{{font:16px/1.5 system-ui,sans-serif;max-width:40rem;margin:15vh auto;padding:0 1rem}}</style>
<h1>{title}</h1><p>{text}</p></html>"""


def refusal(error: Exception, method: str, headers: Headers) -> Response:
    """Return the answer for a request that reaches no server. A preflight succeeds, else no script reads the error."""
    asked = headers.get("access-control-request-headers", "")
    if method == "OPTIONS" and "access-control-request-method" in headers:
        allowed = {"Access-Control-Allow-Headers": asked} if asked else {}
        age = {"Access-Control-Allow-Methods": "*", "Access-Control-Max-Age": str(PREFLIGHT_S)}
        return Response(status_code=204, headers={**ANY_ORIGIN, **age, **allowed})
    plain = answer(error)
    plain.headers.update(ANY_ORIGIN)
    return _page(error) if wants_page(headers) else plain


def wants_page(headers: Headers) -> bool:
    """Tell whether a person's browser opens the address, rather than a script of a page."""
    accept, mode = headers.get("accept", "").lower(), headers.get("sec-fetch-mode", "").lower()
    is_of_script = mode in _OF_SCRIPTS or (mode != "navigate" and "x-requested-with" in headers)
    if is_of_script or ("application/json" in accept and "text/html" not in accept):
        return False
    return _BROWSER.search(headers.get("user-agent", "")) is not None


def _page(error: Exception) -> Response:
    known = as_e2b(error)
    title = f"{known.status} {HTTPStatus(known.status).phrase}"
    return HTMLResponse(_PAGE.format(title=title, text=escape(known.message)), known.status, headers=ANY_ORIGIN)
