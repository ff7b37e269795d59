"""What is asked of the container that an agent works in: its image, its folders, whose they are."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from .errors import InvalidRequest

_IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:@+-]*")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkspaceContainer:
    """Describe an agent's container; nothing in it can be taken for an option of docker's.

    `folders` are host folders by their place inside, `/workspace` among them; `user` and `group` are the ids that it
    runs as. `env` has a variable's value, or None for the one that it has wherever docker is called. `runtime` is
    empty for the daemon's default.
    """

    image: str
    command: tuple[str, ...] = ()
    folders: Mapping[str, str]
    user: int
    group: int
    env: Mapping[str, str | None] = field(default_factory=dict, repr=False)
    name: str = ""
    runtime: str = ""
    has_terminal: bool = False

    def __post_init__(self) -> None:
        if not _IMAGE.fullmatch(self.image):
            raise InvalidRequest(f"image: {self.image!r} is not the name of an image")
        if self.name and not _NAME.fullmatch(self.name):
            raise InvalidRequest(f"name: {self.name!r} is not the name of a container")
        for folder in self.folders.values():
            if not os.path.isabs(folder) or os.path.normpath(folder).strip("/") == "" or "\0" in folder:
                raise InvalidRequest(f"workspace: {folder!r} is no folder to show to an agent; name one below /")
        if self.user < 1 or self.group < 1:
            raise InvalidRequest(
                f"user: an agent does not run as {self.user}:{self.group}, which is root's; name a user who may write "
                "to its folder, or give the folder to one (chown)"
            )
        for variable in self.env:
            if not variable or "=" in variable or "\0" in f"{variable}{self.env[variable]}":
                raise InvalidRequest(f"env: {variable!r} is not a variable's name, or its value has a NUL")
