"""A program `cloche` for tests that type many commands: it has one process that has imported the modules run them."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SERVER = Path(__file__).parent / "programs" / "imported.py"
# Without `site` and the modules of Python's own, it starts in a few milliseconds.
PROGRAM = """\
#!{python} -IS
import marshal, posix, sys, _socket
asking = _socket.socket(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
asking.connect({socket!r})
mask = posix.umask(0)
posix.umask(mask)
told = marshal.dumps((sys.argv[1:], posix.getcwd(), mask, posix.environ))
streams = b"".join(number.to_bytes(4, sys.byteorder) for number in range(3))
asking.sendmsg([told], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, streams)])
posix._exit(int(asking.recv(4) or 125))
"""


@contextmanager
def imported() -> Iterator[Path]:
    """Give the folder of a program `cloche` whose commands run in forks of one process."""
    with tempfile.TemporaryDirectory() as folder:
        socket, program = f"{folder}/socket", Path(folder, "cloche")
        program.write_text(PROGRAM.format(python=sys.executable, socket=socket))
        program.chmod(0o755)
        words = [sys.executable, str(SERVER), socket]
        with subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as server:
            try:
                assert server.stdout is not None
                assert server.stdout.readline() == b"\n"
                yield Path(folder)
            finally:
                server.kill()
