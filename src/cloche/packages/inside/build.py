"""Build a wheel of a source distribution, as PEP 517 has it, and write it to standard output as one frame.

Standard input is JSON: `source`, the path of the source distribution; `known`, the build requirements that are met, in
any spelling. Where the source or its backend needs more, the one frame is that list in JSON, and no wheel was built.
Code of the package runs here, so the reader must not trust the output.
"""

from __future__ import annotations

import importlib
import json
import os
import struct
import sys
import tarfile
import tempfile
import tomllib
import zipfile

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

FRAME = struct.Struct(">BHQ")
WHEEL, WANTED = 1, 2
PIECE = 1 << 18
DEFAULT_REQUIRES, DEFAULT_BACKEND = ["setuptools>=40.8.0"], "setuptools.build_meta:__legacy__"
OLDEST_TIME = "315532800"  # 1980, before which a zip file has no time: of one source comes one wheel


def unpack(path: str) -> str:
    """Unpack a source distribution; return its one folder."""
    folder = tempfile.mkdtemp()
    if path.endswith(".zip"):
        with zipfile.ZipFile(path) as archive:
            archive.extractall(folder)  # noqa: S202 - in a jail that ends with it
    else:
        with tarfile.open(path) as tarball:
            if hasattr(tarfile, "data_filter"):  # else it is an early 3.11, and the jail is all that bounds it
                tarball.extraction_filter = tarfile.data_filter
            tarball.extractall(folder)  # noqa: S202
    folders = [entry.path for entry in os.scandir(folder) if entry.is_dir()]
    if len(folders) != 1:
        sys.exit("it is not one folder, as a source distribution is")
    return folders[0]


def build_system(folder: str) -> dict[str, Any]:
    """Return the build system of a source. Exits if it cannot be read."""
    settings: dict[str, Any] = {}
    try:
        with open(f"{folder}/pyproject.toml", "rb") as file:
            settings = tomllib.load(file).get("build-system") or {}
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        sys.exit(f"its pyproject.toml cannot be read: {error}")
    listed = [settings.get("requires", []), settings.get("backend-path", [])]
    if not all(isinstance(entry, list) and all(isinstance(text, str) for text in entry) for entry in listed):
        sys.exit("its pyproject.toml does not list the build requirements as text")
    return {
        "requires": settings.get("requires", DEFAULT_REQUIRES if not settings else []),
        "backend": str(settings.get("build-backend", DEFAULT_BACKEND)), "path": settings.get("backend-path", []),
    }  # fmt: skip


def load(system: dict[str, Any]) -> Any:  # noqa: ANN401 - a module, or whatever it has
    """Return the backend, which finds its requirements, and none of the caller's own packages."""
    paths = [path for path in sys.path if os.path.basename(path) not in ("", "site-packages", "dist-packages")]
    sys.path[:] = [*map(os.path.abspath, system["path"]), *paths]
    module, _, inner = system["backend"].partition(":")
    backend: Any = importlib.import_module(module)
    for name in filter(None, inner.split(".")):
        backend = getattr(backend, name)
    return backend


def send(out: int, kind: int, name: str, data: bytes) -> None:
    """Write the frame."""
    with os.fdopen(out, "wb") as file:
        file.write(FRAME.pack(kind, len(name.encode()), len(data)) + name.encode())
        for offset in range(0, len(data), PIECE):
            file.write(data[offset : offset + PIECE])


def main() -> None:
    """Name missing requirements, or build."""
    asked = json.load(sys.stdin)
    out = os.dup(1)
    os.dup2(2, 1)  # what a backend prints is no frame
    folder, installed = unpack(asked["source"]), asked["known"]
    system = build_system(folder)
    if missing := [requirement for requirement in system["requires"] if requirement not in installed]:
        send(out, WANTED, "", json.dumps([*installed, *missing]).encode())
        return
    os.chdir(folder)
    os.environ["SOURCE_DATE_EPOCH"] = OLDEST_TIME
    backend = load(system)
    if hasattr(backend, "get_requires_for_build_wheel"):
        more = [str(requirement) for requirement in backend.get_requires_for_build_wheel(None)]
        if missing := [requirement for requirement in more if requirement not in installed]:
            send(out, WANTED, "", json.dumps([*installed, *missing]).encode())
            return
    target = tempfile.mkdtemp()
    name = backend.build_wheel(target, None)
    with open(os.path.join(target, name), "rb") as file:
        send(out, WHEEL, name, file.read())


if __name__ == "__main__":
    main()
