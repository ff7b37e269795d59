"""Attempts to find what a careless caller hands on, and what tells the host's identity."""

from functools import partial

from tests.harness.escape.attempts import BOTH, Attempt
from tests.harness.escape.controls import Controls

leak = partial(Attempt, family="leaks")

ATTEMPTS = (
    leak(name="the environment", levels=BOTH, code="""saw(repr(dict(os.environ)))"""),
    leak(name="the environment of a shell", levels=BOTH, language="bash", code="""env; echo "CONTAINED saw it all" """),
    leak(
        name="the environment the program was started with",
        levels=BOTH,
        code="""saw(open("/proc/self/environ", "rb").read())""",
    ),
    leak(
        name="the environment of all processes",
        levels=BOTH,
        code="""
        for entry in filter(str.isdigit, os.listdir("/proc")):
            try:
                saw(open(f"/proc/{entry}/environ", "rb").read())
            except OSError:
                pass
        """,
    ),
    leak(
        name="the command lines of all processes",
        levels=BOTH,
        code="""
        for entry in filter(str.isdigit, os.listdir("/proc")):
            try:
                saw(open(f"/proc/{entry}/cmdline", "rb").read())
            except OSError:
                pass
        """,
    ),
    leak(
        name="all of its own memory",
        levels=BOTH,
        code="""
        with open("/proc/self/mem", "rb", buffering=0) as memory:
            for line in open("/proc/self/maps"):
                begin, end = (int(number, 16) for number in line.split()[0].split("-"))
                if line.split()[1].startswith("r") and end - begin < 1 << 26:
                    try:
                        memory.seek(begin)
                        saw(memory.read(end - begin))
                    except (OSError, OverflowError, ValueError):
                        pass
        """,
    ),
    leak(
        name="the memory of its ancestors",
        root_only="reads another process's memory",
        levels=BOTH,
        code="""
        pid = os.getpid()
        while (pid := int(open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[1])) > 0:
            try:
                with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
                    for line in open(f"/proc/{pid}/maps"):
                        if "[stack]" in line:
                            begin, end = (int(number, 16) for number in line.split()[0].split("-"))
                            memory.seek(begin)
                            saw(memory.read(end - begin))
            except OSError:
                continue
        """,
    ),
    leak(
        name="open descriptors",
        levels=BOTH,
        code="""
        for number in range(3, 1024):
            for read in (lambda n: os.pread(n, 65536, 0), lambda n: os.read(n, 65536)):
                try:
                    os.set_blocking(number, False)
                    saw(read(number))
                except OSError:
                    pass
        """,
    ),
    leak(
        name="a folder left open",
        levels=BOTH,
        code="""
        for number in range(3, 1024):
            try:
                saw(os.read(os.open("." + T["public"], os.O_RDONLY, dir_fd=number), 4096))
            except OSError:
                pass
        """,
    ),
    leak(
        name="a socket left open",
        levels=BOTH,
        code="""
        import socket
        for number in set(range(3, 1024)) - {LINK}:
            try:
                found = socket.socket(fileno=os.dup(number))
            except OSError:
                continue
            found.setblocking(False)
            try:
                saw(found.recv(4096))
            except OSError:
                pass
            escaped(f"descriptor {number} is a socket: {found}")
        """,
    ),
    leak(
        name="any descriptor besides three",
        levels=BOTH,
        code="""
        found = []
        import fcntl, stat
        for number in set(range(3, 4096)) - {LINK}:
            try:
                is_pipe = stat.S_ISFIFO(os.fstat(number).st_mode)
            except OSError:
                continue
            # The value of the last expression leaves by a pipe of its own, as one-way as standard output.
            if not is_pipe or fcntl.fcntl(number, fcntl.F_GETFL) & os.O_ACCMODE != os.O_WRONLY:
                found.append((number, os.readlink(f"/proc/self/fd/{number}")))
        if found:
            escaped(f"holds {found[:4]}")
        """,
    ),
    leak(
        name="descriptors of the parent",
        root_only="reads another process's descriptors",
        levels=BOTH,
        code="""
        for entry in os.listdir(f"/proc/{os.getppid()}/fd"):
            try:
                found = os.open(f"/proc/{os.getppid()}/fd/{entry}", os.O_RDONLY | os.O_NONBLOCK)
                saw(os.pread(found, 65536, 0))
            except OSError:
                pass
        """,
    ),
    leak(
        name="standard input",
        levels=BOTH,
        code="""os.lseek(0, 0, 0) if os.path.isfile("/dev/stdin") else None; saw(os.read(0, 4096))""",
    ),
    leak(
        name="standard input opened anew",
        levels=BOTH,
        code="""saw(os.read(os.open("/proc/self/fd/0", os.O_RDONLY | os.O_NONBLOCK), 4096))""",
    ),
    leak(
        name="the host's name",
        code="""
        import socket
        setting = open("/proc/sys/kernel/hostname").read().strip()
        if T["hostname"] in (socket.gethostname(), os.uname().nodename, setting):
            escaped(T["hostname"])
        """,
    ),
    leak(
        name="the host's name in etc",
        code="""
        for path in ("/etc/hostname", "/etc/hosts"):
            if os.path.exists(path) and T["hostname"] in open(path).read().split():
                escaped(path)
        """,
    ),
    leak(
        name="the machine's number",
        code="""
        for path in ("/etc/machine-id", "/var/lib/dbus/machine-id"):
            if os.path.exists(path) and T["machine_id"] == open(path).read().strip() != "":
                escaped(path)
        """,
    ),
    leak(
        name="the machine's hardware",
        code="""
        for folder in ("/sys/class/dmi/id", "/sys/block", "/sys/class/net"):
            if os.path.isdir(folder) and os.listdir(folder):
                escaped(f"lists {folder}")
        """,
    ),
    leak(
        name="the path of the control group",
        code="""
        paths = [line.split(":", 2)[2].strip() for line in open("/proc/self/cgroup")]
        if any(path != "/" for path in paths):
            escaped(f"{paths}")
        """,
    ),
    leak(
        name="the host's mounts",
        code="""
        ours = {"/", "/proc", "/dev", "/tmp", "/dev/shm", "/workspace"}
        points = {line.split()[4] for line in open("/proc/self/mountinfo")}
        shared = (points & set(T["mounts"])) - ours
        if shared:
            escaped(f"{sorted(shared)[:4]}")
        """,
    ),
    leak(
        name="the host's mounts, by pid 1",
        code="""
        ours = {"/", "/proc", "/dev", "/tmp", "/dev/shm", "/workspace"}
        points = {line.split()[4] for line in open("/proc/1/mountinfo")}
        shared = (points & set(T["mounts"])) - ours
        if shared:
            escaped(f"{sorted(shared)[:4]}")
        """,
    ),
    leak(
        name="a place in the host's folders",
        code="""
        import glob
        for number in (1, os.getpid()):
            for kind in ("cwd", "root"):
                try:
                    place = os.readlink(f"/proc/{number}/{kind}")
                except OSError:
                    continue
                if kind == "cwd" and place.startswith(os.path.dirname(T["public"]).rsplit("/", 1)[0] + "/escape-"):
                    escaped(place)
        """,
    ),
    leak(
        name="type into the terminal",
        terminal=True,
        levels=BOTH,
        code="""
        import fcntl, termios
        for number in range(3):
            try:
                fcntl.ioctl(number, termios.TIOCSTI, b"!")
                escaped(f"typed by descriptor {number}")
            except OSError as error:
                last = error
        raise last
        """,
    ),
    leak(
        name="type with bits that the kernel ignores",
        terminal=True,
        levels=BOTH,
        code="""
        byte = ctypes.create_string_buffer(b"!")
        escaped(syscall(16, 0, 0x1_0000_5412, ctypes.addressof(byte)))
        """,
    ),
    leak(name="open the terminal", terminal=True, levels=BOTH, code="""os.open("/dev/tty", os.O_RDWR); escaped()"""),
    leak(
        name="see whether there is a terminal",
        terminal=True,
        levels=BOTH,
        code="""
        if any(os.isatty(number) for number in range(3)):
            escaped("a stream is the caller's terminal")
        """,
    ),
    leak(
        name="other terminals",
        terminal=True,
        code="""
        found = [name for name in os.listdir("/dev/pts") if name.isdigit()]
        if found:
            escaped(f"sees terminals {found}")
        """,
    ),
    leak(
        name="take the console",
        root_only="they are root's",
        code="""
        for name in ("/dev/console", "/dev/tty0", "/dev/tty1"):
            try:
                os.open(name, os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK)
            except OSError as error:
                last = error
                continue
            escaped(name)
        raise last
        """,
    ),
)


def test_contained(attempt: Attempt, where: str, controls: Controls) -> None:
    """The guest gets what the request gives it and nothing that the caller merely has."""
    controls.assert_contained(attempt, where)
