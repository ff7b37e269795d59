"""Attempts to leave something for the next run: the first program leaves it, the second looks for it."""

import os
from functools import partial

from tests.harness.escape.attempts import Attempt
from tests.harness.escape.controls import Controls

residue = partial(Attempt, family="residue")
LEFT = f"escape-left-{os.getpid()}"  # outside, where the suites of two users and their controls run at once


def left_file(name: str, path: str) -> Attempt:
    """Return an attempt to leave a file; outside, it lies in the home that both runs share, or where it says."""
    return residue(
        name=name,
        first=f"""
        path = os.path.expanduser("{path}")
        os.makedirs(os.path.dirname(path), exist_ok=True)
        open(path, "w").write("left behind")
        """,
        code=f"""
        path = os.path.expanduser("{path}")
        if os.path.exists(path):
            os.unlink(path)
            escaped(path)
        """,
    )


ATTEMPTS = (
    left_file("a file in the workspace", "~/left"),
    left_file("a file in tmp", f"/tmp/{LEFT}"),
    left_file("a file in var tmp", f"/var/tmp/{LEFT}"),
    left_file("a file in shared memory", f"/dev/shm/{LEFT}"),
    left_file("a shell's start-up file", "~/.bashrc"),
    left_file("a module of the user", "~/.local/lib/python3/site-packages/usercustomize.py"),
    left_file("a module that shadows the library's", "~/json.py"),
    left_file("a git hook", "~/.git/hooks/pre-commit"),
    residue(
        name="a module that is loaded in the library's place",
        first="""open(os.path.expanduser("~/antigravity_left.py"), "w").write("here = 1")""",
        code="""
        sys.path.insert(0, os.path.expanduser("~"))
        try:
            import antigravity_left
        except ImportError:
            contained("it is not there")
        escaped("loaded it")
        """,
    ),
    residue(
        name="a start-up file that a shell reads",
        first="""
        with open(os.path.expanduser("~/.profile"), "w") as file:
            file.write("echo ESCAPED by the start-up file")
        """,
        code="""
        import subprocess
        out = subprocess.run(["sh", "-lc", "true"], capture_output=True, text=True).stdout
        print(out, flush=True)
        """,
    ),
    residue(
        name="bytecode of the library",
        root_only="it is root's",
        first="""
        path = os.path.join(os.path.dirname(os.__file__), "__pycache__", "escape_left.pyc")
        try:
            open(path, "w").write("left behind")
        except OSError:
            pass
        """,
        code="""
        path = os.path.join(os.path.dirname(os.__file__), "__pycache__", "escape_left.pyc")
        if os.path.exists(path):
            os.unlink(path)
            escaped(path)
        """,
    ),
    residue(
        name="shared memory",
        first="""syscall(29, 0x7E5C0001, 4096, 0o1666)""",
        code="""
        syscall(31, syscall(29, 0x7E5C0001, 0, 0), 0, 0)
        escaped("the segment is still there")
        """,
    ),
    residue(
        name="a semaphore",
        first="""syscall(64, 0x7E5C0002, 1, 0o1666)""",
        code="""
        syscall(66, syscall(64, 0x7E5C0002, 0, 0), 0, 0)
        escaped("it is still there")
        """,
    ),
    residue(
        name="a message",
        first="""
        import struct
        syscall(69, syscall(68, 0x7E5C0003, 0o1666), struct.pack("q", 1) + b"left", 4, 0)
        """,
        code="""
        syscall(71, syscall(68, 0x7E5C0003, 0), 0, 0)
        escaped("it is still there")
        """,
    ),
    residue(
        name="a named message queue",
        first="""syscall(240, b"escape-left", os.O_RDWR | os.O_CREAT, 0o666, 0)""",
        code="""
        syscall(241, b"escape-left")
        escaped("it is still there")
        """,
    ),
    residue(
        name="a key",
        first="""syscall(248, b"user", b"escape-left", b"left", 4, -4)""",
        code="""
        key = syscall(250, 10, -4, b"user", b"escape-left", 0)
        syscall(250, 9, key, -4)
        escaped("it is still there")
        """,
    ),
    residue(
        name="a process that listens without an address",
        first="""
        import socket, time
        if os.fork() == 0:
            quiet = os.open("/dev/null", os.O_RDWR)
            for stream in range(3):
                os.dup2(quiet, stream)
            os.setsid()
            listener = socket.socket(socket.AF_UNIX)
            listener.bind("\\0escape-left")
            listener.listen()
            time.sleep(1)
            os._exit(0)
        time.sleep(0.1)
        """,
        code="""
        import socket
        socket.socket(socket.AF_UNIX).connect("\\0escape-left")
        escaped("it still listens")
        """,
    ),
    residue(
        name="a process that listens on loopback",
        first="""
        import socket, time
        if os.fork() == 0:
            quiet = os.open("/dev/null", os.O_RDWR)
            for stream in range(3):
                os.dup2(quiet, stream)
            os.setsid()
            listener = socket.socket()
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(("127.0.0.1", 47613))
            listener.listen()
            time.sleep(1)
            os._exit(0)
        time.sleep(0.1)
        """,
        code="""
        import socket
        socket.create_connection(("127.0.0.1", 47613))
        escaped("it still listens")
        """,
    ),
    residue(
        name="a process that waits",
        first="""
        import time
        if os.fork() == 0:
            quiet = os.open("/dev/null", os.O_RDWR)
            for stream in range(3):
                os.dup2(quiet, stream)
            os.setsid()
            syscall(157, 15, b"escape-left", 0, 0, 0)
            time.sleep(1)
            os._exit(0)
        time.sleep(0.05)
        """,
        code="""
        for entry in filter(str.isdigit, os.listdir("/proc")):
            try:
                if open(f"/proc/{entry}/comm").read().strip() == "escape-left":
                    escaped(f"process {entry}")
            except OSError:
                pass
        """,
    ),
)


def test_contained(attempt: Attempt, where: str, controls: Controls) -> None:
    """A run finds nothing of the run before it."""
    controls.assert_contained(attempt, where)
