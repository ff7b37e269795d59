"""Files: read, write, describe, list, move, remove, watch, and signed addresses."""

from __future__ import annotations

import io
import stat
import time
from typing import Any

import httpx
from e2b import (
    FileNotFoundException,
    FilesystemEventType,
    FileType,
    InvalidArgumentException,
    NotFoundException,
    SandboxException,
)

from .both import Both
from .rows import shows


@shows("files.write", "files.read")
async def contents(sdk: Both) -> None:
    """Text, bytes and streams, empty and large, compressed or not, over files that are there, in new folders."""
    sandbox = await sdk.shared()
    files = sandbox.files
    written = await sdk(files.write("new/folder/text.txt", "héllo"))
    assert (written.name, written.type, written.path) == (
        "text.txt", FileType.FILE, "/home/user/new/folder/text.txt",
    )  # fmt: skip
    assert await sdk(files.read("new/folder/text.txt")) == "héllo"
    await sdk(files.write("new/folder/text.txt", "shorter"))
    assert await sdk(files.read("/home/user/new/folder/text.txt")) == "shorter"
    data = bytes(range(256)) * 20_000
    for options in ({}, {"use_octet_stream": True}, {"use_octet_stream": True, "gzip": True}):
        await sdk(files.write("data.bin", data, **options))
        assert bytes(await sdk(files.read("data.bin", format="bytes"))) == data
    assert bytes(await sdk(files.read("data.bin", format="bytes", gzip=True))) == data
    await sdk(files.write("data.bin", io.BytesIO(data)))
    pieces = await sdk.collect(await sdk(files.read("data.bin", format="stream")))
    assert b"".join(pieces) == data
    await sdk(files.write("empty", ""))
    assert await sdk(files.read("empty")) == ""
    assert bytes(await sdk(files.read("empty", format="bytes"))) == b""
    await sdk.raises(FileNotFoundException, lambda: files.read("no/such/file"))
    await sdk.raises(InvalidArgumentException, lambda: files.read("/home/user"))
    await sdk(files.write("/root/of-root", "1", user="root"))
    assert await sdk(files.read("of-root", user="root")) == "1"


@shows("files.write_files")
async def several(sdk: Both) -> None:
    """Many in one request, of either kind; none at all; metadata stay with the file."""
    sandbox = await sdk.shared()
    files = sandbox.files
    entries = [{"path": f"several/{number}.txt", "data": f"{number}"} for number in range(12)]
    entries.append({"path": "several/ü ö?&=#.txt", "data": b"\0\xff"})
    for octets in (None, True):
        written = await sdk(files.write_files(entries, use_octet_stream=octets))
        assert [item.path for item in written] == [f"/home/user/{entry['path']}" for entry in entries]
    assert await sdk(files.read("several/11.txt")) == "11"
    assert bytes(await sdk(files.read("several/ü ö?&=#.txt", format="bytes"))) == b"\0\xff"
    assert await sdk(files.write_files([])) == []


@shows("files.write", "files.get_info")
async def metadata(sdk: Both) -> None:
    """Names and values that are given with a file are in its description, until it is written without."""
    sandbox = await sdk.shared()
    await sdk(sandbox.files.write("marked", "1", metadata={"author": "me", "kind": "x y"}))
    assert (await sdk(sandbox.files.get_info("marked"))).metadata == {"author": "me", "kind": "x y"}
    await sdk(sandbox.files.write("marked", "1"))
    assert not (await sdk(sandbox.files.get_info("marked"))).metadata


@shows("files.get_info", "files.exists", "files.make_dir")
async def descriptions(sdk: Both) -> None:
    """A file, a folder, a link; a folder is made with those above it, once."""
    sandbox = await sdk.shared()
    files = sandbox.files
    assert await sdk(files.make_dir("made/deep/er")) is True
    assert await sdk(files.make_dir("made/deep/er")) is False
    await sdk(files.write("made/file", "12345"))
    await sdk(sandbox.commands.run("chmod 640 made/file; ln -s file made/link; ln -s nothing made/broken"))
    info = await sdk(files.get_info("made/file"))
    assert (info.name, info.path, info.type, info.size) == ("file", "/home/user/made/file", FileType.FILE, 5)
    assert (info.mode, info.permissions, info.owner, info.group) == (0o640, "-rw-r-----", "user", "user")
    assert abs(info.modified_time.timestamp() - time.time()) < 60
    folder = await sdk(files.get_info("made"))
    assert (folder.type, folder.permissions[0], stat.S_IMODE(folder.mode) & 0o700) == (FileType.DIR, "d", 0o700)
    link = await sdk(files.get_info("made/link"))
    assert (link.name, link.symlink_target) == ("link", "/home/user/made/file")
    assert [await sdk(files.exists(path)) for path in ("made", "made/file", "made/no")] == [True, True, False]
    await sdk.raises(FileNotFoundException, lambda: files.get_info("made/no"))
    await sdk.raises(SandboxException, lambda: files.make_dir("made/file/below"))


@shows("files.list")
async def listing(sdk: Both) -> None:
    """One level, or more; in order; not of what is no folder."""
    sandbox = await sdk.shared()
    files = sandbox.files
    await sdk(sandbox.commands.run("mkdir -p listed/b/c listed/a; touch listed/a/1 listed/b/c/2 listed/z"))
    entries = await sdk(files.list("listed"))
    assert [(entry.name, entry.type) for entry in entries] == [
        ("a", FileType.DIR), ("b", FileType.DIR), ("z", FileType.FILE),
    ]  # fmt: skip
    deep = [entry.path.removeprefix("/home/user/listed/") for entry in await sdk(files.list("listed", depth=3))]
    assert deep == ["a", "a/1", "b", "b/c", "b/c/2", "z"]
    await sdk.raises(FileNotFoundException, lambda: files.list("listed/no"))
    await sdk.raises(InvalidArgumentException, lambda: files.list("listed/z"))
    await sdk.raises(InvalidArgumentException, lambda: files.list("listed", depth=0))


@shows("files.rename", "files.remove")
async def moves(sdk: Both) -> None:
    """A file and a folder get a new name; a folder goes with all in it; what is not there is removed, too."""
    sandbox = await sdk.shared()
    files = sandbox.files
    await sdk(files.write("moved/old", "1"))
    moved = await sdk(files.rename("moved/old", "moved/new"))
    assert (moved.name, moved.path, moved.type) == ("new", "/home/user/moved/new", FileType.FILE)
    assert (await sdk(files.exists("moved/old")), await sdk(files.read("moved/new"))) == (False, "1")
    assert (await sdk(files.rename("moved", "moved2"))).type == FileType.DIR
    await sdk.raises(FileNotFoundException, lambda: files.rename("moved/no", "x"))
    await sdk(files.remove("moved2"))
    assert await sdk(files.exists("moved2/new")) is False
    await sdk(files.remove("moved2"))


async def _watch(sdk: Both, sandbox: Any, path: str, events: list[Any], **options: Any) -> Any:
    if sdk.is_async:
        return await sandbox.files.watch_dir(path, on_event=events.append, **options)
    return sandbox.files.watch_dir(path, **options)


async def _events(sdk: Both, handle: Any, events: list[Any], is_enough: Any) -> list[Any]:
    """Return the events so far once they are enough."""

    def look() -> Any:
        if not sdk.is_async:
            events.extend(handle.get_new_events())
        return is_enough(events)

    await sdk.until(look)
    return events


@shows("files.watch_dir", "WatchHandle.get_new_events", "WatchHandle.stop")
async def watch(sdk: Both) -> None:
    """What happens to files below a folder is told in order, in folders that are made meanwhile, too."""
    sandbox = await sdk.shared()
    files = sandbox.files
    await sdk(files.make_dir("watched"))
    events: list[Any] = []
    handle = await _watch(sdk, sandbox, "watched", events)
    await sdk(files.write("watched/file", "1"))
    kinds = FilesystemEventType
    seen = await _events(sdk, handle, events, lambda seen: kinds.WRITE in [event.type for event in seen])
    assert seen[0].type == kinds.CREATE
    assert {event.name for event in seen} == {"file"}
    await sdk(files.rename("watched/file", "watched/other"))
    await sdk(files.remove("watched/other"))
    await _events(
        sdk, handle, events,
        lambda seen: {kinds.RENAME, kinds.REMOVE} <= {event.type for event in seen},
    )  # fmt: skip
    await sdk(handle.stop())
    if not sdk.is_async:
        await sdk.raises(SandboxException, handle.get_new_events)
    deep: list[Any] = []
    handle = await _watch(sdk, sandbox, "watched", deep, recursive=True, include_entry=True)
    await sdk(files.write("watched/new/folder/file", "12"))
    await _events(sdk, handle, deep, lambda seen: "new/folder/file" in [event.name for event in seen])
    entry = next(event.entry for event in deep if event.name == "new/folder/file" and event.entry is not None)
    assert (entry.path, entry.size) in [("/home/user/watched/new/folder/file", size) for size in (0, 2)]
    await sdk(handle.stop())
    await sdk.raises((NotFoundException, FileNotFoundException), lambda: _watch(sdk, sandbox, "watched/no", []))


@shows("Sandbox.download_url", "Sandbox.upload_url")
async def addresses(sdk: Both) -> None:
    """Anyone with a signed address reads or writes that file, until its end, and nothing else."""
    sandbox = await sdk.shared()
    await sdk(sandbox.files.write("signed.txt", "before"))
    with httpx.Client(trust_env=False, timeout=30) as client:
        headers = {"E2b-Sandbox-Id": sandbox.sandbox_id, "E2b-Sandbox-Port": "49983"}
        read = sandbox.download_url("signed.txt", use_signature_expiration=100)
        answer = client.get(read, headers=headers)
        assert (answer.status_code, answer.text) == (200, "before")
        write = sandbox.upload_url("signed.txt", user="user")
        assert client.post(write, headers=headers, files={"file": ("x", b"after")}).status_code == 200
        assert await sdk(sandbox.files.read("signed.txt")) == "after"
        wrong = [read.replace("signed.txt", "other.txt"), write.replace("signature=v1_", "signature=v1_0")]
        assert [client.get(url, headers=headers).status_code for url in wrong] == [401, 401]
        ended = client.get(sandbox.download_url("signed.txt", use_signature_expiration=-100), headers=headers)
        assert (ended.status_code, ended.json()) == (401, {"code": 401, "message": "signature is already expired"})
        # A signature tells its sandbox where the request has no header.
        assert client.get(sandbox.download_url("signed.txt")).text == "after"
