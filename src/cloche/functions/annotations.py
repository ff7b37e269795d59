"""What a value from a guest must be, by the annotation of its parameter.

JSON's own types and what is made of them (`list[str]`, `dict[str, int]`, `Literal`, `int | None`, `tuple`, enums of
text) are checked here. Any other annotation, such as a model or a date, needs pydantic, which then makes the object.
"""

from __future__ import annotations

import collections.abc
import types
import typing
from collections.abc import Callable
from typing import Any

from cloche.core.errors import InvalidRequest

Check = Callable[[Any, str], Any]
_KINDS: dict[Any, tuple[str, Callable[[Any], bool]]] = {
    str: ("text", lambda value: isinstance(value, str)),
    bool: ("true or false", lambda value: isinstance(value, bool)),
    int: ("an integer", lambda value: isinstance(value, int) and not isinstance(value, bool)),
    float: ("a number", lambda value: isinstance(value, int | float) and not isinstance(value, bool)),
    type(None): ("null", lambda value: value is None),
    list: ("a list", lambda value: isinstance(value, list)),
    dict: ("an object", lambda value: isinstance(value, dict)),
    tuple: ("a list", lambda value: isinstance(value, list)),
}
_LISTS = (list, collections.abc.Sequence, collections.abc.Iterable, collections.abc.Collection)
_OBJECTS = (dict, collections.abc.Mapping, collections.abc.MutableMapping)


class Unfit(ValueError):
    """Say which argument has a value that its annotation does not allow."""


def checker(annotation: Any) -> Check:  # noqa: ANN401 - an annotation may be anything
    """Return a function from a value and its place to the value that the caller's function gets; it raises Unfit.

    Raises InvalidRequest for an annotation that needs pydantic where that is not installed.
    """
    if annotation is Any or annotation is object or annotation is None:
        return _kind(type(None)) if annotation is None else lambda value, _: value
    if annotation in _KINDS:
        return _kind(annotation)
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType) and all(map(_is_plain, arguments)):
        return _any_of(annotation, [checker(argument) for argument in arguments])
    if origin is typing.Literal:
        return _literal(arguments)
    if origin in _LISTS and _is_plain(annotation):
        return _list(checker(arguments[0]))
    if origin in _OBJECTS and _is_plain(annotation):
        return _object(checker(arguments[1]))
    return _by_pydantic(annotation)


def _is_plain(annotation: Any) -> bool:  # noqa: ANN401
    """Tell whether JSON has all values of an annotation as they are."""
    if annotation in (Any, object, None) or (annotation in _KINDS and annotation is not tuple):
        return True
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return True
    if origin in (typing.Union, types.UnionType) or origin in _LISTS:
        return all(map(_is_plain, arguments))
    return origin in _OBJECTS and arguments[0] is str and _is_plain(arguments[1])


def _kind(annotation: Any) -> Check:  # noqa: ANN401
    words, is_one = _KINDS[annotation]
    convert = annotation if annotation in (float, tuple) else None

    def check(value: Any, place: str) -> Any:  # noqa: ANN401
        if not is_one(value):
            raise Unfit(f"{place} must be {words}, not {_named(value)}")
        return value if convert is None else convert(value)

    return check


def _literal(allowed: tuple[Any, ...]) -> Check:
    def check(value: Any, place: str) -> Any:  # noqa: ANN401
        if not any(type(value) is type(one) and value == one for one in allowed):
            raise Unfit(f"{place} must be one of {', '.join(map(repr, allowed))}")
        return value

    return check


def _any_of(annotation: Any, checks: list[Check]) -> Check:  # noqa: ANN401
    def check(value: Any, place: str) -> Any:  # noqa: ANN401
        for one in checks:
            try:
                return one(value, place)
            except Unfit:
                continue
        raise Unfit(f"{place} must be {annotation}, not {_named(value)}")

    return check


def _list(check_item: Check) -> Check:
    check_list = _kind(list)

    def check(value: Any, place: str) -> Any:  # noqa: ANN401
        return [check_item(item, f"{place}[{index}]") for index, item in enumerate(check_list(value, place))]

    return check


def _object(check_item: Check) -> Check:
    check_object = _kind(dict)

    def check(value: Any, place: str) -> Any:  # noqa: ANN401
        return {name: check_item(item, f"{place}[{name!r}]") for name, item in check_object(value, place).items()}

    return check


def _by_pydantic(annotation: Any) -> Check:  # noqa: ANN401
    try:
        import pydantic
    except ImportError:
        raise InvalidRequest(
            f"the annotation {annotation} is checked by pydantic, which is not installed; install it, or "
            "annotate with JSON's own types (str, int, list[str], dict[str, float])"
        ) from None
    try:
        adapter: Any = pydantic.TypeAdapter(annotation)
    except Exception as error:
        raise InvalidRequest(
            f"pydantic cannot check the annotation {annotation}; annotate with JSON's own types, records or models"
        ) from error

    def check(value: Any, place: str) -> Any:  # noqa: ANN401
        try:
            return adapter.validate_python(value)
        except pydantic.ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            at = "".join(f"[{step!r}]" for step in first["loc"])
            raise Unfit(f"{place}{at}: {first['msg']}") from None

    return check


def _named(value: object) -> str:
    return _KINDS[type(value)][0] if type(value) in _KINDS else "something else"
