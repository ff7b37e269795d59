"""Layers of packages on a daemon: each is a volume, filled by the daemon's archive call and mounted read-only.

Theory of operation: a layer's volume has the name of its folder, `KEY.NONCE`, which is used only once. It is filled
through a container that is never started, by one process at a time (a lock on the layer's manifest). The manifest is
written last. When it can be read back, a second, empty volume is created as a mark that the first is complete. If the
mark is missing, the manifest is read back again; if that is missing, too, the volume is filled again. A volume left
incomplete by a killed process or daemon is therefore never mounted in a sandbox. Nothing of the host is mounted.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import logging
import os
import tarfile
from collections.abc import Iterator, Mapping, Sequence

from cloche.core.errors import StartFailed

from ..garbage_collection import owner
from .daemon import LAYER_LABEL, MAKER_LABEL, MARK_LABEL, OWNER_LABEL, STORE_LABEL, Daemon, explained
from .images import LAYERS, DockerImage

log = logging.getLogger("cloche.docker")
MANIFEST = "layer.json"  # of a layer; written last to its volume
PLACE = "/layer"  # mount point of the volume in the container through which it is filled
MOST_MANIFEST_BYTES = 8 << 20
PIECE_BYTES = 1 << 20


def volumes_of(layers: Sequence[str]) -> dict[str, str]:
    """Return the volumes of layers (folders of the host), and their mount points in a container."""
    return {_volume(layer): target for layer, target in zip(layers, places_of(layers), strict=True)}


def places_of(layers: Sequence[str]) -> list[str]:
    """Return the layers' mount points in a container. They contain the keys, which the layers' bytecode refers to."""
    return [f"{LAYERS}/{os.path.basename(layer).partition('.')[0]}" for layer in layers]


def _volume(layer: str) -> str:
    return f"cloche-packages-{os.path.basename(layer)}"


def fill(daemon: Daemon, image: DockerImage, layers: Sequence[str]) -> None:
    """Ensure that the volumes of layers are complete. Blocks. `image` is used for containers that are never started.

    Raises StartFailed.
    """
    for layer in layers:
        if not _is_whole(daemon, layer):
            _fill(daemon, image, layer)


def _is_whole(daemon: Daemon, layer: str) -> bool:
    """Return whether the daemon has both the volume and its mark."""
    return {_volume(layer), _mark(layer)} <= {name for name, _ in _volumes(daemon, layer)}


def _mark(layer: str) -> str:
    return f"{_volume(layer)}.whole"


def _volumes(daemon: Daemon, layer: str) -> list[tuple[str, Mapping[str, str]]]:
    try:
        return daemon.labelled_volumes(f"{LAYER_LABEL}={os.path.basename(layer)}")
    except Exception as error:
        raise _failed(layer, error) from error


def _failed(layer: str, error: BaseException) -> StartFailed:
    name = os.path.basename(layer)
    return StartFailed(f"packages: the volume of layer {name} cannot be made: {explained(error)}", step="packages")


def _fill(daemon: Daemon, image: DockerImage, layer: str) -> None:
    with _turn(layer) as manifest:
        if _is_whole(daemon, layer):
            return
        try:
            daemon.make_volume(_volume(layer), _labels(layer))
            container = daemon.create(_container(image, layer))
            try:
                if _read_back(daemon, container) != manifest:
                    daemon.put_archive(container, PLACE, archive(layer))
                    if _read_back(daemon, container) != manifest:
                        raise ValueError("what was put there cannot be read back")
            finally:
                daemon.remove(container)
            daemon.make_volume(_mark(layer), {**_labels(layer), MARK_LABEL: "1"})
        except StartFailed:
            raise
        except Exception as error:
            raise _failed(layer, error) from error
    log.debug("the daemon has a volume for layer %s", layer)


@contextlib.contextmanager
def _turn(layer: str) -> Iterator[bytes]:
    """Hold the lock on a layer's volume, and yield the layer's manifest. Raises StartFailed."""
    try:
        file = open(os.path.join(layer, MANIFEST), "rb")  # noqa: SIM115 - closed below
    except OSError as error:
        raise StartFailed(f"packages: a layer is gone: {error}; open the sandbox again", step="packages") from error
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield file.read()


def _labels(layer: str) -> dict[str, str]:
    return {LAYER_LABEL: os.path.basename(layer), STORE_LABEL: os.path.dirname(layer), MAKER_LABEL: owner()}


def _container(image: DockerImage, layer: str) -> dict[str, object]:
    """Return the request body that creates the container through which a volume is filled."""
    mount = {"Type": "volume", "Source": _volume(layer), "Target": PLACE, "VolumeOptions": {"NoCopy": True}}
    return {
        "Image": image.id,
        "Entrypoint": ["false"],
        "Labels": {OWNER_LABEL: owner()},
        "HostConfig": {"NetworkMode": "none", "CapDrop": ["ALL"], "Mounts": [mount]},
    }


def _read_back(daemon: Daemon, container: str) -> bytes:
    """Return the manifest in the volume of a container; b"" if it is missing."""
    try:
        data = daemon.archive_of(container, f"{PLACE}/{MANIFEST}", MOST_MANIFEST_BYTES)
        with tarfile.open(fileobj=io.BytesIO(data)) as opened:
            file = opened.extractfile(MANIFEST)
            return file.read() if file is not None else b""
    except (StartFailed, tarfile.TarError, KeyError):
        return b""


def archive(layer: str) -> Iterator[bytes]:
    """Yield a tar archive of a layer in pieces: owned by root, read-only, manifest last. Raises OSError."""
    names = sorted(set(os.listdir(layer)) - {MANIFEST})
    for name in names:
        for folder, folders, files in os.walk(os.path.join(layer, name)):
            folders.sort()
            yield _head(folder, layer, 0o555, tarfile.DIRTYPE)
            for file in sorted(files):
                yield from _file(os.path.join(folder, file), layer)
    yield from _file(os.path.join(layer, MANIFEST), layer)
    yield bytes(2 * tarfile.BLOCKSIZE)


def _head(path: str, layer: str, mode: int, kind: bytes, size: int = 0) -> bytes:
    entry = tarfile.TarInfo(os.path.relpath(path, layer))
    entry.mode, entry.type, entry.size = mode, kind, size
    return entry.tobuf(tarfile.PAX_FORMAT)


def _file(path: str, layer: str) -> Iterator[bytes]:
    with open(path, "rb") as file:
        facts = os.fstat(file.fileno())
        yield _head(path, layer, 0o444 | (facts.st_mode & 0o111), tarfile.REGTYPE, facts.st_size)
        bytes_left = facts.st_size
        while bytes_left:
            piece = file.read(min(PIECE_BYTES, bytes_left))
            if not piece:
                raise OSError(f"{path} is shorter than it was")
            bytes_left -= len(piece)
            yield piece
        yield bytes(-facts.st_size % tarfile.BLOCKSIZE)


def prune(daemon: Daemon, folder: str) -> list[str]:
    """Remove the volumes of layers of this host that no longer exist below `folder`; return one line for each."""
    removed = []
    for name, labels in daemon.labelled_volumes(f"{STORE_LABEL}={folder}"):
        layer = labels.get(LAYER_LABEL, "")
        is_gone = not os.path.exists(os.path.join(folder, layer, MANIFEST))
        is_of_host = labels.get(MAKER_LABEL, "").partition(":")[0] == owner().partition(":")[0]
        if is_gone and is_of_host and layer and daemon.remove_volume(name) and MARK_LABEL not in labels:
            removed.append(f"volume {name}")
    return removed
