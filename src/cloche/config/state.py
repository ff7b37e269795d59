"""The location of a user's records: one database, shared by the service, the command line and agents."""

from __future__ import annotations

import os
from contextlib import suppress

from cloche.core.errors import InvalidRequest

DATABASE = "CLOCHE_DATABASE"
_SQLITE = "sqlite:///"  # prefix of a URL, before a file's path


def state_file(name: str) -> str | None:
    """Return the path of a file in the user's state folder, None for a user without a home."""
    from platformdirs import user_state_path

    with suppress(RuntimeError):  # platformdirs raises this for a user without a home, or an empty HOME
        path = os.fspath(user_state_path("cloche") / name)
        if os.path.isabs(path):
            return path
    return None


def records_location() -> str:
    """Return CLOCHE_DATABASE (a file or a URL), or else `records.db` in the user's state folder. Raises
    InvalidRequest.
    """
    location = os.environ.get(DATABASE) or state_file("records.db")
    if location is None:
        raise InvalidRequest(
            f"records cannot be stored, because this user has no home folder; name a file ({DATABASE}=/FILE)"
        )
    return location


def records_file() -> str:
    """Return the records' file as an absolute path. Raises InvalidRequest if they are in memory or in a database
    server.
    """
    location = records_location()
    if "://" not in location:
        return os.path.abspath(location)
    path = location.removeprefix(_SQLITE).partition("?")[0]
    if not location.startswith(_SQLITE) or path in ("", ":memory:"):
        raise InvalidRequest(f"{DATABASE} is not a file; name one for approvals (CLOCHE_APPROVALS=/FILE)")
    return os.path.abspath(path)
