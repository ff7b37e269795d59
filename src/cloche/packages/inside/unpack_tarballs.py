"""Unpack tarballs of npm's registry, and write their files to standard output as frames.

Standard input is JSON: `tarballs`, rows of path and folder below node_modules, in order; `most_files`, `most_bytes`.
Links, devices, and names that lead out are refused. For each command of a package at the top there is a script, which
starts it. The last frame is an empty one that says that all files came. No script of a package runs.
"""

from __future__ import annotations

import json
import os
import posixpath
import re
import shlex
import struct
import sys
import tarfile

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

FRAME = struct.Struct(">BHQ")
SCRIPT, FILES_END, MODULE = 2, 4, 5
EXECUTABLE = 16  # added to a kind
PIECE = 1 << 18
MOST_DESCRIPTION, MOST_COMMAND = 8 << 20, 16 << 20
REGULAR = (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.CONTTYPE)
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
COMMAND = """\
#!/bin/sh
exec "${{0%/*}}"/../node_modules/{path} "$@"
"""


class TarballOutput:
    """Write frames, and count them."""

    def __init__(self, fd: int, most_files: int, most_bytes: int) -> None:
        self._out = os.fdopen(fd, "wb", buffering=1 << 20, closefd=False)
        self._files, self._bytes = most_files, most_bytes

    def begin(self, kind: int, path: str, size: int) -> None:
        """Begin a file. Exits where there are too many, or too large ones."""
        self._files -= 1
        self._bytes -= size
        if self._files < 0 or self._bytes < 0:
            sys.exit("the packages contain too many files, or files that are too large")
        name = path.encode()
        self._out.write(FRAME.pack(kind, len(name), size) + name)

    def put(self, kind: int, path: str, data: bytes) -> None:
        """Write a whole file."""
        self.begin(kind, path, len(data))
        self.write(data)

    def write(self, data: bytes) -> None:
        """Write a piece of the file that has begun."""
        self._out.write(data)

    def flush(self) -> None:
        """Send the buffered bytes."""
        self._out.flush()


def files_in(path: str) -> Iterator[tuple[tarfile.TarFile, tarfile.TarInfo, str]]:
    """Yield the files of a tarball with their names below its one folder. Exits for what none should hold."""
    with tarfile.open(path, "r|gz", errorlevel=2) as tarball:
        for entry in tarball:
            if entry.isdir():
                continue
            if entry.type not in REGULAR or entry.issparse():
                sys.exit(f"{said(path)} holds {entry.name[:200]!r}, which is not a regular file")
            names = [name for name in entry.name.split("/") if name != "."]
            if "\\" in entry.name or "\0" in entry.name or any(name in ("", "..") for name in names):
                sys.exit(f"{said(path)} holds a file with the name {entry.name[:200]!r}, which leads out of it")
            if len(names) > 1:  # what lies beside the folder is nobody's, as for npm
                yield tarball, entry, "/".join(names[1:])


def said(path: str) -> str:
    """Return how a tarball is called in an error: by its package."""
    return str(PLACES.get(path, "a package"))


def commands_of(path: str) -> dict[str, str]:
    """Return the commands of a package, by name, with the files that they are."""
    for tarball, entry, name in files_in(path):
        if name != "package.json":
            continue
        if entry.size > MOST_DESCRIPTION:
            return {}
        try:
            description = json.loads(read(tarball, entry))
        except (ValueError, RecursionError):
            return {}
        return dict(commands_in(description))
    return {}


def commands_in(description: object) -> Iterator[tuple[str, str]]:
    """Yield names and files of the commands that a package.json says."""
    listed = description.get("bin") if isinstance(description, dict) else None
    if isinstance(listed, str) and isinstance(description, dict):
        listed = {str(description.get("name", "")).rpartition("/")[2]: listed}
    for name, file in listed.items() if isinstance(listed, dict) else ():
        if isinstance(name, str) and isinstance(file, str) and NAME.fullmatch(name):
            target = posixpath.normpath(file)
            if not target.startswith(("/", "..")) and "\0" not in target and "\n" not in target:
                yield name, target


def read(tarball: tarfile.TarFile, entry: tarfile.TarInfo) -> bytes:
    """Return a file whole. Exits where it does not have the declared size."""
    file = tarball.extractfile(entry)
    data = file.read(entry.size) if file is not None else b""
    if len(data) != entry.size:
        sys.exit(f"{entry.name[:200]!r} does not have the declared size")
    return data


def unpack(path: str, folder: str, out: TarballOutput) -> None:
    """Write the files of a tarball, and the scripts for its commands where it lies at the top."""
    commands = commands_of(path) if "/node_modules/" not in f"/{folder}" else {}
    names = set()
    for tarball, entry, name in files_in(path):
        names.add(name)
        is_command = name in commands.values()
        kind = MODULE | (EXECUTABLE if is_command or entry.mode & 0o111 else 0)
        if is_command and entry.size <= MOST_COMMAND:
            head, newline, body = read(tarball, entry).partition(b"\n")
            # Written on Windows: the kernel would look for an interpreter whose name ends so.
            head = head.removesuffix(b"\r") if head.startswith(b"#!") else head
            out.put(kind, f"{folder}/{name}", head + newline + body)
        else:
            copy(tarball, entry, kind, f"{folder}/{name}", out)
    for command, file in commands.items():
        if file in names:
            out.put(SCRIPT | EXECUTABLE, command, COMMAND.format(path=shlex.quote(f"{folder}/{file}")).encode())


def copy(tarball: tarfile.TarFile, entry: tarfile.TarInfo, kind: int, name: str, out: TarballOutput) -> None:
    """Write a file piece by piece."""
    left_bytes = entry.size
    out.begin(kind, name, left_bytes)
    file = tarball.extractfile(entry)
    while file is not None and left_bytes and (piece := file.read(min(PIECE, left_bytes))):
        left_bytes -= len(piece)
        out.write(piece)
    if left_bytes:
        sys.exit(f"{entry.name[:200]!r} does not have the declared size")


def main() -> None:
    """Write everything."""
    out = TarballOutput(1, ASKED["most_files"], ASKED["most_bytes"])
    for path, folder in ASKED["tarballs"]:
        try:
            unpack(path, folder, out)
        except Exception as error:  # of a tarball, its compression, or a name that is no UTF-8
            sys.exit(f"{said(path)} cannot be unpacked: {type(error).__name__}: {error}")
    out.put(FILES_END, "", b"")
    out.flush()


ASKED = json.load(sys.stdin)
PLACES = dict(ASKED["tarballs"])
if __name__ == "__main__":
    main()
