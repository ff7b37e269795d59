"""Start the helper: a fresh interpreter that shares nothing with the caller but one socket.

Its modules come out of one archive of compiled code, in a sealed memory file that all helpers of a process read. In the
same way start the fork server, the mapper of subordinate ids, the shim for programs of the host, and the probe.
"""

from __future__ import annotations
import __future__

import errno
import fcntl
import functools
import hashlib
import itertools
import marshal
import os
import socket
import subprocess
import sys
import threading
import types
from collections.abc import Callable, Mapping
from typing import Any

from .. import messages
from ..cgroups import Cgroup
from ..syscalls import run_beside
from .cache import own_cache, read_cache, write_cache

PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
# The top-level packages a helper may import, and nothing else of Cloche's.
HELPER_PACKAGES = ("jail", "interpreter", "init", "keeper")
CALLERS_OWN = ("keeper.registry", "keeper.attach")  # which are in these packages, and the caller's
PROBE_PACKAGES = (*HELPER_PACKAGES, "jail.setup")  # what is in jail.setup is the caller's, but the probe is run from it
_TAG = f"{sys.implementation.cache_tag}-{sys.hexversion:x}"
ONLY_AST = 0x400  # ast.PyCF_ONLY_AST, without importing all of ast
FIRST_PASSABLE = 3
_ALL_SEALS = 0x0001 | 0x0002 | 0x0004 | 0x0008  # F_SEAL_SEAL, _SHRINK, _GROW, _WRITE
EMPTY_ENVIRONMENT = {"LANG": "C.UTF-8"}
# Modules come out of an archive of compiled code: no search, no file, and it works behind a changed root as well.
# Those that every helper needs are made at once, in this order: the import system would take a millisecond for them.
HELPER_MODULES = (
    "jail", "jail.syscalls", "jail.messages", "jail.steps", "jail.shared_status", "jail.seccomp_notify", "jail.pid1",
    "jail.guest", "jail.reaper", "jail.user_namespaces", "jail.cgroups", "jail.accounting", "jail.sandbox_state",
    "jail.supervisor", "jail.helper",
)  # fmt: skip
# The first code of every process of ours: a signal mask and ignored signals are inherited over execve (signal(7)); the
# caller's may neither reach a guest, nor hide SIGCHLD from us. Python's own two (SIGPIPE, SIGXFSZ) stay.
RESET_SIGNALS = """\
import _signal
for number in _signal.valid_signals() - {_signal.SIGPIPE, _signal.SIGXFSZ}:
    if _signal.getsignal(number) == _signal.SIG_IGN: _signal.signal(number, _signal.SIG_DFL)
_signal.pthread_sigmask(_signal.SIG_SETMASK, ())
"""
# The first code of a helper, compiled once: it gets `archive`, a descriptor, and its `head` and `size` in bytes.
_BOOT = (
    RESET_SIGNALS
    + """\
import gc, marshal, posix, sys
from _frozen_importlib import ModuleSpec, _load
from _frozen_importlib_external import ExtensionFileLoader, spec_from_file_location
class Archive:
    offsets, data = marshal.loads(posix.pread(archive, head, 0)), None
    def code(name):
        start, end = Archive.offsets[name]
        if Archive.data is None: return marshal.loads(posix.pread(archive, end - start, start))
        return marshal.loads(Archive.data[start:end])
    def find_spec(name, path=None, target=None):
        is_package = name in ("jail", "jail.setup", "interpreter", "init", "keeper")
        if name in Archive.offsets: return ModuleSpec(name, Archive, origin="cloche", is_package=is_package)
    def create_module(spec): return None
    def exec_module(module): exec(Archive.code(module.__name__), module.__dict__)
sys.meta_path.insert(0, Archive)
def load_library(name, path):
    # The one that every helper needs is where the caller found it: no search.
    _load(spec_from_file_location(name, path, loader=ExtensionFileLoader(name, path)))
def make_modules(names):
    gc.disable()  # nothing of it is garbage; who has loaded all that is needed goes on as usual
    for name in names:
        parent, _, stem = name.rpartition(".")
        module = sys.modules[name] = type(sys)(name)
        module.__package__ = parent or name
        if parent: setattr(sys.modules[parent], stem, module)
        else: module.__path__ = []
        Archive.exec_module(module)
def map_archive():
    # Code that is needed at once was read, which leaves no copy; the rest stays in the file's own memory.
    import jail.syscalls
    jail.archive, jail.load = Archive, load
    Archive.data = jail.syscalls.map_file(archive, size)
    posix.close(archive)
def load(name):
    __import__(name)
    return sys.modules[name]
def load_interpreter(name):
    return load(f"interpreter.{name}")
"""
)
_RUN_BOOT = """\
import marshal, posix
archive, head, size = {fd}, {head}, {size}
exec(marshal.loads(posix.pread(archive, {boot}, size - {boot})))
"""
# Modules that every guest needs are loaded before it is forked: an import in a fork takes twice as long, because each
# written page is copied first.
_BOOT_HELPER = """\
import os, site
if {namespace} >= 0:
    import jail.subordinate_ids
    jail.subordinate_ids.enter({namespace})
_guest = sys.modules["jail.helper"].main({fd}, load_interpreter)
if _guest: _guest()
"""
_BOOT_FORK_SERVER = """\
gc.enable()
import jail.fork_server, jail.seccomp_notify, jail.procfs, jail.user_namespaces, jail.subordinate_ids
import jail.resident, init.server
jail.subordinate_ids.enter({namespace})
_guest = jail.fork_server.main({fd}, load_interpreter)
if _guest: _guest()
"""
_BOOT_SHIM = """\
import jail.container_shim
jail.container_shim.main({fd})
"""
_BOOT_MAPPER = """\
import jail.subordinate_ids
jail.subordinate_ids.main({fd}, {order})
"""
# It needs little of what helpers need, and there may be hundreds.
_LOAD_KEEPER = """\
gc.enable()
import keeper
keeper.load = load
import keeper.process, init.wire
posix.close(archive)
gc.collect()
gc.freeze()
"""
_BOOT_KEEPER = f"{_LOAD_KEEPER}keeper.process.main({{fd}})\n"
_BOOT_KEEPER_FORKS = f"{_LOAD_KEEPER}caller = keeper.process.fork_keepers({{fd}})\nkeeper.process.main(caller)\n"
_BOOT_PROBE = """\
map_archive()
import jail.setup.probe
jail.setup.probe.main()
"""


@functools.cache
def _archive(is_probe: bool) -> bytes:
    """Return every module that a helper (or the probe) may import: code by name, loaded when imported.

    Compiling them takes longer than a run, so the result is kept beside the interpreter's own compiled files, as
    trusted and as replaceable as those; where these are unwanted, or that folder cannot be written to, in a cache of
    this user's alone.
    """
    sources = _sources(is_probe=is_probe)
    key = marshal.dumps([_state(path) for path in sources.values()])
    name = f"{'probe' if is_probe else 'helper'}.{_TAG}.archive"
    beside, own = os.path.join(PACKAGE, "jail", "__pycache__"), own_cache("helpers")
    own_name = f"{hashlib.blake2b(os.fsencode(PACKAGE), digest_size=8).hexdigest()}.{name}"
    cached = read_cache(beside, name, key) or (read_cache(own, own_name, key, is_own=True) if own else None)
    is_unwanted = sys.dont_write_bytecode or sys.pycache_prefix is not None  # beside the sources
    if cached is None:
        cached = marshal.dumps({name: marshal.dumps(_compile(path)) for name, path in sources.items()})
        is_kept = not is_unwanted and write_cache(beside, name, key, cached)
        if own and not is_kept:
            write_cache(own, own_name, key, cached, is_own=True)
    return cached


def _sources(*, is_probe: bool) -> dict[str, str]:
    sources = {}
    for package in PROBE_PACKAGES if is_probe else HELPER_PACKAGES:
        folder = os.path.join(PACKAGE, *package.split("."))
        for name in sorted(os.listdir(folder)):
            stem, suffix = os.path.splitext(name)
            module = package if stem == "__init__" else f"{package}.{stem}"
            if suffix == ".py" and module not in CALLERS_OWN:
                sources[module] = os.path.join(folder, name)
    return sources


def _state(path: str) -> tuple[str, int, int]:
    """Return values that change with a file."""
    state = os.stat(path)
    return path, state.st_mtime_ns, state.st_size


@functools.cache
def _compile(path: str) -> types.CodeType:
    """Compile a module without docstrings, and with its `__future__` import done here instead of in every run."""
    with open(path, "rb") as file:
        tree: Any = compile(file.read(), path, "exec", ONLY_AST, dont_inherit=True)
    tree.body = [statement for statement in tree.body if getattr(statement, "module", "") != "__future__"]
    flags = __future__.annotations.compiler_flag
    code: types.CodeType = compile(tree, path, "exec", flags, dont_inherit=True, optimize=2)
    return code


class _ArchiveFile:
    """Hold a sealed memory file, which no process can change: a table of each module's code in it, then all code.

    `head`, `boot` (at the end) and `size` are bytes.
    """

    def __init__(self, *, fd: int, inode: int, head: int, boot: int, size: int) -> None:
        self.fd, self.inode, self.head, self.boot, self.size = fd, inode, head, boot, size

    def is_open(self) -> bool:
        """Tell whether the descriptor is still ours: a caller may have closed descriptors that it did not open."""
        try:
            state = os.fstat(self.fd)
        except OSError:
            return False
        return state.st_ino == self.inode and state.st_size == self.size

    def run_boot(self) -> str:
        """Return the beginning of a program that reads its modules from here."""
        return _RUN_BOOT.format(fd=self.fd, head=self.head, boot=self.boot, size=self.size)


_archive_files: dict[bool, _ArchiveFile] = {}
_turn = threading.Lock()
# Held while a process starts, and while this one is forked: a child that was forked between would hold the pipe on
# which the start is waited for, for as long as it lives. A handler of signals may fork in the midst of a start.
_starts = threading.RLock()


def _forget_after_fork() -> None:
    global _turn, _starts
    _turn, _starts = threading.Lock(), threading.RLock()


def _wait_for_starts() -> None:
    _starts.acquire()


def _let_start() -> None:
    _starts.release()


os.register_at_fork(before=_wait_for_starts, after_in_parent=_let_start, after_in_child=_forget_after_fork)


def _archive_file(*, is_probe: bool = False) -> _ArchiveFile:
    """Return the archive of modules for every helper (or the probe) of this process. Raises OSError."""
    with _turn:  # else each of several threads that come first would write one, and all but the last stay open for ever
        archive = _archive_files.get(is_probe)
        if archive is None or not archive.is_open():
            archive = _archive_files[is_probe] = _write_archive(marshal.loads(_archive(is_probe)))
        return archive


def _write_archive(codes: Mapping[str, bytes]) -> _ArchiveFile:
    """Return a sealed memory file with the archive."""
    head = 0
    while head != (head := len(_offsets(codes, head))):  # numbers as long as they are at the end
        pass
    boot = marshal.dumps(compile(_BOOT, "<cloche>", "exec", dont_inherit=True, optimize=2))
    content = b"".join((_offsets(codes, head), *codes.values(), boot))
    fd = _passable(os.memfd_create("cloche", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
    try:
        if os.write(fd, content) != len(content):
            raise OSError(errno.EFBIG, f"no room for the modules of a helper, {len(content)} bytes")
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _ALL_SEALS)
        return _ArchiveFile(fd=fd, inode=os.fstat(fd).st_ino, head=head, boot=len(boot), size=len(content))
    except BaseException:
        os.close(fd)
        raise


def _passable(fd: int) -> int:
    """Return a descriptor in place of `fd` that keeps its number in a child: 0 to 2 become its standard streams.

    A caller that closed its own gets those numbers for the next files it opens. Raises OSError; then `fd` is closed.
    """
    if fd >= FIRST_PASSABLE:
        return fd
    try:
        return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, FIRST_PASSABLE)
    finally:
        os.close(fd)


def _offsets(codes: Mapping[str, bytes], start: int) -> bytes:
    """Return the start and end of each module's code, all of it behind `start`."""
    ends = list(itertools.accumulate(map(len, codes.values()), initial=start))
    return marshal.dumps(dict(zip(codes, itertools.pairwise(ends), strict=True)))


def run_probe_process(executable: str, timeout_s: float) -> bytes:
    """Run the probe process and return its output. Raises OSError when it cannot run or fails."""
    archive = _archive_file(is_probe=True)
    try:
        completed = subprocess.run(
            [executable, "-I", "-S", "-c", archive.run_boot() + _BOOT_PROBE],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            env=EMPTY_ENVIRONMENT,
            pass_fds=(archive.fd,),
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        message = f"the probe process took longer than {timeout_s:g} s; is this host overloaded?"
        raise OSError(errno.ETIMEDOUT, message) from error
    if completed.returncode != 0 or not completed.stdout:
        raise OSError(f"the probe process {_end_of_probe(completed)}")
    return completed.stdout


def _end_of_probe(completed: subprocess.CompletedProcess[bytes]) -> str:
    if completed.returncode < 0:
        return f"was killed by signal {-completed.returncode}"
    errors = completed.stderr.decode("utf-8", "replace").strip()[-400:]
    return f"ended with code {completed.returncode}: {errors or 'it printed nothing'}"


def start_helper(
    executable: str = sys.executable,
    *,
    version: int = 0,
    folders: Mapping[str, str] | None = None,
    namespace: int = -1,
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start a helper and return its process and our end of its socket. Raises OSError.

    `version` and `folders` are those of its control group, which `make_cgroup` makes while it is starting;
    `namespace` is the descriptor of the user namespace that it enters, see `subordinate_ids`, -1 for none.
    """
    first_body = {"version": version, "folders": dict(folders or {})}
    return _start(
        executable,
        lambda fd: _BOOT_HELPER.format(fd=fd, namespace=namespace),
        passed=namespace,
        first_message=("begin", first_body),
    )


def start_template(
    settings: Mapping[str, Any], executable: str = sys.executable, *, namespace: int = -1
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start a fork server and return its process and our end of its socket; `namespace` as above. Raises OSError."""
    return _start(
        executable, lambda fd: _BOOT_FORK_SERVER.format(fd=fd, namespace=namespace), is_awaited=False, passed=namespace,
        first_message=("begin", dict(settings)),
    )  # fmt: skip


def start_mapper(
    programs: list[list[str]], namespace: int = -1, executable: str = sys.executable
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start the mapper of `subordinate_ids` and return its process and our end of its socket. Raises OSError."""
    order = {"programs": programs, "namespace": namespace}
    return _start(executable, lambda fd: _BOOT_MAPPER.format(fd=fd, order=order), passed=namespace)


def start_shim(executable: str = sys.executable) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start a `container_shim` and return its process and our end of its socket. Raises OSError."""
    return _start(executable, lambda fd: _BOOT_SHIM.format(fd=fd))


def start_keeper(executable: str = sys.executable) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start a keeper (`cloche.keeper`) and return its process and our end of its socket. Raises OSError."""
    return _start(executable, lambda fd: _BOOT_KEEPER.format(fd=fd), is_awaited=False, is_helper=False)


def start_keeper_forks(executable: str = sys.executable) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start a process that forks keepers, and return it and our end of its socket; see `keepers`. Raises OSError."""
    return _start(executable, lambda fd: _BOOT_KEEPER_FORKS.format(fd=fd), is_awaited=False, is_helper=False)


def _start(
    executable: str,
    end_of_boot: Callable[[int], str],
    *,
    is_awaited: bool = True,
    is_helper: bool = True,
    passed: int = -1,
    first_message: tuple[str, dict[str, Any]] | None = None,
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start an interpreter with the modules of a helper; `end_of_boot` gives the rest of its program, by its socket.

    One that is started ahead of need stays where the kernel puts it: the other processor is for work that is waited
    for. `first_message` is in its socket when it starts: guests can read the program in the command line of pid 1.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        if first_message is not None:
            messages.send(ours.fileno(), *first_message)
        theirs = socket.socket(fileno=_passable(theirs.detach()))
        archive = _archive_file()
        first = f"{_load_ctypes(executable)}make_modules({HELPER_MODULES})\nmap_archive()\n" if is_helper else ""
        boot = archive.run_boot() + first + end_of_boot(theirs.fileno())
        with _starts:
            process = subprocess.Popen(
                [executable, "-I", "-S", "-c", boot],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=EMPTY_ENVIRONMENT,
                cwd="/",
                pass_fds=(theirs.fileno(), archive.fd, *((passed,) if passed >= 0 else ())),
                start_new_session=True,
            )
        if is_awaited:  # where this is interrupted half-way, the process ends with our end of the socket
            run_beside(process.pid, os.sched_getaffinity(0))
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()
    return process, ours


def _load_ctypes(executable: str) -> str:
    """Return the code that loads `_ctypes` in an interpreter; empty if it must search itself."""
    path = getattr(sys.modules.get("_ctypes"), "__file__", None)
    return f"load_library('_ctypes', {path!r})\n" if executable == sys.executable and path else ""


def make_cgroup(cgroup: Mapping[str, Any], *, is_there: bool = False) -> None:
    """Make a sandbox's control group with its limits, or give the one that is there new ones. Raises OSError."""
    group = Cgroup(cgroup["version"], cgroup["folders"])
    if is_there:
        group.loosen()
    group.create(**cgroup["amounts"])
