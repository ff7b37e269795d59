"""JSON request bodies: bounded while they are received (`cloche.serving.json_bounds`), parsed once, and validated."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from pydantic_core import from_json

from cloche.serving.json_bounds import JsonBounds as Counted
from cloche.serving.json_bounds import TooMuch

from .problems import Refused

T = TypeVar("T", bound=BaseModel)
MOST_JSON = 1 << 20  # bytes, of a body without files
FEW_BYTES = 1 << 20  # parsed on the event loop
_AS_FILES = "send files in base64, more of them as a form or an archive"


class BodyBounds(Counted):
    """Count the bytes and items of one JSON text, and refuse one that exceeds the bounds."""

    __slots__ = ()

    def feed(self, piece: bytes) -> None:
        """Count a piece. Raises Refused (413)."""
        try:
            super().feed(piece)
        except TooMuch as error:
            raise Refused(413, "body-too-large", str(error), remedy=_AS_FILES) from None


def parse(data: bytes) -> Any:  # noqa: ANN401 - whatever JSON is
    """Return the value of a bounded JSON text. NaN and infinity are refused. Raises Refused (422)."""
    try:
        return from_json(data, allow_inf_nan=False, cache_strings=False)
    except ValueError as error:
        raise Refused(422, "invalid-request", f"body: this is not JSON: {error}", field="body") from None


def validated(model: type[T], data: object) -> T:
    """Return plain data as a model. Raises RequestValidationError."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        faults = [{**fault, "loc": ("body", *fault["loc"])} for fault in error.errors(include_url=False)]
        raise RequestValidationError(faults) from error


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


async def parse_apart(data: bytes) -> Any:  # noqa: ANN401 - whatever JSON is
    """Return the value of a JSON text, parsed in a thread if it is large. Raises Refused (422)."""
    if len(data) <= FEW_BYTES:
        return parse(data)
    return await asyncio.to_thread(parse, data)


class JsonRoute(APIRoute):
    """A route with a JSON body."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the handler with a `JsonRequest`."""
        handle = super().get_route_handler()

        async def with_bounds(request: Request) -> Response:
            return await handle(JsonRequest(request.scope, request.receive))

        return with_bounds
