"""From wheels and tarballs to files: a sandbox without a network unpacks and compiles, and the files are written here.

The archive reader, the decompressor and the compiler process untrusted input, so they run in the sandbox. `frames.py`
reads their output: paths inside the folder, regular files alone, a bound on their number and size. All files are new,
in a folder that no other process writes to.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import BinaryIO

from cloche.core.errors import StartFailed
from cloche.core.events import Progress, report_progress
from cloche.core.layers import Target
from cloche.core.limits import GIB
from cloche.core.policy import Policy
from cloche.core.protocols import Backend
from cloche.core.record import dataclass, field

from .folders import MODULES, PARTS
from .frames import DATA, EXECUTABLE, FILES_END, MODULE, SCRIPT, SITE, Bounds, Reader, WrongFrame, check_path
from .steps import Step, failed, on_stdout, run_step
from .target import own_target

MOST_FILES, MOST_BYTES = 200_000, 6 * GIB
# Where a layer has the files of each kind.
FOLDERS: Mapping[int, str] = dict(zip((SITE, SCRIPT, DATA), PARTS, strict=True))
NPM_FOLDERS: Mapping[int, str] = {MODULE: MODULES, SCRIPT: FOLDERS[SCRIPT]}


@dataclass(slots=True, kw_only=True)
class Unpacked:
    """Count the written files. `has_all` is false until every file of the packages is there."""

    folder: str
    folders: Mapping[int, str] = field(default_factory=lambda: FOLDERS)
    files: int = 0
    total_bytes: int = 0
    modules: set[str] = field(default_factory=set)
    has_all: bool = False
    path: str = ""
    file: BinaryIO | None = None  # which the frame that has begun is for

    def begin(self, kind: int, name: str, size: int) -> BinaryIO | _Nothing:
        """Begin a file. Raises WrongFrame, and OSError where it cannot be written."""
        if kind == FILES_END:
            self.has_all = True
            return _Nothing()
        names, is_executable = check_path(name), bool(kind & EXECUTABLE)
        kind &= ~EXECUTABLE
        if kind not in self.folders or (kind == SCRIPT and len(names) > 1):
            raise WrongFrame(f"the file {name[:200]!r} is of a kind that is not installed")
        above = list(names)
        last = above.pop()
        folder = os.path.join(self.folder, self.folders[kind], *above)
        os.makedirs(folder, 0o755, exist_ok=True)
        self.files += 1
        self.total_bytes += size
        if kind == SITE:
            self._note_module(names)
        path = os.path.join(folder, last)
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC  # the last of two wins, as for pip
        fd = os.open(path, flags, 0o755 if kind == SCRIPT or is_executable else 0o644)
        self.path, self.file = path, open(fd, "wb")  # noqa: SIM115 - Reader closes it
        return self.file

    def drop_half_made(self) -> None:
        """Remove the file that has not all of its content."""
        if self.file is not None and not self.file.closed:
            self.file.close()
            os.unlink(self.path)

    def _note_module(self, names: Sequence[str]) -> None:
        top = names[0] if len(names) > 1 else names[0].partition(".")[0]
        if top.isidentifier() and top != "__pycache__":
            self.modules.add(top)


class _Nothing:
    """Take nothing."""

    def write(self, data: bytes) -> None:
        """Raise WrongFrame: there is nothing to be written."""
        raise WrongFrame(f"{len(data)} bytes arrived where none are expected")

    def close(self) -> None:
        """Do nothing."""


def unpack_step(wheels: Sequence[str], shown: str, site: str, target: Target) -> Step:
    """Return the step that unpacks the wheels below `shown`, for a folder that will be `site`.

    Bytecode is written only for the caller's own interpreter, not for an image's of another version.
    """
    order = {
        "wheels": list(wheels), "site": site, "python": target.python, "most_files": MOST_FILES,
        "most_bytes": MOST_BYTES, "compiles": target.tag == own_target().tag,
    }  # fmt: skip
    return Step(name="unpack", program="unpack", stdin=json.dumps(order).encode(), shown=(shown,) if wheels else ())


async def unpack(
    backend: Backend, policy: Policy, wheels: Sequence[str], shown: str, target_folder: str, final: str, target: Target
) -> Unpacked:
    """Write the files of wheels below `made`, which programs will find as `final`. Raises StartFailed."""
    return await write_files(
        backend, policy, unpack_step(wheels, shown, f"{final}/site", target), target_folder, FOLDERS
    )


async def unpack_tarballs(
    backend: Backend, policy: Policy, tarballs: Sequence[tuple[str, str]], shown: str, target_folder: str
) -> Unpacked:
    """Write the files of npm's tarballs, each at its place below node_modules, below `made`. Raises StartFailed."""
    order = {"tarballs": list(tarballs), "most_files": MOST_FILES, "most_bytes": MOST_BYTES}
    stdin, paths = json.dumps(order).encode(), (shown,) if tarballs else ()
    step = Step(name="unpack", program="unpack_tarballs", stdin=stdin, shown=paths)
    return await write_files(backend, policy, step, target_folder, NPM_FOLDERS)


async def write_files(
    backend: Backend, policy: Policy, step: Step, target_folder: str, folders: Mapping[int, str]
) -> Unpacked:
    """Run a step, and write its frames to folders of a new one. Raises StartFailed."""
    unpacked = Unpacked(folder=target_folder, folders=folders)
    for name in folders.values():
        os.mkdir(os.path.join(target_folder, name), 0o755)
    reader = Reader(unpacked.begin, Bounds(files=MOST_FILES, total_bytes=MOST_BYTES))
    what = "running install scripts" if step.runs_code else "unpacking"
    report_progress(Progress(what=what))
    try:
        outcome = await run_step(backend, policy, step, on_stdout(reader.feed))
    except WrongFrame as error:
        raise StartFailed(f"packages: cannot {step.name}: {error}", step=step.name) from None
    except OSError as error:
        raise StartFailed(f"packages: cannot write a file of a package: {error.strerror}", step="unpack") from error
    finally:
        unpacked.drop_half_made()
        report_progress(Progress(what=what, is_over=True))
    # A compiler that crashed on what a package wrote leaves all of its files, and some of the bytecode.
    if not unpacked.has_all:
        raise failed(step, outcome.result)
    return unpacked
