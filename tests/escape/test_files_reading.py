"""Attempts to read what belongs to the host: homes, /tmp, accounts, devices, other views of the root."""

from functools import partial

from tests.harness.escape.attempts import BOTH, Attempt
from tests.harness.escape.controls import Controls

read = partial(Attempt, family="files")

ATTEMPTS = (
    read(
        name="a file at home",
        levels=BOTH,
        code="""
        for name in os.listdir(T["home"]):
            saw(open(os.path.join(T["home"], name), "rb").read())
        """,
    ),
    read(name="the names at home", levels=BOTH, code="""saw(" ".join(os.listdir(T["home"])))"""),
    read(name="a file in the host's tmp", levels=BOTH, code="""saw(open(T["public"], "rb").read())"""),
    read(
        name="a file in the host's tmp, by climbing",
        levels=BOTH,
        code="""
        os.chdir("../" * 40)
        saw(open("." + T["public"], "rb").read())
        """,
    ),
    read(
        name="a link to a file of the host",
        levels=BOTH,
        code="""
        os.symlink(T["public"], "link")
        saw(open("link", "rb").read())
        """,
    ),
    read(
        name="a hard link to a file of the host",
        levels=BOTH,
        code="""
        os.link(T["public"], "hard")
        saw(open("hard", "rb").read())
        """,
    ),
    read(
        name="copying a file with a program",
        levels=BOTH,
        language="bash",
        code="""
        public=$(grep -o '"public": "[^"]*"' <<<"$1" | cut -d'"' -f4)
        cat "$public" || echo "CONTAINED exit $?"
        """,
    ),
    read(
        name="the password hashes",
        levels=BOTH,
        root_only="only root reads /etc/shadow",
        code="""
        if open("/etc/shadow").read().count(":"):
            escaped("read /etc/shadow")
        """,
    ),
    read(
        name="the host's accounts",
        code="""
        import hashlib
        if hashlib.sha256(open("/etc/passwd", "rb").read()).hexdigest() == T["passwd"]:
            escaped("the accounts are the host's")
        """,
    ),
    read(
        name="the root of pid 1",
        levels=BOTH,
        code="""saw(open("/proc/1/root" + T["public"], "rb").read())""",
        root_only="the root of another user's process",
    ),
    read(
        name="the root of every process",
        levels=BOTH,
        code="""
        for pid in filter(str.isdigit, os.listdir("/proc")):
            for way in ("root", "cwd/" + "../" * 40):
                try:
                    saw(open(f"/proc/{pid}/{way}{T['public']}", "rb").read())
                except OSError:
                    pass
        """,
    ),
    read(
        name="the files that processes map",
        levels=BOTH,
        code="""
        for pid in filter(str.isdigit, os.listdir("/proc")):
            for kind in ("fd", "map_files"):
                try:
                    names = os.listdir(f"/proc/{pid}/{kind}")
                except OSError:
                    continue
                for name in names:
                    path = f"/proc/{pid}/{kind}/{name}"
                    try:
                        if os.path.isfile(path) and os.stat(path).st_size < 4096:
                            saw(open(path, "rb").read())
                    except OSError:
                        pass
        """,
    ),
    read(
        name="a file by its handle",
        root_only="open_by_handle_at needs CAP_DAC_READ_SEARCH on the host",
        levels=BOTH,
        code="""
        import struct
        kind, data = T["handle"]
        data = bytes.fromhex(data)
        handle = ctypes.create_string_buffer(struct.pack("Ii", len(data), kind) + data)
        for mount in ("/usr", "/", os.path.dirname(os.__file__), "/workspace", "/etc", "/dev"):
            try:
                found = syscall(304, os.open(mount, os.O_RDONLY), handle, os.O_RDONLY)
                saw(os.read(found, 4096))
            except OSError:
                pass
        """,
    ),
    read(
        name="leaving a changed root",
        destructive=True,
        code="""
        os.mkdir("cell")
        outside = os.open("/", os.O_RDONLY)
        os.chroot("cell")
        os.fchdir(outside)
        for _ in range(40):
            os.chdir("..")
        os.chroot(".")
        saw(open(T["public"], "rb").read())
        """,
    ),
    read(
        name="the host's disk",
        root_only="only root reads a disk",
        levels=BOTH,
        code="""
        for name in sorted(os.listdir("/dev")):
            path, (major, minor) = "/dev/" + name, T["disk"]
            if os.path.exists(path) and os.stat(path).st_rdev == os.makedev(major, minor):
                escaped(f"read {len(os.read(os.open(path, os.O_RDONLY), 512))} bytes of {path}")
        """,
    ),
    read(
        name="a new node for the host's disk",
        root_only="mknod needs CAP_MKNOD on the host",
        levels=BOTH,
        code="""
        import stat
        os.mknod("disk", stat.S_IFBLK | 0o600, os.makedev(*T["disk"]))
        escaped(f"read {len(os.read(os.open('disk', os.O_RDONLY), 512))} bytes of the disk")
        """,
    ),
    read(
        name="a new node for the kernel's log",
        root_only="mknod needs CAP_MKNOD on the host",
        code="""
        import stat
        os.mknod("log", stat.S_IFCHR | 0o600, os.makedev(1, 11))
        escaped(f"read {len(os.read(os.open('log', os.O_RDONLY | os.O_NONBLOCK), 8192))} bytes of the log")
        """,
    ),
    read(
        name="more devices than the harmless",
        code="""
        harmless = {"null", "zero", "full", "random", "urandom", "tty"}
        import stat
        found = [n for n in os.listdir("/dev") if n not in harmless]
        nodes = [n for n in found if stat.S_ISCHR(m := os.lstat("/dev/" + n).st_mode) or stat.S_ISBLK(m)]
        if nodes:
            escaped(f"sees {nodes[:5]}")
        """,
    ),
    read(
        name="the kernel's log by its device",
        root_only="dmesg is restricted to root on many hosts",
        code="""escaped(f"read {len(os.read(os.open('/dev/kmsg', os.O_RDONLY | os.O_NONBLOCK), 8192))} bytes")""",
    ),
    read(
        name="the kernel's log by its system call",
        root_only="dmesg is restricted to root on many hosts",
        levels=BOTH,
        code="""escaped(f"read {syscall(103, 3, ctypes.create_string_buffer(4096), 4096)} bytes")""",
    ),
    read(
        name="the kernel's addresses",
        root_only="kallsyms shows zeros to ordinary users",
        code="""
        if any(not line.startswith("0" * 16) for line in open("/proc/kallsyms")):
            escaped("real addresses")
        """,
    ),
    read(
        name="files that only root opens in proc",
        root_only="they are root's",
        levels=BOTH,
        code="""
        for name in ("kcore", "kmsg", "slabinfo", "timer_list", "kpagecount", "kpageflags", "vmallocinfo"):
            try:
                found = os.open("/proc/" + name, os.O_RDONLY | os.O_NONBLOCK)
            except OSError:
                continue
            if os.fstat(found).st_dev == os.stat("/proc").st_dev:
                escaped(f"opened /proc/{name}")
        """,
    ),
    read(
        name="the kernel's objects in sys",
        code="""
        for name in ("kernel", "class", "block", "bus", "devices", "firmware", "module"):
            if os.path.isdir("/sys/" + name) and os.listdir("/sys/" + name):
                escaped(f"lists /sys/{name}")
        """,
    ),
    read(
        name="the host's logs and package database",
        code="""
        for name, unseen in T["unseen"].items():
            if os.path.isdir(name) and set(unseen) & set(os.listdir(name)):
                escaped(f"lists {name}")
        """,
    ),
)


def test_contained(attempt: Attempt, where: str, controls: Controls) -> None:
    """What the host keeps in files stays there."""
    controls.assert_contained(attempt, where)
