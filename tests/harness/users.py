"""Run programs as an ordinary user who has a range of subordinate ids, on a host where nobody else sees that."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import cloche

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
exec setpriv "--reuid=$uid" "--regid=$uid" --clear-groups --inh-caps=-all "$@"
"""


def run_as_user(
    program: str, *, subuid: str = RANGE, subgid: str = RANGE, broken: str = "", instead: str = "/bin/false"
) -> Any:
    """Run a program of Python's as an ordinary user, and return the JSON that it prints last.

    `subuid` and `subgid` are what is in the files of these names, `broken` is a program of the host's in whose place is
    another one, which fails.
    """
    needed = [sys.prefix, sys.base_prefix, str(Path(cloche.__file__).parents[1])]
    closed = {_closed_above(Path(path)) for path in needed} - {""}
    opened = dict.fromkeys(os.path.realpath(path) for path in needed if _closed_above(Path(path)))
    env = {"HOME": HOME, "PATH": "/usr/bin:/bin:/usr/sbin:/sbin", "LANG": "C.UTF-8", "PYTHONPATH": needed[-1]}
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
        ["unshare", "--mount", "sh", "-c", _MOUNTS, "sh", *words],
        env={**env, "OPENED": " ".join(opened)}, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def _closed_above(path: Path) -> str:
    """Return the topmost folder above a path that others may not enter; empty for none."""
    folders = [*reversed(path.parents)]
    return next((str(folder) for folder in folders if not folder.stat().st_mode & 0o001), "")
