"""The way from requirements to a usable layer: rules, store, and if the store has no layer, the steps."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from cloche.core.errors import BackendUnavailable, PolicyDenied
from cloche.core.layers import Target, packages_digest
from cloche.core.policy import Policy
from cloche.core.protocols import Backend
from cloche.core.record import dataclass, field, replace

from .build import Workshop
from .defaults import with_default_index, with_default_registry
from .fetch import fetch
from .folders import make_shown
from .index import Index, find_index
from .lock import Locked
from .npm import Npm, npm_target, resolve_locked
from .npm import resolve as resolve_npm
from .registry import Registry, find_registry
from .requirements import Requirement
from .resolve import NOT_BUILT, Pin, resolve
from .rules import Rules, refuse_unlisted
from .store import Layer, Store, layer_key, set_key
from .target import is_own, own_target
from .unpack import Unpacked, unpack, unpack_tarballs

log = logging.getLogger("cloche.packages")
# Called with the names that are in no list of what is allowed; true installs them all the same.
Approve = Callable[[Sequence[str]], Awaitable[bool]]


@dataclass(frozen=True, slots=True, kw_only=True)
class InstallTerms:
    """Set the terms of an installation: rules, index, interpreter and store.

    `locked` is the required pinned set, None to resolve one. `resolves_again` ignores earlier resolutions of the same
    requirements. `fixed` are versions of packages already present. `most_bytes` and `most_layers` bound the store, None
    without a bound: the layers used longest ago are removed. `find_npm` returns how npm is started here, for npm
    packages, and raises BackendUnavailable without npm.
    """

    rules: Rules = field(default_factory=Rules)
    index: Index = field(default_factory=find_index)
    target: Target = field(default_factory=own_target)
    store: Store = field(default_factory=Store)
    locked: Locked | None = None
    resolves_again: bool = False
    fixed: tuple[str, ...] = ()
    most_bytes: int | None = None
    most_layers: int | None = None
    approve: Approve | None = None
    find_npm: Callable[[], Npm] | None = None

    def part(self, *, is_npm: bool) -> InstallTerms:
        """Return the terms for packages of npm's, or of Python's."""
        locked = self.locked.part(is_npm=is_npm) if self.locked is not None else None
        if not is_npm:
            # A build is for the interpreter that runs it.
            rules = self.rules if is_own(self.target) else replace(self.rules, build=())
            return replace(self, locked=locked, rules=rules)
        registry = replace(find_registry(), file_hosts=self.index.file_hosts)
        return replace(self, locked=locked, index=registry, target=npm_target(), fixed=())

    def key(self, requirements: Sequence[Requirement]) -> str:
        """Return the key of a list of requirements on these terms."""
        locked = self.locked.digest if self.locked is not None else ""
        index = (self.index.url, self.index.extra, self.index.strategy)
        terms = (*index, self.rules.min_age_s, locked, sorted(self.fixed))
        built = (sorted(self.rules.build),) if self.rules.build else ()
        return set_key(requirements, self.target, (*terms, *built))

    @property
    def without_builds(self) -> InstallTerms:
        """Return the terms on which a source is built: from wheels, and with nothing that is there already."""
        return replace(self, rules=replace(self.rules, build=()), locked=None, fixed=())


@dataclass(frozen=True, slots=True, kw_only=True)
class Installed:
    """Hold a layer that is kept from being removed while this process lives; `is_new` if it was just made.

    Packages of Python and of npm have a layer each: that of npm is then `beside`.
    """

    layer: Layer
    asked: tuple[Requirement, ...]
    is_new: bool = False
    beside: tuple[Layer, ...] = ()

    @property
    def layers(self) -> tuple[Layer, ...]:
        """Return all layers."""
        return (self.layer, *self.beside)

    @property
    def pins(self) -> tuple[Pin, ...]:
        """Return the pins of all layers."""
        return tuple(pin for layer in self.layers for pin in layer.pins)

    def as_dict(self) -> dict[str, Any]:
        """Return the summary for log and results."""
        return {
            "asked": [requirement.text for requirement in self.asked],
            "layer": ", ".join(os.path.basename(layer.folder) for layer in self.layers),
            "installed": list(dict.fromkeys(pin.text for pin in self.pins)), "is_new": self.is_new,
            **({"built": list(self.built)} if self.built else {}),
        }  # fmt: skip

    @property
    def built(self) -> tuple[str, ...]:
        """Return the packages that were built from source."""
        return tuple(pin.text for pin in self.pins if pin.is_source)


async def install(
    backend: Backend, policy: Policy, requirements: Sequence[Requirement], terms: InstallTerms | None = None
) -> Installed:
    """Return the layers that meet the requirements, made now unless the store has them.

    `policy` sets the isolation of the steps, as that of the run does. Raises PolicyDenied by the rules, InvalidRequest
    for requirements that cannot be met, StartFailed and BackendUnavailable for a failure or a missing program; then no
    package was installed.
    """
    terms = InstallTerms() if terms is None else terms
    await check_rules(terms.rules, requirements, terms.approve)
    if terms.locked is not None:
        terms.locked.check(requirements, terms.target)
    installed = []
    for is_npm in (False, True):
        some = tuple(requirement for requirement in requirements if requirement.is_npm == is_npm)
        if some or (not is_npm and not requirements):
            installed.append(await _install_some(backend, policy, some, terms.part(is_npm=is_npm)))
    beside = tuple(layer for addition in installed[1:] for layer in addition.layers)
    return replace(
        installed[0], asked=tuple(requirements), beside=beside, is_new=any(addition.is_new for addition in installed)
    )


async def _install_some(
    backend: Backend, policy: Policy, requirements: tuple[Requirement, ...], terms: InstallTerms
) -> Installed:
    """Return the layer for packages of one kind."""
    key = terms.key(requirements)
    layer = None if terms.resolves_again else _find(key, terms)
    if layer is not None:
        return Installed(layer=layer, asked=tuple(requirements))
    async with terms.store.turn(key):
        layer = None if terms.resolves_again else _find(key, terms)
        if layer is not None:
            return Installed(layer=layer, asked=tuple(requirements))
        layer, is_new = await _make(backend, policy, requirements, terms)
        (digest,) = digests_of(requirements, terms.locked) or ("",)
        terms.store.note_set(key, layer, requirements, digest)
        if is_new and (terms.most_bytes is not None or terms.most_layers is not None):
            prune = partial(terms.store.prune, most_bytes=terms.most_bytes, most_layers=terms.most_layers)
            await asyncio.to_thread(prune)
        return Installed(layer=layer, asked=tuple(requirements), is_new=is_new)


def digests_of(requirements: Sequence[Requirement], locked: Locked | None = None) -> tuple[str, ...]:
    """Return the digest of Python's packages among the requirements, and that of npm's."""
    digests = []
    for is_npm in (False, True):
        texts = [requirement.text for requirement in requirements if requirement.is_npm == is_npm]
        if texts:
            digests.append(packages_digest(texts, "" if locked is None else locked.part(is_npm=is_npm).digest))
    return tuple(digests)


async def check_rules(rules: Rules, requirements: Sequence[Requirement], approve: Approve | None) -> None:
    """Raise PolicyDenied for forbidden packages, before any lookup."""
    rules.check_denied(requirement.name for requirement in requirements)
    unlisted = rules.unlisted(requirements)
    if unlisted and (approve is None or not await approve(unlisted)):
        raise refuse_unlisted(unlisted)


def _find(key: str, terms: InstallTerms) -> Layer | None:
    layer = terms.store.find(key)
    return _usable(layer, terms) if layer is not None else None


def _usable(layer: Layer, terms: InstallTerms) -> Layer | None:
    """Return a layer that is kept from being removed; None where it is gone. Raises PolicyDenied."""
    terms.rules.check_denied(pin.name for pinned in layer.pins for pin in (pinned, *pinned.build))
    return layer if terms.store.use(layer) else None


async def _make(
    backend: Backend, policy: Policy, requirements: Sequence[Requirement], terms: InstallTerms
) -> tuple[Layer, bool]:
    terms = await _with_default(backend, policy, requirements, terms)
    async with _workshop(backend, policy, terms) as workshop:
        pins = await _pinned(backend, policy, requirements, terms, workshop)
        return await _layer_of(backend, policy, pins, terms, workshop)


@asynccontextmanager
async def _workshop(backend: Backend, policy: Policy, terms: InstallTerms) -> AsyncIterator[Workshop | None]:
    """Give what builds from source, where that may be."""
    if isinstance(terms.index, Registry) or not terms.rules.build:
        yield None
        return
    wheels = terms.without_builds

    async def layer_for(pin: Pin, requirements: Sequence[Requirement]) -> Layer:
        locked = terms.locked.of_build(pin) if terms.locked is not None else None
        return (await _install_some(backend, policy, tuple(requirements), replace(wheels, locked=locked))).layer

    async with terms.store.making() as folder:
        yield Workshop(
            backend=backend, policy=policy, index=terms.index, target=terms.target, folder=folder,
            layer_for=layer_for,
        )  # fmt: skip


async def _layer_of(
    backend: Backend, policy: Policy, pins: Sequence[Pin], terms: InstallTerms, workshop: Workshop | None = None
) -> tuple[Layer, bool]:
    """Return the layer of the pins, and whether it was made now."""
    key = layer_key(pins, terms.target)
    layer = terms.store.find_content(key)
    layer = _usable(layer, terms) if layer is not None else None
    if layer is not None:
        return layer, False
    while True:
        layer = await _make_layer(backend, policy, pins, key, terms, workshop)
        if terms.store.use(layer):  # else somebody removed it at once
            log.debug("installed %d packages in %s", len(pins), layer.folder)
            return layer, True


async def _with_default(
    backend: Backend, policy: Policy, requirements: Sequence[Requirement], terms: InstallTerms
) -> InstallTerms:
    """Return the terms with the client's own default index or registry."""
    if not isinstance(terms.index, Registry):
        if not requirements:
            return terms
        return replace(terms, index=await with_default_index(backend, policy, terms.index, requirements[0].name))
    return replace(terms, index=await with_default_registry(terms.index, _npm(terms)))


def _npm(terms: InstallTerms) -> Npm:
    if terms.find_npm is None:
        raise BackendUnavailable("packages: npm cannot be started here.")
    return terms.find_npm()


async def _pinned(
    backend: Backend,
    policy: Policy,
    requirements: Sequence[Requirement],
    terms: InstallTerms,
    workshop: Workshop | None,
) -> tuple[Pin, ...]:
    if isinstance(terms.index, Registry):
        return await _pinned_npm(backend, policy, requirements, terms, terms.index)
    locked = terms.locked
    pinned = locked.pins if locked is not None else ()
    if refused := sorted(pin.name for pin in pinned if pin.is_source and not terms.rules.may_build(pin.name)):
        raise PolicyDenied(f"packages: the lock file has {', '.join(refused)} as a source; {NOT_BUILT}")
    build = workshop.build if workshop is not None else None
    pins = await resolve(
        backend, policy, requirements, terms.target, terms.index, terms.rules, terms.fixed, build, pinned
    )
    if locked is not None:
        locked.check_resolved(pins)
    return pins


async def _pinned_npm(
    backend: Backend, policy: Policy, requirements: Sequence[Requirement], terms: InstallTerms, registry: Registry
) -> tuple[Pin, ...]:
    if terms.locked is not None:
        return await resolve_locked(backend, policy, requirements, terms.locked, _npm(terms), registry, terms.rules)
    return await resolve_npm(backend, policy, requirements, _npm(terms), registry, terms.rules)


async def _make_layer(
    backend: Backend, policy: Policy, pins: Sequence[Pin], key: str, terms: InstallTerms, workshop: Workshop | None
) -> Layer:
    store = terms.store
    async with store.making() as folder:
        wheels_folder, layer_folder, final = f"{folder}/wheels", f"{folder}/layer", store.place_for(key)
        shown = f"{terms.target.folder}/{key}" if terms.target.folder else final
        make_shown(wheels_folder)
        make_shown(layer_folder)
        built = [await _built(pin, workshop, wheels_folder) for pin in pins if pin.is_source]
        pinned = [pin for pin in pins if not pin.is_source]
        unpacked = await _unpacked(backend, policy, pinned, built, terms, wheels_folder, layer_folder, shown)
        facts = {"modules": sorted(unpacked.modules), "files": unpacked.files, "bytes": unpacked.total_bytes}
        return await store.publish(layer_folder, final, key=key, pins=pins, target=terms.target, facts=facts)


async def _built(pin: Pin, workshop: Workshop | None, folder: str) -> str:
    """Return the path of a wheel that was built, below a folder."""
    if workshop is None:
        raise PolicyDenied(f"packages: {pin.text} is a source; {NOT_BUILT}")
    wheel_folder = os.path.join(folder, f"built-{pin.name}")
    make_shown(wheel_folder)
    return shutil.copy(workshop.wheel(pin), wheel_folder)


async def _unpacked(
    backend: Backend, policy: Policy, pins: Sequence[Pin], built: Sequence[str], terms: InstallTerms, folder: str,
    layer_folder: str, shown: str,
) -> Unpacked:  # fmt: skip
    """Download into a folder, and unpack for programs that will find it as `shown`."""
    if not isinstance(terms.index, Registry):
        wheels = await fetch(backend, policy, pins, terms.index, folder)
        return await unpack(backend, policy, (*wheels, *built), folder, layer_folder, shown, terms.target)
    different = {(pin.url, pin.sha512): pin for pin in pins}  # one may be in several places
    files = await fetch(backend, policy, tuple(different.values()), terms.index, folder)
    paths = dict(zip(different, files, strict=True))
    placed = [(paths[pin.url, pin.sha512], pin.at) for pin in sorted(pins, key=lambda pin: (pin.at.count("/"), pin.at))]
    return await unpack_tarballs(backend, policy, placed, folder, layer_folder)
