"""Firecracker's stand-in as a file that can be started, and the backend over it."""

from __future__ import annotations

import os
import zipapp
from pathlib import Path
from shutil import copy, copytree, ignore_patterns

from cloche.backends.microvm import backend
from cloche.backends.microvm.backend import FirecrackerBackend
from cloche.backends.microvm.firecracker import Firecracker
from cloche.backends.microvm.plan import Found

PACE = 8.0  # emulated
MAIN = "import sys\nfrom stand_in.program import main\nsys.exit(main())\n"


def pack_stand_in(folder: Path) -> Path:
    """Return the stand-in, packed into one program."""
    source = folder / "source"
    copytree(Path(__file__).with_name("stand_in"), source / "stand_in", ignore=ignore_patterns("__pycache__"))
    copy(backend.__file__, source / "counter.py")
    (source / "__main__.py").write_text(MAIN)
    program = folder / "firecracker"
    zipapp.create_archive(source, program, "/usr/bin/python3 -IS")
    program.chmod(0o755)
    return program


def stand_in_backend(program: Path) -> FirecrackerBackend:
    """Return the backend over a stand-in, which needs no KVM."""
    return FirecrackerBackend(given=(Firecracker(program=str(program), pace=PACE), Found(kind="kvm")))


def programs_of(caller: int) -> set[int]:
    """Return the numbers of the stand-ins that a process has started."""
    return {one for one in _numbers() if _is_stand_in(one) and _parent(_parent(one)) == caller}


def machines_of(caller: int) -> set[int]:
    """Return them with what they run machines with."""
    programs = programs_of(caller)
    return programs | {one for one in _numbers() if _parent(one) in programs}


def _numbers() -> list[int]:
    return [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]


def are_there(processes: set[int]) -> bool:
    """Tell whether any of these still runs."""
    return any(_parent(one) for one in processes)


def _is_stand_in(process: int) -> bool:
    try:
        words = Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return b"/firecracker" in words and b"--api-sock" in words


def _parent(process: int) -> int:
    try:
        return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0
