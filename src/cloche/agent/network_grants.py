"""Hosts that an approver allowed for a folder, always: a file of the user's, and the gate that asks about the others.

Theory of operation: the file is in the user's state folder, where no configuration file and no file of a project can
name or put one: it must be the user's own and private, or using it is an error. A grant belongs to a folder by its real
path and its inode, so that another folder which comes to that path inherits nothing. The file is replaced as a whole
while a lock on its folder is held. A sandbox in the folder is asked about other hosts alone.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from cloche import hostfs
from cloche.config.state import state_file
from cloche.core.errors import ApprovalDenied, InvalidRequest
from cloche.core.record import asdict, dataclass, replace

from .approval import ApprovalRequest, Decided, Decision, Gate

NAME, VERSION = "network-grants.json", 1
MOST_GRANTS, MOST_BYTES = 1000, 1 << 20
log = logging.getLogger("cloche.agent")


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkGrant:
    """Allow a host and a port in a folder; `since` and `last_used` are seconds since 1970."""

    folder: str
    inode: int
    host: str
    port: int
    since: int
    last_used: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GrantFolder:
    """Name the folder that grants belong to."""

    path: str
    inode: int

    @classmethod
    def at(cls, path: str) -> GrantFolder:
        """Return the folder that a path leads to now. Raises InvalidRequest."""
        try:
            real = os.path.realpath(path)
            return cls(path=real, inode=os.stat(real).st_ino)
        except OSError as error:
            raise InvalidRequest(f"{path} is no folder with grants: {error.strerror}") from error

    def has(self, grant: NetworkGrant, host: str, port: int) -> bool:
        """Tell whether this is its grant for a host and a port."""
        return (grant.folder, grant.inode, grant.host, grant.port) == (self.path, self.inode, host, port)


def read_grants() -> tuple[NetworkGrant, ...]:
    """Return all grants of this user. Raises InvalidRequest for a file that somebody else could have written."""
    path = state_file(NAME)
    if path is None or not os.path.lexists(path):
        return ()
    try:
        with _opened(path) as folder_fd:
            return _read(path, folder_fd)
    except OSError as error:
        raise _unusable(path, error.strerror or "it cannot be read") from error


def use_grant(folder: GrantFolder, host: str, port: int) -> bool:
    """Tell whether a host is granted, and note that it is used. Raises InvalidRequest as `read_grants` does."""
    if not any(folder.has(grant, host, port) for grant in read_grants()):
        return False
    now = int(time.time())
    with suppress(InvalidRequest):  # a folder that cannot be written: the grant holds nevertheless
        _change(lambda grants: [replace(one, last_used=now) if folder.has(one, host, port) else one for one in grants])
    return True


def add_grant(folder: GrantFolder, host: str, port: int) -> None:
    """Grant a host for later sandboxes in a folder. Raises InvalidRequest, also where there are too many."""
    now = int(time.time())
    new = NetworkGrant(folder=folder.path, inode=folder.inode, host=host, port=port, since=now, last_used=now)

    def added(grants: Sequence[NetworkGrant]) -> list[NetworkGrant]:
        others = [one for one in grants if (one.folder, one.host, one.port) != (new.folder, host, port)]
        if len(others) >= MOST_GRANTS:
            raise InvalidRequest(f"there are {len(others)} grants, the most; revoke some (cloche network revoke)")
        return [*others, new]

    _change(added)


def revoke_grants(is_meant: Callable[[NetworkGrant], bool]) -> int:
    """Remove grants, and return how many. A sandbox that is open keeps its own until it ends."""
    if not any(map(is_meant, read_grants())):
        return 0
    return -_change(lambda grants: [grant for grant in grants if not is_meant(grant)])


def _change(change: Callable[[Sequence[NetworkGrant]], list[NetworkGrant]]) -> int:
    """Replace the grants by what `change` makes of them, and return how many more there are."""
    path = state_file(NAME)
    if path is None:
        raise InvalidRequest("grants have no place, since this user has no home folder; set XDG_STATE_HOME")
    try:
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        with _opened(path) as folder_fd:
            before = _read(path, folder_fd)
            rows = [asdict(grant) for grant in change(before)]
            data = json.dumps({"version": VERSION, "grants": rows}, indent=1).encode()
            hostfs.replace(folder_fd, NAME, data, mode=0o600, permissions=0o600)
            return len(rows) - len(before)
    except OSError as error:
        raise InvalidRequest(f"{path} cannot be written: {error.strerror}") from error


@contextmanager
def _opened(path: str) -> Iterator[int]:
    """Hold the folder of the file open and locked. Raises InvalidRequest for one that another user can change."""
    folder_fd = hostfs.open_folder(os.path.dirname(path), follows_link=True)
    try:
        _check_owner(os.path.dirname(path), os.fstat(folder_fd), 0o002)
        fcntl.flock(folder_fd, fcntl.LOCK_EX)
        yield folder_fd
    finally:
        os.close(folder_fd)


def _read(path: str, folder_fd: int) -> tuple[NetworkGrant, ...]:
    if hostfs.look(NAME, folder_fd) is None:
        return ()
    fd, facts = hostfs.open_regular(NAME, folder_fd)
    with open(fd, "rb") as file:
        _check_owner(path, facts, 0o077)
        data = file.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise _unusable(path, f"it is larger than {MOST_BYTES} bytes")
    try:
        told = json.loads(data)
        if told["version"] == VERSION:
            return tuple(map(_grant, told["grants"]))
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise _unusable(path, "its text is not valid") from error
    raise _unusable(path, "another version of Cloche wrote it")


def _grant(row: dict[str, Any]) -> NetworkGrant:
    grant = NetworkGrant(**row)
    numbers = (grant.inode, grant.port, grant.since, grant.last_used)
    if not all(isinstance(text, str) for text in (grant.folder, grant.host)) or not all(
        type(n) is int for n in numbers
    ):
        raise TypeError("a value of another type")
    return grant


def _check_owner(path: str, facts: os.stat_result, others: int) -> None:
    if facts.st_uid != os.geteuid():
        raise _unusable(path, f"it belongs to user {facts.st_uid}, who could allow hosts")
    if facts.st_mode & others:
        raise _unusable(path, f"its mode is {facts.st_mode & 0o777:o}, and others could use it")


def _unusable(path: str, why: str) -> InvalidRequest:
    return InvalidRequest(f"{path} is not used: {why}. Remove it, or make it yours alone (chmod 600)")


class HostGate:
    """Decide about hosts without a rule: by the grants of a folder, else by an approver, whose yes may be kept.

    `request` returns the request about a host and a port, and a `folder`. Raises InvalidRequest for unusable grants.
    """

    def __init__(
        self, gate: Gate, folder: str, request: Callable[..., ApprovalRequest], on_event: Callable[[Decided], None]
    ):  # fmt: skip
        self._gate, self._request, self._on_event = gate, request, on_event
        self._folder = GrantFolder.at(folder)
        read_grants()

    async def approve(self, host: str, port: int) -> bool:
        """Tell whether a host may be reached."""
        request = self._request(host, port, folder=self._folder.path)
        if await asyncio.to_thread(use_grant, self._folder, host, port):
            decision = Decision(is_approved=True, by="grant", reason="allowed for this folder (cloche network grants)")
            self._on_event(Decided(request=request, decision=decision, was_remembered=True))
            return True
        try:
            decided = await self._gate.approve(request)
        except ApprovalDenied:
            return False
        if decided is not None and decided.is_for_folder is True:
            await self._keep(host, port)
        return True

    async def _keep(self, host: str, port: int) -> None:
        try:
            await asyncio.to_thread(add_grant, self._folder, host, port)
        except InvalidRequest as error:
            log.warning("%s:%d is allowed for this sandbox alone: %s", host, port, error)
