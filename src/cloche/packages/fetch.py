"""From a pinned list to wheels: a sandbox downloads them, and each is compared with its hash here.

The sandbox's output is bounded in number and size before it is written, and written to a new file beside the store. No
file is opened before its hash equals that of the list.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from typing import BinaryIO

from cloche.core.errors import StartFailed
from cloche.core.events import Progress, report_progress
from cloche.core.policy import Policy
from cloche.core.protocols import Backend

from .folders import make_shown
from .frames import Bounds, Reader, WrongFrame
from .index import Index
from .resolve import MOST_TOTAL_BYTES, MOST_WHEEL_BYTES, Pin, credentials_variable
from .steps import CA_FILE, Step, ca_files, failed, on_stdout, run_step

FILE = 1


class _Wheels:
    """Write wheels as they come, in the order of the list."""

    def __init__(self, pins: Sequence[Pin], folder: str) -> None:
        self.pins, self.folder = pins, folder
        self.done = 0
        self.paths: list[str] = []
        self._open: BinaryIO | None = None

    def begin(self, kind: int, name: str, size: int) -> _Wheel:
        """Begin the next one. Raises WrongFrame for any other, and for a size that is not the list's."""
        number = len(self.paths)
        if kind != FILE or number >= len(self.pins) or name != str(number):
            raise WrongFrame("a file arrived that was not requested")
        pin = self.pins[number]
        if size > MOST_WHEEL_BYTES or (pin.size and size != pin.size):
            raise WrongFrame(f"{pin.name} has {size} bytes, but the list says {pin.size}")
        # A folder of its own for each: the name is checked to be one name, and two may be the same.
        folder = os.path.join(self.folder, name)
        make_shown(folder)
        path = os.path.join(folder, pin.file_name)
        self.paths.append(path)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        os.fchmod(fd, 0o644)
        self._open = open(fd, "wb")  # noqa: SIM115 - it is closed with its last byte, or below
        return _Wheel(self, pin, self._open)

    def close(self) -> None:
        """Close the file that has not all of its content."""
        if self._open is not None:
            self._open.close()


class _Wheel:
    """Take one wheel, and compare its hash at the end."""

    def __init__(self, wheels: _Wheels, pin: Pin, file: BinaryIO) -> None:
        self._wheels, self._pin, self._file = wheels, pin, file
        self._hash = hashlib.sha512() if pin.sha512 else hashlib.sha256()
        self._total = sum(pin.size for pin in wheels.pins)

    def write(self, data: bytes) -> None:
        self._hash.update(data)
        self._file.write(data)
        self._wheels.done += len(data)
        report_progress(Progress(what=f"downloading {self._pin.name}", done=self._wheels.done, total=self._total))

    def close(self) -> None:
        """Raise WrongFrame if the hash differs from the list."""
        self._file.close()
        digest, listed = self._hash.hexdigest(), self._pin.sha512 or self._pin.sha256
        if digest != listed:
            raise WrongFrame(
                f"{self._pin.name} {self._pin.version} has the hash {digest}, but the pinned list says "
                f"{listed}: the index sends another file than it lists"
            )


def fetch_step(pins: Sequence[Pin], index: Index) -> Step:
    """Return the step that downloads wheels."""
    bundle = index.ca_bundle()
    order = {
        "files": [(pin.url, pin.size) for pin in pins], "ca": CA_FILE if bundle else "", "most": MOST_WHEEL_BYTES,
    }  # fmt: skip
    return Step(
        name="download", program="download", stdin=json.dumps(order).encode(), env=credentials_variable(index),
        files=ca_files(bundle), network_allow=index.network_allow,
    )  # fmt: skip


async def fetch(backend: Backend, policy: Policy, pins: Sequence[Pin], index: Index, folder: str) -> list[str]:
    """Download wheels into a folder; return their paths, in the order of the list.

    Raises StartFailed for a wheel that cannot be downloaded, or that differs from the list.
    """
    if not pins:
        return []
    wheels, step = _Wheels(pins, folder), fetch_step(pins, index)
    reader = Reader(wheels.begin, Bounds(files=len(pins), total_bytes=MOST_TOTAL_BYTES))
    try:
        outcome = await run_step(backend, policy, step, on_stdout(reader.feed))
    except WrongFrame as error:
        raise StartFailed(f"packages: cannot download: {error}", step="download") from None
    finally:
        wheels.close()
        report_progress(Progress(what="downloading", is_over=True))
    if not outcome.result.ok:
        raise failed(step, outcome.result, index.credentials.hide)
    if len(wheels.paths) < len(pins) or not reader.is_between:
        raise StartFailed("packages: cannot download: not all files arrived", step="download")
    return wheels.paths
