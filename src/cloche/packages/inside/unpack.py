"""Unpack wheels, compile their sources, and write the files to standard output as frames.

Standard input is JSON: `wheels`, paths in order; `site`, the later folder of the files; `python`, the interpreter that
scripts are for; `compiles`, whether to write this interpreter's bytecode; `most_files`, `most_bytes`. Links, devices,
and names that lead out are refused. The first frames are the files of the wheels, then comes an empty one as their end,
then the bytecode: if the compiler crashes on a package's source, the files are complete.
"""

from __future__ import annotations

import configparser
import importlib.util
import json
import marshal
import os
import re
import stat
import struct
import sys
import tempfile
import warnings
import zipfile

FRAME = struct.Struct(">BHQ")
SITE, SCRIPT, DATA, FILES_END = 1, 2, 3, 4
EXECUTABLE = 16  # added to a kind
PIECE = 1 << 18
MOST_SOURCE = 16 << 20
MOST_WORKERS, LEAST_SHARE = 4, 50
UNCHECKED = (1).to_bytes(4, "little")  # bytecode that is taken as it is: the files of a layer never change
SCHEMES = {"purelib": SITE, "platlib": SITE, "scripts": SCRIPT, "data": DATA}
MODULE = re.compile(r"[A-Za-z_][\w.]*")
NAME = re.compile(r"[\w.+-]+")
LONGEST_INTERPRETER = 120  # of the first line of a script, for the kernel
ENTRY = """\
import sys
from {module} import {first}
if __name__ == "__main__":
    sys.argv[0] = sys.argv[0].removesuffix(".exe")
    sys.exit({call}())
"""


class FrameOutput:
    """Write frames, and count them."""

    def __init__(self, fd: int, most_files: int, most_bytes: int) -> None:
        self._out = os.fdopen(fd, "wb", buffering=1 << 20, closefd=False)
        self._files, self._bytes = most_files, most_bytes

    def to(self, fd: int) -> FrameOutput:
        """Return an output to another file, with the rest of the bounds."""
        return FrameOutput(fd, self._files, self._bytes)

    def begin(self, kind: int, path: str, size: int) -> None:
        """Begin a file. Exits where there are too many, or too large ones."""
        self._files -= 1
        self._bytes -= size
        if self._files < 0 or self._bytes < 0:
            sys.exit("the wheels contain too many files, or files that are too large")
        name = path.encode()
        self._out.write(FRAME.pack(kind, len(name), size) + name)

    def write(self, data: bytes) -> None:
        """Write a piece of the file that has begun."""
        self._out.write(data)

    def put(self, kind: int, path: str, data: bytes) -> None:
        """Write a whole file."""
        self.begin(kind, path, len(data))
        self.write(data)

    def flush(self) -> None:
        """Send the buffered bytes."""
        self._out.flush()


def place_of(name: str) -> tuple[int, str] | None:
    """Return kind and path of a wheel's file; None for one that is not installed. Exits for a name that leads out."""
    names = name.split("/")
    if name.startswith("/") or "\\" in name or "\0" in name or any(segment in ("", ".", "..") for segment in names):
        sys.exit(f"a wheel holds a file with the name {name[:200]!r}, which leads out of it")
    if not names[0].endswith(".data") or len(names) < 3:
        return SITE, name
    kind = SCHEMES.get(names[1])
    return None if kind is None else (kind, "/".join(names[2:]))


def unpack(path: str, python: str, out: FrameOutput) -> list[tuple[str, bytes]]:
    """Write the files of a wheel; return its Python sources with their paths."""
    sources = []
    with zipfile.ZipFile(path) as wheel:
        for entry in wheel.infolist():
            mode = entry.external_attr >> 16
            if entry.is_dir():
                continue
            if stat.S_IFMT(mode) not in (0, stat.S_IFREG):
                sys.exit(f"{os.path.basename(path)} holds {entry.filename[:200]!r}, which is not a regular file")
            destination = place_of(entry.filename)
            if destination is None:
                continue
            kind, name = destination
            if kind == SCRIPT:
                out.put(SCRIPT, name, with_interpreter(read(wheel, entry), python))
            elif name.endswith(".py") and entry.file_size <= MOST_SOURCE:
                data = read(wheel, entry)
                out.put(kind, name, data)
                if kind == SITE:
                    sources.append((name, data))
            else:
                copy(wheel, entry, kind | (EXECUTABLE if mode & 0o111 else 0), name, out)
            if name.endswith(".dist-info/entry_points.txt") and kind == SITE and name.count("/") == 1:
                write_scripts(read(wheel, entry).decode("utf-8", "replace"), python, out)
    return sources


def read(wheel: zipfile.ZipFile, entry: zipfile.ZipInfo) -> bytes:
    """Return a file whole. Exits where it does not have the declared size."""
    with wheel.open(entry) as file:
        data = file.read(MOST_SOURCE + 1)
    if len(data) != entry.file_size:
        sys.exit(f"{entry.filename[:200]!r} is larger than declared")
    return data


def copy(wheel: zipfile.ZipFile, entry: zipfile.ZipInfo, kind: int, name: str, out: FrameOutput) -> None:
    """Write a file piece by piece."""
    left_bytes = entry.file_size
    out.begin(kind, name, left_bytes)
    with wheel.open(entry) as file:
        while left_bytes and (piece := file.read(min(PIECE, left_bytes))):
            left_bytes -= len(piece)
            out.write(piece)
        if left_bytes or file.read(1):
            sys.exit(f"{entry.filename[:200]!r} does not have the declared size")


def first_line(python: str) -> bytes:
    """Return how a script names its interpreter, also where that is too long for the kernel."""
    if len(python) <= LONGEST_INTERPRETER and " " not in python:
        return f"#!{python}\n".encode()
    return f"#!/bin/sh\n'''exec' \"{python}\" \"$0\" \"$@\"\n' '''\n".encode()


def with_interpreter(data: bytes, python: str) -> bytes:
    """Let a wheel's script begin with the interpreter, where it asks for one."""
    head, newline, body = data.partition(b"\n")
    return first_line(python) + body if newline and head.startswith(b"#!python") else data


def write_scripts(text: str, python: str, out: FrameOutput) -> None:
    """Write the console scripts of a wheel's entry points."""
    parser = configparser.RawConfigParser(delimiters=("=",), strict=False)
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    try:
        parser.read_string(text)
    except configparser.Error:
        return
    for section in ("console_scripts", "gui_scripts"):
        for name, target in parser.items(section) if parser.has_section(section) else ():
            module, _, call = target.partition("[")[0].strip().partition(":")
            if NAME.fullmatch(name) and MODULE.fullmatch(module) and MODULE.fullmatch(call):
                body = ENTRY.format(module=module, first=call.partition(".")[0], call=call)
                out.put(SCRIPT, name, first_line(python) + body.encode())


def compile_all(sources: list[tuple[str, bytes]], site: str, out: FrameOutput) -> None:
    """Write the bytecode of sources, under the names that the importing interpreter looks for.

    Each processor takes a share. If a compiler crashes, none of its share is written.
    """
    workers = min(MOST_WORKERS, os.cpu_count() or 1, 1 + len(sources) // LEAST_SHARE)
    shares = []
    for number in range(workers):
        file = tempfile.TemporaryFile(dir=".")  # noqa: SIM115 - it is read below
        child = os.fork()
        if child == 0:
            code = 1
            try:
                compile_share(sources[number::workers], site, file.fileno(), out)
                code = 0
            finally:
                os._exit(code)
        shares.append((child, file))
    for child, file in shares:
        _, status = os.waitpid(child, 0)
        if status == 0:
            file.seek(0)
            while piece := file.read(PIECE):
                out.write(piece)
        file.close()


def compile_share(sources: list[tuple[str, bytes]], site: str, fd: int, limits: FrameOutput) -> None:
    """Write bytecode to a file."""
    magic = importlib.util.MAGIC_NUMBER + UNCHECKED
    out = limits.to(fd)
    for name, data in sources:
        try:
            code = compile(data, f"{site}/{name}", "exec", dont_inherit=True)
        except (SyntaxError, ValueError, RecursionError, MemoryError, OverflowError):
            continue  # of another Python's, or a template: whoever imports it is told
        folder, slash, file = name.rpartition("/")
        stem = file.removesuffix(".py")
        compiled = magic + importlib.util.source_hash(data) + marshal.dumps(code)
        out.put(SITE, f"{folder}{slash}__pycache__/{stem}.{sys.implementation.cache_tag}.pyc", compiled)
    out.flush()


def main() -> None:
    """Write everything."""
    warnings.simplefilter("ignore")
    asked = json.load(sys.stdin)
    out = FrameOutput(1, asked["most_files"], asked["most_bytes"])
    sources = []
    for path in asked["wheels"]:
        try:
            sources += unpack(path, asked["python"], out)
        except (zipfile.BadZipFile, NotImplementedError, RuntimeError, OSError, EOFError, ValueError) as error:
            sys.exit(f"{os.path.basename(path)} cannot be unpacked: {error}")
        except Exception as error:  # zlib's and lzma's own
            sys.exit(f"{os.path.basename(path)} cannot be unpacked: {type(error).__name__}: {error}")
    out.put(FILES_END, "", b"")
    out.flush()
    if asked["compiles"]:
        compile_all(sources, asked["site"], out)
    out.flush()


if __name__ == "__main__":
    main()
