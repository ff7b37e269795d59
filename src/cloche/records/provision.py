"""Provision a workspace's development environment: a kept sandbox, the workspace's files, its set-up commands.

Theory of operation: `tighten` is pure. A manifest's limits and hosts apply where they are stricter than the operator's
settings; looser ones are ignored, with a note. `pip` and `npm` never run: their packages are installed as layers, from
the operator's index and by the operator's rules. All other commands run in the sandbox, with its network. A failed step
does not end the others: the sandbox stays, and the steps report what is missing.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, Unpack, cast

from cloche.config.keys import LIMIT_FIELDS, YAML_READERS, Settings, format_limit
from cloche.config.options import SandboxOptions
from cloche.config.settings import given_options, load_settings
from cloche.core.ceilings import covers, mode_rank
from cloche.core.errors import ClocheError, InvalidRequest
from cloche.core.escape import escape
from cloche.core.network import parse_rule
from cloche.core.record import dataclass, field
from cloche.core.result import Result
from cloche.execution.sandbox import AsyncSandbox
from cloche.execution.secrets import with_limits
from cloche.packages.requirements import read_requirements_file

from .dependencies import read_file
from .dependency_files import MOST_LOCK_BYTES, MOST_MANIFEST_BYTES, mapping, read_json, read_toml
from .devenv import INDEX, LIMITS, DevEnvManifest, Setup

if TYPE_CHECKING:
    from cloche.execution.naming import Duration

KEEP = "1h"
LEFT_OUT = (".git", "node_modules", "__pycache__", ".DS_Store")
MOST_ERROR_CHARS = 600
NO_SUCH_PROGRAM = 127


@dataclass(frozen=True, slots=True, kw_only=True)
class ProvisionStep:
    """Hold one set-up command and its outcome."""

    run: tuple[str, ...]
    seconds: float
    error: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Return it in the wire's format, with `error` only for a failure."""
        document = {"run": list(self.run), "status": "error" if self.error else "ok", "seconds": round(self.seconds, 3)}
        return {**document, "error": self.error} if self.error else document


@dataclass(frozen=True, slots=True, kw_only=True)
class Provisioned:
    """Hold the name of the kept sandbox, the steps, and notes about ignored parts of the manifest."""

    sandbox: str
    steps: tuple[ProvisionStep, ...]
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Tell whether every step succeeded."""
        return not any(step.error for step in self.steps)

    def as_dict(self) -> dict[str, Any]:
        """Return it in the wire's format."""
        return {
            "sandbox": self.sandbox, "steps": [step.as_dict() for step in self.steps], "notes": list(self.notes),
        }  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestTerms:
    """Hold the sandbox's options that a manifest lowers, and notes about ignored ones."""

    options: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def tighten(manifest: DevEnvManifest, settings: Settings) -> ManifestTerms:
    """Return the operator's settings that a manifest lowers. Pure."""
    options: dict[str, Any] = {}
    notes: list[str] = []
    for spelled, written in manifest.limits.items():
        key = LIMITS[spelled]
        limit = YAML_READERS[key](written, name=f"limits.{spelled}")[key]
        held = getattr(settings.limits, LIMIT_FIELDS[key])
        if limit < held:
            options[key] = limit
        elif limit > held:
            notes.append(f"limits.{spelled}: {written} is more than {format_limit(key, held)}, the limit that applies")
    commands = [step for step in manifest.setup if _layered(step) is None]
    networks = [step.network for step in commands]
    if commands and all(hosts is not None and INDEX not in hosts for hosts in networks):
        _tighten_network([host for hosts in networks for host in hosts or ()], settings, options, notes)
    return ManifestTerms(options=options, notes=tuple(notes))


def _tighten_network(hosts: Sequence[str], settings: Settings, options: dict[str, Any], notes: list[str]) -> None:
    """Allow only those of a manifest's hosts that the operator's rules allow."""
    own = settings.policy.network_rules()
    reached = []
    for host in dict.fromkeys(hosts):
        if covers(own, parse_rule(host)):
            reached.append(host)
        else:
            notes.append(f"network: {host} is not in the operator's allowlist, and is refused")
    if reached:
        options |= {"network": "allowlist", "network_allow": tuple(reached)}
    elif mode_rank(own.mode):
        options["network"] = "off"


async def provision(
    manifest: DevEnvManifest,
    *,
    folder: int,
    name: str | None = None,
    keep: Duration = KEEP,
    lifetime: Duration | None = None,
    idle: Duration | None = None,
    check_packages: Callable[[Sequence[str]], None] = lambda _: None,
    **options: Unpack[SandboxOptions],
) -> Provisioned:
    """Open a kept sandbox with the files of the workspace behind a descriptor, and set it up.

    `options` are the operator's own, as for `Sandbox`. `.git`, `node_modules`, `__pycache__` and `.DS_Store` are not
    copied. The manifest's variables apply to its set-up commands. `check_packages` raises PolicyDenied for forbidden
    requirements, and their step fails. On an error nothing is left behind. Raises the errors of opening a sandbox, and
    InvalidRequest for a workspace that is too large for it.
    """
    settings = await asyncio.to_thread(load_settings, given_options(options))
    terms = tighten(manifest, settings)
    named = name or _sandbox_name(manifest.name)
    run_options: dict[str, Any] = {**options, **terms.options}
    if "network" in terms.options:
        run_options.pop("network_ports", None)
    if "network_allow" in terms.options and options.get("secrets"):
        run_options["network_allow"] = with_limits(terms.options["network_allow"], settings.policy)
    kept_options = {"name": named, "keep": keep, "lifetime": lifetime, "idle": idle, "env": manifest.env}
    async with AsyncExitStack() as stack:
        opening = _Opening(
            folder=folder, options={**run_options, **kept_options}, own_packages=settings.policy.packages,
            check=check_packages,
        )  # fmt: skip
        sandbox = await opening.open(manifest.setup, stack)
        try:
            left_out = await _upload(sandbox, folder)
            steps = [await _run_step(step, sandbox, opening) for step in manifest.setup]
        except BaseException:
            await sandbox.kill()
            raise
    return Provisioned(sandbox=named, steps=tuple(steps), notes=(*terms.notes, *left_out))


def _sandbox_name(name: str) -> str:
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:48].rstrip("-")
    return f"{slug or 'workspace'}-{secrets.token_hex(4)}"


class _Opening:
    """Open the sandbox with the packages of npm, which can only be added at creation; without them if that fails."""

    def __init__(
        self, *, folder: int, options: Mapping[str, Any], own_packages: Sequence[str] | str,
        check: Callable[[Sequence[str]], None],
    ) -> None:  # fmt: skip
        self.folder, self._options, self._own, self.check = folder, options, own_packages, check
        self.done: dict[tuple[str, ...], ProvisionStep] = {}

    async def open(self, setup: Sequence[Setup], stack: AsyncExitStack) -> AsyncSandbox:
        """Return the open sandbox. `done` has the steps that it covers."""
        steps = [step for step in setup if _layered(step) is _npm_requirements]
        if steps and self._own != "auto":  # a live sandbox cannot be opened with it
            started = time.monotonic()
            try:
                requirements = [line for step in steps for line in _npm_requirements(step, self.folder)]
                self.check(requirements)
                sandbox = await self._enter(stack, packages=(*self._own, *requirements))
            except ClocheError as error:
                self._note(steps, started, escape(str(error)))
            else:
                self._note(steps, started, "")
                return sandbox
        return await self._enter(stack)

    async def _enter(self, stack: AsyncExitStack, **more: object) -> AsyncSandbox:
        sandbox = await asyncio.to_thread(partial(AsyncSandbox, **cast("Any", {**self._options, **more})))
        return await stack.enter_async_context(sandbox)

    def _note(self, steps: Sequence[Setup], started: float, error: str) -> None:
        seconds = time.monotonic() - started
        self.done.update({step.run: ProvisionStep(run=step.run, seconds=seconds, error=error) for step in steps})


async def _upload(sandbox: AsyncSandbox, folder: int) -> tuple[str, ...]:
    path = f"/proc/self/fd/{folder}"  # the opened folder, even if another has its path now
    try:
        count = (await sandbox.upload(path, "/workspace", leave_out=LEFT_OUT)).left_out
    except InvalidRequest as error:
        raise InvalidRequest(str(error).replace(path, "the workspace").replace("upload: ", "workspace: ")) from error
    return (f"workspace: {count} entries are not copied (links that lead out, and special files)",) if count else ()


async def _run_step(step: Setup, sandbox: AsyncSandbox, opening: _Opening) -> ProvisionStep:
    if step.run in opening.done:
        return opening.done[step.run]
    started = time.monotonic()
    try:
        find = _layered(step)
        error = await (_command_error(step, sandbox) if find is None else _install(find, step, sandbox, opening))
    except ClocheError as failure:
        error = escape(str(failure))
    return ProvisionStep(run=step.run, seconds=time.monotonic() - started, error=error[:MOST_ERROR_CHARS])


async def _install(find: Find, step: Setup, sandbox: AsyncSandbox, opening: _Opening) -> str:
    lines = await asyncio.to_thread(find, step, opening.folder)
    opening.check(lines)
    if lines:
        await sandbox.install(*lines)
    return ""


async def _command_error(step: Setup, sandbox: AsyncSandbox) -> str:
    """Run a command; return its error, empty on success."""
    result = await sandbox.exec(step.run)
    if result.ok:
        return ""
    if result.exit_code == NO_SUCH_PROGRAM and not (await sandbox.exec(["sh", "-c", _IS_THERE, "sh", step.run[0]])).ok:
        return (
            f"there is no {escape(step.run[0])} in this sandbox; install it on this host in a folder that the "
            "sandbox shows "
            "(/usr/local/bin), choose a backend with an image that has it, or remove the step from the manifest"
        )
    return _what_failed(result)


def _what_failed(result: Result) -> str:
    output = (result.stderr or result.stdout).strip()[-MOST_ERROR_CHARS // 2 :]
    return escape(f"{result.status}, exit code {result.exit_code}{f': {output}' if output else ''}")


_IS_THERE = 'command -v -- "$1" >/dev/null'


# What pip and npm would install, as requirements of layers.

Find = Callable[[Setup, int], Sequence[str]]


def _layered(step: Setup) -> Find | None:
    """Return a function that finds the requirements of a step installed as layers, None for a step to run."""
    command = step.run
    if command[:2] == ("pip", "install"):
        return _pip_requirements
    return _npm_requirements if command[0] == "npm" and command[1:] in (("ci",), ("install",)) else None


def _pip_requirements(step: Setup, folder: int) -> Sequence[str]:
    arguments = step.run[2:]
    if arguments == (".",):
        project = mapping(_parsed(folder, "pyproject.toml", read_toml, MOST_MANIFEST_BYTES).get("project"))
        listed = project.get("dependencies", [])
        return [line for line in listed if isinstance(line, str)] if isinstance(listed, list) else []
    if len(arguments) == 2 and arguments[0] in ("-r", "--requirement") and "/" not in arguments[1]:
        data = _read(folder, arguments[1], MOST_MANIFEST_BYTES)
        return read_requirements_file(data.decode("utf-8", "replace"), file=arguments[1])
    return arguments  # names of packages; an option is refused as an invalid name


def _npm_requirements(step: Setup, folder: int) -> Sequence[str]:
    """Return the direct dependencies; for `npm ci` in the versions of the lock file."""
    manifest = _parsed(folder, "package.json", read_json, MOST_MANIFEST_BYTES)
    requirements = {**mapping(manifest.get("dependencies")), **mapping(manifest.get("devDependencies"))}
    if step.run[1] == "ci":
        locked = mapping(_parsed(folder, "package-lock.json", read_json, MOST_LOCK_BYTES).get("packages"))
        versions = {name: mapping(locked.get(f"node_modules/{name}")).get("version") for name in requirements}
        requirements |= {name: version for name, version in versions.items() if isinstance(version, str)}
    return [f"npm:{name}@{text}" if text not in ("", "*") else f"npm:{name}" for name, text in requirements.items()]


def _read(folder: int, name: str, max_bytes: int) -> bytes:
    notes: list[str] = []
    data = read_file(folder, name, max_bytes, notes)
    if data is None:
        raise InvalidRequest(notes[0] if notes else f"{escape(name)}: there is no such file in the workspace")
    return data


def _parsed(folder: int, name: str, parse: Callable[[bytes], Mapping[str, Any]], max_bytes: int) -> Mapping[str, Any]:
    try:
        return parse(_read(folder, name, max_bytes))
    except InvalidRequest:
        raise
    except ValueError as error:
        raise InvalidRequest(f"{name}: {error}") from None
