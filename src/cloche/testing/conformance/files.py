"""Conformance: input files, output files, and refusals of either."""

from __future__ import annotations

import asyncio
import hashlib
import os
import tempfile
from functools import partial
from pathlib import Path

from cloche.core.errors import (
    InvalidRequest,
    SandboxFileError,
    SandboxFileNotFound,
    SandboxFileRefused,
    SandboxFileTooLarge,
)
from cloche.core.limits import KIB, MIB
from cloche.core.request import InputFile, Request
from cloche.core.result import Result
from cloche.execution.paths import SupportsListing

from .subject import Broken, Check, Subject, bash, expect, expect_ok, expect_that, python, refuses

ODD_NAMES = (
    " ",
    "a b",
    "-rf",
    'it\'s "q"',
    "ä\u2713",
    "new\nline",
    "\x1b[31m",
    "$HOME;`id`",
    "%s",
    "x" * 200,
    ".hidden",
)


def _sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _rows(result: Result) -> list[tuple[str, int, str]]:
    return [(record.path, record.size, record.sha256) for record in result.files]


async def _in(subject: Subject) -> None:
    files = {"a/b/c.bin": bytes(range(256)) * 100, "top.txt": "ä\n".encode(), "empty": b""}
    code = f"import hashlib\nfor p in {[*files]!r}: print(hashlib.sha256(open(p, 'rb').read()).hexdigest())"
    result = expect_ok(await subject.run(python(code, files=files)))
    expect("their contents", result.stdout.split(), [_sha(data) for data in files.values()])
    expect("files reported though unchanged", _rows(result), [])


async def _absolute(subject: Subject) -> None:
    result = expect_ok(await subject.run(python("print(open('d/f').read())", files={"/workspace/d/f": b"x"})))
    expect("the file's content", result.stdout, "x\n")


async def _modes(subject: Subject) -> None:
    files = (
        InputFile(path="run.sh", data=b"#!/bin/sh\necho ran\n", mode=0o755),
        InputFile(path="data", data=b"", mode=0o640),
    )
    result = expect_ok(
        await subject.run(Request(code="./run.sh; stat -c %a run.sh data", language="bash", files=files))
    )
    expect("output", result.stdout.split(), ["ran", "755", "640"])


async def _odd_in(subject: Subject) -> None:
    files = {name: name.encode() for name in ODD_NAMES}
    code = "import os, sys\nprint(sum(open(n, 'rb').read() == os.fsencode(n) for n in os.listdir()))"
    result = expect_ok(await subject.run(python(code, files=files)))
    expect("files with their own name inside", result.stdout.strip(), str(len(ODD_NAMES)))


async def _bad_paths(subject: Subject) -> None:
    for path in ("../out", "/etc/passwd", "a/../../out", ".", "nul\0"):
        try:
            await subject.run(python("pass", files={path: b"x"}))
        except InvalidRequest:
            continue
        raise Broken(f"an input file {path!r} was not refused")


async def _out(subject: Subject) -> None:
    code = """
import os
os.makedirs("d/e"); open("d/e/new.bin", "wb").write(bytes(1000)); open("empty", "w").close()
open("changed", "w").write("after"); open("same", "w").write("same"); os.unlink("gone")
"""
    inputs = {"changed": b"before", "same": b"same", "gone": b"x", "untouched": b"x"}
    result = expect_ok(await subject.run(python(code, files=inputs)))
    new = [("changed", b"after"), ("d/e/new.bin", bytes(1000)), ("empty", b"")]
    expect("the files", _rows(result), [(path, len(data), _sha(data)) for path, data in new])


async def _odd_out(subject: Subject) -> None:
    names = [*ODD_NAMES, os.fsdecode(b"latin-\xe4")]
    code = f"import os\nfor name in {names!r}: open(name, 'wb').write(os.fsencode(name))"
    result = expect_ok(await subject.run(python(code)))
    expect("the names", sorted(r.path for r in result.files), sorted(names))
    with tempfile.TemporaryDirectory() as folder:
        result.save(folder)
        expect("the saved names", sorted(os.listdir(folder)), sorted(names))


async def _since_last(subject: Subject) -> None:
    """Each run reports its own changes, including to files that a call wrote between runs."""
    async with subject.open() as sandbox:
        await sandbox.write_file("in", b"1")
        first = expect_ok(await sandbox.run(python("open('a', 'w').write('1'); open('b', 'w').write('1')")))
        expect("after the first run", [r.path for r in first.files], ["a", "b"])
        second = expect_ok(await sandbox.run(python("open('b', 'w').write('2'); open('in', 'a').write('2')")))
        expect("after the second", [r.path for r in second.files], ["b", "in"])
        expect("after the third", _rows(expect_ok(await sandbox.run(python("import os; os.unlink('a')")))), [])


async def _save(subject: Subject) -> None:
    code = "import os\nos.makedirs('d'); open('d/f', 'wb').write(bytes(range(256)) * 9000); open('g', 'w').write('g')"
    result = expect_ok(await subject.run(python(code)))
    with tempfile.TemporaryDirectory() as folder:
        target = os.path.join(folder, "made/here")
        expect("the saved paths", sorted(result.save(target)), ["d/f", "g"])
        result.save(target)  # once more: files are replaced
        saved = await asyncio.to_thread(Path(target, "d/f").read_bytes)
        expect_that(saved == bytes(range(256)) * 9000, "a saved file differs")


async def _links(subject: Subject) -> None:
    code = """
import os
os.symlink("/etc/hostname", "link"); os.symlink("/etc", "folder"); os.mkfifo("fifo"); open("real", "w").write("x")
"""
    async with subject.open() as sandbox:
        result = expect_ok(await sandbox.run(python(code)))
        expect("the files", [r.path for r in result.files], ["real"])
        for path in ("link", "folder/hostname", "fifo"):
            await refuses(sandbox.read_file(path, max_bytes=100), SandboxFileRefused, f"reading {path}")
    with tempfile.TemporaryDirectory() as folder:
        result.save(folder)
        expect("what was saved", os.listdir(folder), ["real"])


async def _save_through_links(subject: Subject) -> None:
    """Save into a target with links: they are replaced or refused, and never followed."""
    result = expect_ok(
        await subject.run(python("import os; os.mkdir('d'); open('d/f', 'w').write('x'); open('g', 'w').write('x')"))
    )
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as elsewhere:
        os.symlink(elsewhere, f"{folder}/d")
        os.symlink(f"{elsewhere}/g", f"{folder}/g")
        try:
            result.save(folder)
        except SandboxFileError:
            pass
        expect("files outside of the target", os.listdir(elsewhere), [])


async def _write_through_links(subject: Subject) -> None:
    """One run leaves links: a later write does not follow them out of the workspace."""
    async with subject.open() as sandbox:
        expect_ok(await sandbox.run(bash('mkdir -p "$TMPDIR"; ln -s "$TMPDIR" way; ln -s "$TMPDIR/f" file; : > plain')))
        await refuses(sandbox.write_file("way/f", b"x"), SandboxFileError, "writing through a linked folder")
        await refuses(sandbox.write_file("plain/f", b"x"), SandboxFileError, "writing below a file")
        await sandbox.write_file("file", b"mine")
        expect("what stands in the link's place", await sandbox.read_file("file", max_bytes=10), b"mine")
        expect_ok(await sandbox.run(bash("[ ! -L file ]")))


async def _there_and_back(subject: Subject) -> None:
    data = os.urandom(300 * KIB)
    async with subject.open() as sandbox:
        await sandbox.write_file("d/data.bin", data)
        expect_that(await sandbox.read_file("d/data.bin", max_bytes=MIB) == data, "what was read back differs")
        result = expect_ok(await sandbox.run(bash("sha256sum d/data.bin; echo more >> d/data.bin")))
        expect("the hash inside", result.stdout[:64], _sha(data))
        expect_that(
            await sandbox.read_file("/workspace/d/data.bin", max_bytes=MIB) == data + b"more\n", "the change is lost"
        )
        await sandbox.write_file("d/data.bin", b"")
        expect("after replacing it", await sandbox.read_file("d/data.bin", max_bytes=0), b"")


async def _read_errors(subject: Subject) -> None:
    async with subject.open() as sandbox:
        await sandbox.write_file("d/f", b"12345")
        expect("a file of exactly max_bytes", await sandbox.read_file("d/f", max_bytes=5), b"12345")
        await refuses(sandbox.read_file("d/f", max_bytes=4), SandboxFileTooLarge, "reading 5 bytes with max_bytes=4")
        await refuses(sandbox.read_file("none", max_bytes=4), SandboxFileNotFound, "reading a missing file")
        await refuses(sandbox.read_file("none/f", max_bytes=4), SandboxFileNotFound, "reading below a missing folder")
        await refuses(sandbox.read_file("d", max_bytes=4), SandboxFileRefused, "reading a folder")
        await refuses(sandbox.read_file("../x", max_bytes=4), InvalidRequest, "reading outside the workspace")
        await refuses(sandbox.write_file("/etc/x", b""), InvalidRequest, "writing outside the workspace")


async def _programs_file(subject: Subject) -> None:
    """Run a program beside the caller's files of any name, and after a guest that replaced it by a link."""
    mine = {"main.py": b"word = 'mine'\n", "main.sh": b"echo mine\n"}
    async with subject.open() as sandbox:
        for path, data in mine.items():
            await sandbox.write_file(path, data)
        code = "import main, os, sys\nos.unlink(__file__); os.symlink('main.py', __file__)\nprint(main.word, sys.argv)"
        for _ in range(2):
            result = expect_ok(await sandbox.run(python(code)))
            expect("what a program imports from beside it", result.stdout.split()[0], "mine")
            expect("the files that it changed", _rows(result), [])
        first = await sandbox.run(python("1/0"))
        expect_that("line 1, in <module>" in first.stderr, f"the traceback names no line: {first.stderr!r}")
        listing = expect_ok(await sandbox.run(bash('echo "$0"; . ./main.sh; ls -A')))
        name, *other_names = listing.stdout.split()
        name = name.rpartition("/")[2]
        expect("what a script sees", sorted(other_names), sorted(["mine", name, *mine]))
        expect("the files that it changed", _rows(listing), [])
        if isinstance(sandbox, SupportsListing):
            expect("the listing", sorted(await sandbox.list_files()), sorted(mine))
        for path, data in mine.items():
            expect(f"the caller's {path}", await sandbox.read_file(path, max_bytes=100), data)
        await refuses(sandbox.write_file(name, b""), InvalidRequest, "writing a file with the program's own name")


_in_, _out_ = partial(Check, family="files in"), partial(Check, family="files out")

CHECKS: tuple[Check, ...] = (
    _in_(name="contents", claim="nested, binary and empty files arrive and are not reported back", attempt=_in),
    _in_(name="absolute path", claim="/workspace/f names the same file as f", attempt=_absolute),
    _in_(name="modes", claim="mode bits arrive; a script can be executed", attempt=_modes),
    _in_(
        name="odd names in", claim="names with blanks, quotes, line ends, controls arrive as they are", attempt=_odd_in
    ),
    _in_(name="bad paths", claim="input paths that leave the workspace are refused", attempt=_bad_paths),
    _in_(
        name="the program's file",
        claim="a program replaces no file of the caller's, imports from among them, and is listed nowhere",
        attempt=_programs_file,
    ),
    _in_(name="links under writes", claim="links the guest left lead no write astray", attempt=_write_through_links),
    _out_(
        name="created and changed",
        claim="created and changed files are told with size and SHA-256, no others",
        attempt=_out,
    ),
    _out_(
        name="odd names out", claim="odd names come out as they are, also bytes that are not UTF-8", attempt=_odd_out
    ),
    _out_(name="since the last run", claim="each run tells what it changed itself", attempt=_since_last),
    _out_(name="save", claim="save copies the files after the sandbox is gone, as often as asked", attempt=_save),
    _out_(name="links and fifos", claim="links and fifos are neither told, nor read, nor saved", attempt=_links),
    _out_(name="links in the target", claim="save follows no link out of its target", attempt=_save_through_links),
    _out_(name="there and back", claim="write_file, run and read_file see the same file", attempt=_there_and_back),
    _out_(name="file errors", claim="what cannot be read or written is a typed error", attempt=_read_errors),
)
