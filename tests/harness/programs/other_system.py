"""Call Cloche's command line, or a program given as text, as if this were macOS or Windows.

`other_system.py darwin|win32 cloche words...`, or `other_system.py darwin|win32 -c PROGRAM words...`. What Cloche's
modules import is not what is there: `sys.platform` is another, modules and names of Linux are gone. The standard
library and other packages are left alone: they have files of their own for other systems, which nobody can load here.
"""

from __future__ import annotations

import builtins
import importlib
import re
import sys
import types
from typing import Any

LINUX = {
    "os": (
        r"eventfd|EFD_|timerfd|TFD_|sched_|SCHED_|pidfd_open|P_PIDFD|PIDFD_"
        r"|O_(PATH|TMPFILE|DIRECT$|LARGEFILE|NOATIME|RSYNC)|memfd_create|MFD_|setns|unshare|CLONE_|pipe2"
        r"|[gs]etres[ug]id|splice|SPLICE_|copy_file_range|posix_fa|POSIX_FADV|\w*xattr|XATTR_|RWF_"
        r"|preadv2|pwritev2|getrandom|GRND_|lockf$|posix_openpt"
    ),
    "signal": (r"SIGRT|SIG(POLL|PWR|STKFLT|CLD)$|sigtimedwait|sigwaitinfo|pidfd_send_signal"),
    "select": (r"epoll|EPOLL"),
    "socket": (
        r"(AF|PF)_(NETLINK|PACKET|VSOCK|ALG|CAN|TIPC|RDS|QIPCRTR)|SOCK_(CLOEXEC|NONBLOCK)"
        r"|MSG_(NOSIGNAL|CMSG_CLOEXEC)|SO_(PEERCRED|PASSCRED|DOMAIN|PROTOCOL|MARK|BINDTODEVICE|PRIORITY)"
        r"|SCM_CREDENTIALS|TCP_(USER_TIMEOUT|FASTOPEN_|QUICKACK|CORK)"
    ),
    "fcntl": (r"F_(ADD_SEALS|GET_SEALS|SEAL_|SETPIPE_SZ|GETPIPE_SZ|OFD_|NOTIFY|SETLEASE|GETLEASE)|DN_"),
    "resource": (r"RLIMIT_(SIGPENDING|MSGQUEUE|NICE|RTPRIO|RTTIME|OFILE)|prlimit|RUSAGE_THREAD"),
}
UNIX = {
    "os": (
        r"fork|register_at_fork|(get|set|gete|sete|getre|setre)[ug]id$|[gs]etgroups|initgroups"
        r"|getgrouplist|getlogin_|[l f]?chown|fchmod|chroot|mkfifo|mknod|makedev|major|minor"
        r"|O_(NOFOLLOW|DIRECTORY|CLOEXEC|NONBLOCK|NOCTTY|D?SYNC|ASYNC|ACCMODE|NDELAY)|W[A-Z]+$|killpg"
        r"|[gs]etpg|[gs]etsid|uname|f?statvfs|ST_|f?pathconf|sysconf|confstr|posix_spawn|POSIX_"
        r"|p(read|write)|(read|write)v|wait3|wait4|waitid|P_(ALL|PID|PGID)|getloadavg|openpty|login_tty"
        r"|nice|[gs]etpriority|PRIO_|sync$|tc[gs]etpgrp|ttyname|sendfile|ctermid|lockf|F_|[gs]et_blocking"
        r"|fwalk|RTLD_|environb|getenvb|EX_(USAGE|NO|SO|TE|CA|CO|UN|IO|PR|DATA)|fchdir|fdatasync|lchflags"
    ),
    "signal": (
        r"SIG(?!ABRT$|FPE$|ILL$|INT$|SEGV$|TERM$|_DFL$|_IGN$)|pthread_|sigwait|sigpending|[gs]etitimer"
        r"|ITIMER|alarm|pause|siginterrupt"
    ),
    "select": (r"poll|POLL"),
    "socket": (r"AF_UNIX|SCM_RIGHTS|CMSG_|send_fds|recv_fds|sethostname|if_nametoindex$"),
}
NO_MODULES = frozenset(
    [
        "fcntl",
        "pwd",
        "grp",
        "resource",
        "termios",
        "tty",
        "pty",
        "posix",
        "syslog",
        "readline",
        "curses",
        "spwd",
        "crypt",
    ]
)


class Elsewhere(types.ModuleType):
    """Be a module of the standard library without names that another system has not."""

    def __init__(self, module: types.ModuleType, gone: str):
        super().__init__(module.__name__, module.__doc__)
        names = [name for name in dir(module) if not (gone and re.match(gone, name))]
        self.__dict__.update({name: getattr(module, name) for name in names})


def pretend(system: str) -> None:
    """Give Cloche's modules what they would find on that system."""
    tables = [LINUX, UNIX] if system == "win32" else [LINUX]
    missing = NO_MODULES if system == "win32" else frozenset[str]()
    names = {name for table in tables for name in table} - missing
    given: dict[str, Any] = {
        name: Elsewhere(
            importlib.import_module(name), "|".join(f"(?:{table[name]})" for table in tables if name in table)
        )
        for name in names
    }
    given["sys"] = Elsewhere(sys, "")
    given["sys"].platform = system
    given["os"].supports_dir_fd = set() if system == "win32" else sys.modules["os"].supports_dir_fd
    real = builtins.__import__

    def elsewhere(name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:  # noqa: A002
        asks = (globals or {}).get("__name__") or ""
        if level or asks.partition(".")[0] not in ("cloche", "__elsewhere__"):
            return real(name, globals, locals, fromlist, level)
        if name.partition(".")[0] in missing:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        if name in given:
            return given[name]
        return real(name, globals, locals, fromlist, level)

    builtins.__import__ = elsewhere


def main() -> None:
    """Do what the command line says."""
    system, what, *words = sys.argv[1:]
    import asyncio  # noqa: F401 - whose files for this system are to be loaded
    import multiprocessing  # noqa: F401
    import subprocess  # noqa: F401

    is_text = what == "-c"
    sys.argv = ["-c", *words[1:]] if is_text else [what, *words]
    pretend(system)
    if is_text:
        exec(compile(words[0], "<program>", "exec"), {"__name__": "__elsewhere__"})
        return
    from cloche.cli import main as call

    call()


if __name__ == "__main__":
    main()
