"""Layers of packages as volumes of a daemon: what is in a request, in the archive, and what was left half made."""

from __future__ import annotations

import io
import tarfile
from dataclasses import replace
from pathlib import Path

from cloche.backends.docker.daemon import LAYER_LABEL, MAKER_LABEL, MARK_LABEL, half_made
from cloche.backends.docker.layers import archive, volumes_of
from cloche.backends.docker.plan import plan_container
from cloche.backends.garbage_collection import owner
from cloche.core.limits import Limits
from cloche.core.policy import Policy

LAYER = "/home/me/.local/share/cloche/packages/layers/abc.123"


def test_a_layer_is_a_volume_that_can_only_be_read() -> None:
    """Below its key; containers with and without it do not stand for each other."""
    plain = plan_container(Policy(), Limits(), image="i", command=("python3",), user=1, is_watched=True)
    plan = replace(plain, layers=volumes_of([LAYER]))
    assert plan.api()["HostConfig"]["Mounts"][1:] == [
        {
            "Type": "volume", "Source": "cloche-packages-abc.123", "Target": "/opt/cloche/packages/abc",
            "ReadOnly": True, "VolumeOptions": {"NoCopy": True},
        }
    ]  # fmt: skip
    shown = "--mount=type=volume,src=cloche-packages-abc.123,dst=/opt/cloche/packages/abc,readonly,volume-nocopy"
    assert shown in plan.arguments()
    assert plan.kind() != plain.kind()


def test_the_archive_has_all_of_a_layer_and_its_manifest_last(tmp_path: Path) -> None:
    """Root's, read-only; long names, sizes of all kinds, empty folders, what can be executed."""
    deep = tmp_path / "site" / ("d" * 120) / ("e" * 120)
    deep.mkdir(parents=True)
    contents = {"site/a.py": b"x", "site/empty": b"", "site/block": bytes(512), "bin/tool": b"#!", "layer.json": b"{}"}
    contents[str((deep / "ä.py").relative_to(tmp_path))] = b"y" * 1000
    (tmp_path / "bin").mkdir()
    (tmp_path / "data").mkdir()
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "bin/tool").chmod(0o755)
    with tarfile.open(fileobj=io.BytesIO(b"".join(archive(str(tmp_path))))) as opened:
        members = opened.getmembers()
        files = {one.name: opened.extractfile(one) for one in members if one.isfile()}
        assert {name: file.read() for name, file in files.items() if file is not None} == contents
    assert members[-1].name == "layer.json"
    assert {(one.uid, one.gid) for one in members} == {(0, 0)}
    assert {one.mode for one in members if one.isdir()} == {0o555}
    assert {one.name: one.mode for one in members if one.isfile() and one.mode != 0o444} == {"bin/tool": 0o555}
    assert "data" in {one.name for one in members}


def test_what_a_dead_process_left_half_made_is_told_from_what_is_whole() -> None:
    """Nothing of one that lives, and no mark of what is there."""
    living = owner()
    dead = ":".join([*living.split(":")[:4], "1"])

    def volume(name: str, layer: str, maker: str, *, marks: bool = False) -> tuple[str, dict[str, str]]:
        return name, {LAYER_LABEL: layer, MAKER_LABEL: maker, **({MARK_LABEL: "1"} if marks else {})}

    volumes = [
        volume("whole", "a", dead), volume("its mark", "a", dead, marks=True),
        volume("half", "b", dead), volume("coming", "c", living), volume("mark of nothing", "d", dead, marks=True),
    ]  # fmt: skip
    assert half_made(volumes) == ["half", "mark of nothing"]
