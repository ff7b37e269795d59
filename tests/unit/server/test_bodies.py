"""What is parsed of a client's JSON: bounded while it comes, whatever its shape, and few faults told of it."""

from __future__ import annotations

import asyncio
import base64
import json
import random
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import pytest
from fastapi.routing import APIRoute

from cloche.core.errors import InvalidRequest
from cloche.server import app
from cloche.server.bodies import JsonRoute
from cloche.server.guard import Guard
from cloche.server.problems import response_to
from cloche.serving.json_bounds import MOST_PARTS_AT_ALL, MOST_RICH
from cloche.wire.bodies import BodyBounds, validated
from cloche.wire.callers import Caller
from cloche.wire.exec_options import MOST_FAULTS, WireModel, decoded
from cloche.wire.problems import InvalidFields, Refused
from cloche.wire.verbs import VERBS
from tests.harness.json_shapes import SHAPES

ROUTES = [import_module(f"cloche.server.routes.{name}") for name in app.ROUTES]
HARD_TEXTS = ("", ",:[{", '"', "\\", '\\"', '",["', '\\\\",:', "é,", "\n[", "\U0001f600:")


def _parts(value: object) -> int:
    """Return how many commas, colons and openings a value has as JSON."""
    if isinstance(value, dict):
        return 1 + max(0, len(value) - 1) + len(value) + sum(map(_parts, value.values()))
    return 1 + max(0, len(value) - 1) + sum(map(_parts, value)) if isinstance(value, list) else 0


def _value(chance: random.Random, depth: int) -> object:
    kinds = ["text", "number", "list", "object"][: 4 if depth else 2]
    match chance.choice(kinds):
        case "text":
            return "".join(chance.choices(HARD_TEXTS, k=3))
        case "number":
            return chance.choice([0, -1.5, None, True])
        case "list":
            return [_value(chance, depth - 1) for _ in range(chance.randrange(4))]
        case _:
            return {f"{n}{chance.choice(HARD_TEXTS)}": _value(chance, depth - 1) for n in range(chance.randrange(4))}


def test_what_is_counted_is_what_would_be_made() -> None:
    """Only what stands outside of strings counts, each once, wherever the pieces in which it comes are cut."""
    chance = random.Random(7)
    for _ in range(500):
        value = _value(chance, 4)
        text = json.dumps(value, ensure_ascii=chance.random() < 0.5).encode()
        bounds = BodyBounds()
        cuts = sorted(chance.choices(range(len(text) + 1), k=chance.randrange(8)))
        for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
            bounds.feed(text[begin:end])
        assert (bounds.parts, bounds.seen) == (_parts(value), len(text)), (text, cuts)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("piece", [1 << 10, 1 << 18])
def test_too_much_is_refused_while_it_comes(shape: str, piece: int) -> None:
    """No shape gets more past than the bound and one piece; the rest is never looked at."""
    text, bounds = SHAPES[shape](), BodyBounds()

    def feed() -> None:
        for begin in range(0, len(text), piece):
            bounds.feed(text[begin : begin + piece])

    with pytest.raises(Refused) as refused:
        feed()
    assert refused.value.status_code == 413
    assert bounds.seen <= MOST_RICH + piece
    assert bounds.parts <= MOST_PARTS_AT_ALL + piece


def test_what_is_as_large_as_it_may_be_passes() -> None:
    """Thousands of files, megabytes of code in many lines, and tens of megabytes in base64."""
    file = {"path": "folder/name.txt", "base64": "YWJj" * 10, "mode": "644"}
    program = "print('a, b: [c] {d}')\n" * 100_000
    for value in ({"files": [file] * 2_500}, {"code": program}, {"files": [{**file, "base64": "YWJj" * (7 << 20)}]}):
        BodyBounds().feed(json.dumps(value).encode())


def test_no_json_is_parsed_that_was_not_counted() -> None:
    """Each route that takes JSON has it parsed by the one bounded way, and so has the wire."""
    taking = [route for module in ROUTES for route in module.router.routes if _takes_json(route)]
    assert len(taking) > 20
    assert [route.path for route in taking if not isinstance(route, JsonRoute)] == []


def _takes_json(route: object) -> bool:
    return isinstance(route, APIRoute) and (route.body_field is not None or bool(route.openapi_extra))


def _models(of: type[WireModel] = WireModel) -> Iterator[type[WireModel]]:
    for model in of.__subclasses__():
        if model.__module__.startswith("cloche."):
            yield model
        yield from _models(model)


MODELS = sorted({*_models(), *(verb.fields for verb in VERBS.values())}, key=repr)
WRONG: dict[str, Any] = {
    "items": [0, {}, []] * 5_000, "objects": [{f"k{n}": 0} for n in range(5_000)],
    "members": {f"k{n}": [] for n in range(5_000)}, "members of members": {f"k{n}": {"a": 0} for n in range(5_000)},
}  # fmt: skip


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_what_is_wrong_all_over_is_told_of_few(model: type[WireModel]) -> None:
    """Each field is wrong in thousands of places, and thousands are unknown: a fault of each kind is made, not more."""
    fields = [str(field.alias or name) for name, field in model.model_fields.items()]
    for wrong in WRONG.values():
        data = {**dict.fromkeys(fields, wrong), **{f"unknown{n}": 0 for n in range(5_000)}}
        with pytest.raises(InvalidFields) as refused:
            validated(model, data)
        assert len(refused.value.faults) <= MOST_FAULTS + 5 * len(fields)
        answer = json.loads(bytes(response_to(refused.value).body))
        assert answer["detail"].count(";") < MOST_FAULTS


def test_a_form_is_parsed_a_piece_at_a_time() -> None:
    """Its parser is in Python, and takes a turn of the loop for each piece; no more than the bound of pairs comes."""

    async def received(body: bytes, kind: str) -> list[int]:
        sizes: list[int] = []

        async def route(_: object, receive: Any, send: Any) -> None:
            while (message := await receive())["more_body"]:
                sizes.append(len(message["body"]))
            sizes.append(len(message["body"]))

        async def receive() -> Any:
            return {"type": "http.request", "body": body, "more_body": False}

        async def identify(_: object) -> Caller:
            return Caller(project="default", scopes=("run",), key_id="key")

        async def send(message: Any) -> None:
            sizes.append(-message.get("status", 0))

        guard = Guard(route, names=["localhost"], identify=identify)
        headers = [(b"host", b"localhost"), (b"content-type", kind.encode()), (b"content-length", b"%d" % len(body))]
        scope = {"type": "http", "path": "/run", "headers": headers, "method": "POST"}
        await guard(scope, receive, send)
        return sizes

    sizes = asyncio.run(received(b"x" * 100_000, "multipart/form-data; boundary=b"))
    assert (sum(sizes), max(sizes)) == (100_000, 16 << 10)
    with pytest.raises(Refused, match="fields"):
        asyncio.run(received(b"a=&" * 5_000, "application/x-www-form-urlencoded"))


@pytest.mark.parametrize("text", ["YWJj" * 300_000, "YWJj" * 262_143 + "YQ==", "", "YQ=="])
def test_base64_in_parts_is_what_it_is_as_a_whole(text: str) -> None:
    """It is decoded a mebibyte at a time; padding is at its end alone."""
    assert decoded(text, "x") == base64.b64decode(text)


@pytest.mark.parametrize("text", ["YQ==" * 300_000, "YWJj" * 262_143 + "YQ==" + "YWJj", "Y", "é"])
def test_what_is_no_base64_is_refused(text: str) -> None:
    """Also where padding stands at the end of a part."""
    with pytest.raises(InvalidRequest, match="not base64"):
        decoded(text, "x")
