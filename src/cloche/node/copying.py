"""Copy this Cloche, and the packages that a node needs, to a folder where another image's Python runs them.

A compiled part has the version of Python in its name, so those of several versions are side by side: all are copied.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path

from cloche.core.errors import BackendUnavailable

EXTRA = "node"
_REQUIREMENT = re.compile(r"([A-Za-z0-9._-]+)(?:\[[^\]]*\])?[^;]*(?:;(.*))?")


def copy_to(target: Path) -> None:
    """Copy to a folder that exists. Raises BackendUnavailable where a package is missing, or the folder is full."""
    try:
        _copy(Path(__file__).parents[1], target / "cloche")
        for distribution in needed(metadata.distribution("cloche"), EXTRA):
            for path in parts_of(distribution):
                if not (target / path.name).exists():
                    _copy(path, target / path.name)
    except OSError as error:
        raise BackendUnavailable(f"--copy-to {target}: {error}.", remedy="Give a folder with room.") from error


def needed(distribution: metadata.Distribution, extra: str = "") -> Iterator[metadata.Distribution]:
    """Yield a distribution, and those that it needs with this extra, as far as they are installed here."""
    seen, waiting = set[str](), [(distribution, extra)]
    while waiting:
        distribution, extra = waiting.pop()
        if distribution.name in seen:
            continue
        seen.add(distribution.name)
        yield distribution
        for name in required(distribution.requires or (), extra):
            try:
                waiting.append((metadata.distribution(name), ""))
            except metadata.PackageNotFoundError:  # for another system or Python
                continue


def required(requirements: Iterable[str], extra: str) -> Iterator[str]:
    """Yield the names of requirements, those of extras for this extra alone."""
    for text in requirements:
        match = _REQUIREMENT.match(text)
        if match is not None:
            marker = match[2] or ""
            if "extra" not in marker or (extra and re.search(rf"extra\s*==\s*['\"]{extra}['\"]", marker)):
                yield match[1]


def parts_of(distribution: metadata.Distribution) -> Iterator[Path]:
    """Yield the folders and files of a distribution beside each other, with compiled parts for all versions."""
    tops = {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}
    for name in sorted(tops):
        path = Path(str(distribution.locate_file(name)))
        if path.suffix == ".so":
            yield from path.parent.glob(f"{path.name.partition('.')[0]}.*.so")
        elif path.suffix != ".pth" and path.exists():
            yield path


def _copy(path: Path, target: Path) -> None:
    if path.is_dir():
        shutil.copytree(path, target)
    else:
        shutil.copy2(path, target)
