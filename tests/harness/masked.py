"""Run a command where a folder is covered by its masked view: an overlay of the folder and of the mask above it.

The arguments are the folder and the command; the mask comes as JSON on standard input, as `dataclasses.asdict` has it.
Mounts are made in a user namespace of its own, so no right is needed, and none is left behind.
"""

import json
import os
import subprocess
import sys
from dataclasses import asdict

from cloche.workspace.hidden import Mask


def run_masked(folder: str, mask: Mask, command: list[str], **env: str) -> subprocess.CompletedProcess[str]:
    """Run a command in the masked view of a folder, at the folder's own path, and return what it wrote."""
    return subprocess.run(
        ["unshare", "-Urm", sys.executable, __file__, folder, *command],
        input=json.dumps(asdict(mask)),
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def _make_mask(mask: dict[str, list[object]]) -> None:
    """Make the layer in the current folder: whiteouts first, since they change the times of folders."""
    folders: list[dict[str, object]] = mask["folders"]  # type: ignore[assignment]
    for one in folders:
        os.makedirs(f"./{one['path']}", exist_ok=True)
    for path in mask["whiteouts"]:
        os.mknod(f"./{path}", 0o20000, 0)
    for one in reversed(folders):
        os.chmod(f"./{one['path']}", int(str(one["mode"])))
        os.utime(f"./{one['path']}", ns=(0, int(str(one["mtime_ns"]))))


def _main(folder: str, command: list[str]) -> None:
    mask = json.load(sys.stdin)
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", "/mnt"], check=True)
    os.mkdir("/mnt/mask")
    os.chdir("/mnt/mask")
    _make_mask(mask)
    layers = f"ro,userxattr,lowerdir=/mnt/mask:{folder}"
    subprocess.run(["mount", "-t", "overlay", "overlay", "-o", layers, folder], check=True)
    os.chdir(folder)
    os.execvp(command[0], command)


if __name__ == "__main__":
    _main(sys.argv[1], sys.argv[2:])
