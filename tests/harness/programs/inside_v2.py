"""Try the local backend where control groups are of version 2 alone: a program for a machine's root.

Argument: JSON with the folder of the kit, `user` (0 for root) and what to try. It makes what a service manager makes
of a session: a group of its own for itself, and beside it room for others, given to the user. Output: a line of JSON
for each thing that was tried.
"""

import ctypes
import json
import os
import subprocess
import sys
import time

GROUPS = "/sys/fs/cgroup"
OWN, THEIRS = f"{GROUPS}/own", f"{GROUPS}/user"
SESSION = f"{THEIRS}/session"
REMOUNT, BIND, PLAIN = 1 << 5, 1 << 12, 2 | 4 | 8
MOST_NAMESPACES = "20000"


def write(path: str, text: str) -> None:
    """Write to a file of the kernel's."""
    with open(path, "w") as file:
        file.write(text)


def delegate(user: int) -> None:
    """Leave the group that this runs in for one below it, and give the user the rest."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(None, GROUPS.encode(), None, ctypes.c_ulong(REMOUNT | BIND | PLAIN), None):
        raise OSError(ctypes.get_errno(), "cannot have the control groups writable")
    os.mkdir(OWN)
    move(GROUPS, OWN)
    write(f"{GROUPS}/cgroup.subtree_control", "+memory +pids +cpu")
    if user:
        os.mkdir(THEIRS)
        write(f"{THEIRS}/cgroup.subtree_control", "+memory +pids +cpu")
        os.mkdir(SESSION)
        for folder in (THEIRS, SESSION):
            for path in (folder, f"{folder}/cgroup.procs", f"{folder}/cgroup.subtree_control"):
                os.chown(path, user, user)


def move(source: str, target: str) -> None:
    """Move all that is in a group into another one."""
    with open(f"{source}/cgroup.procs") as file:
        for pid in file.read().split():
            write(f"{target}/cgroup.procs", pid)


def wait_for_the_last() -> list[str]:
    """Return the groups that a caller which has ended leaves, once its helpers had the time to remove theirs."""
    for _ in range(400):
        left = [
            f"{folder}/{name}" for folder, names, _ in os.walk(GROUPS) for name in names if name.startswith("cloche")
        ]
        if not left:
            break
        time.sleep(0.05)
    return left


def take_back() -> None:
    """Be in the group again that this began in, without others below it: whoever made that shall be able to end it."""
    for folder in (SESSION, THEIRS):
        if os.path.isdir(folder):
            os.rmdir(folder)
    write(f"{GROUPS}/cgroup.subtree_control", "-memory -pids -cpu")
    move(OWN, GROUPS)
    os.rmdir(OWN)


def become(user: int) -> None:
    """Become an ordinary user, for good."""
    write("/proc/sys/user/max_user_namespaces", MOST_NAMESPACES)
    if user:
        write(f"{SESSION}/cgroup.procs", "0")
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)


def main() -> None:
    """Delegate, let whoever is asked for do what is asked for, and take back."""
    told = json.loads(sys.argv[1])
    env = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/workspace", "LANG": "C.UTF-8", "PYTHONPATH": told["kit"]}
    delegate(told["user"])
    try:
        words = ["/usr/bin/python3", *told["words"]]
        done = subprocess.run(words, env=env, cwd=told["kit"], preexec_fn=lambda: become(told["user"]), check=False)
    finally:
        print(json.dumps({"left": wait_for_the_last()}), flush=True)
        take_back()
    sys.exit(done.returncode)


main()
