"""What a caller may ask of a run: the request's fields, and that they get nobody more than the operator configured.

`ExecRequest` is a table of its own: what is not in it cannot be asked for (configuration, audit, host paths). Below
scope admin, what a request comes to is compared, key by key, with what holds without it: each key's own rule says
whether a value is looser, and only the operator's ceilings grant more. Pure.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    StringConstraints,
    ValidationError,
    model_validator,
)  # fmt: skip
from pydantic_core import CoreSchema, InitErrorDetails, PydanticCustomError

from cloche.config.keys import KEYS, LIMIT_FIELDS, Key, Settings
from cloche.core.ceilings import PackageList, covers, matches_package, mode_rank, packages_above
from cloche.core.errors import InvalidRequest, PolicyDenied
from cloche.core.limits import REQUESTED_LIMITS
from cloche.core.policy import BACKEND_ROWS, Policy
from cloche.core.request import InputFile
from cloche.records.results import camel, snake
from cloche.records.settings import SPELLINGS, read_spelling

from .identities import Caller
from .problems import FIELDS

ADMIN_FIELDS = ("level", "best_effort", "tier", "trusted", "fallback", "image", "runtime", "network_ports", "prefer")
# Which choice is made among what is equally safe, or what is looked at elsewhere here.
_NOT_COMPARED = frozenset({
    "backend", "preset", "network", "network_allow", "network_ports", "packages", "locked", "timeout_override",
    "autofix", "on_network",
})  # fmt: skip
_REQUEST_NAMES: Mapping[str, str] = {
    snake(row.wire): row.keyword for row in REQUESTED_LIMITS if row.wire != row.keyword
}
_KEYWORDS = (
    "timeout", "network", "network_allow", "network_deny", "network_ports", "packages", "preset", "backend", "runtime",
    "prefer", "require", "best_effort", "level", "tier", "trusted", "fallback", "image", "users", "warm", "screen",
)  # fmt: skip

# Of a request for a run, what its row keeps.
_KEPT = frozenset({
    "code", "language", "argv", "session_id", "timeout", "memory_limit", "cpu_limit", "network", "network_allow",
    "packages",
})  # fmt: skip
MOST_KEPT_CHARS = 256 << 10
_OPTIONS = frozenset({*_REQUEST_NAMES, *_KEYWORDS})

Amount = int | float | Annotated[str, StringConstraints(max_length=32)]
Word = Annotated[str, StringConstraints(max_length=256)]


def _without_nul(text: str) -> str:
    if "\0" in text:
        raise ValueError("this has a NUL character")  # which not every database has
    return text


SessionId = Annotated[str, StringConstraints(max_length=64), AfterValidator(_without_nul)]
MOST_PATH = 4_096  # characters
MOST_FAULTS = 10  # that are told of one request
_DECODED_AT_ONCE = 1 << 20  # characters, a multiple of 4


def _end_at_first(schema: Any) -> None:  # noqa: ANN401 - mappings and lists of pydantic's
    if isinstance(schema, dict):
        if schema.get("type") in ("list", "dict"):
            schema["fail_fast"] = True
        for part in schema.values():
            _end_at_first(part)
    elif isinstance(schema, list):
        for part in schema:
            _end_at_first(part)


def _option_spellings(own: Mapping[str, str]) -> dict[str, str]:
    """Return all spellings of the options among the fields of a model."""
    known = {_REQUEST_NAMES.get(name, name): wire for name, wire in own.items() if name in _OPTIONS}
    return {spelling: known[keyword] for spelling, keyword in SPELLINGS.items() if keyword in known}


def _names_backend(data: Mapping[str, Any]) -> bool:
    """Tell whether `runtime` is another word for `backend` here (C1), and not one of docker's own."""
    said = data.get("runtime")
    return isinstance(said, str) and said.strip().lower() in BACKEND_ROWS


def _wrong(model: str, name: str, why: str) -> ValidationError:
    error = PydanticCustomError("wrong", "{why}", {"why": why})
    return ValidationError.from_exception_data(model, [InitErrorDetails(type=error, loc=(name,), input=None)])


# What the library calls by another name, as the wire does; any other spelling as it was said.
FIELDS.update({keyword: camel(name) for name, keyword in _REQUEST_NAMES.items()})
FIELDS.update({spelling: spelling for spelling in SPELLINGS if spelling not in FIELDS and "_" not in spelling})


class WireModel(BaseModel):
    """Be data of the wire: camelCase, no field that nobody knows, and few faults told of what is wrong all over."""

    model_config = ConfigDict(alias_generator=camel, populate_by_name=True, extra="forbid")

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:  # noqa: ANN401
        """Let a list or a mapping end at its first wrong item: each one told takes far more than the item."""
        schema = handler(source)
        _end_at_first(schema)
        return schema

    _spellings: ClassVar[Mapping[str, str]] = {}  # each name of a field -> the wire's own
    _own_names: ClassVar[frozenset[str]] = frozenset()

    @classmethod
    def __pydantic_init_subclass__(cls, **_: object) -> None:
        own = {name: field.alias or name for name, field in cls.model_fields.items()}
        cls._spellings = {**_option_spellings(own), **own, **{name: name for name in own.values()}}
        cls._own_names = frozenset(own.values())
        for name, wire in {**own, **{wire: wire for wire in own.values()}}.items():
            FIELDS.setdefault(name, wire)

    @model_validator(mode="before")
    @classmethod
    def _read_names(cls, data: object) -> object:
        """Return data by the wire's names, with few of those that nobody knows, which are then refused."""
        if not isinstance(data, dict) or (cls._own_names.issuperset(data) and not _names_backend(data)):
            return data
        read: dict[str, Any] = {}
        said: dict[str, str] = {}
        unknown = 0
        for name, value in data.items():
            field = "backend" if name == "runtime" and _names_backend(data) else cls._spellings.get(name, name)
            if field in said:
                raise _wrong(cls.__name__, name, f"{said[field]} says the same; give one of them")
            unknown += name not in cls._spellings
            if name in cls._spellings or unknown <= MOST_FAULTS:
                said[field] = name
                try:
                    read[field] = read_spelling(name, value) if name in SPELLINGS else value
                except InvalidRequest as error:
                    raise _wrong(cls.__name__, name, str(error).removeprefix(f"{name}: ")) from None
        return read


class InFile(WireModel):
    """A file for the program: a path below /workspace, its content as text or in base64, and permission bits."""

    path: Annotated[str, StringConstraints(min_length=1, max_length=MOST_PATH)]
    text: str | None = None
    base64: str | None = None
    mode: Annotated[str, StringConstraints(pattern="^0?[0-7]{3}$")] | None = None

    @model_validator(mode="after")
    def _has_one(self) -> Self:
        if (self.text is None) == (self.base64 is None):
            raise ValueError("give either text or base64")
        return self

    def content(self) -> bytes | InputFile:
        """Return its bytes, or what has its mode as well. Raises InvalidRequest."""
        if self.text is not None:
            data = self.text.encode("utf-8", "surrogateescape")
        else:
            data = decoded(self.base64 or "", "files: base64")
        return data if self.mode is None else InputFile(path=self.path, data=data, mode=int(self.mode, 8))


class OptionFields(WireModel):
    """What may be asked of a sandbox, whether it lives or is for one run."""

    timeout: Amount | None = None
    memory_limit: Amount | None = None
    cpu_limit: Amount | None = None
    pids_limit: int | None = None
    disk_limit: Amount | None = None
    max_output_bytes: Amount | None = None
    network: bool | Word | None = None
    network_allow: list[Word] | None = Field(default=None, max_length=256)
    network_deny: list[Word] | None = Field(default=None, max_length=256)
    network_ports: list[int] | None = Field(default=None, max_length=64)
    packages: list[Word] | Literal["auto"] | None = Field(default=None)
    preset: Word | None = None
    backend: Word | None = None
    require: list[Word] | Word | None = None
    users: bool | None = None
    warm: bool | None = None
    screen: Literal["off", "warn", "block"] | None = None
    best_effort: list[Word] | None = None
    level: Word | None = None
    tier: int | None = None
    trusted: bool | None = None
    fallback: Word | None = None
    image: Word | None = None
    runtime: Word | None = None
    prefer: Literal["strongest", "fastest"] | None = None

    def options(self) -> dict[str, Any]:
        """Return the keywords of `SandboxOptions` that were given."""
        given = self.model_fields_set & _OPTIONS
        names = [name for name in (*_REQUEST_NAMES, *_KEYWORDS) if name in given] if given else []
        return {_REQUEST_NAMES.get(name, name): value for name in names if (value := getattr(self, name)) is not None}


class RunFields(WireModel):
    """What is run: `code`, or `argv` alone as a command."""

    code: str | None = None
    language: Word = "python"
    argv: list[str] = Field(default_factory=list, max_length=10_000)
    stdin: str | None = None
    stdin_base64: str | None = None
    env: dict[Word, str] | None = None
    files: list[InFile] = Field(default_factory=list)
    return_files: bool = False
    session_id: SessionId | None = None

    @model_validator(mode="after")
    def _runs_something(self) -> Self:
        if self.code is None and not self.argv:
            raise ValueError("give code, or argv as a command")
        if self.stdin is not None and self.stdin_base64 is not None:
            raise ValueError("give stdin or stdinBase64, not both")
        return self

    async def run_arguments(self) -> dict[str, Any]:
        """Return the other keywords of `cloche.arun`. Raises InvalidRequest."""
        return {
            "code": self.code, "language": self.language, "argv": self.argv, "env": self.env,
            "stdin": await read_input(self.stdin, self.stdin_base64), "files": await read_files(self.files),
        }  # fmt: skip

    def kept(self) -> dict[str, Any]:
        """Return what is kept beside the result, as the wire has it: no files, input and environment.

        `leftOut` names what else was given; what is very long is left out, too.
        """
        left_out = self.model_fields_set - _KEPT - {"return_files"}
        packages = getattr(self, "packages", None) or ()
        if len(self.code or "") + sum(map(len, (*self.argv, *packages))) > MOST_KEPT_CHARS:
            left_out |= self.model_fields_set & {"code", "argv", "packages"}
        kept = self.model_dump(by_alias=True, exclude_unset=True, include=set(_KEPT - left_out))
        return {**kept, "leftOut": sorted(map(camel, left_out))} if left_out else kept


class ExecRequest(OptionFields, RunFields):
    """A run. `code`, or `argv` alone as a command; limits as text such as "30s" and "256m", or seconds and bytes."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"code": "print(1)", "language": "python", "timeout": "30s"}]},
    )


def decoded(text: str, name: str) -> bytes:
    """Return the bytes of base64 text, decoded part by part: others have turns between. Raises InvalidRequest."""
    found = bytearray()
    try:
        for at in range(0, len(text), _DECODED_AT_ONCE):
            if len(found) % 3:
                raise ValueError("padding within it")
            found += base64.b64decode(text[at : at + _DECODED_AT_ONCE], validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidRequest(f"{name}: this is no base64 ({error})") from error
    return bytes(found)


async def read_input(text: str | None, base64_text: str | None) -> bytes | str:
    """Return what a program reads, decoded in a thread. Raises InvalidRequest."""
    return text or "" if base64_text is None else await asyncio.to_thread(decoded, base64_text, "stdinBase64")


async def read_files(files: Sequence[InFile]) -> dict[str, bytes | InputFile] | None:
    """Return the files of a request by path, decoded in a thread; None for none. Raises InvalidRequest."""
    return await asyncio.to_thread(lambda: {file.path: file.content() for file in files}) if files else None


def check_fields(options: Mapping[str, Any], caller: Caller) -> None:
    """Raise PolicyDenied for a field that takes scope admin."""
    if caller.has("admin"):
        return
    given = [camel(name) for name in ADMIN_FIELDS if name in options]
    if given:
        raise PolicyDenied(f"{given[0]}: this needs a key with scope admin; leave it out, or ask the operator")


def check_not_looser(own: Settings, base: Settings) -> None:
    """Raise PolicyDenied where a request would get more than the settings, and more than their ceilings grant."""
    for key in KEYS:
        if not key.settings_field or key.name in _NOT_COMPARED:
            continue
        new, old = key.value_in(own), key.value_in(base)
        if new != old and _is_more(key, new, old, base):
            raise _above(key.label, _shown(key, new, own), _shown(key, _most(key, old, base), base))
    check_stays(own.backend, base)
    _check_network(own.policy, base)
    check_packages(own.policy.packages, base)


def check_stays(backend: str, base: Settings) -> None:
    """Raise PolicyDenied where a request would send code to a provider that the settings do not name."""
    if backend != base.backend and (row := BACKEND_ROWS.get(backend)) is not None and row.is_remote:
        raise PolicyDenied(
            f"backend: {backend} sends code to other machines, at the expense of this service's account; that needs a "
            "key with scope admin, or settings with that backend"
        )


def _is_more(key: Key, new: Any, old: Any, base: Settings) -> bool:  # noqa: ANN401 - as many types as keys
    if key.name in LIMIT_FIELDS:
        return bool(new > _most(key, old, base))
    if key.name == "users":
        return bool(new) and not base.ceilings.get("users", False)
    if key.name == "network_deny":  # as an argument it takes the place of the service's own
        return not set(old) <= set(new)
    return key.is_looser is None or bool(key.is_looser(new, old))


def _shown(key: Key, value: Any, settings: Settings) -> str:  # noqa: ANN401 - as many types as keys
    return key.text_if_empty if value in (None, "", ()) else key.render(value, settings)


def _most(key: Key, old: Any, base: Settings) -> Any:  # noqa: ANN401 - as many types as keys
    field = LIMIT_FIELDS.get(key.name)
    return old if field is None else max(old, base.ceilings.get(field, old))


def _above(name: str, asked: str, most: str) -> PolicyDenied:
    return PolicyDenied(f"{name}: {asked} is above what the service allows ({most}); ask for less, or the operator")


def _check_network(own: Policy, base: Settings) -> None:
    asked, held, ceiling = own.network_rules(), base.policy.network_rules(), base.ceilings.get("network")
    if asked.mode == "off" or asked == held:
        return
    if asked.mode in ("open", "bridge"):
        granted = mode_rank(asked.mode) <= mode_rank(held.mode)
        granted = granted or (ceiling is not None and mode_rank(asked.mode) <= mode_rank(ceiling.mode))
        if not granted or set(asked.open_ports) - set(held.open_ports):
            raise _above("network", asked.mode, held.mode)
        return
    for rule in asked.allow:
        granted = held.mode != "bridge" and covers(held, rule)
        if not (granted or (ceiling is not None and ceiling.grants(rule))):
            raise _above("networkAllow", rule.text, held.mode)


def check_packages(asked: PackageList, base: Settings) -> None:
    """Raise PolicyDenied for packages that the settings neither have nor let anybody name."""
    held, ceiling = base.policy.packages, base.ceilings.get("packages")
    if not asked or asked == held:
        return
    allowed = (*base.packages_allow, *(ceiling or ()))
    if asked != "auto":
        new = tuple(one for one in asked if held == "auto" or one not in held)
        if not new or (allowed and not packages_above(new, allowed)):
            return
        named = packages_above(new, allowed) or new[0]
    else:
        named = "auto"
        if matches_package("*", allowed) and "*" in allowed:
            return
    raise _above("packages", named, ", ".join(allowed) or "none")
