"""Firecracker's stand-in as a file that can be started, and the backend over it."""

from __future__ import annotations

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
