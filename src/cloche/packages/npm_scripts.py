"""Install scripts of one npm package: the only code of an npm package that runs at its installation.

No other package's script runs. Each runs in a jail without a network, on a copy of its package's folder. The regular
files that it changed come back as frames, and are written to a new folder; the caller puts them in their place.
"""

from __future__ import annotations

import json
import os

from cloche.core.limits import GIB, MIB
from cloche.core.policy import Policy
from cloche.core.protocols import Backend
from cloche.core.record import replace

from .folders import MODULES
from .steps import LIMITS, Step
from .unpack import NPM_FOLDERS, write_files

MOST_FILES, MOST_BYTES = 10_000, 2 * GIB
SCRIPT_LIMITS = replace(
    LIMITS, memory_bytes=4 * GIB, disk_bytes=2 * GIB, tmp_bytes=512 * MIB, flood_bytes=MOST_BYTES + 16 * MIB
)


def script_step(package: str, modules: str, node: str, shown: tuple[str, ...]) -> Step:
    """Return the step that runs the scripts of a package below `modules`, a node_modules folder, by this Node."""
    order = {
        "modules": modules, "package": package, "programs": os.path.dirname(node), "most_files": MOST_FILES,
        "most_bytes": MOST_BYTES,
    }  # fmt: skip
    return Step(
        name="install", program="install_script", stdin=json.dumps(order).encode(),
        shown=(modules, *shown), runs_code=True, limits=SCRIPT_LIMITS,
    )  # fmt: skip


async def run_install_scripts(
    backend: Backend, policy: Policy, package: str, modules: str, node: str, shown: tuple[str, ...], folder: str
) -> str:
    """Run them, write the changed files of the package into a new empty folder, and return where they are.

    Raises StartFailed with the last words of a script that fails.
    """
    await write_files(backend, policy, script_step(package, modules, node, shown), folder, NPM_FOLDERS)
    return os.path.join(folder, MODULES, *package.split("/"))
