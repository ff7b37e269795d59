"""The caller's end of its range of subordinate ids: find it, claim it once, have workspaces shown as this user's.

See `cloche.jail.subordinate_ids` for the mechanism. A missing or invalid part is reported as a reason; guests then have
the caller's own id.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import pwd
import select
import signal
import socket
import subprocess
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Protocol

from cloche.jail import messages
from cloche.jail.setup.launch import start_mapper
from cloche.jail.user_namespaces import claim_outside_id

FILES = {"newgidmap": "/etc/subgid", "newuidmap": "/etc/subuid"}
PROGRAM_PATH = "/usr/bin:/bin:/usr/local/bin:/run/wrappers/bin"
LEAST_IDS = 256  # each jail takes two; fewer would soon run out
MOST_DIGITS = 10
MAPPER_S = 10.0
QUICK_S = 0.05  # many times the usual time to show a mount


class Show(Protocol):
    """Make a guest's files appear as this user's in a mount; with `is_quick`, only if it takes a moment. Raises
    OSError.
    """

    def __call__(self, mount: int, /, *, is_quick: bool = False) -> None: ...


class SubordinateIds:
    """Hold a range of ids in a user namespace of this process, and the mapper that shows a guest's files as this
    user's.

    `lock_folders` may hold the locks of ids in use. `namespace` is the descriptor that helpers enter.
    """

    def __init__(self, first: int, count: int, lock_folders: tuple[str, ...], programs: list[list[str]]):
        """Claim the range. Raises OSError with the reason if that fails."""
        self.first, self.count, self.lock_folders, self._programs = first, count, lock_folders, programs
        self.namespace = -1
        self._state: os.stat_result | None = None
        self._turn = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._link: socket.socket | None = None
        os.close(claim_outside_id(first, count, lock_folders).held)
        self._take()
        _held_ranges.append(self)
        os.register_at_fork(after_in_child=self._forget)

    def _take(self) -> None:
        self.namespace = self._start(self._programs)
        self._state = os.fstat(self.namespace)

    def hold(self) -> None:
        """Claim the range again if its descriptor is gone: a caller may have closed a descriptor that it did not open.

        Raises OSError.
        """
        if self._is_there():
            return
        with self._turn:
            if not self._is_there():
                if self._link is not None:
                    self._link.detach()  # likewise: its number may belong to another file by now
                self._stop()
                self.namespace = -1
                self._take()

    def _is_there(self) -> bool:
        try:
            return self._state is not None and os.path.samestat(os.fstat(self.namespace), self._state)
        except OSError:
            return False

    def show(self, inside_id: int, mount: int, *, is_quick: bool = False) -> None:
        """Make a detached mount show the files of `inside_id` as this user's. Raises OSError.

        With `is_quick`, the attempt is short and needs a mapper that runs already.
        """
        timeout_s = QUICK_S if is_quick else MAPPER_S
        if not self._turn.acquire(timeout=timeout_s):
            raise TimeoutError("the process that maps ids is busy")
        try:
            why = self._try_to_show(inside_id, mount, timeout_s, is_quick=is_quick)
        finally:
            self._turn.release()
        if why and os.fstat(mount).st_uid != os.geteuid():  # else the mapper did it before it was killed
            raise OSError(0, why)

    def _try_to_show(self, inside_id: int, mount: int, timeout_s: float, *, is_quick: bool) -> str:
        if is_quick and self._link is None:
            raise TimeoutError("the process that maps ids is not started yet")
        try:
            return self._ask(inside_id, mount, timeout_s)
        except OSError:  # it was killed or stopped from outside
            if is_quick:
                raise
            return self._ask(inside_id, mount, timeout_s)

    def showing(self, inside_id: int) -> Show:
        return partial(self.show, inside_id)

    def rest(self) -> None:
        """End the mapper, which is started again when needed; the range stays claimed."""
        with self._turn:
            self._stop()

    def _ask(self, inside_id: int, mount: int, timeout_s: float) -> str:
        """Send a request to the mapper, starting it if necessary; return its error message, empty on success."""
        if self._link is None:
            os.close(self._start([]))
        try:
            messages.send(self._fileno(), "show", {"inside_id": inside_id}, [mount])
            return self._receive(timeout_s)[0]
        except BaseException:
            self._stop()  # a late answer would be read as that of the next request
            raise

    def _start(self, programs: list[list[str]]) -> int:
        """Start a mapper, in the existing namespace or in a new one, and return that namespace's descriptor."""
        self._process, self._link = start_mapper(programs, self.namespace)
        try:
            why, fds = self._receive(MAPPER_S)
            if why:
                raise OSError(0, why)
        except BaseException:
            self._stop()
            raise
        return fds[0]

    def _receive(self, timeout_s: float) -> tuple[str, list[int]]:
        """Return the mapper's error message, empty on success, and its descriptors."""
        waiting = select.poll()
        waiting.register(self._fileno(), select.POLLIN)
        if not waiting.poll(timeout_s * 1000):
            raise TimeoutError("the process that maps ids does not answer")
        tag, body, fds = messages.receive(self._fileno())
        if not tag:
            raise ConnectionResetError("the process that maps ids has ended")
        return body["message"] if tag == "failed" else "", fds

    def _fileno(self) -> int:
        return self._link.fileno() if self._link is not None else -1

    def _stop(self) -> None:
        process, link, self._process, self._link = self._process, self._link, None, None
        if link is not None:
            link.close()
        if process is not None:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # the group includes a program that it waits for
            process.wait()

    def _forget(self) -> None:
        """Close the mapper's link in a forked child: the mapper belongs to the parent."""
        self._turn = threading.Lock()
        if self._link is not None:
            self._link.close()
        if self._process is not None:
            self._process.returncode = 0  # a child of the parent, so wait(2) would fail here
        self._process = self._link = None


async def make_seen(show: Show, mount: int) -> None:
    """Have a mount shown: in this thread, where that is nearly always quick, otherwise in another. Raises OSError.

    When cancelled, the other thread keeps its own duplicate of the descriptor.
    """
    with suppress(OSError):
        show(mount, is_quick=True)
        return
    fd = os.dup(mount)

    def let_go(future: asyncio.Future[None]) -> None:
        os.close(fd)
        if not future.cancelled():
            future.exception()  # retrieved, so that asyncio does not log it

    task = asyncio.ensure_future(asyncio.to_thread(show, fd))
    task.add_done_callback(let_go)
    await asyncio.shield(task)


_held_ranges: list[SubordinateIds] = []


def rest() -> None:
    """End the mappers of this process until they are needed again."""
    for ids in _held_ranges:
        ids.rest()


atexit.register(rest)


def take_range(uid: int, gid: int, *, hindrance: Callable[[], str]) -> SubordinateIds | str:
    """Claim this user's range of subordinate ids, or return the reason why that is impossible.

    `hindrance` returns a further reason, empty for none; it is called only if a range is configured.
    """
    try:
        user = pwd.getpwuid(uid)
    except KeyError:
        return f"uid {uid} has no name, and so no line in {FILES['newuidmap']}"
    ranges = {}
    for program, path in FILES.items():
        id_range = _read_range(path, user.pw_name, uid, gid if program == "newgidmap" else uid)
        if id_range is None:
            return f"{path} has no range of {LEAST_IDS} ids or more for {user.pw_name}"
        ranges[program] = id_range
    first, count = ranges["newuidmap"][0], min(id_range[1] for id_range in ranges.values())
    import shutil  # imports all compressors, which a user without a range need not pay for

    arguments = []
    for program, own in (("newgidmap", gid), ("newuidmap", uid)):
        helper = shutil.which(program, path=PROGRAM_PATH)
        if helper is None:
            return f"{program} is missing (`uidmap`)"
        arguments.append([helper, "0", str(own), "1", str(first), str(ranges[program][0]), str(count)])
    if why := hindrance():
        return why
    try:
        return SubordinateIds(first, count, _lock_folders(user), arguments)
    except OSError as error:
        return f"the ids of {FILES['newuidmap']} cannot be used: {error.strerror or error}"


def _read_range(path: str, name: str, uid: int, own: int) -> tuple[int, int] | None:
    """Return the user's first range that is large enough and holds neither root's id nor `own`."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            rows = [line.strip().split(":") for line in file]
    except OSError:
        return None
    for row in rows:
        if len(row) == 3 and row[0] in (name, str(uid)) and all(map(_is_number, row[1:])):
            first, count = int(row[1]), int(row[2])
            if count >= LEAST_IDS and 0 < first < first + count < 1 << 32 and not first <= own < first + count:
                return first, count
    return None


def _is_number(text: str) -> bool:
    return text.isdecimal() and len(text) <= MOST_DIGITS


def _lock_folders(user: pwd.struct_passwd) -> tuple[str, ...]:
    """Return the folders for locks: the same for every process of a user, independent of the environment."""
    return os.path.join(user.pw_dir, ".cache"), f"/run/user/{user.pw_uid}"
