"""Run `cloche` for those who ask at a socket, each in a process of its own that has the modules already.

Of a command that prints a line, most is the import of modules. The fork has the streams, the folder and the variables
of who asks, and its exit code goes back; signals do not, but for the end: when who asks is killed, it gets SIGTERM.
Who asks is the program of tests/harness/commands.py.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import marshal
import os
import select
import signal
import socket
import sys

import cloche.cli

MODULES = (
    "alembic.command", "asyncio", "cloche.agent.toolbox", "cloche.audit.writer", "cloche.backends.local.backend",
    "cloche.cli.app", "cloche.records.environment", "cloche.records.reproductions", "cloche.records.workspace",
    "cloche.sync", "sqlalchemy.dialects.sqlite",
)  # fmt: skip
MOST_BYTES = 1 << 20


def main(path: str, *modules: str) -> None:
    """Fork for each who asks, until somebody ends this."""
    for name in (*MODULES, *modules):
        importlib.import_module(name)
    gc.freeze()  # or each fork would copy what it looks at
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(path)
        listener.listen()
        print(flush=True)
        while True:
            asking, _ = listener.accept()
            if os.fork() == 0:
                break
            asking.close()
            reap()
    command = os.fork()
    if command == 0:
        become(asking)
        try:
            cloche.cli.main()
        except SystemExit as end:
            cloche.cli.leave(end.code)
        cloche.cli.leave(None)
    with contextlib.suppress(OSError):
        asking.send(b"%d" % command)
    ends = select.poll()
    ends.register(ended := os.pidfd_open(command), select.POLLIN)
    ends.register(asking, 0)
    if ended not in dict(ends.poll()):  # who asks was killed
        os.kill(command, signal.SIGTERM)
    code = os.waitstatus_to_exitcode(os.waitpid(command, 0)[1])
    with contextlib.suppress(OSError):
        asking.send(b"%d" % code)
    os._exit(0)


def reap() -> None:
    """Wait for who has ended."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def become(asking: socket.socket) -> None:
    """Take over what makes a process one of who asks."""
    told, streams, _, _ = socket.recv_fds(asking, MOST_BYTES, 3)
    asking.close()
    sys.argv[1:], folder, mask, variables = marshal.loads(told)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(folder)
    os.umask(mask)
    os.environb.clear()
    os.environb.update(variables)


if __name__ == "__main__":
    words = sys.argv[1:]
    del sys.argv[1:]
    main(*words)
