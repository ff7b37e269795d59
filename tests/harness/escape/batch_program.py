"""Run many attempts one after another in one run, each in a child of its own: the inside of batch.py.

This text runs wherever attempts run, so it imports nothing of ours. `TOLD` is put before it: JSON with the prelude and
the attempts. Standard output gets a line of JSON when one begins and when it has ended. What it leaves behind is
removed before the next, unless it is said to stay; one that takes this process with it is the last that was begun.
"""

import ctypes
import json
import os
import select
import shutil
import signal
import sys
import time
import types

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

KEPT_BYTES = 1 << 16
IPC_RMID = 0
SHARED = ("/tmp", "/dev/shm")
QUEUES = (("shm", "shmctl"), ("sem", "semctl"), ("msg", "msgctl"))

told = json.loads(TOLD)  # noqa: F821 - from before this text
assert os.readlink("/proc/self/ns/pid") != told["outside"], "everything that this may kill would be killed on the host"
prelude = compile(told["prelude"], "prelude", "exec")
home = os.path.expanduser("~")
libc = ctypes.CDLL(None)


def tell(**row: object) -> None:
    """Say something to the host."""
    data = (told["word"] + json.dumps(row) + "\n").encode()
    while data:
        data = data[os.write(1, data) :]


def run_attempt(one: "dict[str, Any]", folder: str, ends: list[int]) -> None:
    """Be the attempt; never returns."""
    code = 70
    try:
        os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
        for target, end in zip((1, 2), ends, strict=True):
            os.dup2(end, target)
        os.closerange(3, 1024)
        os.chdir(folder)
        if one["language"] != "python":
            os.execvp(one["language"], [one["language"], "-c", one["code"], one["language"], one["argument"]])
        sys.argv = ["main.py", one["argument"]]
        sys.modules["__main__"] = module = types.ModuleType("__main__")
        exec(prelude, module.__dict__)
        exec(compile(one["code"], "<attempt>", "exec"), module.__dict__)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        os._exit(code & 0xFF)


def receive(outs: list[int], pid: int, until: float) -> tuple[list[bytes], bool]:
    """Return what comes out of the pipes until the process ends, which it does at the latest when its time is over."""
    received, is_late = [b"", b""], False
    over = os.pidfd_open(pid)
    poll = select.poll()
    for fd in (over, *outs):
        poll.register(fd, select.POLLIN)
    has_ended = False
    while not has_ended:
        left = until - time.monotonic()
        ready = [fd for fd, _ in poll.poll(max(0, left) * 1000)]
        if not ready:
            is_late = True
            os.kill(pid, signal.SIGKILL)
            until += 3600
        has_ended = over in ready
        for index, fd in enumerate(outs):
            if fd in ready and not take(fd, received, index):
                poll.unregister(fd)
    for index, fd in enumerate(outs):
        os.set_blocking(fd, False)
        while len(received[index]) < KEPT_BYTES and take(fd, received, index):
            pass
    os.close(over)
    return received, is_late


def take(fd: int, received: list[bytes], index: int) -> bool:
    """Read what is there, and keep it as long as there is room; tell whether there may be more."""
    try:
        data = os.read(fd, 65536)
    except BlockingIOError:
        return False
    received[index] = (received[index] + data)[:KEPT_BYTES]
    return bool(data)


def hits() -> list[int]:
    """Return how often the kernel refused memory, and processes."""
    found = []
    for name, key in (("memory", "oom_kill"), ("pids", "max")):
        try:
            with open(f"/sys/fs/cgroup/{name}.events") as file:
                found.append(int(dict(line.split() for line in file).get(key, 0)))
        except OSError:
            found.append(0)
    return found


def status_of(code: int, is_late: bool, before: list[int], after: list[int]) -> str:
    """Name the end of an attempt as a run's would be named."""
    if is_late:
        return "timeout"
    if code and after[0] > before[0]:
        return "out_of_memory"
    if code and after[1] > before[1]:
        return "pids_limit"
    return "signaled" if code < 0 else "error" if code else "ok"


def end_all() -> None:
    """Kill everything else in here, until there is nothing."""
    for _ in range(200):
        try:
            os.kill(-1, signal.SIGKILL)
        except ProcessLookupError:
            return
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            pass
        if not others():
            return
        time.sleep(0.01)


def others() -> list[str]:
    """Return the processes besides this and the first, those that are dead left out."""
    found = []
    for entry in os.listdir("/proc"):
        try:
            if entry.isdigit() and int(entry) not in (1, os.getpid()):
                with open(f"/proc/{entry}/stat") as file:
                    found += [entry] if file.read().rpartition(")")[2].split()[0] not in "ZX" else []
        except OSError:
            pass
    return found


def tidy(folder: str, kept: dict[str, set[str]]) -> None:
    """Remove what an attempt left in files and in System V memory."""
    shutil.rmtree(folder, ignore_errors=True)
    for place in (home, *SHARED):
        for name in set(os.listdir(place)) - kept[place]:
            path = f"{place}/{name}"
            try:
                os.unlink(path)
            except OSError:
                shutil.rmtree(path, ignore_errors=True)
    for kind, control in QUEUES:
        try:
            with open(f"/proc/sysvipc/{kind}") as rows:
                numbers = [int(row.split()[1]) for row in rows.readlines()[1:]]
        except OSError:
            continue
        for number in numbers:
            getattr(libc, control)(number, *((0, IPC_RMID) if kind == "sem" else (IPC_RMID, None)))


def run_one(number: int, one: "dict[str, Any]") -> None:
    """Run one, and tell how it went."""
    folder = f"{home}/{one['folder']}"
    kept = {place: set(os.listdir(place)) for place in (home, *SHARED)}
    os.mkdir(folder)
    tell(begins=number)
    pipes, before, began = [os.pipe(), os.pipe()], hits(), time.monotonic()
    pid = os.fork()
    if pid == 0:
        run_attempt(one, folder, [1, 2] if told["is_shown"] else [end for _, end in pipes])
    for _, end in pipes:
        os.close(end)
    received, is_late = receive([out for out, _ in pipes], pid, began + one["timeout_s"])
    seconds = time.monotonic() - began
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    for out, _ in pipes:
        os.close(out)
    if not one["stays"]:
        end_all()
        tidy(folder, kept)
    stdout, stderr = (data.decode(errors="backslashreplace") for data in received)
    status = status_of(code, is_late, before, hits())
    tell(ended=number, stdout=stdout, stderr=stderr, exit_code=code, status=status, seconds=seconds)


for number, one in enumerate(told["attempts"]):
    run_one(number, one)
tell(over=True)
while told["waits"]:
    signal.pause()
