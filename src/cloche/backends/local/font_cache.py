"""The list of fonts that matplotlib makes: made once per user, not in every guest.

Theory of operation: matplotlib searches all fonts at its first use and caches the list. A guest's cache is separate and
empty, so each guest that draws would search again. Instead, matplotlib makes its list once, alone in a jail. The list
is kept in this user's cache, keyed by interpreter, packages and fonts. Each guest that seems to draw gets a copy in its
/tmp. So no guest writes a file that another guest or the host reads, and only guests parse the list. If any of this
fails, the guest searches for fonts itself.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import marshal
import os
import re
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Protocol

from cloche.core.errors import ClocheError
from cloche.core.limits import MIB, Limits
from cloche.core.loops import finish
from cloche.core.protocols import OpenSandbox
from cloche.core.record import dataclass
from cloche.core.request import Request
from cloche.jail.setup.cache import own_cache, read_cache, write_cache

log = logging.getLogger("cloche.jail")
FILE = "fonts"
# The program prints the file name of matplotlib's list, then the list.
PROGRAM = f"""
from matplotlib import font_manager

font_manager.json_dump(font_manager.fontManager, "list")
with open("list") as made, open({FILE!r}, "w") as file:
    file.write(f"fontlist-v{{font_manager.FontManager.__version__}}.json\\n" + made.read())
"""
LIMITS = Limits(timeout_s=60.0, memory_bytes=512 * MIB, cpus=1.0)
MOST_BYTES = 8 * MIB
LEAST_ROOM = 4  # the list must fit this many times into the guest's disk limits, otherwise it is not given
_LOOKED_AT_BYTES = MIB  # of each file
_AGAIN_S = 3600  # a failed attempt is repeated after this time
_NAME = re.compile(r"fontlist-v[0-9.]{1,20}\.json")
# The folders that matplotlib and fontconfig search in a jail; adding or removing a font changes a folder's mtime.
_FONT_FOLDERS = (
    "/etc/fonts", "/usr/share/fonts", "/usr/local/share/fonts", "/usr/share/texmf/fonts", "/usr/X11R6/lib/X11/fonts",
    "/usr/X11/lib/X11/fonts", "/usr/lib/openoffice/share/fonts",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class FontList:
    """Hold the list as text, and the name of its file in matplotlib's cache."""

    name: str
    text: str


def seems_to_draw(data: bytes) -> bool:
    """Tell whether a program or input file mentions plots; it need not mention matplotlib, which others import."""
    return any(data.find(mark, 0, _LOOKED_AT_BYTES) >= 0 for mark in (b"plot", b"seaborn"))


async def find_fonts(shown: Sequence[str], make: Callable[[], Awaitable[bytes]]) -> FontList | None:
    """Return the list for a jail that shows these paths, from the cache or made now; None if there is no list.

    `make` returns the output of `PROGRAM`, empty if it failed. A marker is written first: no other process makes the
    same list at the same time, and a failure is not repeated by each run. Without a writable cache no list is made.
    """
    folder, key = own_cache("fonts"), _key(shown)
    if not folder or not key:
        return None
    name = f"{hashlib.blake2b(os.fsencode(sys.executable), digest_size=8).hexdigest()}.list"
    content = read_cache(folder, name, key, is_own=True)
    if content is None:
        begun, marker = f"{name}.begun", marshal.dumps((key, int(time.time() // _AGAIN_S)))
        if read_cache(folder, begun, marker, is_own=True) is not None:
            return None
        if not write_cache(folder, begun, marker, b"", is_own=True):
            return None
        try:
            content = await make()
        except BaseException:  # interrupted, not failed: the next run makes the list
            write_cache(folder, begun, b"", b"", is_own=True)
            raise
        if _parted(content) is not None:
            write_cache(folder, name, key, content, is_own=True)
    return _parted(content)


def _parted(content: bytes) -> FontList | None:
    name, _, text = content.partition(b"\n")
    if not text or len(text) > MOST_BYTES or not content.isascii() or _NAME.fullmatch(name.decode()) is None:
        return None
    return FontList(name=name.decode(), text=text.decode())


def _key(shown: Sequence[str]) -> bytes:
    """Return the cache key: everything the list depends on; empty without matplotlib."""
    import importlib.metadata  # imports `email`; needed only by programs that draw

    try:
        folder = str(importlib.metadata.distribution("matplotlib").locate_file(""))
        version = _version(folder, os.stat(folder).st_mtime_ns)
    except (importlib.metadata.PackageNotFoundError, OSError):  # or matplotlib is not in a folder (a zip file)
        return b""
    states = [state for root in _FONT_FOLDERS for state in _states(root)]
    about = (sys.executable, sys.version, version, folder, tuple(shown))
    return marshal.dumps((about, states))


@functools.lru_cache(maxsize=4)
def _version(folder: str, changed_ns: int) -> str:  # noqa: ARG001 - what the answer depends on
    """Return matplotlib's version. Cached, because reading it takes longer than many runs."""
    import importlib.metadata

    return importlib.metadata.version("matplotlib")


def _states(root: str) -> Iterator[tuple[str, int]]:
    for folder, _, _ in os.walk(root):
        try:
            yield folder, os.stat(folder).st_mtime_ns
        except OSError:
            continue  # it is gone


class FontSandbox(OpenSandbox, Protocol):
    """Run matplotlib, and be closed."""

    async def close(self) -> None:
        """Remove everything."""
        ...


async def made_in(sandbox: FontSandbox) -> bytes:
    """Return the list that matplotlib makes in a sandbox of its own, which is closed; nothing if there is none."""
    try:
        await sandbox.run(Request(code=PROGRAM))
        return await sandbox.read_file(FILE, max_bytes=MOST_BYTES)
    except ClocheError as error:
        log.info("there is no list of fonts, so every guest that draws makes its own: %s", error)
        return b""
    finally:
        await finish(sandbox.close())
