"""Records: data classes that cost next to nothing to define, in the words of `dataclasses`, and with their types.

`dataclasses` writes and compiles source for each class, a millisecond of it, and a first run needs a hundred classes.
Here all classes have the same methods; an `__init__` is the code of `_template` with the parameters of the class, so
that arguments, errors and `inspect.signature` are the interpreter's own. What `dataclasses` and others look for in a
data class is made when they look. A class is made anew, with slots: `super()` without arguments does not work in it.
"""

from __future__ import annotations

import sys
from operator import attrgetter, ge, gt, le, lt
from reprlib import recursive_repr
from types import FunctionType, MappingProxyType

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from dataclasses import asdict, dataclass, field, fields, replace
    from typing import Any

__all__ = ["asdict", "dataclass", "field", "fields", "replace"]

_MISSING = object()
_set = object.__setattr__


class _Factory:
    """Stand for a default that is made for each instance, in signatures too."""

    def __repr__(self) -> str:
        return "<factory>"


_FACTORY: Any = _Factory()


class _Field:
    """Hold the declaration of one field. A field without a parameter may have a default, too."""

    __slots__ = ("compare", "default", "default_factory", "init", "kw_only", "name", "repr", "type")
    name: str
    type: object

    def __init__(
        self, *, default: Any = _MISSING, default_factory: Any = _MISSING, init: bool = True, repr: bool = True,  # noqa: A002
        compare: bool = True, kw_only: bool | None = None,
    ) -> None:  # fmt: skip
        if default.__class__.__hash__ is None:
            raise ValueError(f"mutable default {default.__class__} is not allowed: use default_factory")
        self.default, self.default_factory, self.init = default, default_factory, init
        self.repr, self.compare, self.kw_only = repr, compare, kw_only

    @property
    def parameter(self) -> Any:
        """Return the default of the parameter, or `_MISSING`."""
        return self.default if self.default_factory is _MISSING else _FACTORY

    def told(self) -> dict[str, Any]:
        """Return the arguments that it was made with."""
        settings = {name: getattr(self, name) for name in self.__slots__ if name not in ("name", "type")}
        return {name: value for name, value in settings.items() if value is not _MISSING}


def _record(cls: Any = None, /, **options: bool) -> Any:
    """Make a record of a class, as `dataclasses.dataclass` does. Options: frozen, slots, kw_only, eq, order, repr."""
    if cls is None:
        return lambda cls: _record(cls, **options)
    inherited = {spec.name: spec for base in cls.__mro__[:0:-1] for spec in base.__dict__.get("__record__", ())}
    own, slots = dict(cls.__dict__), []
    for name, kind in cls.__annotations__.items():
        if not str(kind).removeprefix("typing.").startswith("ClassVar"):
            slots += [name] if name not in inherited else []
            inherited[name] = _field_of(name, kind, own, **options)
    own = {**_methods(cls, tuple(inherited.values()), **options), **own, "__qualname__": cls.__qualname__}
    for name in ("__dict__", "__weakref__"):
        own.pop(name, None)
    if options.get("slots"):
        own = {name: value for name, value in own.items() if name not in inherited} | {"__slots__": tuple(slots)}
    return type(cls)(cls.__name__, cls.__bases__, own)


def _field_of(name: str, kind: object, own: dict[str, Any], *, kw_only: bool = False, **_: bool) -> _Field:
    """Return the field of an annotation; where a class attribute was its description, its default takes that place."""
    default = own.get(name, _MISSING)
    spec: _Field = default if isinstance(default, _Field) else _Field(default=default)
    spec.name, spec.type, spec.kw_only = name, kind, kw_only if spec.kw_only is None else spec.kw_only
    if default is spec:
        del own[name]
        own.update({name: spec.default} if spec.default is not _MISSING else {})
    return spec


def _methods(cls: Any, specs: tuple[_Field, ...], **options: bool) -> dict[str, Any]:
    """Return the methods that a record of these fields gets, but for those that its class defines."""
    positional = [spec for spec in specs if spec.init and not spec.kw_only]
    methods: dict[str, Any] = {
        "__record__": specs,
        "__record_options__": options,
        "__dataclass_fields__": _fields_asked_for,
        "__dataclass_params__": _params_asked_for,
        "__match_args__": tuple(spec.name for spec in positional),
        "__init__": _init_of(cls, positional, [spec for spec in specs if spec.init and spec.kw_only]),
        "_set_fields": _setter_of(specs, hasattr(cls, "__post_init__")),
        "__replace__": _replace,
    }
    if options.get("repr", True):
        methods["__repr__"] = _repr
    if options.get("eq", True):
        key = attrgetter("__class__", *(spec.name for spec in specs if spec.compare))
        methods |= {"__record_key__": key, "__eq__": _equals}
        methods |= {"__hash__": _hash} if options.get("frozen") else {}
    if options.get("order"):
        methods |= _COMPARISONS
    if options.get("frozen"):
        methods |= {"__setattr__": _refuse_to_set, "__delattr__": _refuse_to_delete}
        methods |= {"__getstate__": _getstate, "__setstate__": _setstate}
    return methods


def _template(self: Any) -> None:
    self._set_fields(locals())


_CODE = _template.__code__


def _init_of(cls: Any, positional: list[_Field], by_keyword: list[_Field]) -> FunctionType:
    names = ("self", *(spec.name for spec in (*positional, *by_keyword)))
    code = _CODE.replace(
        co_name="__init__", co_varnames=names, co_nlocals=len(names), co_argcount=1 + len(positional),
        co_kwonlyargcount=len(by_keyword),
    )  # fmt: skip
    defaults = tuple(spec.parameter for spec in positional if spec.parameter is not _MISSING)
    init = FunctionType(code, vars(sys.modules[cls.__module__]), "__init__", defaults)
    init.__kwdefaults__ = {spec.name: spec.parameter for spec in by_keyword if spec.parameter is not _MISSING}
    init.__qualname__ = f"{cls.__qualname__}.__init__"
    init.__annotations__ = {spec.name: spec.type for spec in (*positional, *by_keyword)} | {"return": None}
    return init


def _setter_of(specs: tuple[_Field, ...], has_post_init: bool) -> Callable[[Any, dict[str, Any]], None]:
    factories = [(spec.name, spec.default_factory) for spec in specs if spec.default_factory is not _MISSING]
    constants = [(spec.name, spec.default) for spec in specs if not spec.init and spec.default is not _MISSING]

    def set_fields(self: Any, values: dict[str, Any]) -> None:
        del values["self"]
        for name, make in factories:
            if values.get(name, _FACTORY) is _FACTORY:
                values[name] = make()
        for name, value in values.items():
            _set(self, name, value)
        for name, value in constants:
            _set(self, name, value)
        if has_post_init:
            self.__post_init__()

    return set_fields


def _shown(self: Any) -> str:
    shown = ", ".join(f"{spec.name}={getattr(self, spec.name)!r}" for spec in self.__record__ if spec.repr)
    return f"{self.__class__.__qualname__}({shown})"


_repr: Any = recursive_repr("...")(_shown)
_repr.__wrapped__, _shown.__qualname__ = _shown, "__create_fn__"  # by which `pprint` knows a data class


def _equals(self: Any, other: Any) -> Any:
    if other.__class__ is not self.__class__:
        return NotImplemented
    return self is other or self.__record_key__(self) == self.__record_key__(other)


def _hash(self: Any) -> int:
    return hash(self.__record_key__(self))


def _comparison(compare: Callable[[Any, Any], bool]) -> Callable[[Any, object], Any]:
    def method(self: Any, other: object) -> Any:
        same = other.__class__ is self.__class__
        return compare(self.__record_key__(self), self.__record_key__(other)) if same else NotImplemented

    return method


_COMPARISONS = {f"__{compare.__name__}__": _comparison(compare) for compare in (lt, le, gt, ge)}


def _refuse_to_set(self: Any, name: str, value: object) -> None:
    _refuse(self, "assign to", name)
    _set(self, name, value)


def _refuse_to_delete(self: Any, name: str) -> None:
    _refuse(self, "delete", name)
    object.__delattr__(self, name)


def _refuse(self: Any, action: str, name: str) -> None:
    """Raise FrozenInstanceError, but for an attribute that a further class has beside the fields."""
    if "__record__" in type(self).__dict__ or any(name == spec.name for spec in self.__record__):
        from dataclasses import FrozenInstanceError

        raise FrozenInstanceError(f"cannot {action} field {name!r}")


def _getstate(self: Any) -> list[Any]:
    values = [getattr(self, spec.name) for spec in self.__record__]
    return [_ReadOnly(value) if type(value) is MappingProxyType else value for value in values]


def _setstate(self: Any, state: list[Any]) -> None:
    for spec, value in zip(self.__record__, state, strict=True):
        _set(self, spec.name, MappingProxyType(dict(value)) if type(value) is _ReadOnly else value)


class _ReadOnly(dict):  # type: ignore[type-arg]
    """Replace a read-only mapping in a pickle or a copy; `pickle` cannot copy `MappingProxyType`."""


class _AskedFor:
    """Make the attributes that `dataclasses` keeps in a class on first access, from a data class of the same fields."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, _: object, owner: Any) -> Any:
        import dataclasses

        cls = next(base for base in owner.__mro__ if base.__dict__.get(self.name) is self)
        body: dict[str, Any] = {spec.name: dataclasses.field(**spec.told()) for spec in cls.__record__}
        body["__annotations__"] = {spec.name: spec.type for spec in cls.__record__}
        body["__module__"] = cls.__module__
        described: Any = dataclasses.dataclass(**cls.__record_options__)(type(cls.__name__, (), body))
        cls.__dataclass_fields__, cls.__dataclass_params__ = (
            described.__dataclass_fields__,
            described.__dataclass_params__,
        )
        return getattr(described, self.name)


_fields_asked_for, _params_asked_for = _AskedFor("__dataclass_fields__"), _AskedFor("__dataclass_params__")


def _replace(self: Any, /, **changes: object) -> Any:
    """Return a record with these changes."""
    return self.__class__(**{spec.name: getattr(self, spec.name) for spec in self.__record__ if spec.init} | changes)


def _fields(record: Any) -> tuple[_Field, ...]:
    """Return the fields of a record or its class; they have `name`, `type`, and the arguments of `field`."""
    specs: tuple[_Field, ...] = record.__record__
    return specs


def _asdict(record: Any) -> dict[str, Any]:
    """Return the fields as plain data; records, dictionaries and sequences in them are made anew, other values kept."""
    return {spec.name: _plain(getattr(record, spec.name)) for spec in record.__record__}


def _plain(value: Any) -> Any:
    if hasattr(type(value), "__record__"):
        return _asdict(value)
    if isinstance(value, dict):
        return type(value)((key, _plain(item)) for key, item in value.items())
    return type(value)(map(_plain, value)) if isinstance(value, (list, tuple)) else value


if not TYPE_CHECKING:
    dataclass, field, fields, replace, asdict = _record, _Field, _fields, _replace, _asdict
