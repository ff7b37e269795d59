"""Attempts to use more than the limits give: memory, processes, threads, files, disk, processor, time."""

from functools import partial

from tests.harness.escape.attempts import BOTH, Attempt
from tests.harness.escape.checks import returns_by
from tests.harness.escape.controls import Controls

SMALL = {"memory": "48m", "disk": "16m", "timeout": 12}
ALL_OF_IT = 320  # MiB: more than the memory, the workspace, /tmp and /dev/shm together

memory = partial(Attempt, family="resources", limits={**SMALL, "cpus": 2}, levels=BOTH)
disk = partial(Attempt, family="resources", limits={**SMALL, "memory": "512m", "cpus": 2})
# Where the user's own processes count, too, others of theirs that end make room.
count = partial(Attempt, family="resources", limits={"pids": 24, "timeout": 10}, levels=BOTH, promise="pids")
other = partial(Attempt, family="resources", levels=BOTH)


def fills(folder: str, mebibytes: int) -> str:
    """Return code that writes so much into files of 4 MiB in a folder; outside, in a scratch directory in memory."""
    return f"""
        folder = T.get("fast", "{folder}")
        block = bytes(1 << 22)
        for number in range({mebibytes} // 4):
            with open(f"{{folder}}/fill{{number}}", "wb") as file:
                file.write(block)
        escaped("wrote {mebibytes} MiB")
        """


def makes_files(folder: str) -> str:
    """Return code that makes more empty files than a sandbox may have."""
    return f"""
        folder = T.get("fast", "{folder}")
        for number in range(40_000):
            os.mknod(f"{{folder}}/{{number}}")
        escaped("made 40000 files")
        """


ATTEMPTS = (
    memory(
        name="memory in one process",
        code="""
        hoard = bytearray(b"x") * (320 << 20)
        escaped(f"holds {len(hoard) >> 20} MiB")
        """,
    ),
    memory(
        name="memory bit by bit",
        code="""
        hoard = []
        for _ in range(320):
            hoard.append(bytearray(b"x") * (1 << 20))
        escaped(f"holds {len(hoard)} MiB")
        """,
    ),
    memory(
        name="memory in children",
        code="""
        import time
        ready, gate = os.pipe(), os.pipe()
        for _ in range(10):
            if os.fork() == 0:
                os.close(gate[1])
                hoard = bytearray(b"x") * (32 << 20)
                os.write(ready[1], b".")
                os.read(gate[0], 1)
                os._exit(0)
        os.close(ready[1])
        held = 0
        while held < 10 and (more := os.read(ready[0], 10)):
            held += len(more)
        if held == 10:
            escaped("holds 320 MiB in ten children")
        contained(f"{held} of 10 children were left")
        """,
    ),
    memory(
        name="memory shared with children",
        code="""
        import mmap
        hoard = mmap.mmap(-1, 320 << 20)
        for offset in range(0, 320 << 20, 4096):
            hoard[offset] = 1
        escaped("holds 320 MiB")
        """,
    ),
    memory(
        name="memory in a memfd",
        code="""
        file = os.memfd_create("hoard")
        for _ in range(320):
            os.write(file, bytes(1 << 20))
        escaped("holds 320 MiB")
        """,
    ),
    memory(
        name="memory in System V segments",
        code="""
        segments = []
        try:
            for _ in range(10):
                segments.append(syscall(29, 0, 32 << 20, 0o1600))
                address = syscall(30, segments[-1], 0, 0)
                syscall(31, segments[-1], 0, 0)
                ctypes.memset(address, 1, 32 << 20)
        finally:
            pass
        escaped("holds 320 MiB")
        """,
    ),
    memory(
        name="memory in a file mapping",
        levels=("jail",),
        code="""
        import mmap
        folder = "/dev/shm"
        for number in range(10):
            with open(f"{folder}/escape-{T['token']}-{number}", "w+b") as file:
                os.unlink(file.name)
                file.truncate(32 << 20)
                hoard = mmap.mmap(file.fileno(), 32 << 20)
                for offset in range(0, 32 << 20, 4096):
                    hoard[offset] = 1
                globals()[f"kept{number}"] = hoard
        escaped("holds 320 MiB")
        """,
    ),
    memory(
        name="memory in pipes",
        limits={**SMALL, "memory": "32m", "cpus": 2},
        levels=("jail",),
        root_only="an ordinary user's pipes are bounded by the kernel",
        code="""
        import fcntl
        pipes, held = [], 0
        for _ in range(480):
            pipes.append(os.pipe())
            size = fcntl.fcntl(pipes[-1][1], 1031, 1 << 20)
            os.set_blocking(pipes[-1][1], False)
            held += os.write(pipes[-1][1], bytes(size))
        if held > 320 << 20:
            escaped(f"holds {held >> 20} MiB in pipes")
        """,
    ),
    memory(
        name="memory that is locked",
        levels=("jail",),
        code="""
        import mmap
        hoard = mmap.mmap(-1, 320 << 20)
        address = ctypes.addressof(ctypes.c_char.from_buffer(hoard))
        if LIBC.mlock(ctypes.c_void_p(address), ctypes.c_size_t(320 << 20)):
            raise OSError(ctypes.get_errno(), "mlock")
        escaped("locked 320 MiB")
        """,
        root_only="ordinary users may lock little",
    ),
    disk(name="fill the workspace", code=fills(".", 64)),
    disk(name="fill tmp", code=fills("/tmp", 128)),
    disk(name="fill shared memory", code=fills("/dev/shm", 128)),
    disk(name="fill everything", code=fills(".", 320), limits={"disk": "16m", "memory": "48m", "timeout": 12}),
    disk(
        name="one large file",
        levels=BOTH,
        code="""
        with open("large", "wb") as file:
            for _ in range(64):
                file.write(bytes(1 << 20))
        escaped("wrote 64 MiB")
        """,
    ),
    disk(
        name="reserve room",
        levels=BOTH,
        code="""os.posix_fallocate(os.open("large", os.O_CREAT | os.O_RDWR), 0, 64 << 20); escaped()""",
    ),
    disk(
        name="fill a file that is deleted",
        levels=BOTH,
        code="""
        file = os.open("gone", os.O_CREAT | os.O_RDWR)
        os.unlink("gone")
        for _ in range(64):
            os.write(file, bytes(1 << 20))
        escaped("wrote 64 MiB")
        """,
    ),
    disk(name="fill with the smallest files: workspace", code=makes_files(".")),
    disk(name="fill with the smallest files: tmp", code=makes_files("/tmp")),
    disk(name="fill with the smallest files: shared memory", code=makes_files("/dev/shm")),
    disk(
        name="fill with links",
        code="""
        os.chdir(T.get("fast", "."))
        for folder in range(2):
            os.mkdir(f"f{folder}")
            for number in range(20_000):
                os.symlink("x", f"f{folder}/{number}")
        escaped("made 40000 links")
        """,
    ),
    count(
        name="processes",
        code="""
        gate = os.pipe()
        for number in range(64):
            if os.fork() == 0:
                os.close(gate[1])
                os.read(gate[0], 1)
                os._exit(0)
        escaped("holds 64 processes")
        """,
    ),
    count(
        name="threads",
        code="""
        import threading, time
        for _ in range(64):
            threading.Thread(target=time.sleep, args=(20,), daemon=True).start()
        escaped("holds 64 threads")
        """,
    ),
    count(
        name="zombies",
        code="""
        for number in range(64):
            if os.fork() == 0:
                os._exit(0)
        escaped("holds 64 zombies")
        """,
    ),
    count(
        name="a shell's fork bomb",
        language="bash",
        code="""
        made=0
        for i in $(seq 64); do sleep 1 >/dev/null 2>&1 & made=$((made + 1)); done
        n=$(jobs -r | wc -l)
        [ "$n" -ge 64 ] && echo "ESCAPED $n jobs" || echo "CONTAINED $n jobs"
        """,
    ),
    Attempt(
        name="the processor",
        family="resources",
        promise="cpu",
        limits={"cpus": 0.25, "timeout": 10},
        code="""
        import time
        began, used = time.monotonic(), time.process_time()
        while time.monotonic() - began < 0.6:
            pass
        if (time.process_time() - used) / (time.monotonic() - began) > 0.6:
            escaped("uses more than twice its share")
        """,
    ),
    Attempt(
        name="the processor, in many children",
        family="resources",
        promise="cpu",
        limits={"cpus": 0.25, "timeout": 10},
        code="""
        import time
        began = time.monotonic()
        for _ in range(4):
            if os.fork() == 0:
                while time.monotonic() - began < 0.6:
                    pass
                os._exit(0)
        for _ in range(4):
            os.wait()
        used = os.times()
        if (used.children_user + used.children_system) / (time.monotonic() - began) > 0.6:
            escaped("uses more than twice its share")
        """,
    ),
    other(
        name="time without end",
        limits={"timeout": 0.4},
        check=returns_by(1.7),
        code="""
        import signal
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if os.fork() == 0:
            import time
            time.sleep(T["lingers_s"])
            os._exit(0)
        while True:
            pass
        """,
    ),
    other(
        name="core dumps",
        code="""
        import resource
        soft, hard = resource.getrlimit(resource.RLIMIT_CORE)
        resource.setrlimit(resource.RLIMIT_CORE, (hard, hard))
        if hard not in (0, 1):
            escaped(f"may leave cores of {hard} bytes")
        """,
    ),
    other(
        name="raise its own limits",
        root_only="needs CAP_SYS_RESOURCE",
        code="""
        import resource
        for name in ("NPROC", "NOFILE", "MEMLOCK", "RTPRIO", "NICE", "MSGQUEUE"):
            number = getattr(resource, "RLIMIT_" + name)
            hard = resource.getrlimit(number)[1]
            if hard not in (resource.RLIM_INFINITY,):
                resource.setrlimit(number, (hard, hard + 1))
                escaped(f"raised {name}")
        contained("there was none to raise")
        """,
    ),
    other(
        name="access control lists, which the kernel keeps in memory that nothing counts",
        code="""
        import struct
        folder, nobody = T.get("fast", "/workspace"), 0xFFFFFFFF
        folder = f"{folder if os.path.isdir(folder) else '.'}/listed"
        os.mkdir(folder)
        users = [(2, 6, os.getuid())] * 8000
        entries = [(1, 6, nobody), *users, (4, 4, nobody), (16, 6, nobody), (32, 4, nobody)]
        text = struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)
        for name in ("access", "default"):
            os.setxattr(folder, f"system.posix_acl_{name}", text)
        escaped(f"made the kernel hold {2 * len(text)} bytes for an empty folder")
        """,
    ),
    other(
        name="filters of packets, for which the kernel has one supply of memory for all users",
        code="""
        import ctypes, socket, struct
        drop = ctypes.create_string_buffer(struct.pack("HBBI", 6, 0, 0, 0))
        program = struct.pack("HxxxxxxQ", 1, ctypes.addressof(drop))
        one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        other.setsockopt(socket.SOL_SOCKET, 26, program)
        one.send(b"dropped")
        other.setblocking(False)
        try:
            contained(f"there is none: {other.recv(10)}")
        except BlockingIOError:
            escaped("had the kernel compile a filter")
        """,
    ),
    other(
        name="protect itself from the killer for memory",
        root_only="needs CAP_SYS_RESOURCE",
        code="""
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("-999")
        escaped()
        """,
    ),
    other(
        name="open files without end",
        code="""
        import resource
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        for number in range(18_000):
            os.open("/dev/null", os.O_RDONLY)
        escaped(f"{number} files")
        """,
    ),
)


def test_contained(attempt: Attempt, where: str, controls: Controls) -> None:
    """A limit is a limit, whichever way around it is tried."""
    controls.assert_contained(attempt, where)
