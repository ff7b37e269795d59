"""A container of an image without a recent Python: its first process is a shell, and the daemon's exec does the work.

It takes the same orders and sends the same frames as a container with our first process. A shell reports less: an exit
code above 128 counts as a signal, memory is not watched, and there is no value.
"""

from __future__ import annotations

import io
import json
import re
import socket
import tarfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from ..archive import Spool
from ..containers.container import CHUNK_BYTES, DATA, DONE, ENDED, ERR, FAILED, OUT, STARTED, ContainerLink
from .container import Demultiplexer, DockerContainer, Encrypted, stream_of
from .daemon import explained

# For each line that it reads, the shell kills all other processes. At the end of input it exits, which ends the
# container.
# In some shells `read` fails whenever an orphan dies, so only thousands of failures in a row count as the end of input.
_FIRST = "trap '' CHLD; n=0; while [ $n -lt 5000 ]; do if read -r word; then n=0; kill -9 -1; else n=$((n+1)); fi; done"
COMMAND = ("sh", "-c", _FIRST)
# TLS cannot close one direction, so over TLS `fed` reads exactly the number of bytes sent.
# The program is a child; its leftover processes are killed after it. kill(2): pid -1 spares the caller and pid 1.
_RUN = """umask 022; echo 1000 > /proc/self/oom_score_adj; {fed}"$@"; code=$?; kill -9 -1 2>/dev/null; exit $code"""
_UNPACK = "cd / && {fed}tar -x -f -"
_COUNT = (
    "cd /sys/fs/cgroup && cat memory/memory.oom_control memory.events pids/pids.events pids.events 2>/dev/null; true"
)
_PACK = 'chmod 700 /workspace 2>/dev/null; cd /workspace && tar -c -f - . 2>/dev/null; stat -f -c "free %f %d" . >&2'
_READ = """
cd /workspace; set -f; IFS=/; walk=
for part in $1; do walk=$walk$part; [ -L "$walk" ] && exit 41; walk=$walk/; done
[ -e "$1" ] || exit 44
[ -f "$1" ] || exit 41
exec head -c "$2" "./$1"
"""
_LIST = "cd /workspace && find . -type f -print0"
_REFUSED, _MISSING = 41, 44
_LAST_SIGNAL = 64
MOST_NAMES_BYTES = 32 << 20
OnPiece = Callable[[int, bytes], None]


class ShellContainer(DockerContainer):
    """One started container with a shell in it."""

    _is_killed = False

    def _begin(self, link: ContainerLink, boot: bytes) -> None:  # noqa: ARG002 - nothing is sent
        """Mark the container as ready: the shell reads its input as soon as it runs."""
        self._ready.set()

    def order(self, order: Mapping[str, Any], *payloads: bytes) -> None:
        """Carry out an order in the background. Raises OSError if the container has ended."""
        self._connected()
        thread = threading.Thread(target=self._handle, args=(order, payloads), name="cloche-docker-shell", daemon=True)
        thread.start()

    def kill_guest(self) -> None:
        """Have the shell kill all other processes; kill the container if the shell cannot be reached."""
        self._is_killed = True
        try:
            self._connected().send_raw(b"kill\n")
        except OSError:
            self.kill()

    def _handle(self, order: Mapping[str, Any], payloads: tuple[bytes, ...]) -> None:
        verbs: Mapping[str, Callable[[], None]] = {
            "run": lambda: self._run(order, payloads),
            "read": lambda: self._read(order["path"], order["max_bytes"]),
            "write": lambda: self._write(order, payloads),
            "list": self._list,
        }
        try:
            verbs[order["do"]]()
        except Exception as error:
            self._send_json(FAILED, kind="refused", path=order.get("path", "/workspace"), why=explained(error))

    def _send(self, tag: bytes, body: bytes = b"") -> None:
        self._receive(tag, body)

    def _send_json(self, tag: bytes, **body: object) -> None:
        self._send(tag, json.dumps(body).encode())

    def _run(self, order: Mapping[str, Any], payloads: tuple[bytes, ...]) -> None:
        if not self._take_files(payloads[0], order):
            return
        before, stdin = self._counters(), payloads[1] if len(payloads) > 1 else b""
        started, code = time.monotonic(), 0
        self._send(STARTED)
        for number, arguments in enumerate(order["commands"]):
            out = OUT if number == len(order["commands"]) - 1 else ERR
            if self._is_killed:
                break
            code = self._execute(
                ["sh", "-c", _RUN.format(fed=self._fed(stdin) if stdin else ""), "sh", *arguments],
                lambda stream, data, out=out: self._send(out if stream == 1 else ERR, data),  # type: ignore[misc]
                stdin=stdin,
                env=order["env"],
                workdir="/workspace",
            )
            if code:
                break
        end = {"wall_s": time.monotonic() - started, "cause": "asked" if self._is_killed else ""}
        after = self._counters()
        self._hand_files(order["disk_bytes"], lambda is_full: self._report(code, end, before, after, is_full))

    def _report(
        self, code: int, end: Mapping[str, object], before: tuple[int, int], after: tuple[int, int], is_full: bool
    ) -> None:
        status = code - 128 if 128 < code <= 128 + _LAST_SIGNAL else (code & 0xFF) << 8
        self._send_json(
            ENDED, **end, wait_status=status, oom_kills=after[0] - before[0], pids_hits=after[1] - before[1],
            full=is_full, cpu_user_s=None, cpu_system_s=None, peak_bytes=None,
        )  # fmt: skip

    def _hand_files(self, max_bytes: int, report: Callable[[bool], None]) -> None:
        """Send the whole workspace. The caller compares it with the hashes that it knows."""
        spool, errors = Spool(max_bytes), bytearray()

        def take(stream: int, data: bytes) -> None:
            if stream == 1:
                spool.add(data)
            else:
                errors.extend(data[:4096])

        try:
            self._execute(["sh", "-c", _PACK], take)
            is_whole = True
        except ValueError:  # such as a sparse file larger than its disk
            spool, is_whole = Spool(0), False
        free = re.search(rb"free (\d+) (\d+)", bytes(errors))
        report(free is not None and b"0" in free.groups())
        spool.file.seek(0)
        while data := spool.file.read(CHUNK_BYTES):
            self._send(DATA, data)
        spool.file.close()
        self._send_json(DONE, skipped=int(not is_whole), is_whole=is_whole)

    def _take_files(self, packed: bytes, order: Mapping[str, Any]) -> bool:
        errors = bytearray()
        moved = _moved(packed, order)
        code = self._execute(
            ["sh", "-c", _UNPACK.format(fed=self._fed(moved))], lambda _, data: errors.extend(data[:4096]), stdin=moved
        )
        if code:
            why = bytes(errors).decode("utf-8", "replace").strip()
            self._send_json(FAILED, kind="refused", path="/workspace", why=why[-400:] or f"tar ended with {code}")
        return code == 0

    def _write(self, order: Mapping[str, Any], payloads: tuple[bytes, ...]) -> None:
        if self._take_files(payloads[0], order):
            self._send_json(DONE)

    def _read(self, path: str, max_bytes: int) -> None:
        data = bytearray()
        code = self._execute(
            ["sh", "-c", _READ, "sh", path, str(max_bytes + 1)],
            lambda stream, piece: data.extend(piece if stream == 1 else b""),
        )
        kinds = {
            _REFUSED: ("refused", "it is not a regular file of the workspace"),
            _MISSING: ("not_found", "no such file"),
        }
        if code or len(data) > max_bytes:
            kind, why = kinds.get(code, ("refused", f"it cannot be read ({code})"))
            if not code:
                kind, why = "too_large", f"it is larger than {max_bytes} bytes"
            self._send_json(FAILED, kind=kind, path=path, why=why)
            return
        self._send(DATA, bytes(data))
        self._send_json(DONE)

    def _list(self) -> None:
        data = bytearray()

        def take(stream: int, piece: bytes) -> None:
            if stream == 1 and len(data) <= MOST_NAMES_BYTES:
                data.extend(piece)

        self._execute(["sh", "-c", _LIST], take)
        if len(data) > MOST_NAMES_BYTES:
            why = f"there is too much to list it: more than {MOST_NAMES_BYTES} bytes of names"
            self._send_json(FAILED, kind="too_large", path="/workspace", why=why)
            return
        self._send(DATA, b"\0".join(sorted(name.removeprefix(b"./") for name in data.split(b"\0") if name)))
        self._send_json(DONE)

    def _counters(self) -> tuple[int, int]:
        """Return how often the kernel killed a process for memory and refused to create one."""
        rows_text = bytearray()
        self._execute(["sh", "-c", _COUNT], lambda _, data: rows_text.extend(data[:4096]))
        rows = dict(
            line.split(None, 1) for line in bytes(rows_text).decode("ascii", "replace").splitlines() if " " in line
        )
        oom, pids = rows.get("oom_kill", "0"), _pids_refused(bytes(rows_text))
        return int(oom), pids

    def _execute(
        self,
        arguments: Sequence[str],
        on_piece: OnPiece,
        *,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
        workdir: str = "/",
    ) -> int:
        """Run a command in the container to its end and return its exit code."""
        api, is_fed = self.daemon.api, bool(stdin)
        created = api.exec_create(self.id, list(arguments), stdin=is_fed, environment=dict(env or {}), workdir=workdir)
        connection = api.exec_start(created["Id"], socket=True)
        source = getattr(connection, "_response", None)
        raw: Any = (
            source.raw._fp.fp if source is not None else connection
        )  # the buffered reader, which may already hold data read with the HTTP head
        plain = stream_of(connection)
        read = partial(plain.attempt, raw.read1) if isinstance(plain, Encrypted) else raw.read1
        try:
            if is_fed:
                threading.Thread(target=_feed, args=(plain, stdin), name="cloche-docker-stdin", daemon=True).start()
            streams = Demultiplexer()
            while data := read(CHUNK_BYTES):
                for stream, piece in streams.feed(data):
                    on_piece(stream, piece)
        finally:
            connection.close()
            plain.close()
        return self._exit_code(created["Id"])

    def _fed(self, stdin: bytes) -> str:
        return f"head -c {len(stdin)} | " if self.daemon.is_encrypted else ""

    def _exit_code(self, execution: str) -> int:
        """Return a command's exit code, which the daemon may know only after a moment."""
        deadline = time.monotonic() + 5
        while True:
            code = self.daemon.api.exec_inspect(execution)["ExitCode"]
            if code is not None:
                return int(code)
            if time.monotonic() > deadline:
                raise TimeoutError("docker does not report how a command in the container ended")
            time.sleep(0.01)


def _feed(connection: Any, data: bytes) -> None:  # noqa: ANN401 - a socket, or what the SDK takes for one
    try:
        connection.sendall(data)
        if not isinstance(connection, Encrypted):
            connection.shutdown(socket.SHUT_WR)
    except OSError:
        pass  # the program closed its input


def _pids_refused(text: bytes) -> int:
    """Return the count of the pids controller: the last row `max`, after the rows of memory."""
    counts = re.findall(rb"^max (\d+)$", text, re.MULTILINE)
    return int(counts[-1]) if counts else 0


def _moved(packed: bytes, order: Mapping[str, Any]) -> bytes:
    """Return an archive relative to /: the workspace's files, and the generated files of a compiler."""
    target = io.BytesIO()
    options: dict[str, Any] = {"format": tarfile.GNU_FORMAT, "encoding": "utf-8", "errors": "surrogateescape"}
    with (
        tarfile.open(fileobj=io.BytesIO(packed), **options) as input_archive,
        tarfile.open(fileobj=target, mode="w", **options) as out,
    ):
        for member in input_archive:
            source = input_archive.extractfile(member)
            member.name = f"workspace/{member.name}"
            out.addfile(member, source)
        if order.get("build"):
            folder = tarfile.TarInfo(order["build"].lstrip("/"))
            folder.type, folder.mode = tarfile.DIRTYPE, 0o755
            out.addfile(folder)
        for path, text in (order.get("generated") or {}).items():
            member = tarfile.TarInfo(path.lstrip("/"))
            member.size = len(text.encode())
            out.addfile(member, io.BytesIO(text.encode()))
    return target.getvalue()
