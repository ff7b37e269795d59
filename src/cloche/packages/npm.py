"""From npm requirements to a pinned list: npm, in a sandbox with the network of the registry alone.

npm writes a `package-lock.json` and nothing else: it unpacks no package and runs no script. The file is untrusted:
names, versions, locations, addresses and hashes are each checked here.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
import os
import re
import sysconfig
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from cloche.core.errors import InvalidRequest, StartFailed
from cloche.core.layers import Target
from cloche.core.limits import GIB, MIB, format_size
from cloche.core.policy import Policy
from cloche.core.protocols import Backend
from cloche.core.record import dataclass, replace
from cloche.core.request import InputFile

from .lock import Locked
from .npm_names import MOST_NAME_CHARS, PREFIX, parse_npm
from .registry import Registry
from .requirements import Requirement
from .resolve import HASH_CHARS, Pin, host_of_pin
from .rules import Rules
from .steps import CA_FILE, Step, ca_files, failed, last_words, run_step
from .target import own_target

ASKED, ANSWER, SETTINGS, NOTHING = "package.json", "package-lock.json", "npm.settings", "npm.none"
MOST_PINS = 2000  # npm's packages are small ones, and many
MOST_TOTAL_BYTES = 4 * GIB
MOST_ANSWER_BYTES = 16 * MIB
MOST_VERSION_CHARS, MOST_PLACE_CHARS = 256, 600
# What npm says of requirements that cannot be met; whatever else goes wrong is a failure.
_UNMET = re.compile(r"\bcode (E404|ETARGET|ENOVERSIONS|ERESOLVE|EBADPLATFORM|EINVALIDTAGNAME|EINVALIDPACKAGENAME)\b")
_FOLDER = r"(?:@[A-Za-z0-9_~-][A-Za-z0-9._~-]*/)?(?!node_modules(?:/|$))[A-Za-z0-9_~-][A-Za-z0-9._~-]*"
_PLACE = re.compile(rf"{_FOLDER}(?:/node_modules/{_FOLDER})*")
_NAME = re.compile(_FOLDER)
_VERSION = re.compile(r"[0-9A-Za-z][0-9A-Za-z.+-]*")
_CPUS: Mapping[str, str] = {
    "x86_64": "x64", "amd64": "x64", "aarch64": "arm64", "arm64": "arm64", "armv7l": "arm", "armv6l": "arm",
    "i386": "ia32", "i686": "ia32", "ppc64le": "ppc64", "riscv64": "riscv64", "s390x": "s390x",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Npm:
    """Say how npm is started on this host: the first arguments of its command, and the paths it must be shown."""

    argv: tuple[str, ...]
    shown: tuple[str, ...] = ()


def npm_target() -> Target:
    """Return the target of npm packages: a platform, for every version of Node."""
    return Target(python="", version="", tag="npm", platform=sysconfig.get_platform(), libc=own_target().libc)


def resolve_step(
    dependencies: Mapping[str, str], npm: Npm, registry: Registry, rules: Rules, lock: bytes = b"", *more: str
) -> Step:
    """Return the step that resolves dependencies. Credentials are in a file of its workspace, and nowhere else.

    `lock` is a lock file that it begins with, `more` are further options.
    """
    newest, bundle = rules.newest(), registry.ca_bundle()
    argv = (
        *npm.argv, "install", "--package-lock-only", "--ignore-scripts", "--no-audit", "--no-fund", "--no-progress",
        "--no-update-notifier", "--omit-lockfile-registry-resolved=false", "--lockfile-version=3", "--logs-max=0",
        "--loglevel=error", "--allow-git=none", "--allow-remote=none", "--allow-file=none", "--allow-directory=none",
        *((f"--before={newest}",) if newest else ()), *more,
    )  # fmt: skip
    env = {"NPM_CONFIG_USERCONFIG": SETTINGS, "NPM_CONFIG_GLOBALCONFIG": NOTHING}
    if bundle:
        env["NODE_EXTRA_CA_CERTS"] = CA_FILE
    files = (*_project(dependencies, lock), InputFile(path=SETTINGS, data=registry.settings()))
    return Step(
        name="resolve", argv=argv, env=env, files=(*files, *ca_files(bundle)), network_allow=registry.network_allow,
        shown=npm.shown, returns=ANSWER, most_bytes=MOST_ANSWER_BYTES,
    )  # fmt: skip


def _project(dependencies: Mapping[str, str], lock: bytes) -> tuple[InputFile, ...]:
    manifest = json.dumps({"private": True, "dependencies": dict(dependencies)}).encode()
    return InputFile(path=ASKED, data=manifest), *((InputFile(path=ANSWER, data=lock),) if lock else ())


def _dependencies(requirements: Sequence[Requirement]) -> dict[str, str]:
    ranges: dict[str, str] = {}
    for requirement in requirements:
        name, version_range = parse_npm(requirement.text)
        if name in ranges:
            raise InvalidRequest(f"packages: {requirement.name} is requested twice; name one range: 'npm:a@>=1 <3'")
        ranges[name] = version_range or "*"
    return ranges


async def resolve(
    backend: Backend, policy: Policy, requirements: Sequence[Requirement], npm: Npm, registry: Registry, rules: Rules
) -> tuple[Pin, ...]:
    """Return the pinned list for these requirements, sorted.

    Raises InvalidRequest with npm's reason where they cannot be met, StartFailed where npm or the network failed,
    PolicyDenied for packages that the rules deny.
    """
    answer = await _answer(backend, policy, resolve_step(_dependencies(requirements), npm, registry, rules), registry)
    pins = await asyncio.to_thread(read_pins, answer.decode("utf-8", "replace"), registry)  # it may be long
    rules.check_denied(pin.name for pin in pins)
    return pins


async def _answer(backend: Backend, policy: Policy, step: Step, registry: Registry) -> bytes:
    """Return the lock file that npm wrote. Raises InvalidRequest with its reason, StartFailed."""
    outcome = await run_step(backend, policy, step)
    message = registry.credentials.hide(last_words(outcome.result))
    if not outcome.result.ok and _UNMET.search(message):
        raise InvalidRequest(f"packages: cannot be resolved: {message}")
    if not outcome.result.ok:
        raise failed(step, outcome.result, registry.credentials.hide)
    return outcome.file


async def resolve_locked(
    backend: Backend, policy: Policy, requirements: Sequence[Requirement], locked: Locked, npm: Npm, registry: Registry,
    rules: Rules,
) -> tuple[Pin, ...]:  # fmt: skip
    """Return the part of a lock file that these requirements need, with the registry's addresses and hashes, sorted.

    npm runs three times: for the needed locations, with the registry's metadata of these versions, not the file's; to
    check that each version is one that its parent accepts; and for the location of each version, which must be old
    enough. Raises the errors of `resolve`, and InvalidRequest if a check fails.
    """
    check_pins([replace(pin, url=f"{registry.url}/") for pin in locked.pins], registry)  # names, places and versions
    dependencies, aliases = _dependencies(requirements), _aliases(locked.pins)
    lock = await _answer(
        backend, policy, resolve_step(dependencies, npm, registry, rules, _first_lock(locked)), registry
    )
    pins = await asyncio.to_thread(_read_places, lock, locked)
    locked.check_resolved(pins)
    argv = (*npm.argv, "ls", "--all", "--package-lock-only", "--loglevel=error", "--logs-max=0")
    env = {"NPM_CONFIG_USERCONFIG": SETTINGS, "NPM_CONFIG_GLOBALCONFIG": NOTHING}  # neither is there
    step = Step(name="check", argv=argv, env=env, files=_project(dependencies, lock), shown=npm.shown)
    outcome = await run_step(backend, policy, step)
    if not outcome.result.ok:
        raise InvalidRequest(f"packages: {locked.file} is not valid: {last_words(outcome.result)}")
    step = resolve_step(aliases, npm, registry, rules, b"", "--legacy-peer-deps")
    answer = await _answer(backend, policy, step, registry)
    pins = await asyncio.to_thread(_with_addresses, pins, answer, aliases, registry)
    check_pins(pins, registry)
    rules.check_denied(pin.name for pin in pins)
    return pins


def _first_lock(locked: Locked) -> bytes:
    """Return a lock file of npm's first version: npm then asks the registry for the dependencies of each package."""
    root: dict[str, Any] = {}
    for pin in sorted(locked.pins, key=lambda pin: pin.at.count("/node_modules/")):
        *parents, folder = pin.at.split("/node_modules/")
        node = root
        for parent in parents:
            if parent not in node.get("dependencies", {}):
                raise InvalidRequest(
                    f"packages: {locked.file} pins {pin.text} at {pin.at}, below a package that it does not pin"
                )
            node = node["dependencies"][parent]
        name = pin.name.removeprefix(PREFIX)
        version = pin.version if folder == name else f"{PREFIX}{name}@{pin.version}"
        node.setdefault("dependencies", {})[folder] = {"version": version}
    return json.dumps({"lockfileVersion": 1, "requires": True, **root}).encode()


def _aliases(pins: Sequence[Pin]) -> dict[str, str]:
    """Return dependencies on exactly these versions, also several of one name."""
    return {f"p{number}": text for number, text in enumerate(sorted({pin.text for pin in pins}))}


def _read_places(lock: bytes, locked: Locked) -> tuple[Pin, ...]:
    """Return the pins of a lock file whose locations npm needs, and pins without a hash for all other locations.

    Raises StartFailed, and InvalidRequest for packages of other hosts.
    """
    mine = {(pin.name, pin.version, pin.at): pin for pin in locked.pins}
    try:
        packages = {
            _place_of(location): package for location, package in json.loads(lock)["packages"].items() if location
        }
        needed = sorted(
            (*_name_of(location, package), location)
            for location, package in packages.items()
            if _is_wanted(location, package)
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _unusable(error) from None
    return tuple(mine.get(key) or Pin(name=key[0], version=key[1], url="", at=key[2]) for key in needed)


def _with_addresses(
    pins: Sequence[Pin], answer: bytes, aliases: Mapping[str, str], registry: Registry
) -> tuple[Pin, ...]:
    """Return pins with the registry's addresses. Raises StartFailed where its hashes are others."""
    try:
        rows = json.loads(answer)["packages"]
        aliased = {
            text: _read_package(location, rows[f"node_modules/{location}"], registry)
            for location, text in aliases.items()
        }
        for pin in pins:
            if aliased[pin.text].sha512 != pin.sha512:
                raise ValueError(f"the registry lists no file of {pin.text} with the hash of the lock file")
        return tuple(replace(pin, url=aliased[pin.text].url) for pin in pins)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _unusable(error) from None


def _unusable(error: Exception) -> StartFailed:
    why = str(error) if type(error) is ValueError else type(error).__name__
    return StartFailed(f"packages: the pinned list cannot be used: {why}", step="resolve")


def _name_of(location: str, package: Mapping[str, Any]) -> tuple[str, str]:
    name = str(package.get("name") or location.rpartition("node_modules/")[2])
    return f"{PREFIX}{name}", str(package.get("version", ""))


def read_pins(text: str, registry: Registry) -> tuple[Pin, ...]:
    """Return the pins of a `package-lock.json` for this host.

    Raises StartFailed for an unexpected document, InvalidRequest for a package of other hosts.
    """
    try:
        document = json.loads(text)
        rows = {_place_of(location): package for location, package in document["packages"].items() if location}
        pins = tuple(
            sorted(
                _read_package(location, package, registry)
                for location, package in rows.items()
                if _is_wanted(location, package)
            )
        )
    except InvalidRequest:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _unusable(error) from None
    check_pins(pins, registry)
    return pins


def _place_of(location: str) -> str:
    """Return a location below node_modules, "" for any other, such as the root's entry."""
    if not location.startswith("node_modules/"):
        raise ValueError(f"{location[:80]!r} is not a place below node_modules")
    return location.removeprefix("node_modules/")


def check_pins(pins: Sequence[Pin], registry: Registry) -> None:
    """Raise StartFailed for a list that is too long, or that names an address outside of the registry."""
    total = sum(pin.size for pin in pins)
    wrong = ""
    if len(pins) > MOST_PINS:
        wrong = f"it has {len(pins)} packages; at most {MOST_PINS} are installed"
    elif not all(0 <= pin.size <= MOST_TOTAL_BYTES for pin in pins):
        wrong = f"it has a tarball with an invalid size, or one of more than {format_size(MOST_TOTAL_BYTES)}"
    elif total > MOST_TOTAL_BYTES:
        wrong = f"it has {format_size(total)} to download; at most {format_size(MOST_TOTAL_BYTES)} are installed"
    elif len({pin.at for pin in pins}) < len(pins):
        wrong = "it has two packages at one path"
    for pin in pins:
        wrong = wrong or _what_is_wrong(pin, registry)
    if wrong:
        raise StartFailed(f"packages: the pinned list cannot be used: {wrong}", step="resolve")


def _what_is_wrong(pin: Pin, registry: Registry) -> str:
    name = pin.name.removeprefix(PREFIX)
    if not pin.name.startswith(PREFIX) or not _NAME.fullmatch(name) or len(name) > MOST_NAME_CHARS:
        return f"{pin.name[:80]!r} is not a name of a package"
    if not _PLACE.fullmatch(pin.at) or len(pin.at) > MOST_PLACE_CHARS:
        return f"{pin.name} is at {pin.at[:80]!r}, which is not a place below node_modules"
    if not _VERSION.fullmatch(pin.version) or len(pin.version) > MOST_VERSION_CHARS:
        return f"{pin.name} has no version"
    host = host_of_pin(pin)
    if not host:
        return f"{pin.name} has no https address"
    if host not in registry.hosts:
        return (
            f"{pin.name} is on {host}, which is not a host of the registry ({', '.join(registry.hosts)}); "
            "the operator can name it in packages_hosts"
        )
    if len(pin.sha512) != 128 or not HASH_CHARS.issuperset(pin.sha512):
        return f"{pin.name} has no hash (SHA-512)"
    return ""


def _is_wanted(location: str, package: Mapping[str, Any]) -> bool:
    """Tell whether a package must be downloaded. Raises InvalidRequest for a needed package of other hosts.

    A package inside its parent's tarball is not downloaded.
    """
    if package.get("inBundle") is True:
        return False
    lacks = [
        f"{key} {', '.join(map(str, listed))}"
        for key, mine in _host().items() if not _has(listed := _list(package.get(key)), mine)
    ]  # fmt: skip
    if lacks and package.get("optional") is not True and package.get("devOptional") is not True:
        raise InvalidRequest(
            f"packages: {PREFIX}{location[:80]} is only for {'; '.join(lacks)}, which does not match this host"
        )
    return not lacks


def _host() -> dict[str, str]:
    machine = os.uname().machine
    return {"os": "linux", "cpu": _CPUS.get(machine, machine), "libc": own_target().libc.partition(" ")[0]}


def _list(value: object) -> list[str]:
    return [value] if isinstance(value, str) else [str(entry) for entry in value] if isinstance(value, list) else []


def _has(listed: Sequence[str], mine: str) -> bool:
    """Tell whether a list of platforms includes this host; `!NAME` excludes one, and an empty list includes all."""
    if f"!{mine}" in listed:
        return False
    named = [entry for entry in listed if not entry.startswith("!")]
    return not named or mine in named or "any" in named


def _read_package(location: str, package: Mapping[str, Any], registry: Registry) -> Pin:
    if package.get("link"):
        raise ValueError(f"{location[:80]!r} is a link")
    name, version = _name_of(location, package)
    url, digests = package.get("resolved"), str(package.get("integrity") or "").split()
    if not isinstance(url, str):
        raise ValueError(f"{name[:80]} has no address")
    try:
        hashed = next(
            (digest.removeprefix("sha512-").partition("?")[0] for digest in digests if digest[:7] == "sha512-"), ""
        )
        sha512 = base64.b64decode(hashed, validate=True).hex()
    except binascii.Error:
        sha512 = ""
    pin = Pin(name=name, version=version, url=url, sha512=sha512, at=location)
    if urlsplit(url).scheme not in ("https", "http"):
        return pin  # which will be refused
    return replace(pin, url=urlsplit(registry.own_address(url))._replace(fragment="").geturl())
