"""Everything planted on the host before an attempt is made: canaries, and where to find them."""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from cloche.backends.local.backend import LocalBackend
from cloche.core.enforcement import Level
from tests.harness.escape.attempts import CONFINED, JAIL
from tests.harness.escape.runners import level_keywords

HERE = Path(__file__).parent
HOLD_SECONDS = 7200  # longer than all tests may take
LINGER_S = 90.0  # by whoever keeps the host waiting in a sandbox: longer than anybody's patience
ADD_KEY, KEYCTL, KEYCTL_INVALIDATE = 248, 250, 21
UNTOUCHED = "untouched\n"
# Folders in which a jail shows nothing, but for the way to the interpreter where that is in one of them.
HOSTS_ALONE = ("/var/log", "/var/lib/dpkg", "/boot", "/srv", "/opt")
# Files that everybody sees, to be locked; of those but the last one that no other session of tests has locked.
LOCKED = ("cmd", "codeop", "colorsys", "calendar", "csv", "code")
LOCKED_INSIDE = ("abc", "base64", "bisect", "contextlib", "dis", "ast")


def new_secret() -> str:
    """Return a secret that nobody can guess and that `saw` recognises."""
    return f"canary-{secrets.token_hex(16)}"


class Canaries:
    """Hold the planted canaries: `secrets` by name for the judge, `targets` (no secrets) for the attempts."""

    def __init__(self) -> None:
        self.secrets: dict[str, str] = {}
        self.targets: dict[str, Any] = {"lingers_s": LINGER_S}
        self._cleanup = ExitStack()
        self._host: subprocess.Popen[str] | None = None
        self.victim = Path()

    def plant(self) -> None:
        """Plant everything that needs no sandbox."""
        self._plant_files()
        self._plant_inheritance()
        self._plant_keys()
        self._describe_host()
        self._host, self.targets["host"] = self._start_holder([sys.executable, "-u", str(HERE / "holder.py")])

    def close(self) -> None:
        """Remove everything."""
        self._cleanup.close()

    def secret(self, name: str) -> str:
        """Return a new secret that the judge will look for under `name`."""
        self.secrets[name] = new_secret()
        return self.secrets[name]

    def folder(self, parent: str | Path, *, mode: int = 0o755) -> Path:
        """Return a new directory that is removed with the canaries."""
        path = Path(tempfile.mkdtemp(prefix="escape-", dir=parent))
        path.chmod(mode)
        self._cleanup.callback(shutil.rmtree, path, ignore_errors=True)
        return path

    def harm(self) -> list[str]:
        """Say which canaries on the host were hurt, and set up again those that can be."""
        found = []
        if self.victim.is_file() and self.victim.read_text(errors="replace") != UNTOUCHED:
            found.append(f"{self.victim} was changed")
            self.victim.write_text(UNTOUCHED)
        if self._host is not None and self._host.poll() is not None:
            found.append("the host's process was killed")
        return found

    def neighbour(self) -> dict[str, Any]:
        """Return where the canaries of a live sandbox are; the first call starts it."""
        if "neighbour" not in self.targets:
            command = [sys.executable, "-u", str(HERE / "driver.py")]
            self.targets["neighbour"] = {}
            self.targets["neighbour"] = self._start_holder(command, is_sandboxed=True)[1]
        assert self.targets["neighbour"], "the neighbour did not start; the first test says why"
        return dict(self.targets["neighbour"])

    def _plant_files(self) -> None:
        home, public = self.folder(Path.home(), mode=0o700), self.folder("/tmp")
        self._write(home / self.secret("the name of a file at home"), self.secret("a file at home"), mode=0o600)
        self._write(public / "public", self.secret("a file in /tmp"), mode=0o644)
        self.victim = public / "victim"
        self._write(self.victim, UNTOUCHED, mode=0o666)
        self.targets |= {
            "home": str(home),
            "public": str(public / "public"),
            "victim": str(self.victim),
            "folder": str(public),
        }
        self.targets["handle"] = _file_handle(public / "public")

    @staticmethod
    def _write(path: Path, text: str, *, mode: int) -> None:
        path.write_text(text)
        path.chmod(mode)

    def _plant_inheritance(self) -> None:
        """Put a canary into everything that a careless caller hands on: environment, descriptors, standard input."""
        os.environ["ESCAPE_CANARY"] = self.secret("the caller's environment")
        self._cleanup.callback(os.environ.pop, "ESCAPE_CANARY", None)
        self.targets["descriptor"] = os.open(self._secret_file("a descriptor of the caller"), os.O_RDONLY)
        self._inherit(self.targets["descriptor"])
        self._inherit(os.open("/", os.O_RDONLY | os.O_DIRECTORY))
        ours, theirs = socket.socketpair()
        ours.sendall(self.secret("a socket of the caller").encode() * 64)
        self._cleanup.callback(ours.close)
        self._inherit(theirs.detach())
        saved, planted = os.dup(0), os.open(self._secret_file("the caller's standard input"), os.O_RDONLY)
        os.dup2(planted, 0)
        os.close(planted)
        self._cleanup.callback(os.close, saved)
        self._cleanup.callback(os.dup2, saved, 0)

    def _plant_keys(self) -> None:
        """Put one key into the session's keyring and one into the user's."""
        self.targets["key"] = name = f"escape-{secrets.token_hex(8)}"
        for keyring, suffix, what in ((-3, "", "a key of the session"), (-4, "-user", "a key of the user")):
            secret = self.secret(what).encode()
            key = _syscall(ADD_KEY, b"user", f"{name}{suffix}".encode(), secret, len(secret), keyring)
            self._cleanup.callback(_syscall, KEYCTL, KEYCTL_INVALIDATE, key)

    def _secret_file(self, name: str) -> Path:
        path = Path(self.targets["home"]) / secrets.token_hex(4)
        self._write(path, self.secret(name), mode=0o600)
        return path

    def _inherit(self, descriptor: int) -> None:
        os.set_inheritable(descriptor, True)
        self._cleanup.callback(os.close, descriptor)

    def _describe_host(self) -> None:
        root = os.stat("/").st_dev
        machine_id = Path("/etc/machine-id")
        self.targets |= {
            "hostname": socket.gethostname(),
            "machine_id": machine_id.read_text().strip() if machine_id.exists() else "",
            "passwd": hashlib.sha256(Path("/etc/passwd").read_bytes()).hexdigest(),
            "disk": [os.major(root), os.minor(root)],
            "site": sysconfig.get_path("purelib"),
            "mounts": [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()],
            "unseen": {name: _beside_the_interpreter(name) for name in HOSTS_ALONE if os.path.isdir(name)},
            "namespaces": {name: os.readlink(f"/proc/self/ns/{name}") for name in os.listdir("/proc/self/ns")},
        }

    def _start_holder(
        self, command: list[str], *, is_sandboxed: bool = False
    ) -> tuple[subprocess.Popen[str], dict[str, Any]]:
        """Start a holder and wait until it tells what it holds."""
        name = "the neighbour" if is_sandboxed else "the host's process"
        wanted = json.dumps(self._wanted(name, is_sandboxed=is_sandboxed))
        if is_sandboxed:
            code = (HERE / "holder.py").read_text()
            run = {
                "code": code,
                "argv": [wanted],
                "timeout": HOLD_SECONDS,
                "stream": True,
                **level_keywords(_best_level()),
            }
            wanted = json.dumps(run)
        holder = subprocess.Popen([*command, wanted], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._cleanup.callback(_end, holder)
        assert holder.stdout is not None
        line = holder.stdout.readline()
        assert line.startswith("{"), f"{name} did not start: {line!r}"
        return holder, json.loads(line)

    def _wanted(self, name: str, *, is_sandboxed: bool) -> dict[str, object]:
        mark = f"escape-{secrets.token_hex(8)}"
        library = sysconfig.get_path("stdlib")
        return {
            "secret": self.secret(name),
            "mark": mark,
            "key": zlib.crc32(mark.encode()) & 0x7FFFFFFF | 1,
            "folder": "/tmp" if is_sandboxed else str(self.victim.parent),
            "locked": [f"{library}/{name}.py" for name in (LOCKED_INSIDE if is_sandboxed else LOCKED)],
            "seconds": HOLD_SECONDS,
            "until_input_ends": not is_sandboxed,
        }


def _beside_the_interpreter(folder: str) -> list[str]:
    """List a folder without what leads to the interpreter or the environment that a jail is given."""
    ways = [Path(way) for way in (sys.prefix, sys.base_prefix, os.path.realpath(sys.executable))]
    return [name for name in os.listdir(folder) if not any(way.is_relative_to(f"{folder}/{name}") for way in ways)]


def _best_level() -> str:
    """Return where a neighbour lives: in a jail, or as near to one as this host comes."""
    return JAIL if LocalBackend().capabilities().level is Level.JAIL else CONFINED


def _syscall(number: int, *arguments: int | bytes) -> int:
    """Call the kernel by number; -1 where it refuses, and then the control of whoever needs it says so."""
    call = ctypes.CDLL(None).syscall
    call.restype = ctypes.c_long
    return int(call(ctypes.c_long(number), *(a if isinstance(a, bytes) else ctypes.c_long(a) for a in arguments)))


def _end(holder: subprocess.Popen[str]) -> None:
    holder.terminate()
    try:
        holder.communicate(timeout=5)
    except subprocess.TimeoutExpired:
        holder.kill()
        holder.communicate()


def _file_handle(path: Path) -> list[object]:
    """Return the kernel's handle of a file (type, bytes in hex), by which a privileged process opens it anywhere."""

    class Handle(ctypes.Structure):
        _fields_ = (("size", ctypes.c_uint), ("type", ctypes.c_int), ("data", ctypes.c_ubyte * 128))

    handle, mount = Handle(size=128), ctypes.c_int()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.name_to_handle_at(-100, os.fsencode(path), ctypes.byref(handle), ctypes.byref(mount), 0):
        return [0, ""]
    return [handle.type, bytes(handle.data[: handle.size]).hex()]


@contextmanager
def open_canaries() -> Iterator[Canaries]:
    """Plant canaries and remove them."""
    canaries = Canaries()
    try:
        canaries.plant()
        yield canaries
    finally:
        canaries.close()
