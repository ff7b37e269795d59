"""From requirements to a pinned list: uv, in a sandbox with the network of the index alone.

uv reads metadata of wheels and builds nothing, so no code of a package runs. Its output is a `pylock.toml` (PEP 751),
which is untrusted: names, versions, addresses and hashes are each checked here.

A package without a wheel is taken as a source where the operator permits builds. uv never looks into one: it is given
the requirements of each source (`dependency-metadata`), at first an empty list. `build.py` builds a wheel of the
chosen version, in a sandbox without a network. Then uv runs again with that wheel's requirements, until the
requirements of all chosen sources are known.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any
from urllib.parse import unquote, urlsplit

from cloche.core.ceilings import normalize_package
from cloche.core.errors import BackendUnavailable, InvalidRequest, StartFailed
from cloche.core.layers import Target
from cloche.core.limits import GIB, MIB, format_size
from cloche.core.policy import Policy
from cloche.core.protocols import Backend
from cloche.core.record import asdict, dataclass, replace
from cloche.core.request import InputFile
from cloche.core.toml import read_toml

from .index import Index, host_of
from .requirements import EXTRA, Requirement
from .rules import Rules
from .steps import CA_FILE, Step, ca_files, failed, last_words, run_step
from .target import is_own, tags, uv_arguments

ASKED, FIXED, ANSWER, SOURCES = "requirements.in", "constraints.txt", "pylock.toml", "sources.toml"
MOST_PINS = 400
MOST_WHEEL_BYTES, MOST_TOTAL_BYTES = 2 * GIB, 4 * GIB
MOST_ANSWER_BYTES = 16 * MIB
NO_SOLUTION = 1  # uv's exit code where the requirements cannot be met; others are failures
HASH_CHARS = frozenset("0123456789abcdef")
TARBALL = "package.tgz"
NAME = re.compile(r"[a-z0-9]+(?:-[a-z0-9]+)*")
_FILE = re.compile(r"[A-Za-z0-9._+!-]+")
ARCHIVES = (".tar.gz", ".zip")  # what a source distribution is
MOST_ROUNDS = 24
_OPTIONAL = ("sha256", "sha512", "at", "build")  # fields that only some pins have
_LACKING = re.compile(r"Wheels are required for `([A-Za-z0-9._-]+)` because building from source is disabled")
NOT_BUILT = (
    "a package without a wheel is built from source only if packages_build lists it, and for this host's own Python"
)


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Pin:
    """Hold one wheel of a pinned list. `size` is 0 if the index does not give it.

    Or a tarball of npm's: its name begins with `npm:`, its hash is `sha512`, and `at` is its folder of node_modules
    (`a`, `@scope/b`, `a/node_modules/c`).

    Or a source distribution, whose wheel is built: `build` has the wheels of its build requirements.
    """

    name: str
    version: str
    url: str
    sha256: str = ""
    size: int = 0
    sha512: str = ""
    at: str = ""
    build: tuple[Pin, ...] = ()

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> Pin:
        """Return what `as_dict` wrote. Raises TypeError."""
        return cls(**{**document, "build": tuple(map(cls.from_dict, document.get("build", ())))})

    @property
    def is_source(self) -> bool:
        """Tell whether a wheel is to be built of it."""
        return not self.at and not self.file_name.endswith(".whl")

    @property
    def file_name(self) -> str:
        """Return the wheel's name."""
        return unquote(urlsplit(self.url).path.rpartition("/")[2]) if not self.at else TARBALL

    @property
    def text(self) -> str:
        """Return name and version, in the form of a requirement."""
        return f"{self.name}@{self.version}" if self.at else f"{self.name}=={self.version}"

    @property
    def identity(self) -> tuple[str, ...]:
        """Return what tells its content, and where it lies, from any other."""
        built = f"built with {json.dumps([pin.identity for pin in sorted(self.build)])}" if self.is_source else ""
        return (self.name, self.version, self.sha256 or self.sha512, *filter(None, (self.at, built)))

    def as_dict(self) -> dict[str, Any]:
        """Return plain data, ready for JSON."""
        document = {**asdict(self), "build": [pin.as_dict() for pin in self.build]}
        return {key: value for key, value in document.items() if value or key not in _OPTIONAL}


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Hold the metadata of a built wheel: its requirements, its Python versions, its extras.

    `build` are the wheels of its build requirements.
    """

    requires: tuple[str, ...] = ()
    python: str = ""
    extras: tuple[str, ...] = ()
    build: tuple[Pin, ...] = ()


# By name: what is known of each version of the packages that are taken as sources.
Sources = Mapping[str, Mapping[str, Facts]]
Build = Callable[[Pin], Awaitable[Facts]]


def find_uv() -> str:
    """Return the path of uv. Raises BackendUnavailable that says how to get it."""
    try:
        from uv import find_uv_bin

        return os.path.realpath(find_uv_bin())
    except (ImportError, FileNotFoundError):
        raise BackendUnavailable(
            "packages are resolved by uv, which is not installed.", remedy=f"Get it: {EXTRA}"
        ) from None


def resolve_step(
    requirements: Sequence[Requirement],
    target: Target,
    index: Index,
    rules: Rules,
    fixed: Sequence[str] = (),
    sources: Sources | None = None,
) -> Step:
    """Return the step that resolves requirements. Its credentials are in its environment only.

    `fixed` are versions (`six==1.17.0`) of packages already present. Only `sources` are taken as sources.
    """
    uv, newest, bundle = find_uv(), rules.newest(), index.ca_bundle()
    argv = [
        uv, "pip", "compile", ASKED, "--output-file", ANSWER, "--format", "pylock.toml", "--no-header",
        "--only-binary", ":all:", *uv_arguments(target), "--no-python-downloads", "--no-progress", "--quiet",
        "--cache-dir", ".cloche-uv", "--keyring-provider", "disabled",
    ]  # fmt: skip
    argv += ["--config-file", SOURCES] if sources else ["--no-config"]
    for name in sources or ():
        argv += ["--no-binary", name]
    if fixed:
        argv += ["--constraints", FIXED]
    if index.strategy:
        argv += ["--index-strategy", index.strategy]
    env = {"UV_DEFAULT_INDEX": index.with_credentials(index.url)}
    if index.extra:
        env["UV_INDEX"] = " ".join(map(index.with_credentials, index.extra))
    if bundle:
        env["SSL_CERT_FILE"] = CA_FILE
    return Step(
        name="resolve", argv=(*argv, *(("--exclude-newer", newest) if newest else ())), env=env,
        files=(
            _lines(ASKED, requirements), *((_lines(FIXED, fixed),) if fixed else ()),
            *((_lines(SOURCES, _described(sources)),) if sources else ()), *ca_files(bundle),
        ),
        network_allow=index.network_allow, shown=(uv,), returns=ANSWER, most_bytes=MOST_ANSWER_BYTES,
    )  # fmt: skip


def _lines(path: str, lines: Iterable[object]) -> InputFile:
    return InputFile(path=path, data="".join(f"{line}\n" for line in lines).encode())


def _described(sources: Sources) -> Iterable[str]:
    """Yield the lines that give uv the requirements of sources, so that it never builds one to find out.

    The first table of a name is for all versions with unknown requirements.
    """
    for name, versions in sources.items():
        for version, facts in (("", Facts()), *versions.items()):
            yield "[[dependency-metadata]]"
            yield f"name = {_quoted(name)}"
            if version:
                yield f"version = {_quoted(version)}"
            yield f"requires-dist = [{', '.join(map(_quoted, facts.requires))}]"
            if facts.python:
                yield f"requires-python = {_quoted(facts.python)}"
            yield f"provides-extra = [{', '.join(map(_quoted, facts.extras))}]"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


async def resolve(
    backend: Backend,
    policy: Policy,
    requirements: Sequence[Requirement],
    target: Target,
    index: Index,
    rules: Rules,
    fixed: Sequence[str] = (),
    build: Build | None = None,
    locked: Sequence[Pin] = (),
) -> tuple[Pin, ...]:
    """Return the pinned list for these requirements, sorted.

    For a `locked` package, that version is taken, and the file with its hash. `build` builds a wheel of a source, where
    permitted, and returns its requirements. A wheel of any matching version is preferred to a source. Raises
    InvalidRequest with uv's reason where they cannot be met, StartFailed where uv or the network failed, PolicyDenied
    for packages that the rules deny, and the errors of `build`.
    """
    sources: dict[str, dict[str, Facts]] = {pin.name: {} for pin in locked if pin.is_source}
    fixed, hashes = (*fixed, *(pin.text for pin in locked)), {pin.name: pin.sha256 for pin in locked}
    for _ in range(MOST_ROUNDS):
        step = resolve_step(requirements, target, index, rules, fixed, sources)
        outcome = await run_step(backend, policy, step)
        if outcome.result.exit_code == NO_SOLUTION:
            lacking = {normalize_package(name) for name in _LACKING.findall(outcome.result.stderr)}
            more = {name for name in lacking if build is not None and rules.may_build(name)} - sources.keys()
            if not more:
                why = index.credentials.hide(last_words(outcome.result))
                raise InvalidRequest(f"packages: cannot be resolved: {why}{f' ({NOT_BUILT})' if lacking else ''}")
            sources.update((name, {}) for name in sorted(more))
            continue
        if not outcome.result.ok:
            raise failed(step, outcome.result, index.credentials.hide)
        text = outcome.file.decode("utf-8", "replace")
        pins = await asyncio.to_thread(read_pins, text, index, target, sources, hashes)  # it may be long
        rules.check_denied(pin.name for pin in pins)
        new = [pin for pin in pins if pin.is_source and pin.version not in sources[pin.name]]
        if not new or build is None:
            return tuple(
                replace(pin, build=sources[pin.name][pin.version].build) if pin.is_source else pin for pin in pins
            )
        for pin in new:
            sources[pin.name][pin.version] = await build(pin)
    raise StartFailed(
        f"packages: there is no stable list of packages after {MOST_ROUNDS} rounds of builds", step="resolve"
    )


def read_pins(
    text: str,
    index: Index,
    target: Target,
    sources: Collection[str] = (),
    hashes: Mapping[str, str] = MappingProxyType({}),
) -> tuple[Pin, ...]:
    """Return the pins of a `pylock.toml`. Raises StartFailed for an unexpected document.

    `sources` are the names of packages taken as sources; `hashes` name the required file of a package.
    """
    try:
        packages = read_toml(text).get("packages", [])
        pins = tuple(sorted(_read_package(package, target, sources, hashes) for package in packages))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise StartFailed(f"packages: the pinned list cannot be used: {error}", step="resolve") from None
    check_pins(pins, index, sources)
    return pins


def check_pins(pins: Sequence[Pin], index: Index, sources: Collection[str] = ()) -> None:
    """Raise StartFailed for a list that is too long, too large, or that names an address outside of the index.

    It also does for sources with other names.
    """
    total = sum(pin.size for pin in pins)
    wrong = ""
    if len(pins) > MOST_PINS:
        wrong = f"it has {len(pins)} packages; at most {MOST_PINS} are installed"
    elif not all(0 <= pin.size <= MOST_WHEEL_BYTES for pin in pins):
        wrong = f"it has a wheel with an invalid size, or one of more than {format_size(MOST_WHEEL_BYTES)}"
    elif total > MOST_TOTAL_BYTES:
        wrong = f"it has {format_size(total)} to download; at most {format_size(MOST_TOTAL_BYTES)} are installed"
    elif len({pin.name for pin in pins}) < len(pins):
        wrong = "it has a package twice"
    for pin in pins:
        wrong = wrong or _what_is_wrong(pin, index, sources)
        wrong = wrong or next(filter(None, (_what_is_wrong(built_with, index, ()) for built_with in pin.build)), "")
    if wrong:
        raise StartFailed(f"packages: the pinned list cannot be used: {wrong}", step="resolve")


def _what_is_wrong(pin: Pin, index: Index, sources: Collection[str]) -> str:
    if not NAME.fullmatch(pin.name):
        return f"{pin.name[:80]!r} is not a name of a package"
    host = host_of_pin(pin)
    if not host:
        return f"{pin.name} has no https address"
    if host not in index.hosts:
        return (
            f"{pin.name} is on {host}, which is not a host of the index ({', '.join(index.hosts)}); "
            "the operator can name it in packages_hosts"
        )
    if len(pin.sha256) != 64 or not HASH_CHARS.issuperset(pin.sha256):
        return f"{pin.name} has no hash (SHA-256)"
    if (pin.is_source and pin.name not in sources) or not _FILE.fullmatch(pin.file_name):
        return f"{pin.name} has no wheel; {NOT_BUILT}"
    if pin.is_source and not pin.file_name.endswith(ARCHIVES):
        return f"{pin.name} is a source distribution of an unsupported kind, {pin.file_name[:100]}"
    if pin.is_source:
        name, _, version = _without_ending(pin.file_name).rpartition("-")
    else:
        name, version = (*pin.file_name.split("-", 2), "")[:2]
    if normalize_package(name) != pin.name:
        return f"{pin.name} has the file of another package, {pin.file_name[:100]}"
    if not _is_same_version(pin.version, version):
        return f"{pin.name} {pin.version[:40]!r} has the file of another version, {pin.file_name[:100]}"
    return ""


def _without_ending(name: str) -> str:
    return next((name.removesuffix(ending) for ending in ARCHIVES if name.endswith(ending)), name)


def host_of_pin(pin: Pin) -> str:
    """Return "host:port" of a pin's address; empty for an invalid one, or one with credentials."""
    try:
        address = urlsplit(pin.url)
        is_one = address.scheme in ("https", "http") and address.username is None and bool(address.hostname)
        return host_of(address) if is_one else ""
    except ValueError:
        return ""


def is_version(text: str) -> bool:
    """Tell whether a text is the version of a package of Python's."""
    return _is_same_version(text, text) and text == text.strip()


def _is_same_version(version: str, expected: str) -> bool:
    from packaging.version import Version

    try:
        return Version(version) == Version(expected)
    except ValueError:  # also of a number with more digits than are read
        return False


def _read_package(
    package: Mapping[str, Any], target: Target, sources: Collection[str], hashes: Mapping[str, str]
) -> Pin:
    name, version = normalize_package(str(package["name"])), str(package.get("version", ""))
    wheels = [package["sdist"]] if name in sources else package.get("wheels")
    if not wheels:
        raise ValueError(f"{name} has no wheel for this interpreter; {NOT_BUILT}")
    if name in hashes:
        wheels = [wheel for wheel in wheels if wheel["hashes"].get("sha256") == hashes[name]]
        if not wheels:
            raise ValueError(f"the index lists no file of {name} {version[:40]} with the hash of the lock file")
    wheel = wheels[0] if len(wheels) == 1 and is_own(target) else _best(wheels, target)
    url = str(wheel.get("url", ""))
    if not url:
        raise ValueError(f"{name} has no address")
    address = urlsplit(url)
    clean = address._replace(netloc=address.netloc.rpartition("@")[2], fragment="").geturl()
    return Pin(
        name=name, version=version, url=clean, sha256=str(wheel["hashes"]["sha256"]), size=int(wheel.get("size", 0))
    )


def _best(wheels: Sequence[Mapping[str, Any]], target: Target) -> Mapping[str, Any]:
    """Return the wheel that suits an interpreter best, of several."""
    from packaging.utils import InvalidWheelFilename, parse_wheel_filename

    ranks = {tag: rank for rank, tag in enumerate(tags(target))}
    best: tuple[int, Mapping[str, Any]] | None = None
    for wheel in wheels:
        name = str(wheel.get("name") or unquote(urlsplit(str(wheel.get("url", ""))).path.rpartition("/")[2]))
        try:
            wheel_ranks = [ranks[str(tag)] for tag in parse_wheel_filename(name)[3] if str(tag) in ranks]
        except InvalidWheelFilename:
            continue
        if wheel_ranks and (best is None or min(wheel_ranks) < best[0]):
            best = (min(wheel_ranks), wheel)
    if best is None:
        raise ValueError(f"a package has no wheel for this interpreter; {NOT_BUILT}")
    return best[1]


def credentials_variable(index: Index) -> dict[str, str]:
    """Return the environment variable with the credentials of a step that downloads; empty without credentials."""
    return {"CLOCHE_CREDENTIALS": json.dumps(dict(index.credentials))} if index.credentials else {}
