"""What a client sends as JSON: bounded as it comes, before any of it is parsed.

Theory of operation: a parser in C keeps the interpreter until it is done, in a thread, too, and a value of two bytes
becomes an object of a hundred. So what is bounded is what the parser would make: commas, colons and openings that
stand outside of strings, which are one for each value and key, and escapes inside. Text beyond some size must be
ASCII without escapes, as base64 is: a string with one character of another plane takes four times its length.
"""

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

from .problems import Refused

T = TypeVar("T", bound=BaseModel)
MOST_JSON = 1 << 20  # bytes, of what brings no files
MOST_PARTS, BYTES_OF_PART, MOST_PARTS_AT_ALL = 20_000, 32, 65_536  # values and names; one more for so many bytes
MOST_RICH = 8 << 20  # bytes, of JSON that has escapes or is not ASCII
MOST_ESCAPES = 1 << 20
FEW_BYTES = 1 << 20  # are parsed at once, without a thread
_AS_FILES = "send files in base64, more of them as a form or an archive"


class JsonBounds:
    """Count what comes of one JSON text, in any pieces; refuse it at the first byte that is too much."""

    __slots__ = ("_escapes", "_is_escaped", "_is_in_string", "_is_rich", "_quotes", "parts", "seen")

    def __init__(self) -> None:
        self.seen = self.parts = self._quotes = self._escapes = 0
        self._is_in_string = self._is_escaped = self._is_rich = False

    def feed(self, piece: bytes) -> None:
        """Take a piece. Raises Refused (413)."""
        self.seen += len(piece)
        self._escapes += piece.count(b"\\")
        self._is_rich = self._is_rich or self._escapes > 0 or not piece.isascii()
        if self._escapes > MOST_ESCAPES or (self._is_rich and self.seen > MOST_RICH):
            raise _refused(
                f"the body has more than {MOST_ESCAPES} escapes, or {MOST_RICH} bytes of which some are no ASCII"
            )
        piece = self._without_escapes(piece)
        self._quotes += piece.count(b'"')
        most = min(MOST_PARTS + self.seen // BYTES_OF_PART, MOST_PARTS_AT_ALL)
        if self._quotes <= 2 * most + 2:
            texts = piece.split(b'"')
            outside = b"".join(texts[self._is_in_string :: 2])
            self._is_in_string ^= len(texts) % 2 == 0
            self.parts += sum(outside.count(sign) for sign in (b",", b":", b"[", b"{"))
        if self._quotes > 2 * most + 2 or self.parts > most:
            raise _refused(f"the body has more than {most} values and names")

    def _without_escapes(self, piece: bytes) -> bytes:
        """Return a piece without escaped quotes and backslashes; one may be cut by the end of the piece before."""
        if self._is_escaped and piece:
            piece, self._is_escaped = piece[1:], False
        if b"\\" in piece:
            piece = piece.replace(rb"\\", b"")
            self._is_escaped = piece.endswith(b"\\")
            piece = piece.replace(rb"\"", b"")
        return piece


def _refused(why: str) -> Refused:
    return Refused(413, "body-too-large", why, remedy=_AS_FILES)


def parse(data: bytes) -> Any:  # noqa: ANN401 - whatever JSON is
    """Return what JSON says, which was bounded before. Raises Refused (422); no number is NaN or infinite."""
    try:
        return from_json(data, allow_inf_nan=False, cache_strings=False)
    except ValueError as error:
        raise Refused(422, "invalid-request", f"body: this is no JSON: {error}", field="body") from None


def validated(model: type[T], data: object) -> T:
    """Return plain data as a model. Raises RequestValidationError."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        faults = [{**one, "loc": ("body", *one["loc"])} for one in error.errors(include_url=False)]
        raise RequestValidationError(faults) from error


class JsonRequest(Request):
    """A request whose JSON is parsed once, and whose body is let go then."""

    async def json(self) -> Any:  # noqa: ANN401 - whatever JSON is
        """Return what the body says. Raises Refused (422)."""
        if not hasattr(self, "_json"):
            self._json = await parse_apart(await self.body())
            self._body = b""
        return self._json


async def parse_apart(data: bytes) -> Any:  # noqa: ANN401 - whatever JSON is
    """Return what JSON says, of much in a thread: the loop has its turn before and after. Raises Refused (422)."""
    if len(data) <= FEW_BYTES:
        return parse(data)
    return await asyncio.to_thread(parse, data)


class JsonRoute(APIRoute):
    """Be a route that takes JSON."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the handler, with a request that lets its body go."""
        handle = super().get_route_handler()

        async def with_bounds(request: Request) -> Response:
            return await handle(JsonRequest(request.scope, request.receive))

        return with_bounds
