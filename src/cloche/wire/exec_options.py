"""The options that a request may set, and the check that they exceed nothing that the operator configured.

`ExecRequest` is an allowlist: options without a field there cannot be set by a request (configuration, audit, host
paths). Below scope admin, the settings that a request leads to are compared key by key with those without it. Each key
has a rule that decides if a value is looser, and only the operator's ceilings permit them. Pure.
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
from cloche.config.spellings import SPELLINGS, read_spelling
from cloche.core.ceilings import PRESENT, PackageList, covers, is_digest, matches_package, mode_rank, packages_above
from cloche.core.errors import InvalidRequest, PolicyDenied
from cloche.core.escape import escape_name
from cloche.core.letter_case import camel, snake
from cloche.core.limits import REQUESTED_LIMITS
from cloche.core.network import parse_rule
from cloche.core.policy import BACKEND_ROWS, MOST_LOCK_CHARS, LockText, Policy
from cloche.core.request import InputFile
from cloche.core.secrets import MOST_SECRETS

from .callers import Caller
from .problems import FIELDS

ADMIN_FIELDS = ("level", "best_effort", "tier", "trusted", "fallback", "runtime", "network_ports", "prefer")
# Choices among equally safe values, and keys with a check of their own below.
_NOT_COMPARED = frozenset({
    "backend", "preset", "network", "network_allow", "network_ports", "packages", "locked", "timeout_override",
    "autofix", "on_network",
})  # fmt: skip
_REQUEST_NAMES: Mapping[str, str] = {
    "packages_lock": "locked",
    **{snake(row.wire): row.keyword for row in REQUESTED_LIMITS if row.wire != row.keyword},
}
_KEYWORDS = (
    "timeout", "network", "network_allow", "network_deny", "network_ports", "packages", "preset", "backend", "runtime",
    "prefer", "require", "best_effort", "level", "tier", "trusted", "fallback", "image", "users", "account", "warm",
    "screen",
    "on_network", "secrets",
)  # fmt: skip

# The fields of a request that are stored in the run's row.
_KEPT = frozenset({
    "code", "language", "argv", "session_id", "timeout", "memory_limit", "cpu_limit", "network", "network_allow",
    "packages", "secrets",
})  # fmt: skip
MOST_KEPT_CHARS = 256 << 10
_OPTIONS = frozenset({*_REQUEST_NAMES, *_KEYWORDS})

Amount = int | float | Annotated[str, StringConstraints(max_length=32)]
LockField = Annotated[str, StringConstraints(max_length=MOST_LOCK_CHARS), AfterValidator(LockText)]
Word = Annotated[str, StringConstraints(max_length=256)]


def _without_nul(text: str) -> str:
    if "\0" in text:
        raise ValueError("this has a NUL character")  # not every database can store it
    return text


SessionId = Annotated[str, StringConstraints(max_length=64), AfterValidator(_without_nul)]
MOST_PATH = 4_096  # characters
MOST_PACKAGES, MOST_CONTROLS = 1_000, 64  # that a request names
MOST_FAULTS = 10  # reported of one request
_DECODED_AT_ONCE = 1 << 20  # characters, a multiple of 4


def _end_at_first(schema: Any) -> None:  # noqa: ANN401 - mappings and lists of pydantic's
    if isinstance(schema, dict):
        if schema.get("type") in ("list", "dict"):
            schema["fail_fast"] = True
        for value in schema.values():
            _end_at_first(value)
    elif isinstance(schema, list):
        for value in schema:
            _end_at_first(value)


def _option_spellings(own: Mapping[str, str]) -> dict[str, str]:
    """Return every accepted spelling of the options among a model's fields."""
    wire_names = {_REQUEST_NAMES.get(name, name): wire for name, wire in own.items() if name in _OPTIONS}
    return {spelling: wire_names[keyword] for spelling, keyword in SPELLINGS.items() if keyword in wire_names}


def _names_backend(data: Mapping[str, Any]) -> bool:
    """Tell whether `runtime` means `backend` here (C1), and not a container runtime of docker."""
    runtime = data.get("runtime")
    return isinstance(runtime, str) and runtime.strip().lower() in BACKEND_ROWS


def _wrong(model: str, name: str, why: str) -> ValidationError:
    error = PydanticCustomError("wrong", "{why}", {"why": why})
    return ValidationError.from_exception_data(model, [InitErrorDetails(type=error, loc=(name,), input=None)])


# Keywords whose names differ from the wire's map to the wire's; any other spelling maps to itself.
FIELDS.update({keyword: camel(name) for name, keyword in _REQUEST_NAMES.items()})
FIELDS.update({spelling: spelling for spelling in SPELLINGS if spelling not in FIELDS and "_" not in spelling})


class WireModel(BaseModel):
    """Base of the wire's models: camelCase names, unknown fields refused, a bounded number of reported faults."""

    model_config = ConfigDict(alias_generator=camel, populate_by_name=True, extra="forbid")

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:  # noqa: ANN401
        """Stop validating a list or mapping at its first invalid item: a reported fault is far larger than its item."""
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
        """Return data by the wire's names. Only the first unknown names are kept, which validation then refuses."""
        if not isinstance(data, dict) or (cls._own_names.issuperset(data) and not _names_backend(data)):
            return data
        read: dict[str, Any] = {}
        spelled: dict[str, str] = {}
        unknown = 0
        for name, value in data.items():
            field = "backend" if name == "runtime" and _names_backend(data) else cls._spellings.get(name, name)
            if field in spelled:
                raise _wrong(cls.__name__, name, f"{spelled[field]} sets the same value; give one of them")
            unknown += name not in cls._spellings
            if name in cls._spellings or unknown <= MOST_FAULTS:
                spelled[field] = name
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
        """Return the content as bytes, or as an InputFile if it has a mode. Raises InvalidRequest."""
        if self.text is not None:
            data = self.text.encode("utf-8", "surrogateescape")
        else:
            data = decoded(self.base64 or "", "files: base64")
        return data if self.mode is None else InputFile(path=self.path, data=data, mode=int(self.mode, 8))


class OptionFields(WireModel):
    """The options of a sandbox, for one run or for a live sandbox longer."""

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
    packages: Annotated[list[Word], Field(max_length=MOST_PACKAGES)] | Literal["auto"] | None = None
    packages_lock: LockField | None = None
    preset: Word | None = None
    backend: Word | None = None
    require: Annotated[list[Word], Field(max_length=MOST_CONTROLS)] | Word | None = None
    users: bool | None = None
    account: Word | None = None
    warm: bool | None = None
    screen: Literal["off", "warn", "block"] | None = None
    best_effort: Annotated[list[Word], Field(max_length=MOST_CONTROLS)] | None = None
    level: Word | None = None
    tier: int | None = None
    trusted: bool | None = None
    fallback: Word | None = None
    image: Word | None = None
    runtime: Word | None = None
    prefer: Literal["strongest", "fastest"] | None = None
    secrets: list[Word] | None = Field(default=None, max_length=MOST_SECRETS)

    def options(self) -> dict[str, Any]:
        """Return the keywords of `SandboxOptions` that the request set."""
        given_fields = self.model_fields_set & _OPTIONS
        names = [name for name in (*_REQUEST_NAMES, *_KEYWORDS) if name in given_fields] if given_fields else []
        return {_REQUEST_NAMES.get(name, name): value for name in names if (value := getattr(self, name)) is not None}


class RunFields(WireModel):
    """What to run: `code`, or `argv` alone as a command."""

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

    def stored_fields(self) -> dict[str, Any]:
        """Return the part of the request that is stored beside the result: without files, input and environment.

        `leftOut` names the fields that are not stored. Very long code, arguments and packages are not stored either.
        """
        left_out = self.model_fields_set - _KEPT - {"return_files"}
        packages = getattr(self, "packages", None) or ()
        if len(self.code or "") + sum(map(len, (*self.argv, *packages))) > MOST_KEPT_CHARS:
            left_out |= self.model_fields_set & {"code", "argv", "packages"}
        document = self.model_dump(by_alias=True, exclude_unset=True, include=set(_KEPT - left_out))
        return {**document, "leftOut": sorted(map(camel, left_out))} if left_out else document


class ExecRequest(OptionFields, RunFields):
    """A run. `code`, or `argv` alone as a command; limits as text such as "30s" and "256m", or seconds and bytes."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"code": "print(1)", "language": "python", "timeout": "30s"}]},
    )


def decoded(text: str, name: str) -> bytes:
    """Return the bytes of a base64 text. Raises InvalidRequest.

    It is decoded in chunks, so that other threads can take the GIL between them.
    """
    data = bytearray()
    try:
        for offset in range(0, len(text), _DECODED_AT_ONCE):
            if len(data) % 3:
                raise ValueError("padding within it")
            data += base64.b64decode(text[offset : offset + _DECODED_AT_ONCE], validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidRequest(f"{name}: this is not base64 ({error})") from error
    return bytes(data)


async def read_input(text: str | None, base64_text: str | None) -> bytes | str:
    """Return the standard input of a program, decoded in a thread. Raises InvalidRequest."""
    return text or "" if base64_text is None else await asyncio.to_thread(decoded, base64_text, "stdinBase64")


async def read_files(files: Sequence[InFile]) -> dict[str, bytes | InputFile] | None:
    """Return the files of a request by path, decoded in a thread; None without files. Raises InvalidRequest."""
    return await asyncio.to_thread(lambda: {file.path: file.content() for file in files}) if files else None


def needs_presence(image: str, base: Settings) -> bool:
    """Tell whether an image is permitted only if the daemon has it. Raises PolicyDenied, InvalidRequest."""
    if not base.images_allow:
        raise PolicyDenied("image: this needs a key with scope admin; leave it out, or ask the operator (images_allow)")
    if not is_digest(image):
        raise InvalidRequest(f"image: {image!r} is no image by digest; write NAME@sha256:...")
    if image in base.images_allow:
        return False
    if PRESENT in base.images_allow:
        return True
    raise PolicyDenied(f"image: {image} is not among those that the operator allows (images_allow)")


def backend_for_image(base: Settings) -> str:
    """Return the backend for a request that names an image and no backend: the configured one if it takes images."""
    if BACKEND_ROWS[base.backend].takes_image:
        return base.backend
    return next(name for name, row in BACKEND_ROWS.items() if row.takes_image and not row.is_remote)


def check_fields(options: Mapping[str, Any], caller: Caller) -> None:
    """Raise PolicyDenied for a field that needs scope admin."""
    if caller.has("admin"):
        return
    admin_fields = [camel(name) for name in ADMIN_FIELDS if name in options]
    if admin_fields:
        raise PolicyDenied(f"{admin_fields[0]}: this needs a key with scope admin; leave it out, or ask the operator")


def check_not_looser(own: Settings, base: Settings) -> None:
    """Raise PolicyDenied if a request exceeds both the settings and their ceilings."""
    for key in KEYS:
        if not key.settings_field or key.name in _NOT_COMPARED:
            continue
        new, old = key.value_in(own), key.value_in(base)
        if new != old and _is_more(key, new, old, base):
            raise _above(key.label, _shown(key, new, own), _shown(key, _ceiling(key, old, base), base))
    check_stays(own.backend, base)
    _check_network(own.policy, base)
    check_packages(own.policy.packages, base)


def check_stays(backend: str, base: Settings) -> None:
    """Raise PolicyDenied if a request would send code to a remote backend that the settings do not name."""
    if backend != base.backend and (row := BACKEND_ROWS.get(backend)) is not None and row.is_remote:
        raise PolicyDenied(
            f"backend: {backend} sends code to other machines and uses this service's account; that needs a "
            "key with scope admin, or settings that name this backend"
        )


def _is_more(key: Key, new: Any, old: Any, base: Settings) -> bool:  # noqa: ANN401 - as many types as keys
    if key.name in LIMIT_FIELDS:
        return bool(new > _ceiling(key, old, base))
    if key.name == "users":
        return bool(new) and not base.ceilings.get("users", False)
    if key.name == "network_deny":  # as an argument it replaces the service's own
        return not set(old) <= set(new)
    return key.is_looser is None or bool(key.is_looser(new, old))


def _shown(key: Key, value: Any, settings: Settings) -> str:  # noqa: ANN401 - as many types as keys
    return key.text_if_empty if value in (None, "", ()) else key.render(value, settings)


def _ceiling(key: Key, old: Any, base: Settings) -> Any:  # noqa: ANN401 - as many types as keys
    field = LIMIT_FIELDS.get(key.name)
    return old if field is None else max(old, base.ceilings.get(field, old))


def _above(name: str, requested: str, ceiling: str) -> PolicyDenied:
    return PolicyDenied(
        f"{name}: {requested} is above the service's limit ({ceiling}); ask for less, or ask the operator"
    )


def _check_network(own: Policy, base: Settings) -> None:
    requested, held, ceiling = own.network_rules(), base.policy.network_rules(), base.ceilings.get("network")
    if requested.mode == "off" or requested == held:
        return
    if requested.mode in ("open", "bridge"):
        granted = mode_rank(requested.mode) <= mode_rank(held.mode)
        granted = granted or (ceiling is not None and mode_rank(requested.mode) <= mode_rank(ceiling.mode))
        if not granted or set(requested.open_ports) - set(held.open_ports):
            raise _above("network", requested.mode, held.mode)
    if requested.mode == "bridge":
        return
    if requested.mode == held.mode == "open":
        check_limits_kept(own, base)
    for rule in requested.allow:
        granted = held.mode != "bridge" and covers(held, rule)
        if not (granted or (ceiling is not None and ceiling.grants(rule))):
            raise _above("networkAllow", rule.text, held.mode)


def check_limits_kept(own: Policy, base: Settings) -> None:
    """Raise PolicyDenied for rules without a host whose requests the settings limit, where it is reached without one.

    So it is in mode `open`, and by a secret for that host.
    """
    named, ceiling = {rule.host for rule in own.network_rules().limited}, base.ceilings.get("network")
    for rule in base.policy.network_rules().limited:
        if rule.host not in named and not (ceiling is not None and ceiling.grants(parse_rule(rule.host))):
            raise _above("networkAllow", f"every request to {rule.host}", escape_name(rule.text))


def check_packages(requested: PackageList, base: Settings) -> None:
    """Raise PolicyDenied for packages that are neither in the settings nor allowed by them."""
    held, ceiling = base.policy.packages, base.ceilings.get("packages")
    if not requested or requested == held:
        return
    allowed = (*base.packages_allow, *(ceiling or ()))
    if requested != "auto":
        new = tuple(package for package in requested if held == "auto" or package not in held)
        if not new or (allowed and not packages_above(new, allowed)):
            return
        named = packages_above(new, allowed) or new[0]
    else:
        named = "auto"
        if matches_package("*", allowed) and "*" in allowed:
            return
    raise _above("packages", named, ", ".join(allowed) or "none")
