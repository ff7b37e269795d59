"""Set-up as data: steps made of system calls, compiled by the caller, made by the helper in one loop.

A *call* is a tuple: the kernel's name, the arguments, the name of the register that keeps the result (or empty), the
errors that are no failure, and whether it needs no register. An argument is an integer, bytes (the kernel gets their
address), None, the name of a register, or a pair of bytes and a register, whose value is appended to them. A call that
needs a register which an excused failure left empty is skipped; a register that was never filled is an error. A *step*
is a tuple as well: name, description, calls; the first that fails is reported by its name. The helper, its children and
the caller all share this one small module, without the cost of the rest: the meaning of the calls is in `setup/`, in
`mounts`, `privileges` and `plan`.
"""

from __future__ import annotations

import posix
from time import perf_counter

from .syscalls import call

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any, TypeAlias

if TYPE_CHECKING:
    Argument: TypeAlias = int | bytes | str | tuple[bytes, str] | None
    Call: TypeAlias = tuple[str, tuple[Argument, ...], str, tuple[int, ...], bool]
    Step: TypeAlias = tuple[str, str, list[Call]]

# The registers that the helper, pid 1, the guests and the caller's list of steps share. Other names are local to one
# list of calls. First the helper's inputs, see also `private_register`:
OUTSIDE_ID = "outside id"  # the host's id for this sandbox
INIT_ID = "init id"  # and that of its init, which no guest gets
NETWORK_LINK = "network link"  # by which the sockets are sent that the egress process serves
AUTHORITY = "sandbox's authority"  # the file of certificates, writable, whose first bytes each sandbox gets anew
OOM_PROC = "proc that is written to"  # opened before there is one that cannot be, for a guest's `oom_score_adj`
ATTACHED_WORKSPACE = "attached workspace"  # the mount that is attached as the workspace, kept from an earlier guest
# Further mounts of the workspace that is in use: the one that the next guest attaches; in a prefork jail the caller's;
# and the one that shows a new workspace to the caller, if its id is not the guest's.
NEXT_WORKSPACE, CALLERS_WORKSPACE = "next workspace", "caller's workspace"
SHOWN_WORKSPACE = "shown workspace"
# The separate parts of each guest of a prefork jail, and each clone of a session: its mounts, by their path, …
OWN_WORKSPACE, OWN_TMP, OWN_SHM = "own workspace", "own tmp", "own shm"
OWN_MOUNTS = {"workspace": OWN_WORKSPACE, "tmp": OWN_TMP, "dev/shm": OWN_SHM}
MOUNT_NAMESPACE, NETWORK_NAMESPACE = "mount namespace", "network namespace"  # … and its namespaces
PROCESS_COUNTER = "process counter"  # by which the count of processes begins anew for each guest of a prefork jail

_NAMES_A_REGISTER = frozenset((str, tuple))
EXCUSED = -1  # the value of a register whose call failed with an excused error
EPERM, ENOENT, EACCES, EEXIST, EISDIR, EINVAL, ENOSPC, EROFS = 1, 2, 13, 17, 21, 22, 28, 30


def private_register(path: str) -> str:
    """Name the register that holds the id-mapped mount of `path`."""
    return f"private {path}"


class StepFailed(Exception):
    """Say which step failed, at which index of the list, and with which errno (0 when it was no system call)."""

    def __init__(self, step: Step, index: int, total: int, error: Exception):
        self.errno = getattr(error, "errno", None) or 0
        super().__init__(f"{step[1]}: {error} (step {index + 1} of {total}, {step[0]})")
        self.step, self.index = step[0], index


def make(name: str, *arguments: Argument, keep: str = "", excuse: tuple[int, ...] = ()) -> Call:
    """Return one call as data."""
    is_plain = name != "write" and _NAMES_A_REGISTER.isdisjoint(map(type, arguments))
    return name, arguments, keep, excuse, is_plain


def perform(steps: Sequence[Step], registers: dict[str, int]) -> list[float]:
    """Make the calls of every step in order; return the seconds each step took. Raises StepFailed."""
    seconds = []
    for index, step in enumerate(steps):
        started = perf_counter()
        try:
            for step_call in step[2]:
                _perform_call(step_call, registers)
        except Exception as error:
            raise StepFailed(step, index, len(steps), error) from error
        seconds.append(perf_counter() - started)
    return seconds


def perform_calls(calls: Sequence[Call], registers: dict[str, int] | None = None) -> None:
    """Make bare calls, without timings. Raises OSError."""
    registers = {} if registers is None else registers
    for step_call in calls:
        _perform_call(step_call, registers)


def _perform_call(step_call: Call, registers: dict[str, int]) -> None:
    name, arguments, keep, excuse, is_plain = step_call
    values: Any = arguments if is_plain else _filled_in(arguments, registers)
    if values is None:
        if keep:
            registers[keep] = EXCUSED
        return
    try:
        result = call(name, *values) if name != "write" else _write(*values)
    except OSError as error:
        if error.errno not in excuse:
            raise
        registers[keep] = EXCUSED
        return
    if keep:
        registers[keep] = result


def _filled_in(arguments: Sequence[Argument], registers: dict[str, int]) -> list[Any] | None:
    """Replace registers by their values; None if a needed one was excused. Raises KeyError for one never filled."""
    values: list[Any] = []
    for argument in arguments:
        if not isinstance(argument, str | tuple):
            values.append(argument)
            continue
        value = registers[argument if isinstance(argument, str) else argument[1]]
        if value == EXCUSED:
            return None
        values.append(value if isinstance(argument, str) else argument[0] + value.to_bytes(4, "little"))
    return values


def _write(fd: int, data: bytes) -> int:
    """Write all of `data`; raises ENOSPC where the room ends."""
    view = memoryview(data)
    while view:
        view = view[posix.write(fd, view) :]
    return len(data)
