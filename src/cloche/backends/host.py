"""What this host gives: measured once per process, and what takes long kept for the next one."""

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

# What the probe tries in a process of its own, and what it must have found to be kept.
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

# What findings depend on: limits that a sandbox of any kind may fail on, and capabilities.
_LIMITS = ("RLIMIT_NPROC", "RLIMIT_NOFILE", "RLIMIT_AS", "RLIMIT_DATA", "RLIMIT_FSIZE", "RLIMIT_MEMLOCK")
_POWERS = ("CapEff:", "CapBnd:", "NoNewPrivs:", "Seccomp:")

# What the kernel says where one was reached, and its name, what it counts, and its option of `ulimit`.
_REACHED = {
    errno.EMFILE: ("RLIMIT_NOFILE", "may have {} files open", "-n"),
    errno.EFBIG: ("RLIMIT_FSIZE", "may write files of {} bytes", "-f"),
}

KVM = "/dev/kvm"
NEEDS_KVM = "Use a host with KVM, or nested virtualisation, whose /dev/kvm this user may open."


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """Hold the probe's findings. Empty text means that a thing works; else it is the kernel's answer.

    `owns_ids` says that we are a root that may give every sandbox an outside id of its own; `ids` are what an ordinary
    user may give in a jail, None with the reason where that is their own id alone.
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
        """Return the same host as it would be for a user without a delegated control group."""
        reason = "control groups are not used"
        return replace(self, cgroup_version=0, cgroup_folders={}, cgroup_reason=reason)

    def level(self) -> Level:
        """Return the strongest level this host can reach."""
        if self.processes:
            return Level.NONE  # nobody could wait for all that a guest starts
        if self.seccomp:
            return Level.PROCESS
        if not self.namespaces:
            return Level.JAIL
        can_confine = self.landlock_abi > 0 and (self.can_switch_identity or self.uid != 0)
        can_confine = can_confine and self.lists_children  # without them a tree that nothing encloses cannot be found
        return Level.CONFINED if can_confine else Level.PROCESS


@functools.cache
def measure_host(executable: str = sys.executable) -> Host:
    """Return what this host gives: what took a probe process may be kept from an earlier one, the rest is looked at.

    Raises OSError when the probe process cannot be run.
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
    """Take an ordinary user's range of ids, where jails can be made and the guest could read its interpreter."""
    if facts["uid"] == 0 or facts["namespaces"] or facts["seccomp"]:
        return ""
    with _turn:  # else each of several threads that come first would take one, which the jails of others are not below
        return _range_of(facts["uid"], os.getegid())


_turn = threading.Lock()


def _forget_after_fork() -> None:
    global _turn
    _turn = threading.Lock()


os.register_at_fork(after_in_child=_forget_after_fork)


@functools.cache
def _range_of(uid: int, gid: int) -> SubordinateIds | str:
    """Take a range once: a host that is found out anew keeps it."""
    from .subordinate_ids import take_range

    return take_range(uid, gid, hindrance=_hidden_toolchain)


def _hidden_toolchain() -> str:
    """Say which toolchain a guest with another id could not read; empty for none."""
    from .toolchain import all_shown

    hidden = [path for path in all_shown() if not is_readable_by_others(path)]
    return f"a guest with another one could not read {hidden[0]}" if hidden else ""


def forget_host(executable: str = sys.executable) -> None:
    """Have the next start find everything out anew: one has failed, and what is kept may be wrong by now."""
    _tried().forget(_about(executable))
    measure_host.cache_clear()


@functools.cache
def _tried() -> KeptAnswers[Mapping[str, Any]]:
    return KeptAnswers("host", to_plain=_to_plain, from_plain=_from_plain)


def _is_filtered() -> bool:
    """Tell whether a filter of system calls is on this process: which ones it refuses cannot be read."""
    return "\nSeccomp:\t2" in _reads("/proc/self/status")


def _to_plain(facts: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return what may be kept: only of a host with all that a jail needs. A start that it does not suffice for fails.

    A refusal is found out anew each time, so that nothing runs on less because of what was refused once.
    """
    is_whole = not facts["seccomp"] and not facts["namespaces"] and not facts["processes"]
    is_whole = is_whole and facts["idmapped"] in ("", "needs root")
    return {name: facts[name] for name in _TRIED} if is_whole else None


def _from_plain(plain: dict[str, Any]) -> Mapping[str, Any] | None:
    is_sound = plain.keys() == _TRIED.keys() and all(type(plain[name]) is kind for name, kind in _TRIED.items())
    return plain if is_sound and _to_plain(plain) is not None else None


def _about(executable: str) -> tuple[object, ...]:
    """Return what allows and refuses namespaces, beside the circumstances of every answer."""
    return (executable, *map(_reads, _REFUSING), *map(_reads, ("/proc/self/uid_map", "/proc/self/attr/current")))


def with_limit(message: str, number: int | None) -> str:
    """Return the message of an error with this number, and which limit of this process was reached, if one was."""
    if number not in _REACHED:
        return message
    name, amount, option = _REACHED[number]
    soft_limit = resource.getrlimit(getattr(resource, name))[0]
    return (
        f"{message}. This process {amount.format(soft_limit)} ({name}, ulimit {option}): start it with a higher limit"
    )


def why_unread_memory(yama: str = "/proc/sys/kernel/yama/ptrace_scope") -> str:
    """Say why a process may not read the memory of its own user's children; empty when it may."""
    scope = _reads(yama)
    if scope in ("", "0", "1"):
        return ""
    return (
        f"kernel.yama.ptrace_scope is {scope}, so nobody may read in a guest's memory which address it asks for; "
        "with 0 or 1 the network works at level confined"
    )


def why_no_kvm() -> str:
    """Return why this user could not open the device; empty when they can, which does not mean that guests run."""
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
    """Answers to one question, by what they depend on: found out once, then known to this process and kept for others.

    What is kept is plain data (`marshal`), in this user's own cache: a file per answer, written beside its place and
    renamed, of bounded size; of all questions' files the oldest go. `to_plain` returns None for an answer that is known
    to this process alone; `from_plain` returns None for data that is not to be believed, or raises ValueError,
    TypeError or KeyError for what is none. What is kept is a hint: who acts on it must fail closed where it is wrong.

    Answers depend on the `about` that they are asked with and, unless `is_of_host` is false, on `circumstances()`.
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
        """Know nothing: a forked child asks for itself."""
        self._turn = threading.Lock()
        self._known: dict[tuple[object, ...], T] = {}

    def find(self, about: tuple[object, ...], measure: Callable[[], T]) -> T:
        """Return what is known or kept, else what `measure` finds out, which one thread at a time does."""
        with self._turn:
            if about not in self._known:
                stored = self._read(about)
                if stored is None:
                    stored = measure()
                    self._write(about, stored)
                self._known[about] = stored
            return self._known[about]

    def forget(self, about: tuple[object, ...]) -> None:
        """Forget an answer that has turned out wrong, here and for other processes."""
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
            write_cache(folder, *self._file(about), data, is_own=True, most=self.MOST)

    def _file(self, about: tuple[object, ...]) -> tuple[str, bytes]:
        """Return the name of an answer's file, and all that the answer depends on."""
        key_parts = (self._question, *map(str, about), *(circumstances() if self._is_of_host else ()))
        key = "\0".join(key_parts).encode(errors="surrogateescape")
        return f"{self._question}-{zlib.crc32(key):08x}", key


def circumstances() -> tuple[str, ...]:
    """Return what findings about this host depend on: boot, kernel, user, namespaces, capabilities, limits, Python.

    A domain of Landlock cannot be seen from within it.
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
    """Return what changes with a program; 0 where there is none."""
    try:
        return os.stat(path).st_mtime_ns
    except OSError:
        return 0
