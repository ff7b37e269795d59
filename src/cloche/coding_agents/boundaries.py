"""Try from inside what a sandbox must refuse: sockets, the network, files, processes of the host, and the keys.

Theory of operation: `_Host` looks at this host: which sockets listen, which files and folders there are, by device and
inode, and which processes. One program (`inside/attempts.py`) then makes all attempts in one process of the sandbox,
and, where that is harmless, also outside, so that a refusal means something. An attempt counts by what was reached, not
by an error that was expected: a socket by the process behind it, a file by its inode, a listener by the token that it
sends. A row that could not be tried is no refusal.

No packet of an attempt can leave the sandbox's network namespace, which has no interface but loopback: they go to ports
that the egress process does not serve, so it does not even learn of them. Only those of `asks_egress` depend on that
process, which must refuse them before it connects. What a guest answers is bounded and checked, but it is the guest's
word: this finds a boundary that is missing, not a guest that lies about one.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any, Literal

from cloche.core.errors import ClocheError, StartFailed
from cloche.core.escape import escape
from cloche.core.record import dataclass
from cloche.keeper import registry

if TYPE_CHECKING:
    from cloche.execution.sandbox import AsyncSandbox

State = Literal["refused", "reached", "untried"]
Order = tuple[Any, ...]  # the row, the kind of attempt, and its arguments

CONTAINERS, BUS, KEYRING, AGENTS = "container daemons", "D-Bus", "keyrings, Secret Service", "ssh-agent, gpg-agent"
DISPLAY, SOCKETS, ABSTRACT = "X11, Wayland, sound", "other sockets", "abstract sockets"
LOOPBACK, METADATA, DNS, PRIVATE = "this host's loopback", "metadata address", "raw DNS", "private networks"
DIRECT, NAMES = "direct connections", "names without a rule"
CREDENTIALS, HOME, FILES = "credentials in the home", "other files of the home", "files of the system"
WRITING = "writing"
PROCESSES, TRACING, KERNEL, KEY = "processes of this host", "tracing, memory", "devices, kernel settings", "the keys"
ROWS = (
    CONTAINERS, BUS, KEYRING, AGENTS, DISPLAY, SOCKETS, ABSTRACT, LOOPBACK, METADATA, DNS, PRIVATE, DIRECT, NAMES,
    CREDENTIALS, HOME, FILES, WRITING, PROCESSES, TRACING, KERNEL, KEY,
)  # fmt: skip
MEANINGS: Mapping[str, str] = {
    CONTAINERS: "sockets of docker, podman, containerd and the like: root on this host",
    BUS: "session and system bus",
    KEYRING: "secrets of the desktop; the kernel's keys",
    AGENTS: "keys for ssh, git and signatures",
    DISPLAY: "screen, keyboard, microphone",
    SOCKETS: "every other listening socket of this host that has a path",
    ABSTRACT: "sockets without a path",
    LOOPBACK: "servers on 127.0.0.1 and ::1",
    METADATA: "a cloud's credentials for this machine",
    DNS: "a name server that is asked directly: data leaves in names",
    PRIVATE: "addresses of the local network",
    DIRECT: "an address of the internet, past the rules",
    NAMES: "a name that no rule allows",
    CREDENTIALS: "keys and tokens of your own programs",
    HOME: "everything else at the top of your home",
    FILES: "other homes, passwords, host keys",
    WRITING: "folders of this host, also those that are shown",
    PROCESSES: "seen in /proc, or signalled",
    TRACING: "ptrace, memory of another process",
    KERNEL: "disks, memory, settings, raw packets",
    KEY: "in environments, command lines, files of credentials",
}
_CREDENTIALS = (
    ".ssh", ".aws", ".azure", ".config/gcloud", ".gnupg", ".kube", ".docker/config.json", ".netrc", ".git-credentials",
    ".config/gh", ".npmrc", ".pypirc", ".cargo/credentials.toml", ".claude/.credentials.json", ".codex/auth.json",
    ".gemini/oauth_creds.json", ".qwen/oauth_creds.json", ".local/share/opencode/auth.json", ".local/share/keyrings",
    ".mozilla", ".config/google-chrome", ".config/chromium", ".password-store", ".bash_history", ".zsh_history",
)  # fmt: skip
_FILES = (
    "/root", "/home", "/etc/shadow", "/etc/sudoers", "/etc/ssh", "/etc/kubernetes", "/var/lib", "/var/log", "/boot",
    "/mnt", "/media", "/var/run/secrets", "/run/secrets",
)  # fmt: skip
_FOLDERS = (
    "/", "/etc", "/usr", "/usr/bin", "/usr/local", "/usr/lib", "/opt", "/var", "/var/tmp", "/tmp", "/run", "/dev",
    "/dev/shm", "/boot", "/home", "/srv", "/root", "/sys/fs/cgroup",
)  # fmt: skip
_KERNEL_FILES = (
    ("/dev/mem", os.O_RDONLY), ("/dev/kmsg", os.O_RDONLY), ("/proc/kcore", os.O_RDONLY), ("/proc/kmsg", os.O_RDONLY),
    ("/proc/sysrq-trigger", os.O_WRONLY), ("/proc/sys/kernel/core_pattern", os.O_WRONLY),
    ("/proc/sys/vm/panic_on_oom", os.O_WRONLY), ("/sys/fs/cgroup/cgroup.procs", os.O_WRONLY),
    ("/sys/kernel/uevent_helper", os.O_WRONLY), ("/dev/kvm", os.O_RDWR), ("/dev/fuse", os.O_RDWR),
    ("/dev/net/tun", os.O_RDWR),
)  # fmt: skip
# Whose socket it is, by a word of its path; the first that fits.
_SOCKETS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (CONTAINERS, ("docker", "podman", "containerd", "crio", "buildkit", "lxd", "incus", "libvirt", "k3s", "/fleet/")),
    (KEYRING, ("keyring", "kwallet", "pcscd")),
    (AGENTS, ("ssh-", "/agent.", "s.gpg-agent", "ssh-agent", "1password", "/gcr/")),
    (DISPLAY, (".x11-unix", "wayland", "pipewire", "pulse", "/tmp/.ice-unix")),
    (BUS, ("dbus", "/bus", "at-spi")),
)
# Where they usually are, tried whether or not anything listens there now.
_USUAL_SOCKETS = (
    "/var/run/docker.sock", "/run/docker.sock", "{runtime}/docker.sock", "/run/podman/podman.sock",
    "{runtime}/podman/podman.sock", "/run/containerd/containerd.sock", "/run/crio/crio.sock",
    "/run/buildkit/buildkitd.sock", "/var/lib/incus/unix.socket", "/var/snap/lxd/common/lxd/unix.socket",
    "/run/libvirt/libvirt-sock", "{runtime}/bus", "/run/dbus/system_bus_socket", "/var/run/dbus/system_bus_socket",
    "{runtime}/keyring/control", "{runtime}/keyring/ssh", "{runtime}/gnupg/S.gpg-agent", "{home}/.gnupg/S.gpg-agent",
    "/tmp/.X11-unix/X0", "\0/tmp/.X11-unix/X0", "{runtime}/wayland-0", "{runtime}/pipewire-0", "{runtime}/pulse/native",
    "/run/systemd/private", "{runtime}/systemd/private",
)  # fmt: skip
_SOCKET_VARIABLES = (
    "SSH_AUTH_SOCK", "DOCKER_HOST", "DBUS_SESSION_BUS_ADDRESS", "WAYLAND_DISPLAY", "TMUX", "VSCODE_IPC_HOOK_CLI",
    "VSCODE_GIT_IPC_HANDLE", "WSL_INTEROP", "GPG_AGENT_INFO", "NVIM", "KITTY_LISTEN_ON",
)  # fmt: skip
_ACCEPTS = 0x10000  # __SO_ACCEPTCON, among the flags of /proc/net/unix
MOST_SOCKETS, MOST_HOME, MOST_TABLE_BYTES = 300, 200, 1 << 20
MOST_LINES_BYTES, MOST_HOW_CHARS, MOST_TOLD = 2 << 20, 120, 4
TIMEOUT_S = 20.0
LEAST_CHARS = 8  # of a value that is looked for: a shorter one may stand anywhere
INTERPRETER = os.path.realpath(sys.executable)  # which a sandbox shows, read-only
# Addresses for documents (RFC 5737, RFC 3849), a private one, and those of metadata services.
_DOCUMENT, _PRIVATE = ("203.0.113.1", "2001:db8::1"), ("10.255.255.254", "fd00::1")
_METADATA, _METADATA6 = ("169.254.169.254", "100.100.100.200"), "fd00:ec2::254"
_HARMLESS = frozenset({"unix", "same", "process", "signal", "trace", "socket"})  # also tried outside, and `tcp` to us


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Say what came of the attempts at one boundary.

    `state` is `refused` only if every one of the `count` attempts was; `how` tells by which errors, or what was
    reached, or why it could not be tried. `outside` has how many of them succeed on this host itself, of how many.
    """

    name: str
    state: State
    how: str
    count: int
    outside: tuple[int, int] | None = None

    @property
    def meaning(self) -> str:
        """Return what lies behind the boundary."""
        return MEANINGS[self.name]


@dataclass(frozen=True, slots=True, kw_only=True)
class Boundaries:
    """Hold all rows, and the seconds that the attempts inside took."""

    rows: tuple[Row, ...]
    seconds: float

    @property
    def is_held(self) -> bool:
        """Tell whether everything was tried and refused."""
        return all(row.state == "refused" for row in self.rows)

    @property
    def failed(self) -> tuple[Row, ...]:
        """Return the rows that were not refused."""
        return tuple(row for row in self.rows if row.state != "refused")


async def try_boundaries(
    sandbox: AsyncSandbox,
    *,
    home: str,
    values: Mapping[str, str] | None = None,
    files: Sequence[str] = (),
    outside: bool = False,
    asks_egress: bool = False,
) -> Boundaries:
    """Make all attempts in an open sandbox; `home` is the user's home folder on this host.

    `values` are the values of secrets by name: they are looked for in what the guest answers, and not sent; `files` are
    those of its home in which they are looked for, too. `outside` makes the harmless attempts on this host as well.
    `asks_egress` also tries addresses, and a name without a rule, at the ports that the
    egress process serves. Raises ClocheError if no program runs.
    """
    async with contextlib.AsyncExitStack() as stack:
        host = _Host(home, _paths_shown(sandbox))
        rules = sandbox.policy.network_rules()
        orders = [*host.orders(), *_network(rules.served_ports, asks_egress=asks_egress), *_kernel()]
        orders += await stack.enter_async_context(_listening())
        orders += _processes(await stack.enter_async_context(_target()) if outside else os.getpid())
        lines, seconds = await _inside(sandbox, [*orders, (KEY, "texts", *files)])
        without = await _outside(orders) if outside else {}
    rows = _judged(orders, lines, without, host.written())
    return Boundaries(rows=(*rows, _keys(lines[len(orders)], values or {})), seconds=seconds)


async def require_boundaries(
    sandbox: AsyncSandbox, *, home: str, values: Mapping[str, str] | None = None
) -> Boundaries:
    """Make the quick attempts of a start, of which the egress process does not learn. Raises StartFailed for one that
    succeeds; one that could not be tried is in the answer.
    """
    tried = await try_boundaries(sandbox, home=home, values=values)
    if reached := [row for row in tried.rows if row.state == "reached"]:
        told = "; ".join(f"{row.name}: {row.how}" for row in reached)
        raise StartFailed(
            f"an attempt from inside the sandbox succeeded that must not ({told}). cloche agent doctor shows all",
            step="boundaries",
        )
    return tried


def _judged(
    orders: Sequence[Order], lines: Sequence[tuple[str, str]], without: Mapping[int, str], written: Sequence[str]
) -> list[Row]:
    """Sum the attempts up by row. Pure."""
    rows = []
    for name in ROWS:
        numbers = [number for number, order in enumerate(orders) if order[0] == name]
        if not numbers:
            continue
        tried = [without[number] for number in numbers if number in without]
        state, how = _sum_up([(orders[number], *lines[number]) for number in numbers])
        if name == WRITING and written:
            state, how = "reached", ", ".join(written)
        outside = (tried.count("reached"), len(tried)) if tried else None
        rows.append(Row(name=name, state=state, how=how, count=len(numbers), outside=outside))
    return rows


def _sum_up(came: Sequence[tuple[Order, str, str]]) -> tuple[State, str]:
    states: tuple[State, ...] = ("reached", "untried")
    for state in states:
        if some := [f"{_target_of(order)}: {how}" for order, its, how in came if its == state]:
            more = f", and {len(some) - MOST_TOLD} more" if len(some) > MOST_TOLD else ""
            return state, ", ".join(some[:MOST_TOLD]) + more
    counts = Counter(how for _, _, how in came)
    return "refused", ", ".join(how if len(counts) == 1 else f"{how} ({n})" for how, n in counts.most_common(MOST_TOLD))


def _target_of(order: Order) -> str:
    words = [str(word).replace("\0", "@") for word in order[2:4] if order[1] in ("tcp", "http") or word is order[2]]
    return escape(":".join(words)) or order[1]


def _keys(answer: tuple[str, str], values: Mapping[str, str]) -> Row:
    """Look for the values of secrets in the environments and command lines inside."""
    try:
        held = bytes.fromhex(answer[1]) if answer[0] == "text" else b""
    except ValueError:
        held = b""
    names = [name for name, value in values.items() if len(value) >= LEAST_CHARS and value.encode() in held]
    state: State = "reached" if names else "refused" if held else "untried"
    how = ", ".join(names) or (f"not in {len(held)} bytes of them" if held else "nothing could be read")
    how = how if values or names or not held else "no secret is given"
    outside = (len(values), len(values)) if values else None
    return Row(name=KEY, state=state, how=how, count=max(len(values), 1), outside=outside)


# Running the program.


@cache
def _program() -> str:
    return resources.files("cloche.coding_agents.inside").joinpath("attempts.py").read_text("utf-8")


def _text(orders: Sequence[Order], *, is_inside: bool) -> str:
    told = [list(order[1:]) for order in orders]
    return f"{_program()}\nIS_INSIDE = {is_inside}\nmain({told!r})\n"


async def _inside(sandbox: AsyncSandbox, orders: Sequence[Order]) -> tuple[list[tuple[str, str]], float]:
    """Return state and how of each order, and the seconds."""
    command = [INTERPRETER, "-I", "-S", "-"]
    started = time.perf_counter()
    result = await sandbox.exec(command, stdin=_text(orders, is_inside=True), cwd="/", timeout=TIMEOUT_S)
    seconds = time.perf_counter() - started
    lines = _read(result.stdout, len(orders))
    if not lines:
        raise ClocheError(f"the attempts could not be made inside: {result.status}: {escape(result.stderr[-200:])}")
    return lines, seconds


def _read(text: str, count: int) -> list[tuple[str, str]]:
    """Return the lines of the guest's answer; empty if it is none. Texts are cut, but that of the last."""
    lines = text[:MOST_LINES_BYTES].split("\n")[:count]
    if len(lines) != count:
        return []
    rows = []
    for number, line in enumerate(lines):
        state, _, how = line.partition("\t")
        is_known = state in ("refused", "reached", "untried", "text")
        rows.append((state if is_known else "untried", how if number == count - 1 else escape(how[:MOST_HOW_CHARS])))
    return rows


async def _outside(orders: Sequence[Order]) -> dict[int, str]:
    """Make the harmless ones on this host; return their states by number."""
    numbers = [number for number, order in enumerate(orders) if _is_harmless(order)]
    text = _text([orders[number] for number in numbers], is_inside=False)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-I", "-S", "-", stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    stdout, _ = await process.communicate(text.encode())
    lines = _read(stdout.decode("utf-8", "replace"), len(numbers))
    return {number: state for number, (state, _) in zip(numbers, lines, strict=True)} if lines else {}


def _is_harmless(order: Order) -> bool:
    return order[1] in _HARMLESS or (order[1] == "tcp" and len(order) > 4)


@asynccontextmanager
async def _listening() -> AsyncIterator[list[Order]]:
    """Listen on this host's loopback, at a path and at an abstract name; yield the orders to reach these."""
    token = secrets.token_hex(16)

    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(token.encode())
        writer.close()

    orders: list[Order] = []
    async with contextlib.AsyncExitStack() as stack:
        for address in ("127.0.0.1", "::1"):
            with contextlib.suppress(OSError):  # this host has no IPv6
                server = await asyncio.start_server(answer, address, 0)
                await stack.enter_async_context(server)
                orders.append((LOOPBACK, "tcp", address, server.sockets[0].getsockname()[1], token))
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="cloche-doctor-"))
        for row, name in ((SOCKETS, f"{folder}/socket"), (ABSTRACT, f"\0cloche-doctor-{token}")):
            listener = stack.enter_context(socket.socket(socket.AF_UNIX))
            listener.bind(name)
            listener.listen(8)
            orders.append((row, "unix", name))
        yield orders


@asynccontextmanager
async def _target() -> AsyncIterator[int]:
    """Have a process on this host that may be traced, and yield its number."""
    process = await asyncio.create_subprocess_exec("sleep", str(int(TIMEOUT_S * 3)))
    try:
        yield process.pid
    finally:
        process.kill()
        await process.wait()


# The orders.


class _Host:
    """Say what this host has that a sandbox must not reach: sockets, files, folders."""

    def __init__(self, home: str, shown: Iterable[str]) -> None:
        self.home, self.shown = home, frozenset(map(os.path.realpath, shown))
        self.token = f".cloche-doctor-{secrets.token_hex(8)}"
        self.folders = self._folders()

    def orders(self) -> list[Order]:
        """Return what to try of them."""
        return [*self._sockets(), *self._files(), *self._writes()]

    def written(self) -> list[str]:
        """Return the folders of this host in which an attempt has left its file."""
        return [path for path in self.folders if os.path.lexists(f"{path}/{self.token}")]

    def _sockets(self) -> Iterator[Order]:
        runtime = os.environ.get("XDG_RUNTIME_DIR") or f"/run/user/{os.geteuid()}"
        usual = [name.format(runtime=runtime, home=self.home) for name in _USUAL_SOCKETS]
        kept = [f"{place}/{found.name}.sock" for place in registry.places() for found in registry.found()]
        for name in list(dict.fromkeys([*_variables(), *usual, *kept, *_listening_here()]))[:MOST_SOCKETS]:
            identity = _identity(name) if name.startswith("/") else None
            yield _row_of(name), "unix", name, *(identity or (0, 0))
        yield KEYRING, "kernel", "keyctl", 0, -4, 0  # KEYCTL_GET_KEYRING_ID of the user's

    def _files(self) -> Iterator[Order]:
        credentials = [f"{self.home}/{name}" for name in _CREDENTIALS]
        with contextlib.suppress(OSError):
            top = sorted(os.listdir(self.home))[:MOST_HOME]
            yield from self._same(HOME, (path for name in top if (path := f"{self.home}/{name}") not in credentials))
        yield from self._same(CREDENTIALS, credentials, is_listed=True)
        yield from self._same(FILES, [path for path in _FILES if path != self.home])

    def _same(self, row: str, paths: Iterable[str], *, is_listed: bool = False) -> Iterator[Order]:
        """Yield the attempt at each path that is here; one that is not is tried with an identity that nothing has."""
        for path in paths:
            identity = _identity(path, follows=False)
            if (identity or is_listed) and os.path.realpath(path) not in self.shown:
                yield row, "same", path, *(identity or (0, 0))

    def _folders(self) -> Mapping[str, tuple[int, int]]:
        paths = (*_FOLDERS, self.home, os.path.dirname(self.home), *self.shown, *map(os.path.dirname, self.shown))
        found = {path: _identity(path) for path in dict.fromkeys(paths) if os.path.isdir(path)}
        return {path: identity for path, identity in found.items() if identity is not None}

    def _writes(self) -> Iterator[Order]:
        for path, identity in self.folders.items():
            yield WRITING, "write", path, *identity, self.token


def _identity(path: str, *, follows: bool = True) -> tuple[int, int] | None:
    try:
        state = os.stat(path, follow_symlinks=follows)
    except OSError:
        return None
    return state.st_dev, state.st_ino


def _variables() -> Iterator[str]:
    """Yield the sockets that variables of this shell name."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    for name in _SOCKET_VARIABLES:
        for word in os.environ.get(name, "").split(";"):
            address = word.partition(",")[0].removeprefix("unix:").removeprefix("path=").removeprefix("//")
            if address.startswith("abstract="):
                yield f"\0{address.removeprefix('abstract=')}"
            elif address and not os.path.isabs(address) and runtime and name == "WAYLAND_DISPLAY":
                yield f"{runtime}/{address}"
            elif os.path.isabs(address):
                yield address


def _listening_here() -> Iterator[str]:
    """Yield the sockets of AF_UNIX that take connections on this host, by path or abstract name."""
    try:
        with open("/proc/net/unix", "rb") as file:
            lines = file.read(MOST_TABLE_BYTES).decode("utf-8", "surrogateescape").split("\n")
    except OSError:
        return
    for line in lines[1:]:
        columns = line.split(None, 7)
        if len(columns) == 8 and int(columns[3], 16) & _ACCEPTS and columns[7][0] in "/@":
            name = columns[7].replace("@", "\0", 1) if columns[7][0] == "@" else columns[7]
            if not name.startswith("/proc/"):
                yield name


def _row_of(name: str) -> str:
    small = name.lower()
    for row, words in _SOCKETS:
        if any(word in small for word in words):
            return row
    return ABSTRACT if name.startswith("\0") else SOCKETS


def _network(served: Sequence[int], *, asks_egress: bool) -> Iterator[Order]:
    """Yield attempts at ports that the sandbox does not serve, so that its own kernel answers."""
    unserved = next(port for port in range(9, 65536) if port not in served)
    for row, addresses in ((METADATA, (*_METADATA, _METADATA6)), (PRIVATE, _PRIVATE), (DIRECT, _DOCUMENT)):
        for address in addresses:
            yield row, "tcp", address, unserved
    for address in dict.fromkeys([*_name_servers(), *_DOCUMENT]):
        yield DNS, "dns", address
        yield DNS, "tcp", address, 53  # which no rule of a sandbox can have
    if asks_egress:
        yield LOOPBACK, "http", "127.0.0.2", 80  # a port of the host may be given at 127.0.0.1
        for row, addresses in ((METADATA, _METADATA), (PRIVATE, _PRIVATE), (DIRECT, _DOCUMENT)):
            yield row, "http", addresses[0], 80
        yield NAMES, "lookup", f"{secrets.token_hex(8)}.invalid"


def _name_servers() -> list[str]:
    """Return the name servers of this host that are not on its loopback."""
    with contextlib.suppress(OSError), open("/etc/resolv.conf") as file:
        words = [line.split() for line in file.read(MOST_TABLE_BYTES).splitlines()]
        named = [line[1].partition("%")[0] for line in words if len(line) > 1 and line[0] == "nameserver"]
        return [address for address in named[:3] if not address.startswith(("127.", "::1"))]
    return []


def _kernel() -> Iterator[Order]:
    for path, flags in _KERNEL_FILES:
        yield KERNEL, "open", path, flags
    yield KERNEL, "kernel", "io_uring_setup", 1, 0
    for words in ((2, 3, 1), (17, 3, 0), (40, 1, 0)):  # raw IP, raw packets, AF_VSOCK
        yield KERNEL, "socket", *words
    with contextlib.suppress(OSError), open("/proc/partitions") as file:
        for line in file.read(MOST_TABLE_BYTES).splitlines()[2:6]:
            yield KERNEL, "open", f"/dev/{line.split()[-1]}", os.O_RDONLY


def _processes(pid: int) -> Iterator[Order]:
    for number in (1, pid):
        yield PROCESSES, "process", number, _started(number)
    yield PROCESSES, "signal", pid, _started(pid)
    yield TRACING, "trace", pid, _started(pid)


def _started(pid: int) -> str:
    with contextlib.suppress(OSError, IndexError), open(f"/proc/{pid}/stat", "rb") as file:
        return file.read(MOST_TABLE_BYTES).rpartition(b")")[2].split()[19].decode()
    return "0"


def _paths_shown(sandbox: AsyncSandbox) -> list[str]:
    """Return the folders of this host that a sandbox is shown by intent."""
    policy = sandbox.policy
    folder = policy.host_folder
    project = [] if folder is None else [folder.path, *(further.path for further in folder.read_only)]
    return [*policy.toolchains, *policy.layers, *project, sys.prefix, sys.base_prefix]
