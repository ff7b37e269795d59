"""What a call on a file says: its path, whose rights to use, and the rest of each operation."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from cloche.core.errors import InvalidRequest
from cloche.core.processes import FileRights
from cloche.core.remote import MOST_FIELDS

from .exec_options import Amount, WireModel, Word, decoded

MOST_PATH, MOST_ROWS = 4096, 10_000

GuestPath = Annotated[str, StringConstraints(min_length=1, max_length=MOST_PATH)]


def read_path(path: str | None, path_base64: str | None) -> str:
    """Return the path from one of two fields. Raises InvalidRequest."""
    if path_base64 is not None:
        return decoded(path_base64, "pathBase64").decode("utf-8", "surrogateescape")
    if not path:
        raise InvalidRequest("path: give the path of a file, such as /workspace/out.txt")
    return path


class Acting(WireModel):
    """Whose rights to use, in a sandbox with several users; who gets what is created, with the rights of root.

    With `atHome`, relative paths and `~` begin in that user's home folder.
    """

    user: Word | None = None
    owner: Word | None = None
    at_home: bool = False

    def rights(self) -> FileRights:
        """Return the rights."""
        return FileRights(user=self.user, owner=self.owner, at_home=self.at_home)


class AtPath(WireModel):
    """A path inside, in base64 if it is not UTF-8."""

    path: GuestPath | None = None
    path_base64: Annotated[str, StringConstraints(max_length=2 * MOST_PATH)] | None = None

    def read(self) -> str:
        """Return the path. Raises InvalidRequest."""
        return read_path(self.path, self.path_base64)


class AtPathInTime(AtPath):
    """A path, and the time-out of the call."""

    timeout: Amount | None = None


class AtPathBy(Acting, AtPathInTime):
    """A path, the time-out of the call, and whose rights to use."""


class AtPathBelow(AtPathBy):
    """A path, and whether to include everything below it."""

    recursive: bool = False


class Listed(AtPathBelow):
    """A folder to list, also with `depth` levels of folders below it."""

    depth: Annotated[int, Field(ge=1)] | None = None


class Watched(AtPathBelow):
    """A folder or file to watch. An exact watch describes files on request."""

    is_exact: bool = False
    describes: bool = False


class Part(Acting, AtPath):
    """A file, or `count` bytes of it from `offset` on."""

    offset: Annotated[int, Field(ge=0)] = 0
    count: Annotated[int, Field(ge=0)] | None = None


class NewContent(AtPathBy):
    """A file to write: replace it, append to it, or create a new one only."""

    how: Literal["replace", "append", "new"] = "replace"
    mode: Annotated[str, StringConstraints(pattern="^0?[0-7]{3}$")] | None = None
    metadata: dict[str, str] | None = None


class WholeFile(AtPath):
    """A file to read as a whole, of at most `most` bytes."""

    most: Annotated[int, Field(ge=0)] = MOST_FIELDS
