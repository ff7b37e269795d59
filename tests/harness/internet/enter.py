"""Enter the namespaces of a process and run a command there with all capabilities in them: `enter PID COMMAND...`.

`nsenter` does that for root alone: who is not loses them with its `execve`.
"""

from __future__ import annotations

import os
import sys

from cloche.jail.syscalls import call

from .build import hand_on_capabilities


def main(pid: str, *command: str) -> None:
    """Become the command."""
    namespaces = [os.open(f"/proc/{pid}/ns/{name}", os.O_RDONLY) for name in ("user", "mnt", "net", "ipc")]
    for fd in namespaces:
        call("setns", fd, 0)
    hand_on_capabilities()
    os.execvp(command[0], command)


main(*sys.argv[1:])
