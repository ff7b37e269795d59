"""Programs that are not shown: at each path, one that says why. Nothing is done here; see `mounts`."""

from __future__ import annotations

import os

from ..steps import ENOENT, make
from ..syscalls import AT_FDCWD, MNT_DETACH, MS_BIND, MS_NODEV, MS_NOSUID, MS_RDONLY, MS_REMOUNT
from .mounts import AT_REMOVEDIR, EACCES, Text, Tmpfs, mount

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..steps import Call

NOT_SHOWN = (
    "programs that install packages are not shown to this run; name the packages when it is started (--packages NAME, "
    "packages=[NAME]), or use a live sandbox (cloche exec, cloche.Sandbox)"
)


class Replaced:
    """Show a program, or a module of Python's, that only prints the reason why the file at each path is not shown."""

    __slots__ = ("paths",)

    STAGE = ".replaced"
    PROGRAM = f'#!/bin/sh\necho "${{0##*/}}: {NOT_SHOWN}" >&2\nexit 127\n'
    MODULE = f'raise ModuleNotFoundError(f"No module named {{__name__!r}}: {NOT_SHOWN}", name=__name__)\n'

    def __init__(self, paths: Sequence[str]):
        self.paths = paths

    def calls(self) -> list[Call]:
        program, module = f"{self.STAGE}/program", f"{self.STAGE}/module"
        read_only = MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV
        return [
            *Tmpfs(self.STAGE, 1 << 16, 16).calls(),
            *Text(program, self.PROGRAM, 0o755).calls(),
            *Text(f"{module}/__init__.py", self.MODULE).calls(),
            mount("none", self.STAGE, "", read_only),  # and so is every further mount of it
            *(
                mount(module if os.path.isdir(path) else program, path[1:], "", MS_BIND, excuse=(ENOENT, EACCES))
                for path in self.paths
            ),
            make("umount2", os.fsencode(self.STAGE), MNT_DETACH),
            make("unlinkat", AT_FDCWD, os.fsencode(self.STAGE), AT_REMOVEDIR),
        ]

    def describe(self) -> str:
        return f"say of {len(self.paths)} programs and modules that install packages that they are not shown"
