"""Firecracker's stand-in as a file that can be started, and the backend over it."""

from __future__ import annotations

import os
import zipapp
from pathlib import Path
from shutil import copy, copytree, ignore_patterns

from cloche.backends.microvm import FirecrackerBackend, counter
from cloche.backends.microvm.acceleration import Found
from cloche.backends.microvm.firecracker import Firecracker

PACE = 8.0  # emulated
MAIN = "import sys\nfrom stand_in.program import main\nsys.exit(main())\n"


def pack_stand_in(folder: Path) -> Path:
    """Return the stand-in, packed into one program."""
    source = folder / "source"
    copytree(Path(__file__).with_name("stand_in"), source / "stand_in", ignore=ignore_patterns("__pycache__"))
    copy(counter.__file__, source / "counter.py")
    (source / "__main__.py").write_text(MAIN)
    program = folder / "firecracker"
    zipapp.create_archive(source, program, "/usr/bin/python3 -IS")
    program.chmod(0o755)
    return program


def stand_in_backend(program: Path) -> FirecrackerBackend:
    """Return the backend over a stand-in, which needs no KVM."""
    return FirecrackerBackend(given=(Firecracker(program=str(program), pace=PACE), Found(kind="kvm")))


def programs_of(caller: int | None = None) -> set[int]:
    """Return the numbers of the stand-ins that run: those of one caller, or all."""
    found = set()
    for entry in os.listdir("/proc"):
        try:
            words = Path(f"/proc/{entry}/cmdline").read_bytes().split(b"\0") if entry.isdigit() else []
        except OSError:
            continue
        if b"/firecracker" in words and b"--api-sock" in words and caller in (None, _parent(_parent(int(entry)))):
            found.add(int(entry))
    return found


def _parent(process: int) -> int:
    try:
        return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0
