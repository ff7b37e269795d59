"""Images: a kernel, a first file system and a root disk, where they lie, and what is on the disk."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cloche.core.errors import BackendUnavailable
from cloche.core.languages import Engine, Language

FORMAT = 4  # of the folder, of what the first process is told, and of what it does
KERNEL, INITRD, DISK, MANIFEST, POINTER = "kernel", "initrd", "root.ext4", "manifest.json", "current"
VARIABLE = "CLOCHE_MICROVM_IMAGE"
BUILD_IT = 'Build them of the distribution\'s packages: "cloche images build".'
_VERSION = re.compile(r"\d+(?:\.\d+)*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """Hold what is known of an image: its folder, its id, the programs on its disk with paths and versions."""

    folder: Path
    id: str
    python: str
    programs: Mapping[str, str]
    versions: Mapping[str, str]

    @property
    def name(self) -> str:
        return self.id[:16]

    def engine(self, language: Language) -> Engine:
        """Return the first engine that is there. Raises BackendUnavailable saying what is missing."""
        for engine in language.engines:
            least = engine.least_version
            if all(name in self.programs for name in engine.programs) and (
                not least or _numbers(self.versions.get(engine.programs[0], "")) >= least
            ):
                return engine
        package = language.engines[0].package.rpartition(" ")[2]
        raise BackendUnavailable(
            f"the microVM's root disk cannot run {language.name}: it has no {language.engines[0].programs[0]}.",
            remedy=f'Build one that has: "cloche images build --package {package}".',
        )

    def version(self, engine: Engine) -> str:
        """Return the version of the engine's main program, else its name."""
        return self.versions.get(engine.programs[0]) or engine.programs[0]


def _numbers(text: str) -> tuple[int, ...]:
    found = _VERSION.search(text)
    return tuple(int(part) for part in found[0].split(".")) if found else ()


def place_of_images() -> Path:
    """Return the folder of the images that this user built."""
    from platformdirs import user_cache_path

    return user_cache_path("cloche") / "microvm"


def point_to(name: str) -> None:
    """Make an image the one that is used, in one step."""
    beside = place_of_images() / f".{POINTER}-{os.getpid()}"
    beside.write_text(name)
    beside.replace(place_of_images() / POINTER)


def find_image(backend: str = "microvm") -> Image:
    """Return the image that is used: the folder in CLOCHE_MICROVM_IMAGE, else what was built last.

    Raises BackendUnavailable, saying how to get one.
    """
    named = os.environ.get(VARIABLE)
    try:
        folder = Path(named) if named else place_of_images() / (place_of_images() / POINTER).read_text().strip()
        return _read(folder)
    except (OSError, ValueError, KeyError, TypeError) as error:
        where = f" in {named} ({VARIABLE})" if named else ""
        why = "" if isinstance(error, FileNotFoundError) else f": {error}"
        raise BackendUnavailable(
            f'backend "{backend}": there is no kernel and root disk{where}{why}.', remedy=BUILD_IT
        ) from error


def _read(folder: Path) -> Image:
    found = json.loads((folder / MANIFEST).read_bytes())
    if found["format"] != FORMAT:
        raise ValueError(f"{folder} was built by another version of Cloche")
    for name in (KERNEL, INITRD, DISK):
        (folder / name).stat()
    return Image(
        folder=folder,
        id=str(found["id"]),
        python=str(found["python"]),
        programs={str(name): str(path) for name, path in found["programs"].items()},
        versions={str(name): str(version) for name, version in found["versions"].items()},
    )
