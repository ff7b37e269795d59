"""Volumes and secrets."""

from __future__ import annotations

import time

from e2b import InvalidArgumentException, SandboxException

from .both import Both
from .rows import shows

NO_VOLUMES = "there are no volumes here: use a snapshot, a template, or `files`"
OF_VOLUMES = (
    "connect", "create", "destroy", "exists", "get_info", "list", "make_dir", "read_file", "remove", "update_metadata",
    "write_file",
)  # fmt: skip


@shows(refused={f"Volume.{name}": NO_VOLUMES for name in OF_VOLUMES})
async def volumes(sdk: Both) -> None:
    """Each method is refused with what there is instead, and so is a sandbox with a volume."""
    volume = sdk.Volume(volume_id="volume", name="volume", token="token")
    for ask in (
        lambda: sdk.Volume.create("volume"), lambda: sdk.Volume.list(), lambda: sdk.Volume.get_info("volume"),
        lambda: sdk.Volume.connect("volume"), lambda: sdk.Volume.destroy("volume"),
    ):  # fmt: skip
        assert "no volumes" in str(await sdk.raises(Exception, ask))
    for ask in (
        lambda: volume.make_dir("/a"), lambda: volume.write_file("/a", "x"), lambda: volume.read_file("/a"),
        lambda: volume.list("/"), lambda: volume.exists("/a"), lambda: volume.get_info("/a"),
        lambda: volume.update_metadata("/a", mode=0o600), lambda: volume.remove("/a"),
    ):  # fmt: skip
        await sdk.raises(Exception, ask)
    error = await sdk.raises(SandboxException, lambda: sdk.create(timeout=100, volume_mounts={"/mnt": volume}))
    assert "no volumes" in str(error)


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
    assert "not found" in str(await sdk.raises(Exception, lambda: sdk.Secret.get_info(name)))


@shows("Secret.fill", refused={"Secret.iam_token": "`create(iam=…)` is refused: there is no workload identity here"})
async def helpers(sdk: Both) -> None:
    """A placeholder is made by the SDK alone; an identity that is asked for is refused."""
    assert sdk.Secret.fill("name") == "${e2b.secrets.name}"
    await sdk.raises(InvalidArgumentException, lambda: sdk.Secret.fill(""))
    token = sdk.Secret.iam_token(audience="aud", token_type="JWT-SVID")
    error = await sdk.raises(SandboxException, lambda: sdk.Sandbox.create(iam={"tokens": {"one": token}}))
    assert "iam" in str(error).lower()
