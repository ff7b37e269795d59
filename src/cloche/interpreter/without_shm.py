"""Find replacements of the modules through which Python's libraries use /dev/shm, for a sandbox without it.

That is level `confined`: no sandbox may see the host's. The modules lie in the folder of `sitecustomize`, which runs
this, as the interpreter does that runs scripts and cells itself.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

NAMES = ("_multiprocessing", "_posixshmem")


class SharedMemoryStandIns:
    """Find these modules in a folder, and have `multiprocessing.heap` keep its arenas among temporary files."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Find a module as the other finders do; None for all but those, which costs an import next to nothing."""
        if name in NAMES:
            return _paths().find_spec(name, [self.folder], target)
        if name != "multiprocessing.heap":
            return None
        spec = _paths().find_spec(name, path, target)
        if spec is not None:
            load = spec.loader.exec_module

            def load_and_change(module: Any) -> None:
                load(module)
                module.Arena._dir_candidates = []

            spec.loader.exec_module = load_and_change
        return spec


def _paths() -> Any:
    return sys.modules["_frozen_importlib_external"].PathFinder


def lead(folder: str) -> None:
    """Have imports find the replacements."""
    sys.meta_path.insert(0, SharedMemoryStandIns(folder))
