"""Frames between a container's first process and its caller, and the kernel's counters for the container.

A frame is a tag, a length of four bytes, and a body. `Counters` reads the container's control groups from inside.
"""

from __future__ import annotations

import json
import os
import select

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

ORDER, DATA, KILL = b"O", b"D", b"K"  # received
READY, STARTED, OUT, ERR, VALUE, ENDED, DONE, FAILED = b"H", b"s", b"o", b"e", b"v", b"r", b"k", b"x"  # sent
CHUNK = 65_536

# Counters.
MUCH_BYTES = 64 << 20
PRIVATE, PRIVATE_PARTS = "RssAnon:", "Pss_Anon:"  # rows of /proc/PID/status and /proc/PID/smaps_rollup
WORKSPACE, TMP, SHM = "/workspace", "/tmp", "/dev/shm"
# Files of version 1 and of version 2.
PLACES = {
    "stat": ("memory/memory.stat", "memory.stat"),
    "oom": ("memory/memory.oom_control", "memory.events"),
    "pids": ("pids/pids.events", "pids.events"),
    "peak": ("memory/memory.max_usage_in_bytes", "memory.peak"),
}
# If the real id differs from the effective one, there is no private pid namespace: foreign processes run here.
SHARES_SANDBOX = len(set(os.getresuid())) > 1
ROUTES = {"ipv4": "/proc/net/snmp", "ipv6": "/proc/net/snmp6"}  # counters of the network namespace


class FrameWriter:
    """Send frames to the caller that started the container."""

    def send(self, tag: bytes, body: bytes = b"") -> None:
        """Send one frame; blocks until it is written."""
        write_all(1, tag + len(body).to_bytes(4, "big") + body)

    def send_json(self, tag: bytes, **body: Any) -> None:
        self.send(tag, json.dumps(body).encode())


class CallerLink(FrameWriter):
    """Exchange frames with the caller that started the container."""

    def __init__(self) -> None:
        self.buffer = bytearray()
        self.later: list[tuple[bytes, bytes]] = []
        self.is_gone = False

    def receive(self) -> tuple[bytes, bytes]:
        """Wait for one frame. At the end of input this process exits, and with it the container."""
        while True:
            frame = self.next()
            if frame is not None:
                return frame
            self.read()
            if self.is_gone:
                os._exit(0)

    def has_input(self) -> bool:
        """Return whether input is available."""
        return bool(self.buffer or self.later) or has_come(0)

    def read(self) -> None:
        data = os.read(0, CHUNK)
        self.buffer += data
        self.is_gone = not data

    def receive_piece(self) -> bytes:
        """Wait for a DATA frame and return its body. Other frames are postponed."""
        postponed, self.later = self.later, []
        while True:
            tag, body = self.receive()
            if tag == DATA:
                self.later = postponed
                return body
            postponed.append((tag, body))

    def next(self) -> tuple[bytes, bytes] | None:
        """Return a frame that has already been received, else None."""
        if self.later:
            return self.later.pop(0)
        if len(self.buffer) < 5:
            return None
        end = 5 + int.from_bytes(self.buffer[1:5], "big")
        if len(self.buffer) < end:
            return None
        frame = bytes(self.buffer[:1]), bytes(self.buffer[5:end])
        del self.buffer[:end]
        return frame


def write_all(fd: int, data: bytes) -> None:
    """Write all of `data`; blocks until it is written."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def has_come(fd: int) -> bool:
    """Return whether `fd` is readable. Uses poll, because some gVisor versions refuse select."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(0))


class IncomingData:
    """File-like reader of the DATA frames after an order; an empty frame ends them."""

    def __init__(self, caller: CallerLink):
        self.caller, self.rest, self.is_over = caller, b"", False

    def read(self, size: int) -> bytes:
        while not self.is_over and len(self.rest) < size:
            piece = self.caller.receive_piece()
            self.rest += piece
            self.is_over = not piece
        data, self.rest = self.rest[:size], self.rest[size:]
        return data

    def drain(self) -> None:
        """Discard the remaining data."""
        self.rest = b""
        while not self.is_over:
            self.read(1)
            self.rest = b""


class OutgoingData:
    """File-like writer that sends DATA frames."""

    def __init__(self, caller: FrameWriter):
        self.caller = caller

    def write(self, data: bytes) -> int:
        for offset in range(0, len(data), CHUNK):
            self.caller.send(DATA, data[offset : offset + CHUNK])
        return len(data)


class Counters:
    """Read the container's control groups, of version 1 or 2, if they are visible."""

    def __init__(self) -> None:
        self.fds: dict[str, int] = {}
        for name, paths in PLACES.items():
            for path in paths:
                try:
                    self.fds[name] = os.open(f"/sys/fs/cgroup/{path}", os.O_RDONLY | os.O_CLOEXEC)
                    break
                except OSError:
                    continue
        for name, path in ROUTES.items():
            try:
                self.fds[name] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError:
                continue
        # gVisor shows no private memory per process; there its kernel's totals are read.
        self.sums_memory = "stat" not in self.fds and memory_of("self", "status", PRIVATE) > 0

    @property
    def counts_processes(self) -> bool:
        return "pids" in self.fds

    def read(self, name: str) -> str:
        try:
            return os.pread(self.fds[name], CHUNK, 0).decode("ascii", "replace")
        except (KeyError, OSError):
            return ""

    def row(self, name: str, *keys: str) -> int:
        """Return the value of the first of `keys` in a file of rows, else 0."""
        rows = dict(line.split(None, 1) for line in self.read(name).splitlines() if " " in line)
        return next((int(rows[key]) for key in keys if key in rows), 0)

    def hits(self) -> tuple[int, int]:
        return self.row("oom", "oom_kill"), self.row("pids", "max")

    def unreachable(self) -> int:
        """Return how often a packet had no route since the container started."""
        rows = [row.split() for row in self.read("ipv4").splitlines() if row.startswith("Ip:")]
        table = dict(zip(*rows, strict=False)) if len(rows) == len(("names", "figures")) else {}
        return int(table.get("OutNoRoutes", 0)) + self.row("ipv6", "Ip6OutNoRoutes")

    @property
    def sees_memory(self) -> bool:
        return SHARES_SANDBOX or self.sums_memory or "stat" in self.fds

    def held(self) -> tuple[int, int]:
        """Return the bytes of private memory, and of shared memory including tmpfs files.

        Without control groups, only the processes' private memory is counted.
        """
        if SHARES_SANDBOX:
            return sum(programs().values()), 0
        if self.sums_memory:
            return summed_memory(), 0
        text = self.read("stat")
        rows = dict(line.split(None, 1) for line in text.splitlines() if " " in line)
        return (
            int(rows.get("total_rss", rows.get("anon", 0))),
            int(rows.get("total_shmem", rows.get("shmem", 0))),
        )


def summed_memory() -> int:
    """Return the private memory of all other processes of this namespace; shared pages count proportionally."""
    own = str(os.getpid())
    sums = [(pid, memory_of(pid, "status", PRIVATE)) for pid in os.listdir("/proc") if pid.isdigit() and pid != own]
    sums = [(pid, held) for pid, held in sums if held]
    total = sum(held for _, held in sums)
    if len(sums) > 1 and total > MUCH_BYTES:  # reading smaps_rollup takes the kernel time proportional to the memory
        total = sum(memory_of(pid, "smaps_rollup", PRIVATE_PARTS) or held for pid, held in sums)
    return total


def memory_of(pid: str, name: str, row: str) -> int:
    """Return the bytes in a row of a process's file in /proc; 0 if it cannot be read."""
    try:
        with open(f"/proc/{pid}/{name}", encoding="ascii", errors="replace") as file:
            line_of_row = next((line for line in file if line.startswith(row)), "")
        return int(line_of_row.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        return 0


def programs() -> dict[int, int]:
    """Return the private memory, by pid, of all processes whose real id is this process's effective id."""
    mine, memory_by_pid = str(os.geteuid()).encode(), {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/status", "rb", buffering=0) as file:
                rows = dict(line.split(b":", 1) for line in file.read(CHUNK).splitlines() if b":" in line)
            if rows[b"Uid"].split()[0] == mine:
                memory_by_pid[int(name)] = int(rows.get(b"RssAnon", rows.get(b"VmRSS", b"0")).split()[0]) * 1024
        except (OSError, ValueError, KeyError, IndexError):
            continue
    return memory_by_pid


def stored(folders: Iterable[str] = (WORKSPACE, TMP, SHM)) -> int:
    """Return the bytes stored in the container's own file systems."""
    total = 0
    for folder in folders:
        try:
            state = os.statvfs(folder)
        except OSError:
            continue
        if os.access(folder, os.W_OK):
            total += (state.f_blocks - state.f_bfree) * state.f_frsize
    return total


def is_full() -> bool:
    """Return whether the workspace has no free block or inode."""
    state = os.statvfs(WORKSPACE)
    return state.f_bfree == 0 or state.f_ffree == 0
