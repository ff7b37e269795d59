"""`sudo` inside a sandbox with several users: it asks the sandbox's first process to run a command as another user.

The sandbox's ordinary user may run everything, without a password, as in E2B's template. Options, variables, exit codes
and signals are those of sudo(8), as far as they make sense without passwords. See `init/sudo.py` for the other end.
"""

from __future__ import annotations

import array
import fcntl
import getopt
import json
import os
import pwd
import re
import select
import signal
import socket
import sys
import termios
import tty

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn

NAME = b"\0cloche-sudo"
SHORT, LONG = "+ABEHKNPSVbehiklnsvC:D:R:T:U:a:c:g:p:r:t:u:", (
    "askpass", "background", "bell", "preserve-env", "edit", "set-home", "help", "login", "remove-timestamp",
    "reset-timestamp", "list", "no-update", "non-interactive", "preserve-groups", "stdin", "shell", "version",
    "validate", "close-from=", "chdir=", "chroot=", "command-timeout=", "other-user=", "group=", "host=", "prompt=",
    "role=", "type=", "user=",
)  # fmt: skip
USAGE = "usage: sudo [-EHiknsv] [-D directory] [-g group] [-u user] [VAR=value] [-i | -s] [command [arg ...]]"
# What goes on without -E, besides the sandbox's own variables (KEPT) and names that begin with LC_.
TERMINAL = ("COLORS", "COLORTERM", "DISPLAY", "HOSTNAME", "LANG", "LANGUAGE", "LS_COLORS", "PS1", "PS2", "TERM", "TZ")
KEPT: tuple[str, ...] = ()
SEARCHED = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
FORWARDED = (
    signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM,
    signal.SIGCONT,
)  # fmt: skip
CONNECT_S = 10.0
REFUSED = b"\xff\xff\xff\xff"  # in place of a status
NOT_ALLOWED = "this user is not in the sudoers file"


def fail(message: str) -> NoReturn:
    """End with an error."""
    sys.stderr.write(f"sudo: {message}\n")
    sys.exit(1)


def main(words: list[str]) -> int:
    """Run the command; return its exit code."""
    options, words = parse(words)
    if "V" in options:
        sys.stdout.write("Sudo version 1.9 (Cloche's own)\n")
        return 0
    if "h" in options:
        sys.stdout.write(f"{USAGE}\n")
        return 0
    if "l" in options and not words:
        sys.stdout.write("This user may run the following commands here:\n    (ALL : ALL) NOPASSWD: ALL\n")
        return 0
    if not words and options.keys() & set("kKv"):
        return 0
    if "e" in options or "R" in options:
        fail("sudoedit and --chroot are not supported in this sandbox")
    variables = {}
    while words and "=" in words[0] and words[0].partition("=")[0].isidentifier():
        name, _, variables[name] = words.pop(0).partition("=")
    if not words and not options.keys() & set("is"):
        sys.stderr.write(f"{USAGE}\n")
        return 1
    account = account_of(options.get("u", "root"))
    return run(order_of(options, words, variables, account), options, account)


def parse(words: list[str]) -> tuple[dict[str, str], list[str]]:
    """Return the options by their letters, and the command."""
    letters = dict(zip((name.rstrip("=") for name in LONG), "AbBEeHhiKklNnPSsVvCDRTUghprtu", strict=True))
    preserved = [word.partition("=")[2] for word in words if word.startswith("--preserve-env=")]
    try:
        pairs, words = getopt.gnu_getopt(
            ["-E" if word.startswith("--preserve-env=") else word for word in words], SHORT, LONG
        )
    except getopt.GetoptError as error:
        fail(f"{error}\n{USAGE}")
    options = {letters.get(name[2:], name[1:]): value for name, value in pairs}
    if preserved and "E" in options:
        options["E"] = ",".join(preserved)
    return options, words


def account_of(name: str) -> pwd.struct_passwd:
    """Return the account of a name, or of `#` and a uid."""
    try:
        return pwd.getpwuid(int(name[1:])) if name.startswith("#") else pwd.getpwnam(name)
    except (KeyError, ValueError, OverflowError):
        fail(f"unknown user {name}")


def order_of(
    options: dict[str, str], words: list[str], variables: dict[str, str], account: pwd.struct_passwd
) -> dict[str, Any]:
    """Return what the first process is asked for."""
    import grp

    gid = account.pw_gid
    if "g" in options:
        group = options["g"]
        try:
            gid = int(group[1:]) if group.startswith("#") else grp.getgrnam(group).gr_gid
        except (KeyError, ValueError):
            fail(f"unknown group {group}")
    groups = sorted({gid, *os.getgrouplist(account.pw_name, account.pw_gid)})
    shell = account.pw_shell or "/bin/sh"
    name = None
    if "i" in options or "s" in options:
        shell = shell if "i" in options else os.environ.get("SHELL") or shell
        name = f"-{os.path.basename(shell)}" if "i" in options else None
        words = [shell, "-c", " ".join(re.sub(r"([^\w$-])", r"\\\1", word) for word in words)] if words else [shell]
    env = {**environment(options, words, account), **variables}
    return {
        "argv": words, "name": name, "env": env, "uid": account.pw_uid, "gid": gid, "groups": groups,
    }  # fmt: skip


def environment(options: dict[str, str], words: list[str], account: pwd.struct_passwd) -> dict[str, str]:
    """Return the command's variables, as sudo's `env_reset` leaves them."""
    own = dict(os.environ)
    named = set(options.get("E", "").split(","))
    is_login = "i" in options
    kept = (*TERMINAL, *KEPT)
    env = (
        own
        if options.get("E") == "" and not is_login
        else {name: own[name] for name in own if name in kept or name in named or name.startswith("LC_")}
    )
    caller = pwd.getpwuid(os.getuid())
    if "E" not in options or "H" in options or is_login:
        env["HOME"] = account.pw_dir
    env |= {"PATH": SEARCHED, "USER": account.pw_name, "LOGNAME": account.pw_name}
    if is_login or "SHELL" not in env:
        env["SHELL"] = account.pw_shell
    env.setdefault("TERM", own.get("TERM", "unknown"))
    env |= {"SUDO_COMMAND": " ".join(words), "SUDO_USER": caller.pw_name}
    return env | {"SUDO_UID": str(caller.pw_uid), "SUDO_GID": str(caller.pw_gid)}


def run(order: dict[str, Any], options: dict[str, str], account: pwd.struct_passwd) -> int:
    """Ask for it, pass signals on, and end as the command has."""
    folder = account.pw_dir if "i" in options else options.get("D", ".")
    fds = [number if is_open(number) else os.open(os.devnull, os.O_RDWR) for number in range(3)]
    has_terminal = os.isatty(0) and os.isatty(1)
    master = slave = -1
    if has_terminal:
        master, slave = os.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, fcntl.ioctl(0, termios.TIOCGWINSZ, bytes(8)))
        fds = [slave, slave, slave if os.isatty(2) else 2]
    try:
        fds.append(os.open(folder, os.O_PATH | os.O_DIRECTORY))
    except OSError as error:
        if "i" not in options:
            fail(f"unable to change directory to {folder}: {error.strerror}")
        fds.append(os.open("/", os.O_PATH | os.O_DIRECTORY))
    link = connect()
    woken, wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    for number in (*FORWARDED, signal.SIGWINCH):
        signal.signal(number, lambda *_: None)
    send(link, {**order, "terminal": has_terminal}, fds)
    status = carry(link, woken, master) if master < 0 else on_terminal(link, woken, master, slave)
    return end(status)


def is_open(number: int) -> bool:
    """Tell whether a descriptor is open."""
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


def connect() -> socket.socket:
    """Return a connection to the first process."""
    link = socket.socket(socket.AF_UNIX)
    link.settimeout(CONNECT_S)
    try:
        link.connect(NAME)
    except OSError as error:
        fail(f"the sandbox's first process does not answer: {error}")
    link.settimeout(None)
    return link


def send(link: socket.socket, order: dict[str, Any], fds: list[int]) -> None:
    """Send the command with its descriptors."""
    data = json.dumps(order).encode()
    packed = len(data).to_bytes(4, "big") + data
    try:
        sent = link.sendmsg([packed], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))])
        link.sendall(packed[sent:])
    except OSError:
        fail(NOT_ALLOWED)


def on_terminal(link: socket.socket, woken: int, master: int, slave: int) -> bytes:
    """Relay between the caller's terminal, which is raw meanwhile, and the command's own."""
    os.close(slave)
    before = termios.tcgetattr(0)
    tty.setraw(0, termios.TCSADRAIN)
    try:
        return carry(link, woken, master)
    finally:
        termios.tcsetattr(0, termios.TCSADRAIN, before)


def carry(link: socket.socket, woken: int, master: int) -> bytes:
    """Relay until the command has ended; return its status, empty if it is unknown."""
    inputs = [link.fileno(), woken, *([0, master] if master >= 0 else [])]
    status = b""
    while True:
        ready, _, _ = select.select(inputs, [], [], 0.05 if status else None)
        if master in ready and not relay(master, 1):
            inputs.remove(master)
            ready.append(link.fileno()) if not status else None
        elif 0 in ready and not status and not relay(0, master):
            inputs.remove(0)
        if woken in ready:
            pass_on(os.read(woken, 64), link, master)
        if link.fileno() in ready and not status:
            status = link.recv(4, socket.MSG_WAITALL)
            inputs = [master] if master in inputs else []
        if status and (master not in ready):
            return status
        if not status and link.fileno() in ready:
            return status


def relay(source: int, target: int) -> bool:
    """Copy what is there; tell whether more may come."""
    try:
        data = os.read(source, 1 << 16)
        while data:
            data = data[os.write(target, data) :]
            if not data:
                return True
    except OSError:
        pass
    return False


def pass_on(numbers: bytes, link: socket.socket, master: int) -> None:
    """Pass signals on, the size of the terminal by its own call."""
    for number in numbers:
        if number == signal.SIGWINCH:
            if master >= 0:
                fcntl.ioctl(master, termios.TIOCSWINSZ, fcntl.ioctl(0, termios.TIOCGWINSZ, bytes(8)))
        else:
            link.sendall(bytes((number,)))


def end(status: bytes) -> int:
    """Return the exit code, or end by the command's signal."""
    if len(status) < 4:
        fail("the end of the command is not known")
    if status == REFUSED:
        fail(NOT_ALLOWED)
    code = os.waitstatus_to_exitcode(int.from_bytes(status, "big"))
    if code < 0:
        signal.signal(-code, signal.SIG_DFL) if -code not in (signal.SIGKILL, signal.SIGSTOP) else None
        os.kill(os.getpid(), -code)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
