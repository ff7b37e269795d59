"""Run the install scripts of one npm package on a copy of its folder, and write the changed files as frames.

Standard input is JSON: `modules`, the node_modules folder, which is read-only; `package`, the name of the package;
`programs`, a folder for PATH; `most_files`, `most_bytes`. The other packages are links to that folder. What a script
prints goes to standard error. The last frame is an empty one that says that all files came.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
import struct
import subprocess
import sys

FRAME = struct.Struct(">BHQ")
FILES_END, MODULE = 4, 5
EXECUTABLE = 16  # added to a kind
PIECE = 1 << 18
EVENTS = ("preinstall", "install", "postinstall")
MOST_DESCRIPTION = 8 << 20


def lay_out(modules: str, package: str) -> str:
    """Make a node_modules folder with a copy of the package, and return the copy's path."""
    copy = os.path.abspath(os.path.join("node_modules", package))
    os.makedirs(os.path.dirname(copy))
    shutil.copytree(os.path.join(modules, package), copy, symlinks=True)
    for folder, _, names in os.walk(copy):
        for path in (folder, *(os.path.join(folder, name) for name in names)):
            if not os.path.islink(path):
                os.chmod(path, os.stat(path).st_mode | stat.S_IRUSR | stat.S_IWUSR)
    for name in names_of(modules):
        if name != package:
            os.makedirs(os.path.dirname(os.path.join("node_modules", name)), exist_ok=True)
            os.symlink(os.path.join(modules, name), os.path.join("node_modules", name))
    return copy


def names_of(modules: str) -> list[str]:
    """Return the names of the packages in a node_modules folder."""
    names = []
    for name in os.listdir(modules):
        below = os.listdir(os.path.join(modules, name)) if name.startswith("@") else []
        names += [f"{name}/{inner}" for inner in below] if name.startswith("@") else [name]
    return names


def run_scripts(copy: str, programs: str) -> None:
    """Run the scripts as npm would. Exits where one fails."""
    with open(os.path.join(copy, "package.json"), encoding="utf-8") as file:
        scripts = json.loads(file.read(MOST_DESCRIPTION)).get("scripts")
    env = {**os.environ, "PATH": f"{programs}{os.pathsep}{os.environ.get('PATH', '')}"}
    for event in EVENTS:
        script = scripts.get(event) if isinstance(scripts, dict) else None
        if isinstance(script, str):
            env |= {"npm_lifecycle_event": event, "npm_config_offline": "true"}
            code = subprocess.call(["sh", "-c", script], cwd=copy, env=env, stdin=subprocess.DEVNULL, stdout=2)
            if code:
                sys.exit(f"{event} of the package ended with {code}")


class ScriptOutput:
    """Write frames, and count them."""

    def __init__(self, most_files: int, most_bytes: int) -> None:
        self.out = os.fdopen(1, "wb", buffering=1 << 20, closefd=False)
        self.files, self.bytes = most_files, most_bytes

    def send(self, path: str, name: str) -> None:
        """Write one regular file. Exits where there are too many, or too large ones."""
        with open(path, "rb") as file:
            facts = os.fstat(file.fileno())
            self.files, self.bytes = self.files - 1, self.bytes - facts.st_size
            if self.files < 0 or self.bytes < 0:
                sys.exit("the scripts wrote too many files, or files that are too large")
            kind, encoded = MODULE | (EXECUTABLE if facts.st_mode & 0o111 else 0), name.encode()
            self.out.write(FRAME.pack(kind, len(encoded), facts.st_size) + encoded)
            left = facts.st_size
            while left and (piece := file.read(min(PIECE, left))):
                left -= len(piece)
                self.out.write(piece)
            if left:
                sys.exit(f"{name[:200]!r} became shorter meanwhile")

    def end(self) -> None:
        """Say that all files came."""
        self.out.write(FRAME.pack(FILES_END, 0, 0))
        self.out.flush()


def is_same(path: str, before: str) -> bool:
    """Tell whether a regular file has the mode and the content of another one."""
    try:
        facts, old = os.stat(path), os.lstat(before)
    except OSError:
        return False
    if facts.st_size != old.st_size or bool(facts.st_mode & 0o111) != bool(old.st_mode & 0o111):
        return False
    with open(path, "rb") as file, open(before, "rb") as other:
        while piece := file.read(PIECE):
            if piece != other.read(PIECE):
                return False
    return True


def main() -> None:
    """Run the scripts, and write what they changed."""
    order = json.load(sys.stdin)
    modules, package = order["modules"], order["package"]
    copy = lay_out(modules, package)
    run_scripts(copy, order["programs"])
    out = ScriptOutput(order["most_files"], order["most_bytes"])
    for folder, _, names in os.walk(copy):
        for name in names:
            path = os.path.join(folder, name)
            relative = os.path.relpath(path, copy)
            is_regular = stat.S_ISREG(os.lstat(path).st_mode)
            if is_regular and not is_same(path, os.path.join(modules, package, relative)):
                out.send(path, f"{package}/{relative}")
    out.end()


if __name__ == "__main__":
    main()
