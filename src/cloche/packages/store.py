"""Layers on disk: one folder for each pinned set, made beside and renamed, locked while it is used.

Theory of operation. A layer is `layers/KEY.NONCE`: files that never change once the folder has that name. Its key is
made of the pinned set and the interpreter; its path is never used again, so that a jail built with a removed layer is
never mistaken for one with its successor. `sets/KEY.json` maps a list of requirements to its layer. A layer is made in
`making/NONCE`, whose folder its maker has locked: a folder without a lock there was left by a process that was killed,
and the next one removes it.

A lock is `flock` on the folder itself. A user of a layer holds a shared lock, for the life of the process, or of the
keeper of a sandbox that is kept; removing one takes the exclusive lock, and the folder is moved away before its files
are removed.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import time
from collections.abc import AsyncIterator, Iterable, Mapping
from typing import Any

from cloche.core.errors import StartFailed
from cloche.core.layers import Target
from cloche.core.loops import finish
from cloche.core.record import dataclass

from .folders import (
    PARTS,
    default_folder,
    is_own,
    lock_folder,
    made_folder,
    make_shown,
    names_in,
    new_name,
    remove_tree,
    sweep,
)
from .requirements import Requirement
from .resolve import Pin

VERSION = 1  # of what is in a layer; another one is made anew
MANIFEST = "layer.json"
MOST_HELD = 256  # layers that this process keeps from being removed
TOUCH_S = 60.0  # how often the time of a layer's last use is written
POLL_S = 0.05
MOST_SETS = 10_000  # whose digests are read
MOST_MANIFEST_BYTES = 4 << 20
_READ_ONLY_FOLDER, _READ_ONLY_FILE, _EXECUTABLE = 0o555, 0o444, 0o111


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """Hold one layer: its folder, and what its manifest says."""

    folder: str
    key: str
    pins: tuple[Pin, ...]
    modules: tuple[str, ...]
    files: int
    total_bytes: int
    created: float
    target: Mapping[str, str]

    @property
    def last_used(self) -> float:
        """Return when it was used last, as far as that was written down; 0 where it is gone."""
        try:
            return os.stat(self.folder).st_mtime
        except OSError:
            return 0.0

    @property
    def is_there(self) -> bool:
        """Tell whether it can be used."""
        return os.path.exists(f"{self.folder}/{MANIFEST}")


def layer_key(pins: Iterable[Pin], target: Target) -> str:
    """Return the key of a layer: its pins, and its interpreter."""
    rows = [pin.identity for pin in sorted(pins)]
    return _digest([VERSION, rows, target.as_dict()])


def set_key(requirements: Iterable[Requirement], target: Target, terms: Iterable[object]) -> str:
    """Return the key of a request: requirements, interpreter, and the terms of their resolution."""
    return _digest([VERSION, sorted(requirement.text for requirement in requirements), target.as_dict(), list(terms)])


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:32]


class Store:
    """Keep layers in a folder of this user's own."""

    def __init__(self, folder: str | None = None) -> None:
        self.folder = default_folder() if folder is None else folder
        self._held: dict[str, int] = {}
        self._touched: dict[str, float] = {}
        self._digests: tuple[tuple[int, ...], tuple[str, ...]] | None = None  # with the times of their folders

    # Finding.

    def find(self, key: str) -> Layer | None:
        """Return the layer for a list of requirements; None if it is missing, removed, or not this user's."""
        if not is_own(self.folder):
            return None  # and who makes one says why
        document = _read_json(os.path.join(self.folder, "sets", f"{key}.json"))
        name = document.get("layer") if document else None
        return self._load(name) if isinstance(name, str) and "/" not in name else None

    def find_content(self, key: str) -> Layer | None:
        """Return a layer with this content, or None."""
        return next((layer for layer in self.layers() if layer.key == key), None)

    def layers(self) -> list[Layer]:
        """Return all layers, the one that was used last first."""
        try:
            names = os.listdir(self._below("layers"))
        except FileNotFoundError:
            return []
        layers = [layer for name in names if (layer := self._load(name)) is not None]
        return sorted(layers, key=lambda layer: layer.last_used, reverse=True)

    def _load(self, name: str) -> Layer | None:
        folder = os.path.join(self._below("layers"), name)
        manifest = _read_json(os.path.join(folder, MANIFEST))
        if manifest is None or manifest.get("version") != VERSION:
            return None
        try:
            return Layer(
                folder=folder, key=manifest["key"], pins=tuple(map(Pin.from_dict, manifest["pins"])),
                modules=tuple(manifest["modules"]), files=manifest["files"], total_bytes=manifest["bytes"],
                created=manifest["created"], target=manifest["target"],
            )  # fmt: skip
        except (KeyError, TypeError):
            return None

    def digests(self, most: int) -> tuple[str, ...]:
        """Return the digests of requirements that have a layer here, those used last first. Blocks.

        Nothing is read again while the folders are the same.
        """
        now = tuple(_changed_at(self._below(name)) for name in ("sets", "layers"))
        if self._digests is None or self._digests[0] != now:
            self._digests = now, self._read_digests()
        return self._digests[1][:most]

    def _read_digests(self) -> tuple[str, ...]:
        used: dict[str, float] = {}
        for name in names_in(self._below("sets"))[:MOST_SETS] if is_own(self.folder) else ():
            document = _read_json(os.path.join(self._below("sets"), name)) or {}
            digest, layer = document.get("digest"), document.get("layer")
            if digest and isinstance(digest, str) and isinstance(layer, str) and "/" not in layer:
                with contextlib.suppress(OSError):
                    used[digest] = os.stat(os.path.join(self._below("layers"), layer)).st_mtime
        return tuple(sorted(used, key=lambda digest: used[digest], reverse=True))

    # Using.

    def use(self, layer: Layer) -> bool:
        """Keep a layer from being removed while this process lives; False where it is gone by now."""
        if layer.folder not in self._held:
            fd = lock_folder(layer.folder, fcntl.LOCK_SH)
            if fd is None:
                return False
            if len(self._held) >= MOST_HELD:
                os.close(self._held.pop(next(iter(self._held))))
            self._held[layer.folder] = fd
        if not layer.is_there:
            self._let_go(layer.folder)
            return False
        now = time.monotonic()
        if now - self._touched.get(layer.folder, -TOUCH_S) >= TOUCH_S:
            self._touched[layer.folder] = now
            with contextlib.suppress(OSError):  # another's, in a store that is shared by mistake
                os.utime(layer.folder)
        return True

    def _let_go(self, folder: str) -> None:
        fd = self._held.pop(folder, None)
        if fd is not None:
            os.close(fd)

    # Making.

    @contextlib.asynccontextmanager
    async def turn(self, key: str) -> AsyncIterator[None]:
        """Wait until no other process makes the layer for this list of requirements."""
        path = os.path.join(self.made("locks"), f"{key}.lock")
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            while True:
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    # A thread that waits would be one of few, and the maker may need one.
                    await asyncio.sleep(POLL_S)
            yield
        finally:
            fcntl.flock(fd, fcntl.LOCK_UN)  # closing lets go of nothing while a fork of this process has the file
            os.close(fd)

    @contextlib.asynccontextmanager
    async def making(self) -> AsyncIterator[str]:
        """Give a new folder to make a layer in; its remains are removed at the end.

        That is in a thread, as are sweeping and publishing: a package may have many files.
        """
        await asyncio.to_thread(self.sweep)
        fd, folder = None, ""
        while fd is None:  # else somebody's sweep came before our lock
            folder = os.path.join(self.made("making"), new_name())
            os.mkdir(folder, 0o700)
            fd = lock_folder(folder, fcntl.LOCK_EX)
        try:
            yield folder
        finally:
            try:
                await finish(asyncio.to_thread(remove_tree, folder))
            finally:
                os.close(fd)

    def place_for(self, key: str) -> str:
        """Return the path of a layer that is to be made."""
        return os.path.join(self.made("layers"), f"{key}.{new_name()}")

    async def publish(
        self, source: str, final: str, *, key: str, pins: Iterable[Pin], target: Target, facts: Mapping[str, Any]
    ) -> Layer:
        """Make a folder a layer: its files read-only, its manifest last, and then its name.

        Raises StartFailed for a manifest above the size limit of its reader.
        """
        manifest = json.dumps({
            "version": VERSION, "key": key, "pins": [pin.as_dict() for pin in pins], "target": target.as_dict(),
            "created": time.time(), **facts,
        })  # fmt: skip
        if len(manifest) > MOST_MANIFEST_BYTES:
            raise StartFailed("packages: they have too many modules to list", step="store")
        # Whoever is cancelled removes the folder afterwards, and not meanwhile.
        return await finish(asyncio.to_thread(self._publish, source, final, manifest))

    def _publish(self, source: str, final: str, manifest: str) -> Layer:
        _freeze(source)
        path = os.path.join(source, MANIFEST)
        with open(path, "x", encoding="utf-8") as file:
            file.write(manifest)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(path, _READ_ONLY_FILE)
        os.rename(source, final)
        os.chmod(final, _READ_ONLY_FOLDER)
        layer = self._load(os.path.basename(final))
        if layer is None:
            raise StartFailed(f"packages: the layer {final} cannot be read again", step="store")
        return layer

    def note_set(self, key: str, layer: Layer, requirements: Iterable[Requirement], digest: str = "") -> None:
        """Write down that a layer serves a list of requirements, whose digest other machines compute, too."""
        document = {
            "layer": os.path.basename(layer.folder), "asked": [requirement.text for requirement in requirements],
            "digest": digest, "resolved": time.time(),
        }  # fmt: skip
        _write_json(self.made("sets"), f"{key}.json", document)

    # Growing: a folder of one live sandbox, to which layers are added; see `folders.Growing`.

    def is_growing(self, folder: str) -> bool:
        """Tell whether a folder is one of these."""
        return os.path.dirname(folder) == self._below("growing")

    def add(self, layer: Layer, folder: str) -> None:
        """Add a layer's files to such a folder, as hard links; existing files stay.

        Each package appears complete, under its name at once: programs may be looking for it meanwhile.
        """
        aside = os.path.join(folder, f".{new_name()}")
        for name in PARTS:
            graft(os.path.join(layer.folder, name), os.path.join(folder, name), aside)
        pins = {pin.name: pin.as_dict() for pin in (*pins_in(folder), *layer.pins)}
        _write_json(folder, MANIFEST, {"version": VERSION, "pins": list(pins.values())})

    # Removing.

    def prune(
        self, *, most_bytes: int | None = None, most_layers: int | None = None, unused_s: float | None = None
    ) -> list[Layer]:
        """Remove the layers that were used longest ago, until the others are within all bounds.

        A layer in use stays, even above the bounds. Returns the removed paths. Unreadable folders are removed, too,
        because they would not be counted.
        """
        self.sweep()
        for name in names_in(self._below("layers")):
            if self._load(name) is None:
                self._remove(os.path.join(self._below("layers"), name))
        kept_bytes = kept_layers = 0
        removed = []
        for layer in self.layers():
            is_over = (
                (most_bytes is not None and kept_bytes + layer.total_bytes > most_bytes)
                or (most_layers is not None and kept_layers >= most_layers)
                or (unused_s is not None and time.time() - layer.last_used >= unused_s)
            )
            if is_over and self._remove(layer.folder):
                removed.append(layer)
            else:
                kept_bytes, kept_layers = kept_bytes + layer.total_bytes, kept_layers + 1
        self._forget_sets()
        return removed

    def remove(self, layer: Layer) -> bool:
        """Remove a layer, and tell whether it was: one that is in use stays."""
        return self._remove(layer.folder)

    def _remove(self, folder: str) -> bool:
        fd = lock_folder(folder, fcntl.LOCK_EX)
        if fd is None:
            return False
        try:
            aside = os.path.join(self.made("making"), new_name())
            os.chmod(folder, 0o700)  # a folder that its owner cannot write to cannot be moved
            os.rename(folder, aside)
            remove_tree(aside)
        finally:
            os.close(fd)
        return True

    def sweep(self) -> None:
        """Remove what makers left who were killed."""
        sweep(self.folder)

    def _forget_sets(self) -> None:
        """Remove the sets whose layer is gone, and unused locks."""
        for name in names_in(self._below("sets")):
            if self.find(name.removesuffix(".json")) is None:
                with contextlib.suppress(OSError):
                    os.unlink(os.path.join(self._below("sets"), name))
        for name in names_in(self._below("locks")):
            path = os.path.join(self._below("locks"), name)
            with contextlib.suppress(OSError), open(path, "rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(path)

    # Folders.

    def _below(self, name: str) -> str:
        return os.path.join(self.folder, name)

    def made(self, name: str) -> str:
        """Return a folder of the store, made where it is not there."""
        return made_folder(self.folder, name)


def pins_in(folder: str) -> tuple[Pin, ...]:
    """Return the pins of a layer, or of a folder that layers were added to; empty without a manifest."""
    manifest = _read_json(os.path.join(folder, MANIFEST)) or {}
    try:
        return tuple(map(Pin.from_dict, manifest.get("pins", ())))
    except TypeError:
        return ()


def graft(source: str, target: str, aside: str) -> None:
    """Hard-link the files of a folder into another one, except for existing names; new folders appear complete.

    `aside` is a path beside the target, where a new folder is made.
    """
    for name in os.listdir(source):
        source_path, target_path = os.path.join(source, name), os.path.join(target, name)
        if not os.path.isdir(source_path):
            with contextlib.suppress(FileExistsError):
                _link(source_path, target_path)
        elif os.path.isdir(target_path):
            graft(source_path, target_path, aside)
        elif not os.path.exists(target_path):
            make_shown(aside)
            graft(source_path, aside, f"{aside}.")
            os.rename(aside, target_path)


def _link(source: str, target: str) -> None:
    """Give a file another name, or copy it where there can be none."""
    try:
        os.link(source, target)
    except FileExistsError:
        raise
    except OSError:
        shutil.copy2(source, target)


def _freeze(folder: str) -> None:
    """Make all that is in a folder read-only; the folder itself has to take its last file, and be renamed."""
    for walked, _, names in os.walk(folder):
        for name in names:
            path = os.path.join(walked, name)
            if os.path.islink(path):
                continue  # to the interpreter of an agent, which is not ours
            os.chmod(path, _READ_ONLY_FILE | (os.stat(path).st_mode & _EXECUTABLE))
        if walked != folder:
            os.chmod(walked, _READ_ONLY_FOLDER)


def _changed_at(folder: str) -> int:
    try:
        return os.stat(folder).st_mtime_ns
    except OSError:
        return 0


def _read_json(path: str) -> dict[str, Any] | None:
    try:
        with open(path, encoding="utf-8") as file:
            document = json.loads(file.read(MOST_MANIFEST_BYTES))
    except (OSError, ValueError):
        return None
    return document if isinstance(document, dict) else None


def _write_json(folder: str, name: str, value: object) -> None:
    """Write a file whole or not at all."""
    fresh = os.path.join(folder, f".{name}.{new_name()}")
    with open(fresh, "x", encoding="utf-8") as file:
        json.dump(value, file)
    os.replace(fresh, os.path.join(folder, name))
