"""How large the project's own benchmark is, and what it needs from outside."""

from __future__ import annotations

import os
from pathlib import Path

from cloche.bench import scenarios
from cloche.core.record import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting(scenarios.BenchSize):
    """Say how large the benchmark is. `import_path` is for children that need Cloche.

    `sessions` is how many are open at once; 0 leaves that out.
    """

    image: str = ""
    sessions: int = 0
    events: tuple[str, ...] | list[str] = ()
    import_path: str | None = None
    peers_folder: Path | None = None  # None: no peers

    def env(self) -> dict[str, str] | None:
        """Return the environment of a child that imports what this process can import; None for the usual one."""
        return None if self.import_path is None else {**os.environ, "PYTHONPATH": self.import_path}
