"""Print what every record class of the package is and does, as JSON; with the argument `dataclasses`, as data classes.

Then `dataclasses` itself takes the place of `cloche.core.record` before anything is imported.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import json
import pickle
import pprint
import re
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import cloche
from cloche.core.errors import ClocheError

PACKAGE = Path(cloche.__file__).parent


def main() -> None:
    """Print the facts of all classes, by their names."""
    if sys.argv[1:] == ["dataclasses"]:
        sys.modules["cloche.core.record"] = dataclasses
    found = {f"{cls.__module__}.{cls.__qualname__}": facts(cls) for cls in record_classes()}
    print(re.sub("0x[0-9a-f]+", "0x", json.dumps(found)))


def record_classes() -> Iterator[type]:
    """Return the records of every module that makes some, but those that need further packages."""
    for path in sorted(PACKAGE.rglob("*.py")):
        if "record import" in path.read_text() and "integrations" not in path.parts:
            module = import_module(".".join(("cloche", *path.relative_to(PACKAGE).with_suffix("").parts)))
            for cls in tuple(vars(module).values()):
                if isinstance(cls, type) and cls.__module__ == module.__name__ and dataclasses.is_dataclass(cls):
                    yield cls


def facts(cls: Any) -> dict[str, Any]:
    """Return what can be seen of a class from outside; what fails is its error."""
    fields = dataclasses.fields(cls)
    one, twin, other = (sample(cls, text) for text in ("x", "x", "y"))
    first = next((field.name for field in fields if field.init), "nothing")
    return {
        "signatures": [str(inspect.signature(cls)), str(inspect.signature(cls.__init__))],
        "fields": [
            [field.name, field.type, repr(field.default), repr(field.default_factory), field.init, field.repr,
             field.compare, field.kw_only]
            for field in fields
        ],
        "parameters": str(cls.__dataclass_params__),
        "class": [cls.__match_args__, cls.__slots__ if "__slots__" in vars(cls) else None, cls.__hash__ is None,
                  hasattr(cls, "__dict__") and "__dict__" in vars(cls), cls.__qualname__],
        "wrong arguments": [end_of(cls), end_of(cls, nothing=1), end_of(cls, *range(len(fields) + 1)),
                            end_of(cls, 1, **{first: 2})],
        "texts": [end_of(repr, one), end_of(pprint.pformat, one)],
        "equal": [end_of(lambda: one == twin), end_of(lambda: one == other), one.__eq__(0) is NotImplemented],
        "hash": [end_of(lambda: hash(one) == hash(twin)), end_of(lambda: hash(one) == hash(other))],
        "order": [end_of(lambda: one < other), end_of(lambda: one >= other), end_of(lambda: one < 0)],
        "copies": [end_of(lambda: repr(pickle.loads(pickle.dumps(one)))), end_of(lambda: repr(copy.copy(one))),
                   end_of(lambda: repr(copy.deepcopy(one)))],
        "replace": [end_of(lambda: repr(dataclasses.replace(one, **{first: "z"}))),
                    end_of(lambda: repr(copy.replace(one, **{first: "z"})) if sys.version_info >= (3, 13) else "")],
        "plain": [end_of(dataclasses.asdict, one), end_of(dataclasses.astuple, one)],
        "frozen": [end_of(setattr, one, first, "z"), end_of(delattr, one, first)] if fields else [],
        "defaults": end_of(defaults_of, cls),
    }  # fmt: skip


def sample(cls: Any, text: str) -> Any:
    """Return an instance whose fields hold texts, past the checks of `__post_init__`."""
    made = object.__new__(cls)
    for field in dataclasses.fields(cls):
        object.__setattr__(made, field.name, text)
    return made


def defaults_of(cls: Any) -> list[str]:
    """Return the types of the values of an instance that was told nothing but what it must be told."""
    required = [name for name, one in inspect.signature(cls).parameters.items() if one.default is one.empty]
    made = cls(**dict.fromkeys(required, "x"))
    return [f"{name}: {type(getattr(made, name)).__name__}" for name in (one.name for one in dataclasses.fields(cls))]


def end_of(call: Callable[..., Any], /, *words: Any, **named: Any) -> str:
    """Return what a call returned, or what it raised."""
    try:
        return repr(call(*words, **named))
    except (AttributeError, LookupError, TypeError, ValueError, OSError, ClocheError) as error:
        return f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    main()
