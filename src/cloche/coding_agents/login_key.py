"""The key that the logins of a user are encrypted with: in the user's keyring where one runs, else in a file.

The file is in the folder of the configuration, and the logins are in that of the state: a copy or a backup of one of
them alone is worth nothing. Programs of the same user can read both. A separate process asks the keyring, with a
time-out: the keyring may wait for its password.
"""

from __future__ import annotations

import base64
import binascii
import os
import subprocess
import sys
from typing import Literal

from cloche.core.errors import BackendUnavailable, InvalidRequest
from cloche.core.record import dataclass, field
from cloche.hostfs import own_folder, write_whole
from cloche.sealing import KEY_BYTES

KEYRING_S = 20.0
Place = Literal["keyring", "file"]
# Of the package `keyring`, those that a daemon with a password is behind.
_ASK = """
import sys, keyring
from keyring.backend import get_all_keyring
good = ("keyring.backends.SecretService", "keyring.backends.libsecret", "keyring.backends.kwallet")
found = [each for each in get_all_keyring() if type(each).__module__ in good and each.priority > 0]
if found:
    best = max(found, key=lambda each: each.priority)
    new = sys.stdin.read()
    if new and best.get_password("cloche", "logins") is None:
        best.set_password("cloche", "logins", new)
    print(best.get_password("cloche", "logins") or "")
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class UserKey:
    """Hold the key, and where it is kept."""

    key: bytes = field(repr=False)
    place: Place


def user_key(*, makes: bool = False) -> UserKey | None:
    """Return the key; without one None, or a new one if it `makes` one. Raises InvalidRequest, BackendUnavailable.

    Blocks, for KEYRING_S at most.
    """
    path = key_path()
    if (text := _read(path)) is not None:
        return UserKey(key=_decoded(text, path), place="file")
    new = base64.b64encode(os.urandom(KEY_BYTES)).decode() if makes else ""
    if kept := _in_keyring(new):
        return UserKey(key=_decoded(kept, "the user's keyring"), place="keyring")
    if not makes:
        return None
    return UserKey(key=_decoded(_made(path, new), path), place="file")


def key_path() -> str:
    """Return the path of the key's file. Raises InvalidRequest for a user without a home."""
    folder = own_folder("XDG_CONFIG_HOME", ".config")
    if folder is None:
        raise InvalidRequest("agent login: this user has no home folder, where a key is kept; set XDG_CONFIG_HOME")
    return f"{folder}/logins.key"


def _read(path: str) -> str | None:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise InvalidRequest(f"agent login: {path} cannot be read: {error.strerror}") from None
    with open(fd, "rb") as file:
        facts = os.fstat(fd)
        if facts.st_uid != os.geteuid() or facts.st_mode & 0o077:
            raise InvalidRequest(f"agent login: others may read {path}; make another one: rm {path}, and log in again")
        return file.read(4 * KEY_BYTES).decode("ascii", "replace").strip()


def _decoded(text: str, where: str) -> bytes:
    try:
        key = base64.b64decode(text, validate=True)
    except binascii.Error:
        key = b""
    if len(key) != KEY_BYTES:
        raise BackendUnavailable(
            f"agent login: {where} does not have a key of {KEY_BYTES} bytes in base64.",
            remedy="Remove it, and log in again.",
        )
    return key


def _made(path: str, text: str) -> str:
    """Write a new key, and return it, or that of another process that was faster."""
    os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
    temporary = f"{path}.{os.getpid()}.new"
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        write_whole(fd, text.encode())
        os.fsync(fd)
        os.link(temporary, path)
    except FileExistsError:
        pass
    finally:
        os.close(fd)
        os.unlink(temporary)
    return _read(path) or ""


def _in_keyring(new: str) -> str:
    """Return the key in the user's keyring, once `new` is written if it had no key; empty without a keyring."""
    if not os.environ.get("DBUS_SESSION_BUS_ADDRESS") and not os.path.exists(f"/run/user/{os.geteuid()}/bus"):
        return ""
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-c", _ASK],
            input=new,
            capture_output=True,
            text=True,
            timeout=KEYRING_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
