"""The documents of the service against its code: each route has an example that tests/integration/test_docs.py runs."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

from fastapi.routing import APIRoute, APIRouter
from starlette.routing import WebSocketRoute

from cloche.server import app
from cloche.wire import problems
from tests.harness.texts import commands

ROOT = Path(__file__).parents[3]
PAGES = (ROOT / "docs/service.md", *sorted((ROOT / "docs/service").glob("*.md")))
SERVER = ROOT / "src/cloche/server"
WIRE = ROOT / "src/cloche/wire"
# How the pages' examples shorten an address: a file that has it, or a variable.
SHORT = (
    (r"\$\(cat api\)", "/api"), (r"\$ADDRESS", ""), (r"\$\{A%/api\}", ""), (r"\$\(cat sandbox\)", "/api/sandboxes/X"),
    (r"\$\(cat process\)", "/api/sandboxes/X/processes/X"), (r"\$\(cat session\)", "/api/sandboxes/X/sessions/X"),
    (r"\$\([^()]*\)|\$\(sed [^|]*\| head -n 1\)", "X"),
)  # fmt: skip
FIELD = re.compile(r"\{[^{}]*\}")


def _routes() -> set[tuple[str, str]]:
    """Return method and path of each route of the API, a web socket's method as `WS`."""
    found = set()
    for name in (*app.ROUTES, *app.FUSION_ROUTES):
        router: APIRouter = import_module(f"cloche.server.routes.{name}").router
        for route in router.routes:
            if isinstance(route, APIRoute):
                found |= {(method, FIELD.sub("{}", route.path)) for method in route.methods}
            elif isinstance(route, WebSocketRoute):
                found.add(("WS", FIELD.sub("{}", route.path)))
    return found


def _listed() -> set[tuple[str, str]]:
    """Return the routes that tables and sentences of the pages name."""
    text = "\n".join(page.read_text() for page in PAGES)
    found = re.findall(r"`(GET|POST|PUT|DELETE|WS) (/[^`?\s]*)", text)
    return {(method, FIELD.sub("{}", path)) for method, path in found} - {("GET", "/api/openapi.json")}


def _requests(page: Path) -> Iterator[tuple[str, str]]:
    """Yield method and path of each request that the examples of a page make."""
    yield from (("WS", path) for path in re.findall(r'connect\(f"ws\{address\}(/[^"?]*)"', page.read_text()))
    for command, _ in commands(page):
        for part in re.split(r"\bcurl |\bpython client\.py ", command)[1:]:
            line = part
            for short, long in SHORT:
                line = re.sub(short, long, line)
            address = re.search(r'(?:^|[\s"])(/(?:api|health|ready|metrics|run_|v1/)[^\s?";]*)', line)
            if address is not None:
                yield _method(line, is_web_socket=f"client.py {part}" in command), address[1]


def _method(line: str, *, is_web_socket: bool) -> str:
    if is_web_socket:
        return "WS"
    named = re.search(r" -X (\w+)", line)
    if named is not None:
        return named[1]
    return "POST" if re.search(r" (--json|-F) ", line) else "PUT" if " -T " in line else "GET"


def _route_of(request: tuple[str, str], routes: set[tuple[str, str]]) -> tuple[str, str] | None:
    """Return the route that takes a request: of several the one with the fewest fields, None for none."""
    method, path = request
    found = [
        route
        for route in routes
        if route[0] == method and re.fullmatch(re.escape(route[1]).replace(r"\{\}", "[^/]+"), path)
    ]
    return min(found, key=lambda route: route[1].count("{}"), default=None)


def test_every_route_is_listed_and_no_other_one() -> None:
    """What the pages name is what there is, method by method."""
    routes = _routes()
    assert len(routes) > 70
    assert sorted(routes ^ _listed()) == []


def test_every_route_has_an_example_that_is_run() -> None:
    """A request to each of them stands in a console block, and each request there is to one of them."""
    routes = _routes()
    taken = {one: _route_of(one, routes) for page in PAGES for one in _requests(page)}
    assert sorted(routes - set(taken.values())) == []
    assert [one for one, route in taken.items() if route is None] == []
    assert _route_of(("GET", "/api/runs/X"), routes) == ("GET", "/api/runs/{}")
    assert _route_of(("PUT", "/api/runs/X"), routes) is None


def test_every_route_says_what_it_does() -> None:
    """Each has a first sentence of its own, which is its summary: a list of them says which one to use."""
    routes = [
        route
        for name in (*app.ROUTES, *app.FUSION_ROUTES)
        for route in app._described(import_module(f"cloche.server.routes.{name}").router).routes
        if isinstance(route, APIRoute)
    ]
    summaries = [route.summary for route in routes]
    assert all(summary and len(summary.split()) > 1 for summary in summaries)
    assert [summary for summary in summaries if summaries.count(summary) > 1] == []


def _kinds() -> set[str]:
    """Return the last part of the type of each problem that the service answers with."""
    found = {name for _, _, name in problems._CLASSES} | {"internal-error"}
    for file in (*SERVER.rglob("*.py"), *WIRE.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("Refused", "answer"):
                found |= {one.value for one in node.args[1:2] if isinstance(one, ast.Constant)}
    return found


def test_every_problem_is_in_the_table() -> None:
    """The types of errors are stable, so each is documented, and none that is gone."""
    section = (ROOT / "docs/service.md").read_text().partition("\n## Errors\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`.*?) \|", section, re.MULTILINE)
    listed = {name for row in rows for name in re.findall(r"`([a-z-]+)`", row)} - {"type"}
    assert sorted(listed ^ _kinds()) == []
