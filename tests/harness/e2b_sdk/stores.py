"""Volumes and secrets."""

from __future__ import annotations

import time
from typing import Any

from e2b import InvalidArgumentException, NotFoundException, SandboxException

from .both import Both
from .rows import shows


@shows("Volume.create", "Volume.connect", "Volume.get_info", "Volume.list", "Volume.destroy")
async def volumes(sdk: Both) -> None:
    """A volume is made, listed, found again and destroyed once."""
    name = f"volume-{time.time_ns()}"
    volume = await sdk(sdk.Volume.create(name))
    assert (volume.name, bool(volume.volume_id), bool(volume.token)) == (name, True, True)
    assert (volume.volume_id, name) in [(item.volume_id, item.name) for item in await sdk(sdk.Volume.list())]
    assert (await sdk(sdk.Volume.get_info(volume.volume_id))).name == name
    assert (await sdk(sdk.Volume.connect(volume.volume_id))).name == name
    await sdk.raises(SandboxException, lambda: sdk.Volume.create(name))
    assert await sdk(sdk.Volume.destroy(volume.volume_id)) is True
    assert await sdk(sdk.Volume.destroy(volume.volume_id)) is False
    await sdk.raises(NotFoundException, lambda: sdk.Volume.get_info(volume.volume_id))


@shows(
    "Volume.write_file", "Volume.read_file", "Volume.list", "Volume.make_dir", "Volume.exists", "Volume.get_info",
    "Volume.remove", "Volume.update_metadata",
)  # fmt: skip
async def volume_files(sdk: Both) -> None:
    """Files of a volume, without a sandbox; and the same in a sandbox that has it mounted."""
    volume = await sdk(sdk.Volume.create(f"files-{time.time_ns()}"))
    try:
        await sdk(volume.make_dir("/folder"))
        written = await sdk(volume.write_file("/folder/file", "héllo"))
        assert (written.name, written.size) == ("file", 6)
        assert await sdk(volume.read_file("/folder/file")) == "héllo"
        assert bytes(await sdk(volume.read_file("/folder/file", format="bytes"))) == "héllo".encode()
        assert [item.name for item in await sdk(volume.list("/folder"))] == ["file"]
        assert [await sdk(volume.exists(path)) for path in ("/folder/file", "/no")] == [True, False]
        assert (await sdk(volume.update_metadata("/folder/file", mode=0o600))).mode & 0o777 == 0o600
        assert (await sdk(volume.get_info("/folder/file"))).size == 6
        await sdk.raises(NotFoundException, lambda: volume.read_file("/no"))
        await _mounted(sdk, volume)
        await sdk(volume.remove("/folder/file"))
        assert await sdk(volume.exists("/folder/file")) is False
    finally:
        await sdk(sdk.Volume.destroy(volume.volume_id))


async def _mounted(sdk: Both, volume: Any) -> None:
    sandbox = await sdk.create(timeout=100, volume_mounts={"/mnt/data": volume})
    assert await sdk(sandbox.files.read("/mnt/data/folder/file", user="root")) == "héllo"
    await sdk(sandbox.commands.run("echo inside >/mnt/data/from-inside", user="root"))
    assert await sdk(volume.read_file("/from-inside")) == "inside\n"
    await sdk(sandbox.kill())
    assert await sdk(volume.read_file("/from-inside")) == "inside\n"


@shows(
    "Secret.create", "Secret.update", "Secret.get_info", "Secret.list", "Secret.exists", "Secret.destroy",
    "SecretPaginator.next_items",
)  # fmt: skip
async def secrets(sdk: Both) -> None:
    """A secret has versions and metadata, and no one reads its value."""
    name = f"secret-{time.time_ns()}"
    made = await sdk(sdk.Secret.create(name, "placeholder-one", metadata={"for": "tests"}))
    assert (made.name, made.version, made.metadata) == (name, 1, {"for": "tests"})
    assert (await sdk(sdk.Secret.update(name, "placeholder-two"))).version == 2
    info = await sdk(sdk.Secret.get_info(name))
    assert (info.name, info.version) == (name, 2)
    assert "placeholder" not in repr(info)
    assert name in [item.name for item in await sdk.pages(sdk.Secret.list())]
    assert await sdk(sdk.Secret.exists(name)) is True
    assert await sdk(sdk.Secret.destroy(name)) is True
    assert await sdk(sdk.Secret.destroy(name)) is False
    assert await sdk(sdk.Secret.exists(name)) is False
    await sdk.raises(NotFoundException, lambda: sdk.Secret.get_info(name))


@shows("Secret.fill", refused={"Secret.iam_token": "`create(iam=…)` is refused: there is no workload identity here"})
async def helpers(sdk: Both) -> None:
    """A placeholder is made by the SDK alone; an identity that is asked for is refused."""
    assert sdk.Secret.fill("name") == "${e2b.secrets.name}"
    await sdk.raises(InvalidArgumentException, lambda: sdk.Secret.fill(""))
    token = sdk.Secret.iam_token(audience="aud", token_type="JWT-SVID")
    error = await sdk.raises(SandboxException, lambda: sdk.Sandbox.create(iam={"tokens": {"one": token}}))
    assert "iam" in str(error).lower()
