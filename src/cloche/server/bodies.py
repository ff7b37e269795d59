"""Requests with a JSON body, which is parsed once, and routes that take them."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request
from fastapi.responses import Response
from fastapi.routing import APIRoute

from cloche.wire.bodies import parse_apart
from cloche.wire.problems import Refused

MOST_JSON = 1 << 20  # bytes, of a body without files


class JsonRequest(Request):
    """A request that parses its JSON once and then frees its body."""

    async def json(self) -> Any:  # noqa: ANN401 - whatever JSON is
        """Return the parsed body. Raises Refused: 415 for what was not counted as JSON while it came, 422."""
        if not hasattr(self, "_json"):
            kind = self.headers.get("content-type", "").partition(";")[0].strip().lower()
            if kind not in ("", "application/json") and not kind.endswith("+json"):
                raise Refused(415, "unsupported-media-type", "send application/json")
            self._json = await parse_apart(await self.body())
            self._body = b""
        return self._json


class JsonRoute(APIRoute):
    """A route with a JSON body."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the handler with a `JsonRequest`."""
        handle = super().get_route_handler()

        async def with_bounds(request: Request) -> Response:
            return await handle(JsonRequest(request.scope, request.receive))

        return with_bounds
