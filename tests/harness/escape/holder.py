"""A process that holds one canary in every place where another process might reach it.

It runs on the host and, as the neighbour, in a sandbox of its own. Arguments: what to hold, as JSON. It prints where
everything is as one line of JSON (what this place does not allow is left out), then holds it until its input ends or
its time is over.
"""

import ctypes
import fcntl
import json
import os
import select
import signal
import socket
import struct
import sys
import threading
import time

WANTED = json.loads(sys.argv[1])
SECRET = WANTED["secret"].encode()
LIBC = ctypes.CDLL(None, use_errno=True)
HELD = {"pid": os.getpid(), "mark": WANTED["mark"]}
KEPT = []
LIBC.prctl(15, WANTED["mark"][-15:].encode(), 0, 0, 0)  # a name to be known by: in a sandbox the command line has none
MQ_OPEN, ADD_KEY, SHMGET, SHMAT, MSGGET, MSGSND = 240, 248, 29, 30, 68, 69


def syscall(number, *arguments):
    LIBC.syscall.restype = ctypes.c_long
    passed = [a if isinstance(a, bytes | ctypes.Array) else ctypes.c_void_p(a) for a in arguments]
    result = LIBC.syscall(ctypes.c_long(number), *passed)
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def serve(family, address, kind=socket.SOCK_STREAM):
    """Listen, answer whoever comes with the secret, and return the socket."""
    listener = socket.socket(family, kind)
    listener.bind(address)
    if kind == socket.SOCK_STREAM:
        listener.listen(64)
    KEPT.append(listener)

    def answer():
        while True:
            if kind == socket.SOCK_STREAM:
                caller, _ = listener.accept()
                caller.setblocking(False)
                try:
                    caller.recv(64)  # unread data would make the end of the connection a reset
                except OSError:
                    pass
                caller.send(SECRET)
                caller.close()
            else:
                _, caller = listener.recvfrom(64)
                if caller:
                    listener.sendto(SECRET, caller)

    threading.Thread(target=answer, daemon=True).start()
    return listener


def tcp4():
    HELD["tcp4"] = serve(socket.AF_INET, ("127.0.0.1", 0)).getsockname()[1]


def tcp6():
    HELD["tcp6"] = serve(socket.AF_INET6, ("::1", 0)).getsockname()[1]


def udp4():
    HELD["udp4"] = serve(socket.AF_INET, ("127.0.0.1", 0), socket.SOCK_DGRAM).getsockname()[1]


def udp6():
    HELD["udp6"] = serve(socket.AF_INET6, ("::1", 0), socket.SOCK_DGRAM).getsockname()[1]


def abstract():
    serve(socket.AF_UNIX, "\0" + WANTED["mark"])
    serve(socket.AF_UNIX, "\0" + WANTED["mark"] + "-dgram", socket.SOCK_DGRAM)
    HELD["abstract"] = WANTED["mark"]


def path_socket():
    path = os.path.join(WANTED["folder"], WANTED["mark"] + ".sock")
    serve(socket.AF_UNIX, path)
    serve(socket.AF_UNIX, path + ".dgram", socket.SOCK_DGRAM)
    for one in (path, path + ".dgram"):
        os.chmod(one, 0o777)
    HELD["socket"] = path


def sysv():
    HELD["key"] = WANTED["key"]
    segment = syscall(SHMGET, WANTED["key"], 4096, 0o1666)
    HELD["shm"] = segment
    address = syscall(SHMAT, segment, 0, 0)
    ctypes.memmove(address, SECRET, len(SECRET))
    HELD["msg"] = queue = syscall(MSGGET, WANTED["key"], 0o1666)
    for _ in range(8):
        syscall(MSGSND, queue, struct.pack("q", 1) + SECRET, len(SECRET), 0)


def posix_shm():
    HELD["dev_shm"] = path = "/dev/shm/" + WANTED["mark"]
    with open(path, "wb") as file:
        file.write(SECRET)
    os.chmod(path, 0o644)


def posix_mq():
    name = WANTED["mark"]
    small = struct.pack("8q", 0, 8, 64, 0, 0, 0, 0, 0)  # of the usual size nine are all that a user may have
    os.umask(0)
    KEPT.append(syscall(MQ_OPEN, name.encode(), os.O_RDWR | os.O_CREAT | os.O_NONBLOCK, 0o666, small))
    os.umask(0o022)
    HELD["mq"] = name
    for _ in range(8):
        syscall(242, KEPT[-1], SECRET, len(SECRET), 0, 0)


def locks():
    """Lock files that everybody sees: a flock on one, a record lock on another."""
    *candidates, recorded = WANTED["locked"]
    for path in candidates:
        KEPT.append(os.open(path, os.O_RDONLY))
        try:
            fcntl.flock(KEPT[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(KEPT.pop())
            continue
        HELD["flocked"] = path
        break
    else:
        raise OSError(f"each of {candidates} is locked by another")
    KEPT.append(os.open(recorded, os.O_RDONLY))
    fcntl.lockf(KEPT[-1], fcntl.LOCK_SH)
    HELD["recorded"] = recorded


def memory():
    KEPT.append(ctypes.create_string_buffer(SECRET))
    HELD["address"] = ctypes.addressof(KEPT[-1])
    HELD["length"] = len(SECRET)


def descriptor():
    read, write = os.pipe()
    os.write(write, SECRET)
    KEPT.append(write)
    HELD["fd"] = read


def let_go(*_):
    """Remove what the kernel would keep after us, then end."""
    for number, arguments in (
        (31, (HELD.get("shm", -1), 0, 0)),
        (71, (HELD.get("msg", -1), 0, 0)),
        (241, (HELD.get("mq", "").encode(),)),
    ):
        try:
            syscall(number, *arguments)
        except OSError:
            pass
    if "dev_shm" in HELD:
        os.unlink(HELD["dev_shm"])
    os._exit(0)


def main():
    signal.signal(signal.SIGTERM, let_go)
    signal.signal(signal.SIGCONT, signal.SIG_IGN)
    for hold in (tcp4, tcp6, udp4, udp6, abstract, path_socket, sysv, posix_shm, posix_mq, locks, memory, descriptor):
        try:
            hold()
        except OSError as error:
            HELD.setdefault("missing", []).append(f"{hold.__name__}: {error}")
    print(json.dumps(HELD), flush=True)
    deadline = time.monotonic() + WANTED["seconds"]
    while (left := deadline - time.monotonic()) > 0:
        if WANTED["until_input_ends"]:
            select.select([0], [], [], left)
            break
        time.sleep(left)
    let_go()


main()
