"""Packages that are installed into a sandbox that lives: `install` of a sandbox and of a session.

A sandbox that lives is opened with an empty folder of the host, shown read-only, that belongs to it alone. What is
installed later gets names there, while the sandbox runs; versions that are there already stay, as a program may have
loaded them.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import TYPE_CHECKING

from cloche.core.errors import BackendUnavailable, InvalidRequest
from cloche.core.protocols import SupportsLayers
from cloche.packages.folders import Growing, default_folder

from .live import LiveOperations
from .prepare import Prepared

if TYPE_CHECKING:
    from cloche.keeper.attach import Kept
    from cloche.packages.install import Installed

log = logging.getLogger("cloche.runtime")


def with_growing(prepared: Prepared) -> tuple[Prepared, Growing | None]:
    """Return a call whose sandbox has such a folder, and the folder; none where the backend shows none."""
    if not isinstance(prepared.backend, SupportsLayers):
        return prepared, None
    try:
        growing = Growing(default_folder())
    except (BackendUnavailable, OSError) as error:
        log.info("nothing can be installed in this sandbox later: %s", error)
        return prepared, None
    layers = (*prepared.policy.layers, growing.folder)
    return replace(prepared, policy=prepared.policy.with_changes(layers=layers)), growing


class PackageOperations(LiveOperations):
    """Install packages in a sandbox that lives."""

    _kept: Kept | None

    async def install(self, *packages: str) -> tuple[str, ...]:
        """Install packages, with what they need, and return all that was: `("httpx==0.28.1", ...)`.

        `packages` are names with versions. Programs that start from now on find them, and so do sessions. What is there
        already keeps its version. It is installed as `packages=` of a run is, by the same rules.

        Raises InvalidRequest for what cannot be met, also where the sandbox does not live, PolicyDenied,
        BackendUnavailable, StartFailed.
        """
        from cloche.packages.install import install
        from cloche.packages.requirements import parse_requirements
        from cloche.packages.store import pins_in

        from .packages import check_backend, shared_store, terms_of

        self._require_live("install")
        asked = parse_requirements(packages)
        if not asked:
            raise InvalidRequest("packages: none is named; name some: install('httpx')")
        check_backend(self._prepared)
        folder, store = self._growing_folder(), shared_store()
        async with store.turn(os.path.basename(folder)):
            fixed = [f"{pin.name}=={pin.version}" for layer in self.policy.layers for pin in pins_in(layer)]
            terms = replace(terms_of(self._prepared.settings), fixed=tuple(fixed), locked=None)
            installed = await install(self._prepared.backend, self.policy, asked, terms)
            store.add(installed.layer, folder)
        self._note_installed(installed)
        found: Sequence[str] = installed.as_dict()["installed"]
        return tuple(found)

    def _grow(self, stack: AsyncExitStack) -> None:
        """Have a folder to which packages can be added, until the sandbox that is about to be opened is closed."""
        if self._is_live is not False and self._kept is None:
            before = self._prepared
            self._prepared, growing = with_growing(before)
            if growing is not None:
                stack.callback(growing.close)
                stack.callback(setattr, self, "_prepared", before)

    def _growing_folder(self) -> str:
        """Return the folder to which packages are added. Raises BackendUnavailable where there is none."""
        from .packages import shared_store

        store = shared_store()
        found = next((layer for layer in self.policy.layers if store.is_growing(layer)), "")
        if not os.path.isdir(found):
            raise BackendUnavailable(
                "packages: nothing can be installed in this sandbox any more.",
                remedy="Open it with packages=[...], which needs the same folder of user data as this call has.",
            )
        return found

    def _note_installed(self, installed: Installed) -> None:
        if self.audit is not None:
            self.audit.note("packages", **installed.as_dict())
