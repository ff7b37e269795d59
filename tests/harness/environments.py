"""Virtual environments in places where people have them, and an ordinary user who has a range of subordinate ids."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import cloche

INNER = "inner"  # a module that is installed there alone


def make_environment(folder: Path, inside: Sequence[str] = ()) -> Path:
    """Make an environment that has this one's packages, Cloche, and a module of its own; return its interpreter.

    `inside` are the words before a command that sees this folder, where it is none of the host's.
    """
    subprocess.run([*inside, sys.executable, "-m", "venv", "--without-pip", "--copies", str(folder)], check=True)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
    beside = [str(Path(cloche.__file__).parents[1]), sysconfig.get_path("purelib")]
    for name, text in ((f"{INNER}.py", "WORD = 'within'\n"), ("beside.pth", "\n".join(beside))):
        words = [*inside, "sh", "-c", 'cat > "$0"', str(packages / name)]
        subprocess.run(words, input=text, text=True, check=True)
    return folder / "bin" / "python"


def root_with(folder: Path, shown_at: str) -> list[str]:
    """Return the words before a command that sees the host as it is, and a folder at a top-level path more."""
    same = [
        word for path in sorted(Path("/").iterdir()) if not path.is_symlink() for word in ("--dev-bind", path, path)
    ]
    links = [word for path in Path("/").iterdir() if path.is_symlink() for word in ("--symlink", path.readlink(), path)]
    powers = ["--cap-add", "ALL"] if os.geteuid() == 0 else []
    return [str(word) for word in ("bwrap", "--die-with-parent", *powers, *same, *links, "--bind", folder, shown_at)]


def run_there(python: Path, program: str, inside: Sequence[str] = ()) -> Any:
    """Run a program with another interpreter and return the JSON that it prints last."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        [*inside, str(python), "-c", program], env=env, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


UID = 61_234
FIRST, COUNT = 1_850_000_000, 65_536
RANGE = f"{UID}:{FIRST}:{COUNT}\n"
HOME = "/mnt/home"
# Told the files' texts and what is below a folder that this user could not enter, then the command.
_MOUNTS = """
set -e
mount -t tmpfs -o mode=755 none /mnt
mkdir -m 700 /mnt/home && chown "$1:$1" /mnt/home && mkdir /mnt/kept
cp /etc/passwd /mnt/passwd && echo "subordinate:x:$1:$1::/mnt/home:/bin/sh" >>/mnt/passwd
printf %s "$2" >/mnt/subuid && printf %s "$3" >/mnt/subgid
for one in passwd subuid subgid; do mount --bind "/mnt/$one" "/etc/$one"; done
[ -z "$4" ] || mount --bind "$5" "$4"
uid=$1 closed=$6 number=0 && shift 6
if [ -n "$closed" ]; then
    for path in $OPENED; do
        number=$((number + 1)) && mkdir "/mnt/kept/$number" && mount --rbind "$path" "/mnt/kept/$number"
    done
    number=0
    for folder in $closed; do mount -t tmpfs -o mode=755 none "$folder"; done
    for path in $OPENED; do
        number=$((number + 1)) && mkdir -p "$path" && mount --rbind "/mnt/kept/$number" "$path"
    done
fi
cd /
exec setpriv "--reuid=$uid" "--regid=$uid" --clear-groups "--inh-caps=-all${GIVEN:+,$GIVEN}" \\
    ${GIVEN:+"--ambient-caps=$GIVEN"} "$@"
"""


def run_as_user(
    program: str,
    *,
    subuid: str = RANGE,
    subgid: str = RANGE,
    broken: str = "",
    instead: str = "/bin/false",
    inside: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    capabilities: str = "",
) -> Any:
    """Run a program of Python's as an ordinary user, and return the JSON that it prints last.

    `subuid` and `subgid` are what is in the files of these names, `broken` is a program of the host's in whose place is
    another one, which fails. `inside` are the words before a command elsewhere, `env` what is set beside the usual.
    `capabilities` are what a service may be given, in the words of setpriv.
    """
    needed = [sys.prefix, sys.base_prefix, str(Path(cloche.__file__).parents[1])]
    closed = {_closed_above(Path(path)) for path in needed} - {""}
    opened = dict.fromkeys(os.path.realpath(path) for path in needed if _closed_above(Path(path)))
    usual = {"HOME": HOME, "PATH": "/usr/bin:/bin:/usr/sbin:/sbin", "LANG": "C.UTF-8", "PYTHONPATH": needed[-1]}
    words = [
        str(UID),
        subuid,
        subgid,
        broken,
        os.path.realpath(instead),
        " ".join(closed),
        sys.executable,
        "-c",
        program,
    ]
    done = subprocess.run(
        [*inside, "unshare", "--mount", "sh", "-c", _MOUNTS, "sh", *words],
        env={**(env or {}), **usual, "OPENED": " ".join(opened), "GIVEN": capabilities},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def _closed_above(path: Path) -> str:
    """Return the topmost folder above a path that others may not enter; empty for none."""
    folders = [*reversed(path.parents)]
    return next((str(folder) for folder in folders if not folder.stat().st_mode & 0o001), "")
