"""The common parts of every guest: visible parts of the host's system, an account, variables, and the search path.

Toolchains are added to it, each by its own root.
"""

from __future__ import annotations

import functools
import os
import stat
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cloche.core.policy import Policy

Row = tuple[Any, ...]

SYSTEM_FOLDERS = ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/lib32", "/libx32")
# Public parts of /etc that programs need; private keys and accounts are not among them.
ETC_SHOWN = (
    "/etc/alternatives", "/etc/ssl/certs", "/etc/ssl/openssl.cnf", "/etc/pki/tls/certs", "/etc/ld.so.cache",
    "/etc/fonts", "/etc/localtime", "/etc/mime.types", "/etc/os-release", "/etc/protocols", "/etc/services",
)  # fmt: skip
# The guest's name and id inside, by the policy's user.
USERS: Mapping[str | None, tuple[str, int]] = {None: ("sandbox", 1000), "nobody": ("nobody", 65534)}
# The folder in a jail from which every Python interpreter imports Cloche's `sitecustomize`.
STARTUP_FOLDER, STARTUP_FILE = "/etc/cloche", "sitecustomize.py"
STAND_INS = ("without_shm.py", "stand_ins/_multiprocessing.py", "stand_ins/_posixshmem.py")
LAYERS_VARIABLE = "CLOCHE_LAYERS"
SYSTEM_PATH = "/usr/local/bin:/usr/bin:/bin"
DEVICES = ("null", "zero", "full", "random", "urandom")
DEVICE_LINKS = (
    ("/proc/self/fd", "dev/fd"), ("/proc/self/fd/0", "dev/stdin"), ("/proc/self/fd/1", "dev/stdout"),
    ("/proc/self/fd/2", "dev/stderr"),
)  # fmt: skip
_UNIX = "".join(f"{kind} required pam_unix.so\n" for kind in ("auth", "account", "password", "session"))
# Files that useradd, adduser, su and runuser read besides the accounts.
USER_FILES: Mapping[str, str] = {
    "pam.d/other": _UNIX,
    "pam.d/su": f"auth sufficient pam_rootok.so\n{_UNIX}",
    "pam.d/runuser": "auth sufficient pam_rootok.so\nsession required pam_unix.so\n",
    "pam.d/chfn": f"auth sufficient pam_rootok.so\n{_UNIX}",
    "pam.d/chsh": f"auth sufficient pam_rootok.so\n{_UNIX}",
    "shells": "/bin/sh\n/bin/bash\n",
    "login.defs": "UID_MIN 1000\nUID_MAX 8000\nGID_MIN 1000\nGID_MAX 8000\nSYS_UID_MIN 100\nSYS_UID_MAX 999\n"
    "SYS_GID_MIN 100\nSYS_GID_MAX 999\nENCRYPT_METHOD SHA512\nUSERGROUPS_ENAB yes\nCREATE_HOME yes\n",
    "adduser.conf": "DSHELL=/bin/sh\nDHOME=/home\nUSERGROUPS=yes\nLAST_UID=8000\nLAST_GID=8000\n",
}
# Files of /proc that describe the host beyond the guest's own processes, or that only an administrator should reach.
MASKED_PROC = (
    "acpi", "asound", "bus", "cmdline", "config.gz", "consoles", "diskstats", "driver", "dynamic_debug", "execdomains",
    "fs", "interrupts", "iomem", "ioports", "irq", "kallsyms", "kcore", "keys", "key-users", "kmsg", "kpagecgroup",
    "kpagecount", "kpageflags", "latency_stats", "locks", "modules", "mtrr", "pagetypeinfo", "partitions", "pressure",
    "sched_debug", "schedstat", "scsi", "slabinfo", "softirqs", "swaps", "sysrq-trigger", "sysvipc", "timer_list",
    "timer_stats", "tty", "vmallocinfo", "vmstat", "zoneinfo",
)  # fmt: skip


def system_rows() -> list[Row]:
    """Return the mounts of every jail; computed once, since they do not depend on the run."""
    return list(_system_rows())


@functools.cache
def _system_rows() -> tuple[Row, ...]:
    rows: list[Row] = []
    for path in SYSTEM_FOLDERS:
        if os.path.islink(path):
            rows.append(("symlink", os.readlink(path), path[1:]))
        elif os.path.isdir(path):
            rows.append(("bind", path, path[1:]))
    rows += [_etc_row(path) for path in etc_shown()]
    rows += [("device", name) for name in DEVICES if os.path.exists(f"/dev/{name}")]
    rows += [("symlink", points_to, target) for points_to, target in DEVICE_LINKS]
    return tuple(rows)


@functools.cache
def etc_shown() -> tuple[str, ...]:
    """Return the visible parts of /etc that exist on this host."""
    paths = [path for path in ETC_SHOWN if os.path.exists(path)]
    names = sorted(os.listdir("/etc")) if os.access("/etc", os.R_OK) else []
    return (*paths, *(f"/etc/{name}" for name in names if name == "R" or name.startswith(("python3", "java-"))))


def _etc_row(path: str) -> Row:
    """Show a part of /etc: by a link if the real file is below /usr, because a link is cheaper than a mount."""
    real = os.path.realpath(path)
    return ("symlink", real, path[1:]) if is_below(real, "/usr") else ("bind", real, path[1:])


@functools.cache
def masked_proc() -> tuple[str, ...]:
    """Return the names below /proc on this kernel that are hidden from the guest.

    Files that only root may read are not masked: the guest is never the outside root, and each mask costs every run
    time.
    """
    return tuple(name for name in MASKED_PROC if _mode(f"/proc/{name}") & 0o004)


def _mode(path: str) -> int:
    try:
        return os.stat(path).st_mode
    except OSError:
        return 0


# TEST-NET-1 (RFC 5737), unreachable; without a nameserver line, the resolver asks loopback (resolv.conf(5)).
NO_NAME_SERVER = "192.0.2.1"


def etc_rows(user: str, uid: int, name_server: str = NO_NAME_SERVER) -> list[Row]:
    """Return the synthetic files of /etc: accounts, names, and a resolver, whose default address is unreachable."""
    nobody = "" if user == "nobody" else "nobody:x:65534:65534:nobody:/:/usr/sbin/nologin\n"
    group = "" if user == "nobody" else "nogroup:x:65534:\n"
    return [
        ("text", "etc/passwd", f"{user}:x:{uid}:{uid}:{user}:/workspace:/bin/sh\n{nobody}"),
        ("text", "etc/group", f"{user}:x:{uid}:\n{group}"),
        ("text", "etc/hosts", "127.0.0.1 localhost cloche\n::1 localhost\n"),
        ("text", "etc/nsswitch.conf", "passwd: files\ngroup: files\nhosts: files dns\n"),
        ("text", "etc/resolv.conf", f"nameserver {name_server}\n"),
        ("text", "etc/hostname", "cloche\n"),
    ]


def account_rows(policy: Policy, home: str) -> list[Row]:
    """Return the accounts of a live sandbox; with several users, also the files that account tools need."""
    user, uid = USERS.get(policy.user, USERS[None])
    user, has_users = policy.account or user, policy.users
    nobody = [] if user == "nobody" else [("nobody", 65534, "/", "/usr/sbin/nologin")]
    root = [("root", 0, "/root", login_shell())] if has_users else []
    accounts = [*root, (user, uid, home, login_shell() if policy.account else "/bin/sh"), *nobody]
    passwd = "".join(
        f"{user_name}:x:{account_id}:{account_id}:{user_name}:{where}:{shell}\n"
        for user_name, account_id, where, shell in accounts
    )
    groups = [(user_name if user_name != "nobody" else "nogroup", account_id) for user_name, account_id, *_ in accounts]
    if has_users:
        groups.append(("users", 100))
    group = "".join(f"{group_name}:x:{group_id}:\n" for group_name, group_id in groups)
    rows: list[Row] = [("text", "etc/passwd", passwd), ("text", "etc/group", group)]
    if has_users:
        rows += [
            ("text", "etc/shadow", "".join(f"{user_name}:*:19000:0:99999:7:::\n" for user_name, *_ in accounts), 0o600)
        ]
        rows += [("text", "etc/gshadow", "".join(f"{group_name}:*::\n" for group_name, _ in groups), 0o600)]
        rows += [("text", f"etc/{name}", text) for name, text in USER_FILES.items()]
    return rows


@functools.cache
def login_shell() -> str:
    """Return the shell of accounts with a name of the caller's choice, and of root."""
    return "/bin/bash" if os.path.exists("/bin/bash") else "/bin/sh"


def guest_variables(workspace: str = "/workspace", tmp: str = "/tmp") -> dict[str, str]:
    """Return the variables of every guest, without PATH."""
    return {
        "HOME": workspace,
        "TMPDIR": tmp,
        "XDG_CACHE_HOME": f"{tmp}/.cache",
        "LANG": "C.UTF-8",
        "PYTHONDONTWRITEBYTECODE": "1",
    }


def search_path() -> str:
    """Return the PATH of a guest that sees the host's system and the caller's interpreter."""
    programs = os.path.dirname(sys.executable)
    return SYSTEM_PATH if is_below(programs, "/usr") else f"{programs}:{SYSTEM_PATH}"


def _ancestors(path: str) -> list[str]:
    folders = []
    while path != "/":
        path = os.path.dirname(path)
        folders.append(path)
    return folders


def is_below(path: str, folder: str) -> bool:
    """Tell whether `path` is `folder` or lies in it; both absolute and normal."""
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def needs_private_mount(folder: str) -> bool:
    """Tell whether only the owner can read `folder`, so that a plain bind mount would be unreadable inside."""
    mode = os.stat(folder).st_mode
    return mode & 0o005 != 0o005


def is_readable_by_others(path: str) -> bool:
    """Tell whether other users may read `path` once they reach it, and search it if it is a folder."""
    mode = os.stat(path).st_mode
    needed = 0o005 if stat.S_ISDIR(mode) else 0o004
    return mode & needed == needed


def is_reachable_by_others(path: str) -> bool:
    """Tell whether other users may reach `path`: every folder above it is searchable by others."""
    return not closed_to_others(path)


def closed_to_others(path: str) -> str:
    """Return a folder above `path` that others may not search; empty if there is none."""
    return next((folder for folder in _ancestors(path) if not os.stat(folder).st_mode & 0o001), "")


@functools.cache
def startup_text() -> str:
    """Return the `sitecustomize` that every Python interpreter inside runs."""
    with open(f"{os.path.dirname(os.path.dirname(__file__))}/interpreter/{STARTUP_FILE}", encoding="utf-8") as file:
        return file.read()


@functools.cache
def startup_files(*, has_stand_ins: bool) -> dict[str, str]:
    """Return the files of the startup folder, with replacements for /dev/shm if the sandbox has none."""
    if not has_stand_ins:
        return {STARTUP_FILE: startup_text()}
    folder, texts = f"{os.path.dirname(os.path.dirname(__file__))}/interpreter", {}
    for name in STAND_INS:
        with open(f"{folder}/{name}", encoding="utf-8") as file:
            texts[os.path.basename(name)] = file.read()
    return {STARTUP_FILE: startup_text(), **texts}


def with_startup(env: Mapping[str, str], folder: str = STARTUP_FOLDER) -> dict[str, str]:
    """Put the startup folder first in PYTHONPATH, before all other entries."""
    python_path = env.get("PYTHONPATH", "")
    is_there = python_path.partition(os.pathsep)[0] == folder
    return (
        dict(env)
        if is_there
        else {**env, "PYTHONPATH": f"{folder}{os.pathsep}{python_path}" if python_path else folder}
    )


def with_layers(env: Mapping[str, str], layers: Sequence[str], sites: Sequence[str] | None = None) -> dict[str, str]:
    """Add layers of packages, by the paths that programs inside see, to an environment.

    `sites` are the folders from which Python imports, if not every layer has one; our `sitecustomize` reads them.
    """
    if not layers:
        return dict(env)
    path = os.pathsep.join(filter(None, (*(f"{layer}/bin" for layer in layers), env.get("PATH", ""))))
    return {**env, "PATH": path, LAYERS_VARIABLE: os.pathsep.join(sites_of(layers) if sites is None else sites)}


def sites_of(layers: Sequence[str]) -> list[str]:
    """Return the layers' folders from which Python imports."""
    return [f"{layer}/site" for layer in layers]
