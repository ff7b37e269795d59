"""Packages of a run: its requirements are installed as a layer before the run starts.

A prepared set is cached with its settings, so that the next run with it only checks that the layer still exists.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import sysconfig
from collections.abc import Iterable, Mapping
from functools import partial
from importlib.machinery import PathFinder
from typing import Unpack, cast

from cloche.audit.recording import refusals
from cloche.config.keys import Settings
from cloche.config.options import SandboxOptions
from cloche.config.origins import DEFAULT
from cloche.core.ceilings import packages_above
from cloche.core.enforcement import Level
from cloche.core.errors import BackendUnavailable, InvalidRequest, PolicyDenied
from cloche.core.layers import (
    InstallsPackages,
    Interpreter,
    SupportsAddedLayers,
    SupportsLayers,
    SupportsNodeModules,
    SupportsOwnInterpreter,
)
from cloche.core.loops import become_task
from cloche.core.policy import Policy
from cloche.core.protocols import Backend
from cloche.core.record import dataclass, replace
from cloche.core.suppressed import suppress_logged
from cloche.packages.index import find_index
from cloche.packages.install import Approve, Installed, InstallTerms, check_rules, digests_of, install
from cloche.packages.lock import read_lock, read_text
from cloche.packages.npm import Npm
from cloche.packages.npm_names import PREFIX, is_npm
from cloche.packages.requirements import Requirement, check_python, parse_requirements, read_header, resolve_auto
from cloche.packages.rules import Rules
from cloche.packages.store import Layer, Store
from cloche.packages.target import own_target

from .inputs import Files
from .prepare import Prepared, prepare_in_thread
from .registry import backend_named, npm_programs, prune_copies

log = logging.getLogger("cloche.runtime")
LOCAL = "local"
MOST_PREPARED = 64
AUTO = "auto"
SHORT_CODE_CHARS = 16 << 10  # parsed without a thread
NPM_LANGUAGES = frozenset({"javascript", "typescript"})
_prepared: dict[tuple[int, tuple[str, ...]], _Ready] = {}
_stores: dict[str, Store] = {}
os.register_at_fork(after_in_child=_prepared.clear)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ready:
    """A prepared call with its layer. `before` keeps its object alive, so that the id in the key stays valid."""

    before: Prepared
    after: Prepared
    installed: Installed
    store: Store


async def with_packages(
    prepared: Prepared,
    *,
    code: str | None = None,
    language: str = "python",
    files: Files | None = None,
    approve: Approve | None = None,
    is_own_list: bool = False,
) -> Prepared:
    """Return a call with a layer of the packages that its policy asks for, installing what is missing.

    If the operator has a list of allowed packages, `approve` decides about others. `is_own_list` says that packages
    given as an argument are for this one program: plain names then belong to its language. Raises the errors of
    `install`; the program has not run then.
    """
    packages = prepared.policy.packages
    if not packages:
        return prepared
    if isinstance(prepared.backend, InstallsPackages):
        with refusals(prepared.settings, language=language, code=code):
            return await _for_installing_there(prepared, _named(prepared, language, is_own_list=is_own_list), approve)
    with refusals(prepared.settings, language=language, code=code):
        named = _named(prepared, language, is_own_list=is_own_list)
        interpreter = await _interpreter_of(prepared, named)
        requirements = named or await _find_in_code(prepared, code, language, files, interpreter)
        if not requirements:
            return replace(prepared, policy=prepared.policy.with_changes(packages=()))
        ready = _find_ready(prepared, requirements)
        if ready is None:
            ready = await _make_ready(prepared, requirements, approve, interpreter)
    if prepared.audit is not None:
        prepared.audit.record("packages", **ready.installed.as_dict())
    return ready.after


async def _for_installing_there(
    prepared: Prepared, named: tuple[Requirement, ...], approve: Approve | None
) -> Prepared:
    """Return a call whose backend installs the packages, within the rules of this host; with the lock, if one is named.

    Raises PolicyDenied, InvalidRequest.
    """
    settings = prepared.settings
    check_ceiling(settings, named)
    await check_rules(rules_of(settings), named, approve)
    if not settings.packages_lock:
        return replace(prepared, policy=prepared.policy.with_changes(digests=digests_of(named)))
    await become_task()
    text = await asyncio.to_thread(read_text, settings.packages_lock)
    digests = digests_of(named, read_lock(text))
    return replace(prepared, policy=prepared.policy.with_changes(packages_lock=text, digests=digests))


def _named(prepared: Prepared, language: str, *, is_own_list: bool) -> tuple[Requirement, ...]:
    """Return the requirements that are named; empty if they are to be found in the code."""
    packages = prepared.policy.packages
    if packages == AUTO:
        return ()
    is_argument = prepared.settings.origins.get("packages", DEFAULT).first.kind == "argument"
    return parsed(_for_language(tuple(packages), language) if is_own_list and is_argument else tuple(packages))


async def _interpreter_of(prepared: Prepared, named: tuple[Requirement, ...]) -> Interpreter | None:
    """Return the interpreter that runs Python if it is not the caller's. Raises BackendUnavailable."""
    backend = prepared.backend
    if not isinstance(backend, SupportsOwnInterpreter):
        return None
    check_backend(prepared, named)  # before any download
    await become_task()
    return await asyncio.to_thread(backend.find_interpreter)


async def _find_in_code(
    prepared: Prepared, code: str | None, language: str, files: Files | None, interpreter: Interpreter | None
) -> tuple[Requirement, ...]:
    if prepared.policy.packages != AUTO or code is None or language != "python":
        return ()
    look = partial(_auto, code, _modules_of(files), prepared.settings.packages_allow, interpreter)
    if len(code) <= SHORT_CODE_CHARS:
        return look()
    await become_task()
    return await asyncio.to_thread(look)


def _for_language(lines: tuple[str, ...], language: str) -> tuple[str, ...]:
    """Return requirements for a program of this language: plain names are npm's if Node runs it.

    It applies only to requirements given for this program; a list in a configuration file is always for Python.
    """
    if language not in NPM_LANGUAGES:
        return lines
    return tuple(line if is_npm(line.strip()) else f"{PREFIX}{line.strip()}" for line in lines)


@functools.lru_cache(maxsize=64)
def parsed(lines: tuple[str, ...]) -> tuple[Requirement, ...]:
    """Return parsed requirements, cached. Raises InvalidRequest."""
    return parse_requirements(lines)


@functools.lru_cache(maxsize=64)
def _auto(
    code: str, own_modules: frozenset[str], allowed: tuple[str, ...], interpreter: Interpreter | None
) -> tuple[Requirement, ...]:
    provides = partial(_is_provided, interpreter=interpreter)
    requirements = resolve_auto(code, provides=provides, given=own_modules, allowed=allowed)
    header = read_header(code)
    if header is not None:
        check_python(header, (interpreter.target if interpreter is not None else own_target()).version)
    return requirements


def _is_provided(module: str, *, interpreter: Interpreter | None) -> bool:
    """Tell whether the guests' interpreter has a module in its own site-packages."""
    if interpreter is not None:
        return module in interpreter.modules
    folders = [sysconfig.get_path(name) for name in ("purelib", "platlib")]
    return PathFinder.find_spec(module, folders) is not None


def _modules_of(files: Files | None) -> frozenset[str]:
    names: Iterable[object] = files.keys() if isinstance(files, Mapping) else (files or ())
    paths = [os.fspath(name) if isinstance(name, os.PathLike) else str(name) for name in names]
    last = [os.path.basename(path.rstrip("/")) for path in paths]
    first = [path.lstrip("/").removeprefix("workspace/").partition("/")[0] for path in paths]
    return frozenset(name.removesuffix(".py") for name in (*last, *first))


def _find_ready(prepared: Prepared, requirements: tuple[Requirement, ...]) -> _Ready | None:
    """Return the cached result for the same call if its layer still exists."""
    key = (id(prepared), tuple(requirement.text for requirement in requirements))
    ready = _prepared.get(key)
    if ready is None or ready.before is not prepared or prepared.settings.packages_lock:
        return None  # the lock file may have changed
    if rules_of(prepared.settings).unlisted(requirements):
        return None  # approval is needed each time
    if not all(map(ready.store.use, ready.installed.layers)):
        del _prepared[key]
        return None
    return ready


async def _make_ready(
    prepared: Prepared,
    requirements: tuple[Requirement, ...],
    approve: Approve | None,
    interpreter: Interpreter | None,
) -> _Ready:
    check_backend(prepared, requirements)
    check_ceiling(prepared.settings, requirements)
    await become_task()
    terms = replace(await asyncio.to_thread(terms_of, prepared.settings, interpreter), approve=approve)
    installed = await install(*installing_with(prepared), requirements, terms)
    if installed.is_new:  # the store may have pruned layers, so prune their copies
        await asyncio.to_thread(_prune_copies, prepared.backend, terms.store)
    policy = _with_layer(prepared.policy, installed, interpreter)
    notes = {**prepared.notes, "packages": installed.as_dict()["installed"]}
    if installed.built:
        notes["packages_built"] = list(installed.built)
    after = replace(prepared, policy=policy, notes=notes)
    ready = _Ready(before=prepared, after=after, installed=replace(installed, is_new=False), store=terms.store)
    if len(_prepared) >= MOST_PREPARED:
        _prepared.clear()
    _prepared[id(prepared), tuple(requirement.text for requirement in requirements)] = ready
    return replace(ready, installed=installed)


def installing_with(prepared: Prepared) -> tuple[Backend, Policy]:
    """Return the backend whose sandboxes install packages, and their policy. Raises BackendUnavailable.

    Backends other than `local` use the local jail on this host. No package code runs there, unless the operator allows
    building from source.
    """
    policy = prepared.policy
    if prepared.backend.name == LOCAL:
        return prepared.backend, policy
    jail = replace(policy, level=Level.JAIL, runtime=None, users=False, require_level=None, require_controls=())
    return backend_named(LOCAL), jail


def _prune_copies(backend: Backend, store: Store) -> None:
    if isinstance(backend, SupportsOwnInterpreter):
        with suppress_logged(
            log, "copies of layers that are gone stay, until cloche packages prune", BackendUnavailable
        ):
            backend.prune_layers(_layers_of(store))


def _with_layer(policy: Policy, installed: Installed, interpreter: Interpreter | None) -> Policy:
    """Return the policy with the layers. Modules are not preloaded if a layer replaces one of the interpreter's own."""
    modules = [module for layer in installed.layers for module in layer.modules]
    is_provided = partial(_is_provided, interpreter=interpreter)
    replaces = bool(policy.preload) and any(map(is_provided, modules))
    preload = () if replaces else policy.preload
    folders = [layer.folder for layer in installed.layers]
    return policy.with_changes(layers=(*policy.layers, *folders), packages=(), preload=preload)


def check_backend(prepared: Prepared, requirements: Iterable[Requirement] = ()) -> None:
    """Raise BackendUnavailable for a backend without layers, or without npm layers if one is required."""
    backend = prepared.backend
    if not isinstance(backend, SupportsLayers):
        raise BackendUnavailable(
            f"packages: backend {backend.name!r} cannot use them in this version.",
            remedy='Use backend "local", or an image that has them.',
        )
    cast("SupportsLayers", backend).check_layers(prepared.policy)
    if not any(requirement.is_npm for requirement in requirements):
        return
    if not isinstance(backend, SupportsNodeModules):
        raise BackendUnavailable(
            f"packages: backend {prepared.backend.name!r} cannot use packages of npm in this version.",
            remedy='Use backend "local", or an image that has them.',
        )
    cast("SupportsNodeModules", backend).check_node_modules(prepared.policy)


def check_adds(prepared: Prepared) -> None:
    """Raise BackendUnavailable for a backend whose live sandboxes cannot get more packages."""
    backend = prepared.backend
    if not isinstance(backend, SupportsAddedLayers):
        raise BackendUnavailable(
            f"packages: nothing can be added to a live sandbox of backend {backend.name!r}.",
            remedy='Name them when it is opened (packages=[...]); or use backend "local".',
        )
    backend.check_added_layers(prepared.policy)


def check_ceiling(settings: Settings, requirements: Iterable[Requirement]) -> None:
    """Raise PolicyDenied for packages beyond the operator's ceiling."""
    ceiling = settings.ceilings.get("packages")
    above = (
        packages_above(tuple(requirement.text for requirement in requirements), ceiling) if ceiling is not None else ""
    )
    if above:
        raise PolicyDenied(
            f"packages: {above} is above the operator's ceiling (ceilings.packages: "
            f"{', '.join(ceiling or ()) or 'none'}); ask for less, or have the operator raise it"
        )


def rules_of(settings: Settings) -> Rules:
    """Return the operator's rules for packages."""
    return Rules(
        allow=settings.packages_allow, deny=settings.packages_deny, min_age_s=settings.packages_min_age_s,
        build=settings.packages_build,
    )  # fmt: skip


def terms_of(settings: Settings, interpreter: Interpreter | None = None) -> InstallTerms:
    """Return the terms for installing packages with these settings; blocks. Raises InvalidRequest."""
    rules = rules_of(settings)
    locked = read_lock(settings.packages_lock) if settings.packages_lock else None
    index = replace(find_index(), file_hosts=settings.packages_hosts)
    target = interpreter.target if interpreter is not None else own_target()
    return InstallTerms(
        rules=rules, index=index, target=target, store=shared_store(), locked=locked, find_npm=_find_npm,
        most_bytes=settings.packages_keep_bytes, most_layers=settings.packages_keep_count,
    )  # fmt: skip


def _find_npm() -> Npm:
    try:
        programs, shown = npm_programs()
    except BackendUnavailable as error:
        why = f"packages of npm are resolved by npm, and {error.reason}"
        raise BackendUnavailable(why, remedy=error.remedy) from None
    node, npm = programs["node"], programs["npm"]
    is_script = npm.endswith((".js", ".cjs", ".mjs"))
    return Npm(argv=(node, npm) if is_script else (npm,), shown=shown)


async def install_ahead(*, upgrade: bool = False, **options: Unpack[SandboxOptions]) -> Installed:
    """Install the configured packages for later runs with these options; `upgrade` resolves versions again.

    Raises the errors of `install`, and InvalidRequest if no package is named.
    """
    prepared = await prepare_in_thread(**options)
    check_not_auto(prepared.policy)
    requirements = parsed(tuple(prepared.policy.packages))
    if not requirements:
        raise InvalidRequest("packages: no package is named; name some, or give a file of requirements")
    check_backend(prepared, requirements)
    with refusals(prepared.settings):
        interpreter = await _interpreter_of(prepared, requirements)
        await become_task()
        settled = await asyncio.to_thread(terms_of, prepared.settings, interpreter)
        terms = replace(settled, resolves_again=upgrade)
        installed = await install(*installing_with(prepared), requirements, terms)
    if prepared.audit is not None:
        prepared.audit.note("packages", **installed.as_dict())
    return installed


def prune(
    *, most_bytes: int | None = None, most_layers: int | None = None, unused_s: float | None = None
) -> tuple[list[Layer], list[str]]:
    """Remove layers as `Store.prune` does, and backends' copies of removed layers; return the layers, and a line per
    copy.
    """
    store = Store()
    removed = store.prune(most_bytes=most_bytes, most_layers=most_layers, unused_s=unused_s)
    return removed, prune_copies(_layers_of(store))


def _layers_of(store: Store) -> str:
    return os.path.join(store.folder, "layers")


def shared_store() -> Store:
    """Return this process's store, which keeps its layers in use."""
    store = Store()
    return _stores.setdefault(store.folder, store)


def check_not_auto(policy: Policy) -> None:
    """Raise InvalidRequest for `packages: auto` in a sandbox, which has the code of many runs."""
    if policy.packages == AUTO:
        raise InvalidRequest(
            'packages: "auto" looks at the code of one run, and a sandbox has many; name them, or use cloche.run'
        )
