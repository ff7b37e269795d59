"""The abilities of this host: measured once per process; slow answers are cached for later processes."""

from __future__ import annotations

import errno
import functools
import marshal
import os
import resource
import sys
import threading
import zlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from cloche.core.enforcement import Level
from cloche.core.record import dataclass, field, replace
from cloche.jail.setup.cache import own_cache, read_cache, remove_cache, write_cache
from cloche.jail.setup.probe import look, run_probe

from .layout import is_readable_by_others

if TYPE_CHECKING:
    from .subordinate_ids import SubordinateIds

T = TypeVar("T")

# The facts that the probe process measures, with the types that a cached answer must have.
_TRIED = {
    "landlock": int,
    "seccomp": str,
    "namespaces": str,
    "idmapped": str,
    "can_switch_identity": bool,
    "processes": str,
}
_REFUSING = (
    "/proc/sys/kernel/apparmor_restrict_unprivileged_userns",
    "/proc/sys/user/max_user_namespaces",
    "/proc/sys/kernel/unprivileged_userns_clone",
)

# Parts of the cache key: limits that a sandbox of any kind may fail on, and capabilities.
_LIMITS = ("RLIMIT_NPROC", "RLIMIT_NOFILE", "RLIMIT_AS", "RLIMIT_DATA", "RLIMIT_FSIZE", "RLIMIT_MEMLOCK")
_POWERS = ("CapEff:", "CapBnd:", "NoNewPrivs:", "Seccomp:")

# By the kernel's error when a limit is reached: its name, what it counts, and its option of `ulimit`.
_REACHED = {
    errno.EMFILE: ("RLIMIT_NOFILE", "may have {} files open", "-n"),
    errno.EFBIG: ("RLIMIT_FSIZE", "may write files of {} bytes", "-f"),
}

KVM = "/dev/kvm"
NEEDS_KVM = "Use a host with KVM, or nested virtualisation, whose /dev/kvm this user may open."


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """Hold the probe's findings. An empty text means that a feature works; otherwise it is the kernel's error.

    `owns_ids` says that this process is a root that can give each sandbox a separate outside id. `ids` are the ids that
    an ordinary user can give to a jail; if None, `ids_reason` says why only the user's own id can be used.
    """

    uid: int
    owns_ids: bool
    lists_children: bool
    landlock_abi: int
    seccomp: str
    namespaces: str
    idmapped: str
    can_switch_identity: bool
    processes: str
    cgroup_version: int
    cgroup_folders: Mapping[str, str] = field(default_factory=dict)
    cgroup_reason: str = ""
    ids: SubordinateIds | None = None
    ids_reason: str = ""

    @property
    def namespace(self) -> int:
        """Return the descriptor of the user namespace that helpers enter for their ids; -1 for none."""
        return self.ids.namespace if self.ids is not None else -1

    def without_cgroups(self) -> Host:
        """Return this host as it is for a user without a delegated control group."""
        reason = "control groups are not used"
        return replace(self, cgroup_version=0, cgroup_folders={}, cgroup_reason=reason)

    def level(self) -> Level:
        if self.processes:
            return Level.NONE  # the descendants of a guest could not be waited for
        if self.seccomp:
            return Level.PROCESS
        if not self.namespaces:
            return Level.JAIL
        can_confine = self.landlock_abi > 0 and (self.can_switch_identity or self.uid != 0)
        # Without /proc/PID/task/TID/children, descendants outside a namespace cannot be found.
        can_confine = can_confine and self.lists_children
        return Level.CONFINED if can_confine else Level.PROCESS


@functools.cache
def measure_host(executable: str = sys.executable) -> Host:
    """Return this host's abilities; answers of the probe process may come from the cache, the others are measured.

    Raises OSError if the probe process cannot be run.
    """
    probed = functools.partial(run_probe, executable)
    facts = {**(probed() if _is_filtered() else _tried().find(_about(executable), probed)), **look()}
    cgroup: Mapping[str, Any] = facts["cgroup"]
    ids = _subordinate_ids(facts)
    return Host(
        uid=facts["uid"],
        owns_ids=facts["owns_ids"],
        lists_children=facts["lists_children"],
        landlock_abi=facts["landlock"],
        seccomp=facts["seccomp"],
        namespaces=facts["namespaces"],
        idmapped=facts["idmapped"],
        can_switch_identity=facts["can_switch_identity"],
        processes=facts["processes"],
        cgroup_version=cgroup["version"],
        cgroup_folders=cgroup["folders"],
        cgroup_reason=cgroup["reason"],
        ids=None if isinstance(ids, str) else ids,
        ids_reason=ids if isinstance(ids, str) else "",
    )


def _subordinate_ids(facts: Mapping[str, Any]) -> SubordinateIds | str:
    """Claim an ordinary user's range of ids, if jails work here and the guest could read its interpreter."""
    if facts["uid"] == 0 or facts["namespaces"] or facts["seccomp"]:
        return ""
    # Else each of several first threads would claim a range, and their jails would be in different namespaces.
    with _turn:
        return _range_of(facts["uid"], os.getegid())


_turn = threading.Lock()


def _forget_after_fork() -> None:
    global _turn
    _turn = threading.Lock()


os.register_at_fork(after_in_child=_forget_after_fork)


@functools.cache
def _range_of(uid: int, gid: int) -> SubordinateIds | str:
    """Claim a range once: measuring the host again keeps it."""
    from .subordinate_ids import take_range

    return take_range(uid, gid, hindrance=_hidden_toolchain)


def _hidden_toolchain() -> str:
    """Return the reason why a guest with another id could not read a toolchain; empty if there is none."""
    from .toolchain import all_shown

    hidden = [path for path in all_shown() if not is_readable_by_others(path)]
    return f"a guest with another id could not read {hidden[0]}" if hidden else ""


def forget_host(executable: str = sys.executable) -> None:
    """Drop the cached answers, which may be wrong since a start has failed; the next start measures again."""
    _tried().forget(_about(executable))
    measure_host.cache_clear()


@functools.cache
def _tried() -> KeptAnswers[Mapping[str, Any]]:
    return KeptAnswers("host", to_plain=_to_plain, from_plain=_from_plain)


def _is_filtered() -> bool:
    """Tell whether this process has a seccomp filter, since a process cannot read which calls its filter refuses."""
    return "\nSeccomp:\t2" in _reads("/proc/self/status")


def _to_plain(facts: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the facts to cache, None for a host that lacks anything a jail needs.

    So a refusal is measured again each time, and no sandbox runs with fewer controls because of an old refusal. If a
    cached ability is gone, the start fails.
    """
    is_whole = not facts["seccomp"] and not facts["namespaces"] and not facts["processes"]
    is_whole = is_whole and facts["idmapped"] in ("", "needs root")
    return {name: facts[name] for name in _TRIED} if is_whole else None


def _from_plain(plain: dict[str, Any]) -> Mapping[str, Any] | None:
    is_sound = plain.keys() == _TRIED.keys() and all(type(plain[name]) is kind for name, kind in _TRIED.items())
    return plain if is_sound and _to_plain(plain) is not None else None


def _about(executable: str) -> tuple[object, ...]:
    """Return the settings that allow or refuse namespaces, as part of the cache key."""
    return (executable, *map(_reads, _REFUSING), *map(_reads, ("/proc/self/uid_map", "/proc/self/attr/current")))


def with_limit(message: str, number: int | None) -> str:
    """Return the message of an error, with the limit of this process that was reached, if `number` names one."""
    if number not in _REACHED:
        return message
    name, amount, option = _REACHED[number]
    soft_limit = resource.getrlimit(getattr(resource, name))[0]
    return (
        f"{message}. This process {amount.format(soft_limit)} ({name}, ulimit {option}): start it with a higher limit"
    )


def why_unread_memory(yama: str = "/proc/sys/kernel/yama/ptrace_scope") -> str:
    """Return the reason why a process may not read the memory of its own children; empty if it may."""
    scope = _reads(yama)
    if scope in ("", "0", "1"):
        return ""
    return (
        f"kernel.yama.ptrace_scope is {scope}, so no process may read a requested address from a guest's memory; "
        "with 0 or 1 the network works at level confined"
    )


def why_no_kvm() -> str:
    """Return the reason why this user cannot open /dev/kvm; empty if they can, which does not prove that guests run."""
    if not os.path.exists(KVM):
        return "this host has no /dev/kvm"
    return "" if os.access(KVM, os.R_OK | os.W_OK) else f"user {os.geteuid()} may not open {KVM}; join the group kvm"


def _reads(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            return file.read().strip()
    except OSError:
        return ""


class KeptAnswers(Generic[T]):
    """Cache the answers to one question: measured once, then kept for this process and for later ones.

    Answers are stored as plain data (`marshal`) in this user's cache: one file of bounded size per answer, written
    under a temporary name and renamed; the oldest files of all questions are removed. `to_plain` returns None for an
    answer that is not to be stored. `from_plain` returns None for data that must not be trusted, and may raise
    ValueError, TypeError or KeyError for invalid data. A stored answer is only a hint: its user must fail closed if it
    is wrong.

    The key of an answer is its `about` and, unless `is_of_host` is false, `circumstances()`.
    """

    MOST, MOST_BYTES = 64, 1 << 16

    def __init__(
        self,
        question: str,
        *,
        to_plain: Callable[[T], Any],
        from_plain: Callable[[Any], T | None],
        is_of_host: bool = True,
    ) -> None:
        self._question, self._is_of_host = question, is_of_host
        self._to_plain, self._from_plain = to_plain, from_plain
        self._begin()
        os.register_at_fork(after_in_child=self._begin)

    def _begin(self) -> None:
        """Start empty; a forked child measures for itself."""
        self._turn = threading.Lock()
        self._known: dict[tuple[object, ...], T] = {}

    def find(self, about: tuple[object, ...], measure: Callable[[], T]) -> T:
        """Return the cached answer, or else the outcome of `measure`, which runs in one thread at a time."""
        with self._turn:
            if about not in self._known:
                stored = self._read(about)
                if stored is None:
                    stored = measure()
                    self._write(about, stored)
                self._known[about] = stored
            return self._known[about]

    def forget(self, about: tuple[object, ...]) -> None:
        """Drop an answer that turned out wrong, here and for other processes."""
        with self._turn:
            self._known.pop(about, None)
            remove_cache(own_cache("answers"), self._file(about)[0])

    def _read(self, about: tuple[object, ...]) -> T | None:
        folder, (name, key) = own_cache("answers"), self._file(about)
        stored = read_cache(folder, name, key, is_own=True) if folder else None
        try:
            return None if stored is None else self._from_plain(marshal.loads(stored))  # noqa: S302  # our own file
        except (EOFError, ValueError, TypeError, KeyError):
            return None

    def _write(self, about: tuple[object, ...], answer: T) -> None:
        folder, plain = own_cache("answers"), self._to_plain(answer)
        if not folder or plain is None:
            return
        data = marshal.dumps(plain, 4)
        if len(data) <= self.MOST_BYTES:
            write_cache(folder, *self._file(about), data, is_own=True, max_files=self.MOST)

    def _file(self, about: tuple[object, ...]) -> tuple[str, bytes]:
        key_parts = (self._question, *map(str, about), *(circumstances() if self._is_of_host else ()))
        key = "\0".join(key_parts).encode(errors="surrogateescape")
        return f"{self._question}-{zlib.crc32(key):08x}", key


def circumstances() -> tuple[str, ...]:
    """Return the facts that findings about this host depend on: boot, kernel, user, namespaces, capabilities,
    limits, Python.

    A Landlock domain is missing, since a process cannot see its own.
    """
    system = os.uname()
    return (
        _reads("/proc/sys/kernel/random/boot_id"), system.release, system.version,
        f"{os.getresuid()} {os.getresgid()} {sorted(os.getgroups())}",
        *(_namespace_of(name) for name in ("user", "mnt", "pid", "net", "cgroup")),
        _reads("/proc/self/cgroup"),
        *(line for line in _reads("/proc/self/status").splitlines() if line.startswith(_POWERS)),
        *(str(resource.getrlimit(getattr(resource, name))) for name in _LIMITS if hasattr(resource, name)),
        str(sys.executable), sys.version, str(changed_ns(sys.executable)),
    )  # fmt: skip


def _namespace_of(name: str) -> str:
    try:
        return os.readlink(f"/proc/self/ns/{name}")
    except OSError:
        return ""


def changed_ns(path: str | os.PathLike[str]) -> int:
    """Return a program's modification time in ns, as a part of cache keys; 0 if it is missing."""
    try:
        return os.stat(path).st_mtime_ns
    except OSError:
        return 0
