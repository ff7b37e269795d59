"""Messages and records between the caller, its helper and the helper's children, and how they are written and read.

A message is a tag, plain values, and descriptors. All ends are Cloche's own code in the same version of the same
interpreter, and no guest's program ever holds an end, so `marshal` is safe. Large data (files, mostly) travels in a
memory file.

The records describe to the helper what to build and run: written by the caller, read by the helper, and sent as dicts
of plain values. A sandbox is opened once with a `Spec`; every run in it is a `Run`, which the caller compiles
(`setup/plan.py`) to a `Building`, an `Order` and the steps that write the files.
"""

from __future__ import annotations

import marshal
import posix

from .syscalls import ppoll, recvmsg, sendmsg

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any, ClassVar, Self

    from .steps import Step

INLINE_BYTES = 8 * 1024  # a message with more comes as a memory file
MAX_DESCRIPTORS = 136  # two mounts of a workspace for each of many forks
SEEK_SET, ETOOMANYREFS = 0, 109
GARBAGE_PAUSES, GARBAGE_PAUSE_S = 100, 0.002  # the kernel collects descriptors in flight when it has the time
_IN_FILE = marshal.dumps(None)


def send(link: int, tag: str, body: dict[str, Any] | None = None, fds: Sequence[int] = ()) -> None:
    """Send one message; raises OSError when the other end is gone."""
    send_by(lambda data, all_fds: sendmsg(link, data, all_fds), tag, body or {}, fds)


def send_retrying(link: int, tag: str, body: dict[str, Any], fds: Sequence[int] = ()) -> None:
    """Send one message; after ETOOMANYREFS (too many descriptors in flight) retry after a pause.

    The kernel counts them for each user, and guests leave some that are garbage.
    """
    for _ in range(GARBAGE_PAUSES):
        try:
            send(link, tag, body, fds)
        except OSError as error:
            if error.errno != ETOOMANYREFS:
                raise
            ppoll((), GARBAGE_PAUSE_S)
        else:
            return
    send(link, tag, body, fds)


def send_by(
    pass_on: Callable[[bytes, Sequence[int]], None], tag: str, body: dict[str, Any], fds: Sequence[int] = ()
) -> None:
    """Send one message with a function that sends bytes and descriptors."""
    data = marshal.dumps((tag, body))
    if len(data) <= INLINE_BYTES:
        pass_on(data, fds)
        return
    file = _write_file(data)
    try:
        pass_on(_IN_FILE, (file, *fds))
    finally:
        posix.close(file)


def receive(link: int) -> tuple[str, dict[str, Any], list[int]]:
    """Return one message with its descriptors; the tag is empty when the other end is gone."""
    try:
        data, fds = recvmsg(link, INLINE_BYTES, MAX_DESCRIPTORS)
    except ConnectionResetError:
        return "", {}, []
    return read(data, fds)


def read(data: bytes, fds: list[int]) -> tuple[str, dict[str, Any], list[int]]:
    """Read a message that came with these descriptors; the tag is empty for none."""
    if not data:
        return "", {}, fds
    if data == _IN_FILE:
        file = fds.pop(0)
        data = _read_file(file)
        posix.close(file)
    tag, body = marshal.loads(data)
    return tag, body, fds


def pack(value: dict[str, Any]) -> int:
    """Return a memory file that holds `value`, positioned at its start."""
    return _write_file(marshal.dumps(value))


def unpack(fd: int) -> dict[str, Any]:
    """Read the output of `pack`."""
    value: dict[str, Any] = marshal.loads(_read_file(fd))
    return value


def pack_part(value: dict[str, Any]) -> bytes:
    """Return `value` as bytes, to travel in a message or a file of several parts, so that a reader can skip it."""
    return marshal.dumps(value)


def unpack_part(data: bytes) -> dict[str, Any]:
    """Read the output of `pack_part`."""
    value: dict[str, Any] = marshal.loads(data)
    return value


def _write_file(data: bytes) -> int:
    fd = posix.memfd_create("cloche", posix.MFD_CLOEXEC)
    view = memoryview(data)
    while view:
        view = view[posix.write(fd, view) :]
    posix.lseek(fd, 0, SEEK_SET)
    return fd


def _read_file(fd: int) -> bytes:
    size = posix.fstat(fd).st_size
    data = bytearray()
    while len(data) < size:
        data += posix.pread(fd, size - len(data), len(data))
    return bytes(data)


class _Record:
    """Hold the fields its class declares, given by keyword; defaults are the class's own values."""

    def __init__(self, **values: Any):
        unknown = values.keys() - type(self).__annotations__.keys()
        if unknown:
            raise TypeError(f"{type(self).__name__} has no field {', '.join(sorted(unknown))}")
        self.__dict__.update(values)

    def copy(self) -> Self:
        """Return another one with the same values."""
        copied = object.__new__(type(self))
        copied.__dict__.update(self.__dict__)
        return copied

    def as_wire(self) -> dict[str, Any]:
        """Return every field as plain data."""
        return {name: getattr(self, name) for name in type(self).__annotations__ if name.islower()}


class Spec(_Record):
    """Describe a sandbox. The fields after `pids` are compiled into each building, and do not travel.

    - `level` is `jail`, `confined`, `process` or `none`.
    - `workspace` and `tmp` are the guest's paths. Below level jail they are folders of the host inside `folder`, which
      the helper makes and removes unless it `shares_folder`; there, `modules` is the target, a folder of the host, of a
      link beside the workspace, or empty, and `startup` the files by name of a folder that Python interpreters find,
      `sitecustomize` among them.
    - `outside` is the range (first, number) of outside ids to claim one from, or None; `ids` are all of these, with the
      folders for their locks. `users` is the range (first, number) of outside ids for all ids inside, where it has
      several users; the last of them is pid 1's.
    - `is_shown`: the workspace has a second mount, because the caller cannot take the guest's id.
    - `scope_abi` is the version of Landlock with the scopes that end a sandbox without a process namespace
      (`jail/ending.py`), or 0.
    - `is_ahead`: built before its run is known, below level jail.
    - `mounts` are the rows of `mounts.from_rows`.
    - `ucounts` and `prefork_ucounts` are those of `privileges.amounts`.
    - `landlock` and the two filters: None where that control is not used; `landlock_abi` is the kernel's version.
    - `cgroup` is version, folders and amounts, or None.
    - `origin` is the spec that it is a copy of, if any.
    - `accounting` is the way to sum memory: `cgroup`, `tree`, or empty for not at all. `memory_stat` is the file with
      the memory of all processes around the caller, where it must be known.
    - `network` is the argument of `network.open_sockets`, and without a namespace the `link` that carries connections
      to the egress process, once the reaper has it; None where only loopback is reached.
    - `answered` has the names of the calls that are made in the guest's place, by their numbers, by the answering
      module.
    """

    level: str = "jail"
    inside_id: int = 1000
    outside: tuple[int, int] | None = None
    ids: tuple[int, int, tuple[str, ...]] = (0, 0, ())
    users: tuple[int, int] | None = None
    workspace: str = "/workspace"
    tmp: str = "/tmp"
    folder: str = ""
    modules: str = ""
    startup: dict[str, str] = {}
    shares_folder: bool = False
    disk_bytes: int = 0
    inodes: int = 0
    cgroup: dict[str, Any] | None = None
    accounting: str = ""
    memory_stat: str = ""
    memory_bytes: int = 0
    pids: int = 0
    network: dict[str, Any] | None = None
    answered: dict[str, dict[int, str]] = {}
    scope_abi: int = 0
    is_ahead: bool = False
    is_shown: bool = False
    mounts: list[tuple[Any, ...]] = []
    masked: list[str] = []
    hostname: str = "cloche"
    rlimits: list[tuple[str, int]] = []
    ucounts: dict[str, int] = {}
    prefork_ucounts: dict[str, int] = {}
    landlock: list[tuple[str, str]] | None = None
    landlock_abi: int = 0
    cpu_affinity: int = 0
    seccomp: bytes | None = None
    prefork_filter: bytes | None = None
    origin: Spec | None = None

    _COMPILED: ClassVar[tuple[str, ...]] = (
        "is_shown", "mounts", "masked", "hostname", "rlimits", "ucounts", "prefork_ucounts", "landlock", "landlock_abi",
        "cpu_affinity", "seccomp", "prefork_filter", "origin",
    )  # fmt: skip

    def move(self, folder: str) -> None:
        """Move the folders that replace mounts to `folder`: the helper has renamed, or will make, it."""
        prefix_length = len(self.folder)
        self.workspace, self.tmp, self.folder = (
            folder + self.workspace[prefix_length:],
            folder + self.tmp[prefix_length:],
            folder,
        )

    def is_as(self, origin: Spec | None) -> bool:
        """Tell, without comparing each field, whether the sent fields equal those of `origin`, but for the cgroup."""
        return (
            origin is not None
            and self.origin is origin
            and (self.outside, self.shares_folder) == (origin.outside, origin.shares_folder)
        )

    def as_wire(self) -> dict[str, Any]:
        """Return the fields that the helper needs, as plain data."""
        return {name: value for name, value in super().as_wire().items() if name not in self._COMPILED}


class Run(_Record):
    """Describe one run in an open sandbox, as the caller sees it.

    - `commands` run one after the other until one fails; without any, the run only writes `files` (rows of path, mode,
      data). `leftover` is the program that the previous run left in the workspace, to be removed first.
    - `python` has the inputs for the helper's own interpreter to become the guest after the commands, or None.
    - `folders` are made in this order, new, and `generated` maps absolute paths in them to text. `authority` is written
      to the file in the register AUTHORITY, from its beginning.
    - `binds` are the toolchain's paths to show besides the spec's mounts. `covered` are paths in shown trees that are
      hidden from the guest. `replaced` are programs and modules that are replaced by one that prints the reason.
      `private` are those of `binds`, and the folder of an overlay, with files that only the caller may read (shown
      through an id-mapped mount), and `owners` the uid and gid of those that are not root's.
    - `readable` are the rules that Landlock needs for them. `keep_read_search`: Landlock alone decides which files are
      readable (see `privileges.keep_read_search`).
    - `is_session`: it lives until it is ended. The value's pipe takes its answers, and a link for its requests follows
      it.
    """

    commands: list[list[str]] = []
    python: dict[str, Any] | None = None
    env: dict[str, str] = {}
    files: list[tuple[str, int, bytes]] = []
    leftover: str = ""
    folders: list[str] = []
    generated: dict[str, str] = {}
    authority: bytes = b""
    timeout_s: float = 30.0
    binds: list[str] = []
    covered: list[str] = []
    replaced: list[str] = []
    private: list[str] = []
    owners: dict[str, tuple[int, int]] = {}
    readable: list[tuple[str, str]] = []
    keep_read_search: bool = False
    is_session: bool = False

    @property
    def has_files(self) -> bool:
        """Tell whether anything must be written before the program starts."""
        return bool(self.files or self.leftover or self.folders or self.generated or self.authority)

    @property
    def has_one_process(self) -> bool:
        """Tell whether one guest does all of it, and writes nothing but its own files."""
        return len(self.commands) + (self.python is not None) <= 1 and not (self.is_session or self.generated)

    def as_order(self) -> dict[str, Any]:
        """Return the guest's part, as plain data."""
        return {
            "commands": self.commands, "python": self.python, "env": self.env, "is_session": self.is_session,
        }  # fmt: skip


FILTER: Step = ("seccomp", "filter system calls", [])


class Building(_Record):
    """Hold the steps between a reaper's start and the moment when its guest waits for orders; see `setup/plan`.

    `build` are the reaper's, `first` and `late` the first guest's before and after the sandbox is built, `later` those
    of a further guest in place of `first` (in a prefork jail, where they differ). `seccomp` is the filter, if any.
    `warm_up` is done once by a waiting guest, to have run the code that an order needs; it may be empty.
    `unheard` are the steps of a guest if its filter has another listener. `last` are those of a guest of a live sandbox
    , just before its program, when it needs no privileges any more.
    `private` are the paths whose mounts the helper opens id-mapped.
    """

    build: list[Step] = []
    first: list[Step] = []
    later: list[Step] = []
    late: list[Step] = []
    last: list[Step] = []
    private: list[str] = []
    seccomp: bytes | None = None
    unheard: list[Step] = []
    warm_up: list[Step] = []

    def steps_of_guest(self) -> list[Step]:
        """Return the names of the first guest's steps before its program, in order."""
        return [*self.first, *self.late, *([FILTER] if self.seccomp is not None else [])]

    def as_wire(self) -> dict[str, Any]:
        """Return it in two parts, for the reaper and for guests: each unpacks its own only, which saves time."""
        fields = super().as_wire()
        reapers = {name: fields.pop(name) for name in ("build", "private")}
        return {"reapers": pack_part(reapers), "guests": pack_part(fields)}

    @classmethod
    def of_parts(cls, *packed_parts: bytes) -> Building:
        """Return the fields in these parts of `as_wire`; the others are empty."""
        fields: dict[str, Any] = {}
        for packed in packed_parts:
            fields |= unpack_part(packed)
        return cls(**fields)


class Order(_Record):
    """Describe the work of a waiting guest: see the fields of the same names in `Run`."""

    commands: list[list[str]] = []
    python: dict[str, Any] | None = None
    env: dict[str, str] = {}
    is_session: bool = False

    @property
    def guests(self) -> int:
        """Count the processes to run one after the other; one that has nothing to do stands for none."""
        return max(1, len(self.commands) + (self.python is not None))
