"""Install packages into a live sandbox: `install` of a sandbox and of a session.

A live sandbox is opened with its own, initially empty folder of the host, mounted read-only. Packages that are
installed later are added there while the sandbox runs. Installed versions are never replaced, since a program may have
loaded them.
"""

from __future__ import annotations

import ast
import asyncio
import functools
import logging
import os
import re
import shlex
from collections.abc import Sequence
from contextlib import AsyncExitStack
from importlib.util import find_spec
from typing import TYPE_CHECKING

from cloche.audit.recording import refusals
from cloche.core.errors import BackendUnavailable, ClocheError, InvalidRequest
from cloche.core.layers import SupportsAddedLayers
from cloche.core.loops import finish
from cloche.core.record import replace
from cloche.packages.folders import Growing, default_folder

from .live import LiveOperations
from .prepare import Prepared

if TYPE_CHECKING:
    from cloche.keeper.attach import Kept
    from cloche.packages.install import Approve

# Common options without effect here.
_IDLE_OPTIONS = frozenset({"-q", "-qq", "-qqq", "--quiet", "--user", "--no-cache-dir", "--disable-pip-version-check"})
MOST_CELL_CHARS = 1 << 14  # of a cell that is parsed
_PIP = re.compile(r"\s*[%!]\s*(?:uv\s+)?(?:python3?\s+-m\s+)?pip3?\s+install\s+(?P<words>.*)")

_LATER = "packages cannot be installed into this sandbox later: %s"

log = logging.getLogger("cloche.runtime")


@functools.cache
def has_uv() -> bool:
    """Tell whether the extra with uv is installed."""
    return find_spec("uv") is not None


def with_growing(prepared: Prepared) -> tuple[Prepared, Growing | None]:
    """Return a call whose sandbox has such a folder, and the folder; None if nothing can be installed."""
    backend = prepared.backend
    if not isinstance(backend, SupportsAddedLayers) or not has_uv():
        return prepared, None
    try:
        growing = Growing(default_folder())
    except (BackendUnavailable, OSError) as error:
        log.info(_LATER, error)
        return prepared, None
    policy = prepared.policy.with_changes(layers=(*prepared.policy.layers, growing.folder))
    try:
        backend.check_added_layers(policy)
    except BackendUnavailable as error:
        growing.close()
        log.info(_LATER, error)
        return prepared, None
    return replace(prepared, policy=policy), growing


class PackageOperations(LiveOperations):
    """Install packages in a live sandbox."""

    _existing: Kept | None
    _approve_packages: Approve | None = None

    def ask_about_packages(self, approve: Approve) -> None:
        """Let the async function `approve(names)` decide about packages that are not in the operator's
        `packages_allow`.

        Without it, they are refused. For packages of `%pip install` in a cell, it decides about everything not in that
        list, even if there is no list.
        """
        self._approve_packages = approve

    async def install(self, *packages: str) -> tuple[str, ...]:
        """Install packages and their dependencies; return everything installed: `("httpx==0.28.1", ...)`.

        `packages` are names with optional versions. Programs started afterwards find them, and so do sessions. Packages
        that are already installed keep their version. The rules are those of a run's `packages=`.

        Raises InvalidRequest for requirements that cannot be met or a sandbox that is not live, PolicyDenied,
        BackendUnavailable, StartFailed.
        """
        self._require_live("install")
        with refusals(self._prepared.settings):
            return await self._install(packages, is_cells=False)

    async def _install(self, packages: Sequence[str], *, is_cells: bool) -> tuple[str, ...]:
        from cloche.packages.install import install
        from cloche.packages.requirements import parse_requirements
        from cloche.packages.store import pins_in

        from .packages import check_adds, check_backend, check_ceiling, installing_with, shared_store, terms_of

        requirements = parse_requirements(packages)
        if not requirements:
            raise InvalidRequest("packages: no package is named; name one: install('httpx')")
        settings = self._prepared.settings
        check_backend(self._prepared, requirements)
        check_adds(self._prepared)
        if npms := [requirement.text for requirement in requirements if requirement.is_npm]:
            raise InvalidRequest(
                f"packages: {', '.join(npms)} cannot be added to an open sandbox; name them when it is opened: "
                f"Sandbox(packages={npms!r})"
            )
        check_ceiling(settings, requirements)
        folder, store = self._growing_folder(), shared_store()
        async with store.turn(os.path.basename(folder)):
            fixed = [pin.text for layer in self.policy.layers for pin in pins_in(layer) if not pin.at]
            terms = await asyncio.to_thread(terms_of, settings)
            terms = replace(terms, fixed=tuple(fixed), locked=None, approve=self._approve_packages)
            if is_cells:
                terms = replace(terms, rules=replace(terms.rules, is_list_needed=True))
            installed = await install(*installing_with(self._prepared), requirements, terms)
            await finish(asyncio.to_thread(store.add, installed.layer, folder))
        if self.audit is not None:
            self.audit.note("packages", **installed.as_dict())
        names: Sequence[str] = installed.as_dict()["installed"]
        return tuple(names)

    async def install_for_cell(self, code: str, language: str = "python", *, is_notebook: bool = False) -> str:
        """Install the packages of a cell's `%pip install` lines; return the cell with each line replaced by a print of
        the outcome.

        A model writes the cells, so only packages that the operator lists, or that a user approves, are installed. A
        cell that is not Python apart from such lines is returned unchanged, and so is one that runs as in a notebook
        where there is a network: there pip runs inside, as for a command.
        """
        runs_inside = is_notebook and self.policy.network != "off"
        if language != "python" or not self._is_live or "pip" not in code or runs_inside:
            return code
        arguments_by_line = pip_lines(code)
        lines = code.split("\n")
        for number, arguments in arguments_by_line.items():
            try:
                with refusals(self._prepared.settings, code=code):
                    installed = await self._install(_named(arguments), is_cells=True)
                message, stream = f"installed: {', '.join(installed)}", "stdout"
            except ClocheError as error:
                message, stream = str(error), "stderr"
            indent = lines[number][: len(lines[number]) - len(lines[number].lstrip())]
            lines[number] = f"{indent}print({message!r}, file=__import__('sys').{stream})"
        return "\n".join(lines)

    def _grow(self, stack: AsyncExitStack) -> None:
        """Provide a folder for added packages, until the sandbox that is about to be opened is closed."""
        if self._is_live is not False and self._existing is None:
            before = self._prepared
            self._prepared, growing = with_growing(before)
            if growing is not None:
                stack.callback(growing.close)
                stack.callback(setattr, self, "_prepared", before)

    def _growing_folder(self) -> str:
        """Return the folder for added packages. Raises BackendUnavailable if there is none."""
        from cloche.packages.requirements import EXTRA

        from .packages import shared_store

        store = shared_store()
        folder = next((layer for layer in self.policy.layers if store.is_growing(layer)), "")
        if not os.path.isdir(folder):
            raise BackendUnavailable(
                "packages: nothing can be installed in this sandbox: it was opened without uv, or by a caller with "
                "another data folder (XDG_DATA_HOME).",
                remedy=f"Install the extra ({EXTRA}), and open another one.",
            )
        return folder


def pip_lines(code: str) -> dict[int, str]:
    """Return the arguments of a cell's `%pip install` lines by line number, ignoring those in strings. Pure.

    A cell longer than MOST_CELL_CHARS is not parsed, and has none.
    """
    lines = code.split("\n") if len(code) <= MOST_CELL_CHARS else []
    arguments_by_line = {number: match["words"] for number, line in enumerate(lines) if (match := _PIP.fullmatch(line))}
    if not arguments_by_line:
        return {}
    names = {number: f"_cloche_pip_{number}_" for number in arguments_by_line}
    for number, name in names.items():
        lines[number] = lines[number][: len(lines[number]) - len(lines[number].lstrip())] + name
    try:
        tree = ast.parse("\n".join(lines))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return {}  # the session will report the syntax error
    statements = {
        node.value.id for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Name)
    }
    return {number: arguments for number, arguments in arguments_by_line.items() if names[number] in statements}


def _named(arguments: str) -> list[str]:
    """Return the requirements of a command line, without options that have no effect here. Raises InvalidRequest."""
    try:
        listed = shlex.split(arguments)
    except ValueError as error:
        raise InvalidRequest(f"packages: {arguments[:80]!r} cannot be read: {error}") from None
    return [argument for argument in listed if argument not in _IDLE_OPTIONS]
