"""The variables of an environment snapshot: which are stored, which values are masked, how masked ones are compared.

The value of a masked variable is not in a snapshot. To show whether it changed between snapshots, the row has a keyed
hash (HMAC) of it. The key is in a file beside the database. Neither is ever shown.
"""

from __future__ import annotations

import hmac
import os
import re
import stat
from collections.abc import Mapping
from contextlib import suppress
from hashlib import sha256

from cloche.audit.redaction import Redactor, is_secret
from cloche.core.errors import InvalidRequest, RecordsFailed
from cloche.core.escape import utf8_safe
from cloche.core.record import dataclass
from cloche.hostfs import new_file, open_folder, open_regular

MASK = "***"
MOST_VALUE_CHARS = 1_024
MOST_VARIABLES = 2_000
_MOST_CHARS = 256 << 10  # of all values that are not too long
_MOST_KEY_CHARS = 1_024
_SHOWN_KEY_CHARS = 200  # of a skipped variable
_LEAST_SECRET_CHARS = 8  # a shorter one also occurs in other values
_KEY_FILE, _KEY_BYTES = "snapshots.key", 32
KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SENSITIVE = re.compile(r"API_KEY|TOKEN|SECRET|PASSWORD|AUTH|CREDENTIAL|PRIVATE_KEY|ACCESS_KEY", re.IGNORECASE)
# User and password in a URL. In http(s) URLs neither has a slash.
_WITH_PASSWORD = re.compile(r"https?://[^\s/?#]*:[^\s/?#]*@|(?<!http)(?<!https)://[^\s/@:]*:\S*@", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Variables:
    """Hold a snapshot's variables. `hashes` are those of the masked values, by name."""

    env: Mapping[str, str]
    masked: tuple[str, ...]
    skipped: tuple[tuple[str, str], ...]  # key and reason: `name`, `length` or `encoding`
    hashes: Mapping[str, str]


def keep_variables(env: Mapping[str, str], key: bytes) -> Variables:
    """Return the variables that a snapshot stores. Raises InvalidRequest for too many."""
    if len(env) > MOST_VARIABLES:
        raise InvalidRequest(f"env: {len(env)} variables are more than {MOST_VARIABLES}; name those that matter")
    if sum(len(value) for value in env.values() if len(value) <= MOST_VALUE_CHARS) > _MOST_CHARS:
        raise InvalidRequest(f"env: the values have more than {_MOST_CHARS} characters; name the variables that matter")
    values: dict[str, str] = {}
    hashes: dict[str, str] = {}
    skipped: list[tuple[str, str]] = []
    secrets = {name: value for name, value in env.items() if len(value) >= _LEAST_SECRET_CHARS and is_sensitive(name)}
    redactor = Redactor(secrets, environ={})
    for name in sorted(env):
        value = env[name]
        if reason := _reason_to_skip(name, value):
            skipped.append((utf8_safe(name[:_SHOWN_KEY_CHARS]), reason))
        elif is_sensitive(name) or _WITH_PASSWORD.search(value) or redactor.text(value) != value:
            values[name] = MASK
            hashes[name] = hmac.new(key, f"{name}\0{value}".encode(), sha256).hexdigest()
        else:
            values[name] = value
    return Variables(env=values, masked=tuple(hashes), skipped=tuple(skipped), hashes=hashes)


def is_sensitive(name: str) -> bool:
    """Tell whether a variable's name indicates a secret."""
    return _SENSITIVE.search(name) is not None or is_secret(name)


def _reason_to_skip(name: str, value: str) -> str | None:
    if KEY.fullmatch(name) is None:
        return "name"
    if len(name) > _MOST_KEY_CHARS or len(value) > MOST_VALUE_CHARS:
        return "length"
    return "encoding" if "\0" in value or utf8_safe(value) != value else None


def compare_variables(
    before: Mapping[str, str], after: Mapping[str, str], hashes: tuple[Mapping[str, str], Mapping[str, str]]
) -> dict[str, object]:
    """Return the `added`, `removed` and `changed` variables; `unknown` are masked ones without a hash, if any."""
    shared = sorted(before.keys() & after.keys())
    differences: dict[str, object] = {
        "added": {name: after[name] for name in sorted(after.keys() - before.keys())},
        "removed": {name: before[name] for name in sorted(before.keys() - after.keys())},
        "changed": {
            name: [before[name], after[name]]
            for name in shared
            if before[name] != after[name] or len({side.get(name) for side in hashes} - {None}) == 2
        },
    }
    unknown = [
        name for name in shared if before[name] == after[name] == MASK and any(_lacks(side, name) for side in hashes)
    ]
    return {**differences, "unknown": unknown} if unknown else differences


def _lacks(hashes: Mapping[str, str], name: str) -> bool:
    return name not in hashes


def mask_key(folder: str) -> bytes:
    """Return the key of the hashes from its file in the database's folder, which is created when first needed.

    Raises RecordsFailed for a file that cannot be used.
    """
    try:
        folder_fd = open_folder(folder, follows_link=True)
        try:
            with suppress(FileExistsError):
                return _read_key(folder_fd) or _make_key(folder_fd)
            return _read_key(folder_fd) or b""
        finally:
            os.close(folder_fd)
    except OSError as error:
        raise RecordsFailed(f"{_KEY_FILE} beside the records cannot be used: {error.strerror}") from error


def _read_key(folder: int) -> bytes | None:
    try:
        fd, facts = open_regular(_KEY_FILE, folder)
    except FileNotFoundError:
        return None
    with open(fd, "rb") as file:
        key = file.read(_KEY_BYTES + 1)
    if len(key) != _KEY_BYTES or stat.S_IMODE(facts.st_mode) & 0o077:
        raise RecordsFailed(
            f"{_KEY_FILE} beside the records must have {_KEY_BYTES} bytes and be readable by its owner only; restore "
            "it,"
            " or remove it (masked values of older snapshots then count as changed)"
        )
    return key


def _make_key(folder: int) -> bytes:
    """Create the key. Raises FileExistsError if another process was faster."""
    key = os.urandom(_KEY_BYTES)
    with new_file(folder, 0o600) as (beside, file):
        with file:
            file.write(key)
            file.flush()
            os.fsync(file.fileno())
        os.link(beside, _KEY_FILE, src_dir_fd=folder, dst_dir_fd=folder)
        os.unlink(beside, dir_fd=folder)
    return key
