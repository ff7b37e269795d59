"""JSON of requests: bounded while it is received (`cloche.serving.json_bounds`), parsed once, and validated."""

from __future__ import annotations

import asyncio
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import from_json

from cloche.serving.json_bounds import JsonBounds as Counted
from cloche.serving.json_bounds import TooMuch

from .problems import InvalidFields, Refused

T = TypeVar("T", bound=BaseModel)
MOST_UPLOAD = 1 << 30  # bytes of one file into a sandbox
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


async def parse_apart(data: bytes) -> Any:  # noqa: ANN401 - whatever JSON is
    """Return the value of a JSON text, parsed in a thread if it is large. Raises Refused (422)."""
    if len(data) <= FEW_BYTES:
        return parse(data)
    return await asyncio.to_thread(parse, data)


def validated(model: type[T], data: object) -> T:
    """Return plain data as a model. Raises InvalidFields."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        faults = [{**fault, "loc": ("body", *fault["loc"])} for fault in error.errors(include_url=False)]
        raise InvalidFields(faults) from error
