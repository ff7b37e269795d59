"""A PostgreSQL server of the distribution's package, on a Unix socket in a folder of its own, as an ordinary user."""

from __future__ import annotations

import os
import pwd
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

START_S = 120


class Server:
    """Hold a server that runs, with an empty database for whoever asks."""

    def __init__(self, folder: Path, bin_folder: Path, before: Sequence[str], user: dict[str, Any]):
        self._folder, self._bin, self._before, self._user = folder, bin_folder, before, user

    def new_database(self) -> str:
        """Return the URL of a new one."""
        name = f"cloche_{secrets.token_hex(6)}"
        self.tool("createdb", "-h", str(self._folder), "-U", "cloche", name)
        return f"postgresql://cloche@/{name}?host={self._folder}"

    def tool(self, name: str, *words: str) -> None:
        """Run one of PostgreSQL's programs."""
        done = subprocess.run(
            [*self._before, self._bin / name, *words], **self._user, cwd=self._folder, timeout=START_S, check=False,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout.decode()


def _has_name(uid: int) -> bool:
    try:
        pwd.getpwuid(uid)
    except KeyError:
        return False
    return True


@contextmanager
def postgres() -> Iterator[Server]:
    """Serve for the body; nothing of it is left."""
    bin_folder = max(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda one: int(one.parent.name))
    folder = Path(tempfile.mkdtemp(prefix="tested-postgres-"))
    user: dict[str, Any] = {"env": {"PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8"}}
    found, before = pwd.getpwnam("postgres"), []
    if os.geteuid() == 0:  # the server refuses to be root's
        os.chown(folder, found.pw_uid, found.pw_gid)
        user |= {"user": found.pw_uid, "group": found.pw_gid, "extra_groups": []}
    elif not _has_name(os.geteuid()):  # and a user without a name, as that of `test_as_user.sh` is: here it has one
        before = ["unshare", "--user", f"--map-user={found.pw_uid}", f"--map-group={found.pw_gid}"]
    server, data = Server(folder, bin_folder, before, user), str(folder / "data")
    try:
        server.tool("initdb", "--no-sync", "--no-instructions", "-A", "trust", "-U", "cloche", "-D", data)
        options = f"-c listen_addresses= -c unix_socket_directories={folder} -c fsync=off -c shared_buffers=16MB"
        # Its output must not be the pipe of `pg_ctl`, which would end with the server alone.
        server.tool("pg_ctl", "-D", data, "-w", "-t", str(START_S), "-l", str(folder / "log"), "-o", options, "start")
        try:
            yield server
        finally:
            server.tool("pg_ctl", "-D", data, "-w", "-m", "immediate", "stop")
    finally:
        shutil.rmtree(folder)
