"""Secrets that a service or a node holds for callers, who give names: the operator's folder, and a call's options.

The folder has a file for each value, named like the secret, such as a Secret of Kubernetes that is mounted there. Its
table `secrets.yaml` has hosts, and other sources. Both are read for each use, so a value that is rotated counts at
once. A file's value and a command's output are read by the egress process alone, and are never in this one.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

from cloche.config.plain_yaml import parse_yaml
from cloche.config.settings import load_settings
from cloche.core.errors import InvalidRequest, PolicyDenied
from cloche.core.escape import escape_name
from cloche.core.secret_names import OperatorSecret, SecretStore, can_be_held, check_names, holds_secrets, unknown
from cloche.core.secrets import Secret, read_secret
from cloche.execution.secrets import read_with_settings

from .callers import Caller

TABLE = "secrets.yaml"
MOST_TABLE = 256 << 10  # bytes
MOST_HELD = 1_000
_SOURCES = ("file", "env", "command")
_TERMS = ("hosts", "format", "foreign", "places", "files_inside")
_FIELDS = (*_SOURCES, *_TERMS, "projects")


class UsesSecrets(Protocol):
    """Hold secrets for callers, and know what they may ask for besides."""

    @property
    def secret_store(self) -> SecretStore:
        """Return the secrets that are held here."""
        ...

    async def allowed_options(self, caller: Caller, own: Mapping[str, Any]) -> dict[str, Any]:
        """Return a sandbox's options, checked against the caller's permissions."""
        ...


async def allowed_with_secrets(operator: UsesSecrets, caller: Caller, own: Mapping[str, Any]) -> dict[str, Any]:
    """Return a sandbox's options with the secrets that its caller names.

    Where code runs on other machines the names are passed on, since those hold secrets of their own. Raises
    PolicyDenied, InvalidRequest.
    """
    names = own["secrets"]
    check_names(names)
    options = await operator.allowed_options(caller, {name: value for name, value in own.items() if name != "secrets"})
    if not names:
        return options
    if holds_secrets(load_settings(options).backend):
        return {**options, "secrets": list(names)}
    with_values = {**options, "secrets": await operator.secret_store.of(caller.project, names)}
    try:
        read_with_settings(with_values)
    except PolicyDenied:
        raise PolicyDenied(
            "secrets: a ceiling of the network here excludes hosts of these; ask the operator for a higher one"
        ) from None
    return with_values


class SecretFolder:
    """Hold the secrets of an operator's folder; none without a folder. `by` names the holder in errors."""

    def __init__(self, folder: str, *, by: str):
        self.folder, self._by = os.path.abspath(os.path.expanduser(folder)) if folder else "", by

    async def of(self, project: str, names: Sequence[str]) -> dict[str, Secret]:
        """Return secrets of a project. Raises InvalidRequest for a name that it does not have."""
        held = await asyncio.to_thread(self.read, names)
        for name in names:
            if name not in held or not held[name].is_for(project):
                raise unknown(name, self._by, "ask its operator, who holds them in secrets_from")
        return {name: held[name].secret for name in names}

    def read(self, names: Collection[str] | None = None) -> dict[str, OperatorSecret]:
        """Return the secrets by name, or those of these names. Blocks. Raises InvalidRequest for a wrong folder."""
        if not self.folder:
            return {}
        try:
            files = [name for name in os.listdir(self.folder) if can_be_held(name)]
            table = self._table()
        except OSError as error:
            raise InvalidRequest(f"secrets_from: the folder cannot be read: {error.strerror}") from None
        rows = {**dict.fromkeys(files), **table}
        if len(rows) > MOST_HELD:
            raise InvalidRequest(f"secrets_from: {len(rows)} secrets are more than {MOST_HELD}")
        return {name: self._held(name, row) for name, row in rows.items() if names is None or name in names}

    def _table(self) -> Mapping[str, Any]:
        try:
            with open(os.path.join(self.folder, TABLE), encoding="utf-8", errors="replace") as file:
                text = file.read(MOST_TABLE + 1)
        except FileNotFoundError:
            return {}
        if len(text) > MOST_TABLE:
            raise InvalidRequest(f"{TABLE}: it is longer than {MOST_TABLE} characters")
        table = parse_yaml(text, TABLE, takes_anchors=False)
        table = {} if table is None else table
        if not isinstance(table, dict) or not all(isinstance(name, str) for name in table):
            raise InvalidRequest(f"{TABLE}: write NAME: {{hosts: [api.example.com]}} for each secret")
        return table

    def _held(self, name: str, row: Any) -> OperatorSecret:  # noqa: ANN401 - YAML
        where = f"{TABLE}: {escape_name(name)[:100]}"
        if not can_be_held(name):
            raise InvalidRequest(f"{where}: this is not the name of a variable, such as OPENAI_API_KEY")
        row = {} if row is None else row
        if not isinstance(row, dict) or not set(row) <= set(_FIELDS):
            raise InvalidRequest(f"{where}: it takes {', '.join(_FIELDS)}; a value has a file of its own")
        for field in ("hosts", "places", "projects"):
            if not isinstance(row.get(field, []), list):
                raise InvalidRequest(f"{where}: {field} must be a list")
        known = {field: row[field] for field in ("env", "command", *_TERMS) if field in row}
        if not set(row) & {"env", "command"}:
            known["file"] = os.path.join(self.folder, str(row.get("file", name)))
        try:
            secret = read_secret(name, Secret(**known))
        except (InvalidRequest, TypeError) as error:
            raise InvalidRequest(f"{where}: {error}") from None
        return OperatorSecret(name=name, secret=secret, projects=tuple(map(str, row.get("projects", ()))))
