"""Conformance: files of live sandboxes, at any path that their user may access."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import io
import os
import tarfile
import tempfile
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

from cloche.core.errors import (
    BackendUnavailable,
    InvalidRequest,
    SandboxDirectoryError,
    SandboxFileError,
    SandboxFileExists,
    SandboxFileNotFound,
    SandboxFileRefused,
    SandboxFileTooLarge,
)
from cloche.core.events import discard
from cloche.core.file_protocols import SupportsFileStreams
from cloche.core.limits import KIB, MIB
from cloche.core.processes import FileChange
from cloche.core.protocols import (
    OpenLiveSandbox,
    SupportsCollecting,
    SupportsSessions,
    SupportsWatch,
)
from cloche.core.record import replace

from .files import ODD_NAMES
from .live import PATIENCE_S, opened_live, shell, started, until
from .subject import Broken, Check, Skipped, Subject, expect, expect_ok, expect_that, python, refuses

NAMES = (*ODD_NAMES, os.fsdecode(b"latin-\xe4"))
TREE = """
mkdir -p $TMPDIR/d/e $TMPDIR/d/empty; cd $TMPDIR/d; printf 1 > e/f; chmod 750 e/f
ln -s e/f link; ln -s /no/where dangling; mkfifo p
"""

STOPS = """
echo up
cd /proc
while :; do for p in [0-9]*; do case $p in 1|$$) ;; *) kill -STOP $p;; esac; done 2> /dev/null; done
"""
STOPPED_S = 2.0  # the sandbox's time-out, while that runs


async def _content(subject: Subject) -> None:
    data = bytes(range(256)) * 2000
    async with opened_live(subject) as sandbox:
        await sandbox.write_path("/tmp/a/b/f", data)
        expect_that(await sandbox.read_path("/tmp/a/b/f", max_bytes=len(data)) == data, "what is read back differs")
        expect("a part", await sandbox.read_path("/tmp/a/b/f", max_bytes=3, offset=257, count=3), b"\1\2\3")
        expect("beyond its end", await sandbox.read_path("/tmp/a/b/f", max_bytes=3, offset=MIB), b"")
        await sandbox.write_path("/tmp/a/b/f", b"1")
        await sandbox.write_path("/tmp/a/b/f", b"2", how="append")
        await refuses(sandbox.write_path("/tmp/a/b/f", b"3", how="new"), SandboxFileExists, "making a file again")
        await sandbox.write_path("relative", b"3", how="new", mode=0o640)
        code = (
            "import os\nprint(open(os.environ['TMPDIR'] + '/a/b/f').read(), open('relative').read(), "
            "oct(os.stat('relative').st_mode))"
        )
        expect("what a run sees", expect_ok(await sandbox.run(python(code))).stdout, "12 3 0o100640\n")
        expect_ok(await shell(sandbox, "mkdir -p ~/x; echo home > ~/x/f; ln -s ~/x/f $TMPDIR/link"))
        expect("through a link", await sandbox.read_path("/tmp/link", max_bytes=9), b"home\n")
        await sandbox.write_path("/tmp/link", b"new")
        expect(
            "written through a link",
            expect_ok(await shell(sandbox, "cat ~/x/f; readlink $TMPDIR/link | wc -l")).stdout,
            "new1\n",
        )
        status = await sandbox.read_path("/proc/self/status", max_bytes=64 * KIB)
        expect_that(b"Uid:" in status, f"a file of /proc reads as {status!r}")


async def _errors(subject: Subject) -> None:
    async with opened_live(subject) as sandbox:
        await sandbox.write_path("/tmp/f", b"12345")
        expect_ok(
            await shell(sandbox, "cd $TMPDIR; mkfifo p; ln -s l l; mkdir d; echo x > d/x; echo > ~/r; chmod 400 ~/r")
        )
        read, write = partial(sandbox.read_path, max_bytes=4), partial(sandbox.write_path, data=b"")
        home = (await shell(sandbox, "echo ~")).stdout.strip()
        await refuses(read("/tmp/f"), SandboxFileTooLarge, "reading 5 bytes with max_bytes=4")
        await refuses(read("/tmp/none"), SandboxFileNotFound, "reading a missing file")
        await refuses(read("/tmp/d"), SandboxDirectoryError, "reading a folder")
        await refuses(write("/tmp/d"), SandboxDirectoryError, "writing over a folder")
        await refuses(write("/tmp/f/below"), SandboxFileError, "writing below a file")
        await refuses(read("/tmp/l"), SandboxFileRefused, "reading a link to itself")
        await refuses(write("/usr/f"), SandboxFileRefused, "writing into /usr")
        await refuses(write(f"{home}/r"), SandboxFileRefused, "writing a file that is read-only")
        for path in ("/tmp/p", "/dev/zero"):
            await refuses(read(path), SandboxFileRefused, f"reading {path}")
            await refuses(write(path), SandboxFileRefused, f"writing {path}")
        await refuses(sandbox.list_path("/tmp/none"), SandboxFileNotFound, "listing a missing folder")
        await refuses(sandbox.list_path("/tmp/f"), SandboxFileError, "listing a file")
        await refuses(sandbox.remove_path("/tmp/d"), SandboxFileExists, "removing a folder with content")
        await refuses(sandbox.move_path("/tmp/f", "/tmp/d/x"), SandboxFileExists, "moving over a file")
        await refuses(sandbox.stat_path("/tmp/none"), SandboxFileNotFound, "describing nothing")
        for path in ("", "nul\0", "half \ud800"):
            await refuses(read(path), InvalidRequest, f"reading {path!r}")


async def _folders(subject: Subject) -> None:
    async with opened_live(subject) as sandbox:
        expect_ok(await shell(sandbox, TREE))
        rows = await sandbox.list_path("/tmp/d", recursive=True)
        expected = [
            ("dangling", "link"), ("e", "directory"), ("e/f", "file"), ("empty", "directory"), ("link", "link"),
            ("p", "other"),
        ]  # fmt: skip
        expect("the entries", [(row.name, row.type) for row in rows], expected)
        expect("size and mode", (rows[2].size, rows[2].mode), (1, 0o750))
        expect("where links lead", [(row.target, row.leads_to) for row in rows if row.type == "link"],
               [("/no/where", None), ("e/f", "file")])  # fmt: skip
        await sandbox.make_folder("made/below")
        await sandbox.move_path("/tmp/d", "made/below/moved")
        await sandbox.move_path("made/below/moved/e", "/tmp/e")
        expect("what was moved", await sandbox.read_path("/tmp/e/f", max_bytes=1), b"1")
        await sandbox.remove_path("made", recursive=True)
        expect("what is left", [row.name for row in await sandbox.list_path("/workspace")], [])
        expect("and elsewhere", (await sandbox.stat_path("/tmp/e")).type, "directory")


async def _names(subject: Subject) -> None:
    async with opened_live(subject) as sandbox:
        for name in NAMES:
            await sandbox.write_path(f"/tmp/names/{name}", os.fsencode(name))
        counts = "print(sum(open(n, 'rb').read() == os.fsencode(n) for n in os.listdir()))"
        code = f"import os\nos.chdir(os.environ['TMPDIR'] + '/names')\n{counts}"
        expect("files with their own name", expect_ok(await sandbox.run(python(code))).stdout, f"{len(NAMES)}\n")
        expect("the names", sorted(row.name for row in await sandbox.list_path("/tmp/names")), sorted(NAMES))
        read = [await sandbox.read_path(f"/tmp/names/{name}", max_bytes=KIB) for name in NAMES]
        expect("what is in them", read, [os.fsencode(name) for name in NAMES])


async def _archives(subject: Subject) -> None:
    async with opened_live(subject) as sandbox:
        expect_ok(await shell(sandbox, TREE))
        pieces: list[bytes] = []
        expect("what was left out", await sandbox.pack_path("/tmp/d", pieces.append), 1)
        with tarfile.open(fileobj=io.BytesIO(b"".join(pieces))) as archive:
            names = sorted(member.name for member in archive)
        expect("what is in the archive", names, ["dangling", "e", "e/f", "empty", "link"])
        await sandbox.unpack_path("/workspace/copy", b"".join(pieces))
        result = await shell(sandbox, "cat link; stat -c %a e/f", cwd="/workspace/copy")
        expect("what was unpacked", result.stdout.split(), ["1750"])
        copied = [row.name for row in await sandbox.list_path("/workspace/copy", recursive=True)]
        expect("all that was unpacked", copied, names)
        for name, kind, target in (
            ("../x", tarfile.REGTYPE, ""),
            ("/tmp/x", tarfile.REGTYPE, ""),
            ("x", tarfile.CHRTYPE, ""),
        ):
            await refuses(sandbox.unpack_path("/workspace/bad", _archive((name, kind, target))), SandboxFileError, name)
        leads = _archive(("way", tarfile.SYMTYPE, "/tmp"), ("way/x", tarfile.REGTYPE, ""))
        await refuses(sandbox.unpack_path("/workspace/bad", leads), SandboxFileError, "unpacking through a link")
        await refuses(sandbox.stat_path("/tmp/x"), SandboxFileNotFound, "finding what led elsewhere")
        await refuses(sandbox.unpack_path("/workspace/bad", b"no archive " * 99), SandboxFileError, "unpacking text")


def _archive(*members: tuple[str, bytes, str]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, kind, target in members:
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, target
            archive.addfile(member)
    return buffer.getvalue()


async def _streams(subject: Subject) -> None:
    """Stream 40 MiB in and out, abort both halfway, and use the sandbox while one stream is not read."""
    piece = bytes(range(256)) * 4096

    async def pieces(count: int) -> AsyncIterator[bytes]:
        for _ in range(count):
            yield piece

    async with opened_live(subject, disk_bytes=128 * MIB) as sandbox:
        if not isinstance(sandbox, SupportsFileStreams):
            raise Skipped("it passes no files on piece by piece")
        await sandbox.make_folder("/tmp/own")  # beside it there may be what is shown of the host
        await sandbox.write_path("/tmp/own/big", pieces(40))
        unread = sandbox.read_stream("/tmp/own/big")
        await anext(unread)
        digest = hashlib.sha256()
        async for data in sandbox.read_stream("/tmp/own/big"):
            digest.update(data)
        expect("what came", digest.hexdigest(), hashlib.sha256(piece * 40).hexdigest())
        await _is_given_up(sandbox)
        await refuses(sandbox.write_path("/tmp/own/more", pieces(200)), SandboxFileError, "filling the disk")
        await unread.aclose()  # type: ignore[attr-defined]
        expect("what is there", [row.name for row in await sandbox.list_path("/tmp/own")], ["big"])


async def _is_given_up(sandbox: OpenLiveSandbox) -> None:
    """Cancel a write: nothing of the file remains."""
    requested = asyncio.Event()

    async def pieces() -> AsyncIterator[bytes]:
        yield b"x" * MIB
        requested.set()
        await asyncio.Event().wait()

    writing = asyncio.ensure_future(sandbox.write_path("/tmp/own/half", pieces()))
    async with asyncio.timeout(PATIENCE_S):
        await requested.wait()
    writing.cancel()
    (ended,) = await asyncio.gather(writing, return_exceptions=True)
    expect_that(isinstance(ended, asyncio.CancelledError), f"what was cancelled came to {ended!r}")
    await refuses(sandbox.stat_path("/tmp/half"), SandboxFileNotFound, "finding half a file")


async def _concurrent(subject: Subject) -> None:
    async with opened_live(subject) as sandbox:
        await asyncio.gather(*(sandbox.write_path(f"/tmp/many/{n}", b"x" * n) for n in range(40)))
        read = await asyncio.gather(*(sandbox.read_path(f"/tmp/many/{n}", max_bytes=KIB) for n in range(40)))
        expect("their sizes", [len(data) for data in read], list(range(40)))


async def _is_stopped(subject: Subject) -> None:
    content = bytes(8 * MIB)
    async with opened_live(subject, timeout_s=STOPPED_S) as sandbox:
        await sandbox.write_path("/tmp/kept", b"kept")
        async with started(sandbox, "sh", "-c", STOPS) as stopper:
            await until(stopper.stdout, b"up\n")
            for _ in range(2):
                try:
                    async with asyncio.timeout(PATIENCE_S):
                        await sandbox.write_path("/tmp/large", content)
                except SandboxFileError as error:
                    expect("why a call of a process that stands still fails", error.kind, "timeout")
            with contextlib.suppress(TimeoutError, SandboxFileError):
                async with asyncio.timeout(STOPPED_S / 4):  # as `timeout=` gives one up
                    await sandbox.write_path("/tmp/large", content)
        expect("what is read afterwards", await sandbox.read_path("/tmp/kept", max_bytes=KIB), b"kept")
        expect_ok(await shell(sandbox, "true"))


async def _watch(subject: Subject) -> None:
    async with opened_live(subject) as sandbox:
        if not isinstance(sandbox, SupportsWatch):
            raise Skipped("it watches no files")
        await sandbox.make_folder("/tmp/own")
        try:
            async with sandbox.watch_path("/tmp/own"):
                pass
        except BackendUnavailable as error:
            raise Skipped(str(error)) from error
        await refuses(_watched(sandbox, "/tmp/none"), SandboxFileNotFound, "watching nothing")
        async with sandbox.watch_path("/tmp/own", recursive=True) as changes:
            changes_all = "cd $TMPDIR/own; mkdir -p a/b; echo 1 > a/b/f; mv a/b/f g; rm g; echo > end"
            expect_ok(await shell(sandbox, changes_all))
            events: list[FileChange] = []
            async with asyncio.timeout(PATIENCE_S):
                async for change in changes:
                    events.append(change)
                    if change.path == "end":
                        break
        reported = [(change.kind, change.path, change.target) for change in events if change.kind != "changed"]
        expected = [
            ("created", "a", ""), ("created", "a/b", ""), ("created", "a/b/f", ""), ("moved", "a/b/f", "g"),
            ("removed", "g", ""), ("created", "end", ""),
        ]  # fmt: skip
        missing = [
            row
            for row in expected
            if row not in reported and not (row[1] in ("a/b/f", "g") and len(reported) < len(expected))
        ]
        expect_that(not missing, f"a watch told {reported}")


def _text_of(folder: str, path: str) -> str:
    return Path(folder, path).read_text()


async def _collected(subject: Subject) -> None:
    code = """if True:
        import os
        os.makedirs("out/deep")
        for name in ("a.csv", "notes.txt", "out/deep/f", "out/other.csv", "changed.csv"):
            open(name, "w").write(name)
        os.symlink("/etc/passwd", "out/link")
        os.mkfifo("out/fifo")
    """
    async with opened_live(subject) as sandbox:
        for name in ("before.csv", "changed.csv"):
            await sandbox.write_path(name, b"before")
        request = replace(python(code, files={"given.csv": b"given"}), collect=("*.csv", "out/**"))
        result = expect_ok(await sandbox.run(request))
        collected = ["a.csv", "changed.csv", "out/deep/f", "out/other.csv"]
        expect("what is collected", [record.path for record in result.files], collected)
        expect("their mark", result.meta.get("files_shared"), True)
        expect_ok(await shell(sandbox, "rm -r *"))
        with tempfile.TemporaryDirectory() as folder:
            result.save(folder)
            saved = {path: _text_of(folder, path) for path in collected}
        expect("what is saved, later", saved, {path: path for path in collected})
        expect("what was not asked for", expect_ok(await sandbox.run(python(code))).files, ())
        if isinstance(sandbox, SupportsSessions):
            session = await sandbox.open_session("python", {})
            if isinstance(session, SupportsCollecting):
                cell = await session.run_collecting(
                    "open('cell.csv', 'w').close()", timeout_s=PATIENCE_S, sink=discard, collect=("*.csv",)
                )
                expect("files of a cell", [record.path for record in cell.files], ["cell.csv"])


async def _watched(sandbox: SupportsWatch, path: str) -> None:
    async with sandbox.watch_path(path):
        raise Broken(f"{path} can be watched")


_check = partial(Check, family="live files")

CHECKS: tuple[Check, ...] = (
    _check(name="live files: content", claim="what is written is read, by all, wherever it lies", attempt=_content),
    _check(
        name="live files: errors", claim="what cannot be done is a typed error, and hangs on nothing", attempt=_errors
    ),
    _check(name="live files: folders", claim="folders are made, listed, moved and removed", attempt=_folders),
    _check(name="live files: names", claim="names of any bytes come through either way", attempt=_names),
    _check(
        name="live files: archives",
        claim="folders come out and go in as archives, that lead nowhere",
        attempt=_archives,
    ),
    _check(name="live files: streams", claim="files pass piece by piece; half a file is none", attempt=_streams),
    _check(name="live files: many", claim="many operations at once are each done", attempt=_concurrent),
    _check(
        name="live files: stopped",
        claim="processes inside that stop each other hold no operation for longer than the sandbox's time-out",
        attempt=_is_stopped,
    ),
    _check(
        name="live files: collected",
        claim="a result has the files that it was to collect, if they changed, and keeps them",
        attempt=_collected,
    ),
    _check(name="live files: watch", claim="changes are told, in folders that come, too", attempt=_watch),
)
