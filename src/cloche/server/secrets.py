"""The secrets that this service holds: those of its operator's folder, and those that a project has stored.

A value is opened for each use, so a removed or replaced one counts at once, for all workers. The folder goes first: a
name of it cannot be stored.
"""

from __future__ import annotations

import asyncio
import base64
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from typing import Any

from sqlalchemy.orm import Session

from cloche.core.errors import BackendUnavailable, Conflict
from cloche.core.secret_names import OperatorSecret, unknown
from cloche.core.secrets import Secret
from cloche.records.database import Database
from cloche.records.secrets import MAKE_ONE, list_secrets, note_use, open_secrets, read_key
from cloche.sealing import KEY_BYTES, SealingKey
from cloche.wire.secrets import SecretFolder

BY, OWN_KEY = "this service", "secrets.key"


def own_key(folder: str) -> str:
    """Return the path of a key in the folder of the records, which is made at the first call. Blocks.

    The path is empty without the package that encrypts: the service then stores no secrets.
    """
    if find_spec("cryptography") is None:
        return ""
    path = os.path.join(folder, OWN_KEY)
    with suppress(FileExistsError):
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(fd, "wb") as file:
            file.write(base64.b64encode(os.urandom(KEY_BYTES)))
    return path


class ServiceSecrets:
    """Find the secrets of a project. `key` is the path of the operator's key; without one nothing is stored."""

    def __init__(self, database: Database, *, folder: str = "", key: str = ""):
        self._database, self._key = database, read_key(key) if key else None
        self._folder = SecretFolder(folder, by=BY)
        self.used: set[tuple[str, str]] = set()  # whose use is not stored yet, by project and name

    def check(self) -> None:
        """Raise InvalidRequest for a folder that cannot be used. Blocks."""
        self._folder.read()

    async def of(self, project: str, names: Sequence[str]) -> dict[str, Secret]:
        """Return secrets of a project. Raises InvalidRequest for one that it does not have, BackendUnavailable."""
        own = await self._of_folder(project, names)
        stored = await self._read(partial(open_secrets, key=self._key, names=set(names) - set(own), project=project))
        secrets = {**stored, **{name: held.secret for name, held in own.items()}}
        for name in names:
            if name not in secrets:
                raise unknown(name, BY, "GET /api/secrets lists them, `cloche secrets set NAME` stores one")
        self.used |= {(project, name) for name in stored}
        return {name: secrets[name] for name in names}

    async def list(self, project: str) -> list[dict[str, Any]]:
        """Return what a project may know of its secrets, by name."""
        own = await self._of_folder(project)
        mark = None if self._key is None else self._key.mark
        stored = [facts.as_dict(mark) for facts in await self._read(partial(list_secrets, project=project))]
        of_folder = [
            {
                "name": name, "hosts": list(held.secret.hosts), "heldBy": "operator", "createdAt": None,
                "changedAt": None, "changedBy": None, "lastUsedAt": None, "usable": True,
            }
            for name, held in own.items()
        ]  # fmt: skip
        return sorted([*of_folder, *(row for row in stored if row["name"] not in own)], key=lambda row: row["name"])

    @property
    def can_store(self) -> bool:
        """Tell whether there is a key."""
        return self._key is not None

    async def key_for(self, name: str, project: str) -> SealingKey:
        """Return the key for storing a secret. Raises Conflict for a name of the folder, BackendUnavailable."""
        if name in await self._of_folder(project, [name]):
            raise Conflict(f"secrets: the operator of this service holds {name}, in a file; take another name")
        if self._key is None:
            raise BackendUnavailable(
                "this service stores no secrets: its operator has given no key to encrypt them with.",
                remedy=f"Start it with --secrets-key FILE, or with --e2b and 'cloche[secrets]' installed; {MAKE_ONE}",
            )
        return self._key

    async def note_uses(self, write: Callable[..., Any]) -> None:
        """Store which secrets were used."""
        used, self.used = self.used, set()
        if used:
            await write(partial(note_use, used=used))

    async def _of_folder(self, project: str, names: Sequence[str] | None = None) -> dict[str, OperatorSecret]:
        held = await asyncio.to_thread(self._folder.read, names)
        return {name: secret for name, secret in held.items() if secret.is_for(project)}

    async def _read(self, work: Callable[[Session], Any]) -> Any:  # noqa: ANN401 - what the work returns
        return await asyncio.to_thread(self._read_in_thread, work)

    def _read_in_thread(self, work: Callable[[Session], Any]) -> Any:  # noqa: ANN401 - what the work returns
        with self._database.reading() as session:
            return work(session)
