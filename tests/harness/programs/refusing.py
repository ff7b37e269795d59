"""Run a command where user namespaces are refused, in either of the two ways that hosts do it, or where less works.

    python refusing.py seccomp COMMAND...   a filter answers EPERM, as a plain container's does
    python refusing.py sysctl COMMAND...    user.max_user_namespaces is 0, as a hardened host has it
    python refusing.py kernel COMMAND...    the filter, and no Landlock, as an old kernel has it: nothing isolates
    python refusing.py pidfd COMMAND...     the filter, and no descriptors of processes, as gVisor has it
    python refusing.py locks COMMAND...     nothing but locks of files, as file systems of clusters do

Nothing of the host changes: the filter is this process's own, and the setting belongs to a user namespace made for it.
"""

import os
import struct
import sys

from cloche.jail import syscalls
from cloche.jail.setup import privileges
from cloche.jail.steps import perform_calls

CLONE_NEWUSER = 0x10000000
CLONE_NEW_ANY = 0x7E020080
LANDLOCK_CREATE_RULESET = 444
CLONE, CLONE3, UNSHARE = (220, 435, 97) if os.uname().machine == "aarch64" else (56, 435, 272)
EPERM, ENOSYS, ALLOW = 0x00050001, 0x00050026, 0x7FFF0000
LD, JEQ, JSET, RET = 0x20, 0x15, 0x45, 0x06
PR_SET_SECCOMP, MODE_FILTER = 22, 2
EVERYBODY = f"0 0 {2**32 - 1}"
FILTER = (
    (LD, 0, 0, 0),
    (JEQ, 0, 1, CLONE3),
    (RET, 0, 0, ENOSYS),
    (JEQ, 2, 0, CLONE),
    (JEQ, 1, 0, UNSHARE),
    (RET, 0, 0, ALLOW),
    (LD, 0, 0, 16),
    (JSET, 0, 1, CLONE_NEW_ANY),
    (RET, 0, 0, EPERM),
    (RET, 0, 0, ALLOW),
)
FLOCK = 32 if os.uname().machine == "aarch64" else 73
WITHOUT_LOCKS = (FILTER[0], (JEQ, 0, 1, FLOCK), (RET, 0, 0, ENOSYS), (RET, 0, 0, ALLOW))
PIDFD_OPEN = 434
WITHOUT_PIDFD = (FILTER[0], (JEQ, 0, 1, PIDFD_OPEN), (RET, 0, 0, ENOSYS), *FILTER[1:])
WITHOUT_LANDLOCK = (FILTER[0], (JEQ, 0, 1, LANDLOCK_CREATE_RULESET), (RET, 0, 0, ENOSYS), *FILTER[1:])


def refuse_by_seccomp(lines: tuple[tuple[int, int, int, int], ...] = FILTER) -> None:
    """Let every call that would make a namespace fail, here and in all children."""
    program = b"".join(struct.pack("<HBBI", *line) for line in lines)
    perform_calls([privileges.forbid_new_privileges()])
    header = len(lines).to_bytes(8, "little") + syscalls.address_of(program)
    syscalls.prctl(PR_SET_SECCOMP, MODE_FILTER, header, 0, 0)


def refuse_with_landlock() -> None:
    """Refuse as seccomp does, and know nothing of Landlock."""
    refuse_by_seccomp(WITHOUT_LANDLOCK)


def refuse_pidfd() -> None:
    """Refuse as seccomp does, and know of no descriptor of a process."""
    refuse_by_seccomp(WITHOUT_PIDFD)


def refuse_locks() -> None:
    """Know nothing of locks."""
    refuse_by_seccomp(WITHOUT_LOCKS)


def refuse_by_sysctl() -> None:
    """Enter a user namespace in which everybody is who they were, and forbid further ones in it."""
    uid, gid = os.geteuid(), os.getegid()
    if uid == 0:
        enter_namespace(EVERYBODY, EVERYBODY)
    else:
        enter_namespace(f"{uid} {uid} 1", f"{gid} {gid} 1")
    write("/proc/sys/user/max_user_namespaces", "0")
    if uid != 0:
        perform_calls(privileges.drop_all())


def enter_namespace(uid_map: str, gid_map: str) -> None:
    """Unshare, and let a child that stayed outside write the maps."""
    parent = os.getpid()
    go_reading, go = os.pipe()
    child = os.fork()
    if child == 0:
        os.read(go_reading, 1)
        if uid_map != EVERYBODY:
            write(f"/proc/{parent}/setgroups", "deny")
        write(f"/proc/{parent}/gid_map", gid_map)
        write(f"/proc/{parent}/uid_map", uid_map)
        os._exit(0)
    syscalls.unshare(CLONE_NEWUSER)
    os.write(go, b"g")
    _, status = os.waitpid(child, 0)
    assert status == 0, "the maps could not be written"


def write(path: str, text: str) -> None:
    """Write in one call, as these files want it."""
    with open(path, "w") as file:
        file.write(text)


if __name__ == "__main__":
    ways = {
        "seccomp": refuse_by_seccomp, "sysctl": refuse_by_sysctl, "kernel": refuse_with_landlock,
        "pidfd": refuse_pidfd, "locks": refuse_locks,
    }  # fmt: skip
    ways[sys.argv[1]]()
    os.execvp(sys.argv[2], sys.argv[2:])
