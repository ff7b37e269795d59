"""The interpreters that run the benchmark: a fresh virtual environment's or this one, as this user or another one."""

from __future__ import annotations

import compileall
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from cloche.backends.layout import is_reachable_by_others

from .tables import show_report

HERE = Path(__file__).resolve().parent
Report = dict[str, Any]
ORDINARY_USER = 61234  # without a name, as in many a container


def hold(events: tuple[str, ...], asked: dict[str, Any], *, has_packages: bool = False) -> Report:
    """Hold some events in an interpreter of their own and return the report.

    Without packages that is the one of a fresh environment; Cloche and what it imports come in by path, after start-up:
    every interpreter that a contestant starts is as bare as can be. With packages it is this one.
    """
    if has_packages:
        return _run(Path(sys.executable), HERE, {**asked, "events": events, "paths": []})
    paths = [str(HERE.parent / "src"), *(path for path in sys.path if path.endswith("site-packages"))]
    # Not in /tmp, which every guest has for itself.
    with tempfile.TemporaryDirectory(prefix="bench-", dir="/var/tmp") as folder:
        os.chmod(folder, 0o755)  # a container's root may not let guests into what is closed to others
        return _run(_environment(folder), HERE, {**asked, "events": events, "paths": paths})


def hold_as_user(events: tuple[str, ...], asked: dict[str, Any]) -> Report:
    """Hold some events as an ordinary user, which root alone can, in a fresh environment that this user can read.

    Cloche and what it imports lie there as copies, compiled, as an installer leaves them. Where this interpreter is in
    a private home, it is the system's of the same version. Raises LookupError where there is none.
    """
    interpreter = os.path.realpath(sys.executable)
    if not is_reachable_by_others(interpreter):
        name = f"python{sys.version_info.major}.{sys.version_info.minor}"
        interpreter = shutil.which(name, path=os.defpath) or ""
    if not interpreter:
        raise LookupError(f"an ordinary user cannot reach {sys.executable}, and the system has no {name}")
    with tempfile.TemporaryDirectory(prefix="bench-", dir="/var/tmp") as folder:
        os.chmod(folder, 0o755)
        packages, home = Path(folder, "packages"), Path(folder, "home")
        install(packages)
        shutil.copytree(HERE, packages / "bench", ignore=shutil.ignore_patterns("__pycache__", "results"))
        home.mkdir()
        os.chown(home, ORDINARY_USER, ORDINARY_USER)
        python = _environment(folder, interpreter)
        subprocess.run(["chmod", "-R", "go=rX", packages, python.parents[1]], check=True)
        words = {"user": ORDINARY_USER, "group": ORDINARY_USER, "extra_groups": (), "cwd": home}
        words["env"] = {"HOME": str(home), "PATH": os.defpath, "LANG": "C.UTF-8"}
        return _run(python, packages / "bench", {**asked, "events": events, "paths": [str(packages)]}, **words)


def install(packages: Path) -> None:
    """Copy Cloche and what it imports into a new folder, compiled, as an installer leaves them."""
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(HERE.parent / "src" / "cloche", packages / "cloche", ignore=ignored)
    for name in _needed("cloche", set()):
        for file in metadata.files(name) or ():
            if ".." not in file.parts and file.suffix != ".pyc":
                (packages / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(str(file.locate()), packages / file)
    compileall.compile_dir(packages, quiet=1)


def _environment(folder: str, interpreter: str = sys.executable) -> Path:
    place = Path(folder) / "venv"  # the folder itself is closed to others, which no user's environment is
    subprocess.run([interpreter, "-m", "venv", "--without-pip", "--symlinks", place], check=True)
    return place / "bin" / "python"


def _needed(name: str, seen: set[str]) -> Iterator[str]:
    """Yield the distributions that one needs here, without its extras."""
    for line in metadata.requires(name) or ():
        other = re.split(r"[^\w.-]", line, maxsplit=1)[0]
        if other in seen or "extra ==" in line:
            continue
        seen.add(other)
        try:
            metadata.version(other)
        except metadata.PackageNotFoundError:
            continue  # for another Python, or another system
        yield other
        yield from _needed(other, seen)


def _run(python: Path, folder: Path, setting: dict[str, Any], **options: Any) -> Report:  # noqa: ANN401 - Popen's
    program = [str(python), str(folder / "contest.py"), json.dumps(setting)]
    done = subprocess.run(program, stdout=subprocess.PIPE, check=False, **options)
    report: Report = json.loads(done.stdout or "{}")
    if done.returncode != 0:
        if report.get("events"):
            show_report(report)
        raise SystemExit("the contest did not come to its end; what it said and measured is above")
    return report
