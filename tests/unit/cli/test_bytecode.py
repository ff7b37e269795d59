"""Compiled modules of an installation that has none are kept in the user's cache, if that is nobody else's."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import cloche
from cloche.cli import _bytecode

SOURCES = Path(cloche.__file__).parent


def command(installation: Path, cache: Path) -> list[Path]:
    """Run a command that imports little, and return the compiled modules in the cache."""
    program = "import sys; sys.argv = ['cloche', 'presets']; from cloche.cli import main; main()"
    env = {**os.environ, "PYTHONPATH": str(installation), "XDG_CACHE_HOME": str(cache), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, timeout=100, check=True)
    assert b"locked-down" in done.stdout
    assert not list(installation.rglob("*.pyc"))
    return sorted(cache.rglob("*.pyc"))


def test_modules_are_compiled_once(tmp_path: Path) -> None:
    """The first process compiles them, the next ones read them; a source that changes is compiled anew."""
    installation, cache = tmp_path / "installation", tmp_path / "cache"
    shutil.copytree(SOURCES, installation / "cloche", ignore=shutil.ignore_patterns("__pycache__"))
    command(installation, cache)  # which has some modules already, when it makes the folder
    made = command(installation, cache)
    (app,) = [path for path in made if path.parts[-3:-1] == ("cloche", "cli") and path.name.startswith("app.")]
    times = {path: path.stat().st_mtime_ns for path in made}
    assert command(installation, cache) == made
    assert {path: path.stat().st_mtime_ns for path in made} == times
    with (installation / "cloche" / "cli" / "app.py").open("a") as source:
        source.write("# changed\n")
    command(installation, cache)
    assert [path for path in made if path.stat().st_mtime_ns != times[path]] == [app]


@pytest.mark.parametrize("name", ["", "cloche", "cloche/bytecode"])
def test_a_folder_of_others_is_not_used(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where somebody else may write, or a link leads elsewhere, modules would be somebody else's."""
    monkeypatch.setattr(sys, "pycache_prefix", None)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "cache" / name
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    _bytecode.keep_bytecode()
    assert (sys.pycache_prefix, sys.dont_write_bytecode) == (None, True)
    folder.chmod(0o700)
    if name:
        folder.rename(tmp_path / "elsewhere")
        folder.symlink_to(tmp_path / "elsewhere")
        _bytecode.keep_bytecode()
        assert sys.pycache_prefix is None
        folder.unlink()
    for number in range(12):
        (tmp_path / "cache" / "cloche" / "bytecode" / str(number)).mkdir(parents=True)
    _bytecode.keep_bytecode()
    assert Path(str(sys.pycache_prefix)).parent == tmp_path / "cache" / "cloche" / "bytecode"
    assert not sys.dont_write_bytecode
    assert len(os.listdir(tmp_path / "cache" / "cloche" / "bytecode")) == _bytecode.MOST_INSTALLATIONS
