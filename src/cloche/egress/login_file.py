"""A login that is kept for one user: its tokens, encrypted, and the placeholders that stand for them in every sandbox.

Theory of operation: a file is replaced as a whole, and read again when it is another file. An exchange of tokens holds
its lock, since a refresh token is good once. The lock's file has the time at which the exchange began, and is emptied
at its end: a time that is still there was left by an interrupted exchange, and the tokens in the file may be spent.
Both files have mode 0600 in a folder with 0700; others are refused.
"""

from __future__ import annotations

import base64
import datetime as dt
import fcntl
import json
import os
import stat
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from cloche.core.errors import BackendUnavailable, InvalidRequest
from cloche.core.record import dataclass, replace
from cloche.hostfs import new_file, open_folder
from cloche.sealing import SealingKey

FORMAT, MOST_BYTES = 1, 512 << 10
PURPOSE = "logins of coding agents"
_OWN = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
LOG_IN_AGAIN = "Log in again: cloche agent login NAME"


@dataclass(frozen=True, slots=True, kw_only=True)
class Login:
    """Hold the tokens of a login by the fields of the answers that brought them, and the last answer to an exchange.

    A field has its placeholder and its value. In `answer` placeholders stand for values.
    """

    fields: Mapping[str, tuple[str, str]]
    answer: str
    version: int = 0


class LoginFile:
    """Read and write the file of a login at a path."""

    def __init__(self, path: str, key: bytes):
        self.path = path
        self._key = SealingKey(key, "agent login", PURPOSE)

    def state(self) -> tuple[int, ...]:
        """Return values that differ for another file; empty without a file."""
        try:
            facts = os.stat(self.path, follow_symlinks=False)
        except FileNotFoundError:
            return ()
        return facts.st_ino, facts.st_mtime_ns, facts.st_size

    def read(self) -> Login | None:
        """Return the login; None without a file. Raises InvalidRequest, BackendUnavailable for one of another key."""
        row = read_row(self.path)
        return None if row is None else self._opened(row)

    def _opened(self, row: Mapping[str, Any]) -> Login:
        from cryptography.exceptions import InvalidTag

        if row["key"] != self._key.mark:
            raise BackendUnavailable(
                f"{self.path} was encrypted with another key than this user has.", remedy=LOG_IN_AGAIN
            )
        try:
            sealed = json.loads(self._key.open(base64.b64decode(row["sealed"]), _about(row)))
        except (InvalidTag, ValueError):
            raise BackendUnavailable(f"{self.path} was changed by something else.", remedy=LOG_IN_AGAIN) from None
        values, marks = sealed["values"], row["placeholders"]
        fields = {name: (marks[name], value) for name, value in values.items()}
        return Login(fields=fields, answer=sealed["answer"], version=row["version"])

    def write(self, login: Login) -> Login:
        """Replace the login, and return it with its version once the disk has it. Raises OSError."""
        login = replace(login, version=time.time_ns())
        marks = {name: mark for name, (mark, _) in login.fields.items()}
        now = dt.datetime.now(dt.UTC).isoformat(timespec="seconds")
        row = {
            "format": FORMAT, "version": login.version, "changed_at": now, "ends_at": _end_of(login.answer),
            "placeholders": marks, "key": self._key.mark,
        }  # fmt: skip
        values = {name: value for name, (_, value) in login.fields.items()}
        sealed = self._key.seal(json.dumps({"values": values, "answer": login.answer}), _about(row))
        _replace(self.path, json.dumps({**row, "sealed": base64.b64encode(sealed).decode()}).encode())
        return login

    def remove(self) -> None:
        """Forget the login."""
        with suppress(FileNotFoundError):
            os.unlink(self.path)

    @contextmanager
    def locked(self) -> Iterator[int]:
        """Hold the lock of the login, as the descriptor of its file. Blocks."""
        make_private_folder(os.path.dirname(self.path))
        fd = os.open(f"{self.path}.lock", os.O_RDWR | os.O_CREAT | _OWN, 0o600)
        try:
            _check_own(f"{self.path}.lock", os.fstat(fd))
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield fd
        finally:
            os.close(fd)


def begin_exchange(lock: int) -> str:
    """Note the begin of an exchange; return the begin of an interrupted one, empty without one."""
    interrupted_at = os.pread(lock, 64, 0).decode("ascii", "replace")
    os.pwrite(lock, dt.datetime.now(dt.UTC).isoformat(timespec="seconds").encode(), 0)
    os.fdatasync(lock)
    return interrupted_at


def end_exchange(lock: int) -> None:
    """Note that the outcome of the exchange is known."""
    os.ftruncate(lock, 0)
    os.fdatasync(lock)


def read_row(path: str) -> dict[str, Any] | None:
    """Return the content of a login's file, with encrypted tokens; None without a file. Raises InvalidRequest."""
    try:
        fd = os.open(path, os.O_RDONLY | _OWN)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise InvalidRequest(f"agent login: {path} cannot be read: {error.strerror}") from None
    with open(fd, "rb") as file:
        _check_own(path, os.fstat(fd))
        data = file.read(MOST_BYTES + 1)
    try:
        row = json.loads(data) if len(data) <= MOST_BYTES else None
    except ValueError:
        row = None
    if not isinstance(row, dict) or row.get("format") != FORMAT:
        raise InvalidRequest(f"agent login: {path} is no login of this version; remove it, and log in again")
    return row


def make_private_folder(path: str) -> None:
    """Make a folder that only its owner may read. Raises InvalidRequest for one with other permissions."""
    os.makedirs(path, mode=0o700, exist_ok=True)
    _check_own(path, os.stat(path, follow_symlinks=False), stat.S_IFDIR)


def _check_own(path: str, facts: os.stat_result, kind: int = stat.S_IFREG) -> None:
    if stat.S_IFMT(facts.st_mode) != kind or facts.st_uid != os.geteuid() or facts.st_mode & 0o077:
        raise InvalidRequest(
            f"agent login: {path} must belong to this user, and be readable by nobody else: chmod go= {path}"
        )


def _replace(path: str, data: bytes) -> None:
    folder, name = os.path.split(path)
    make_private_folder(folder)
    dir_fd = open_folder(folder)
    try:
        with new_file(dir_fd, 0o600) as (temporary, file):
            with file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.rename(temporary, name, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
        os.fsync(dir_fd)
    finally:
        os.close(dir_fd)


def _end_of(answer: str) -> float | None:
    """Return the time at which the access token of a new answer ends; None for an answer without one."""
    try:
        return time.time() + float(json.loads(answer)["expires_in"])
    except (ValueError, KeyError, TypeError):
        return None


def _about(row: Mapping[str, Any]) -> bytes:
    """Return the part of the row that the tokens are bound to."""
    return json.dumps([row["format"], row["version"], row["placeholders"]], sort_keys=True).encode()
