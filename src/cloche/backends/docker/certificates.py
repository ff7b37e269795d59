"""The certificates that a container trusts: those of its image, with the authority of its sandbox.

An image keeps them in files whose paths depend on its distribution. A file of the host is mounted over each of them and
at a path of Cloche's, and is removed once the container has started: the mounts hold it.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from cloche import hostfs

from ..certificates import MARK, MOST_BYTES
from ..garbage_collection import owner
from ..secrets import BUNDLES, FILE, trusted_here
from .daemon import OWNER_LABEL, Daemon

if TYPE_CHECKING:
    from .images import DockerImage

_found: dict[str, Mapping[str, str]] = {}  # by an image's id, whose files never change


@contextmanager
def shown_certificates(daemon: Daemon, image: DockerImage, authority: str) -> Iterator[dict[str, str]]:
    """Yield the mounts of a file with an image's certificates and an authority: its path on the host, by paths inside.

    Raises StartFailed.
    """
    bundles = bundles_of(daemon, image)
    folder = tempfile.mkdtemp(prefix="cloche-", dir=hostfs.temporary_folder())
    path = f"{folder}/authorities.pem"
    try:
        os.chmod(folder, 0o711)  # noqa: S103 - a daemon that maps ids has another root
        with open(path, "w", encoding="ascii", errors="replace") as file:
            os.fchmod(file.fileno(), 0o644)
            file.write(f"{next(iter(bundles.values()), '') or trusted_here()}\n{authority}")
        yield dict.fromkeys((f"/{FILE}", *bundles), path)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def bundles_of(daemon: Daemon, image: DockerImage) -> Mapping[str, str]:
    """Return the files of certificates that an image has, by their paths without links; cached. Raises StartFailed."""
    bundles = _found.get(image.id)
    if bundles is None:
        container = daemon.create({"Image": image.id, "Cmd": ["true"], "Labels": {OWNER_LABEL: owner()}})
        try:
            files = dict(filter(None, (daemon.file_of(container, path, MOST_BYTES) for path in BUNDLES)))
        finally:
            daemon.remove(container)
        texts = {path: data.decode("ascii", "replace") for path, data in files.items()}
        bundles = _found[image.id] = {path: text for path, text in texts.items() if MARK in text}
    return bundles
