"""Attempts to reach parts of the kernel that programs do not need and exploits do."""

from functools import partial

from tests.harness.escape.attempts import BOTH, Attempt
from tests.harness.escape.controls import Controls

call = partial(Attempt, family="system calls", levels=BOTH)
as_root = partial(call, root_only="the kernel asks for capabilities of the host")


def opens(name: str, family: int, kind: int, protocol: int = 0, *, root_only: str = "") -> Attempt:
    """Return an attempt to open an odd socket."""
    code = f"escaped(syscall(41, {family}, {kind}, {protocol}))"
    return call(name=f"socket: {name}", code=code, root_only=root_only)


ATTEMPTS = (
    as_root(
        name="bpf: make a map",
        code="""
        import struct
        escaped(syscall(321, 0, struct.pack("4I", 2, 4, 4, 1) + bytes(112), 128))
        """,
    ),
    as_root(
        name="bpf: load a program",
        code="""
        import struct
        program = ctypes.create_string_buffer(bytes.fromhex("b700000000000000" "9500000000000000"))
        licence = ctypes.create_string_buffer(b"GPL")
        head = struct.pack("IIQQ", 1, 2, ctypes.addressof(program), ctypes.addressof(licence))
        escaped(syscall(321, 5, head + bytes(128 - len(head)), 128))
        """,
    ),
    call(
        name="perf_event_open",
        code="""
        import struct
        attributes = struct.pack("IIQQQQQ", 1, 112, 9, 0, 0, 0, 1 << 5 | 1 << 6) + bytes(64)
        escaped(syscall(298, attributes, 0, -1, -1, 0))
        """,
    ),
    as_root(name="userfaultfd", code="escaped(syscall(323, 0))"),
    call(name="userfaultfd for user mode", code="escaped(syscall(323, 1))"),
    call(name="io_uring_setup", code="escaped(syscall(425, 8, ctypes.create_string_buffer(120)))"),
    call(name="io_uring_register", code="reaches(427, -1, 0, 0, 0)"),
    call(name="io_uring_enter", code="reaches(426, -1, 0, 0, 0, 0, 0)"),
    call(name="keyctl", code="escaped(syscall(250, 0, -3, 1))"),
    call(name="add_key", code="""escaped(syscall(248, b"user", b"escape", b"x", 1, -2))"""),
    call(name="request_key", code="""reaches(249, b"user", b"escape-none", 0, 0)"""),
    call(name="ptrace itself", code="escaped(syscall(101, 0, 0, 0, 0))"),
    call(
        name="ptrace a child",
        code="""
        import signal
        child = os.fork()
        if child == 0:
            signal.pause()
        try:
            syscall(101, 0x4206, child, 0, 0)
        finally:
            os.kill(child, 9)
        escaped()
        """,
    ),
    call(name="fanotify_init", code="escaped(syscall(300, 0x200, 0))"),
    call(name="personality: no random addresses", code="escaped(syscall(135, 0x40000))"),
    call(name="personality: readable is executable", code="escaped(syscall(135, 0x400000))"),
    call(
        name="32-bit entry",
        code="""
        import mmap
        page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
        page.write(bytes.fromhex("b814000000" "cd80" "c3"))
        getpid = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))
        if (result := getpid()) > 0:
            escaped(f"getpid by int 0x80: {result}")
        raise OSError(-result, os.strerror(-result))
        """,
    ),
    call(
        name="32-bit entry: unshare",
        code="""
        import mmap
        page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
        page.write(bytes.fromhex("53" "b836010000" "bb00000004" "cd80" "5b" "c3"))
        unshare = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))
        if (result := unshare()) == 0:
            escaped("unshare by int 0x80")
        raise OSError(-result, os.strerror(-result))
        """,
    ),
    call(name="the x32 table", code="escaped(syscall(0x40000000 | 39))"),
    call(
        name="execute from memory",
        code="""
        program = os.memfd_create("program", 0)
        with open(os.path.realpath("/bin/echo"), "rb") as echo:
            os.write(program, echo.read())
        os.execve(program, ["echo", "ESCAPED", "ran from memory"], {})
        """,
    ),
    call(
        name="execute a deleted file by execveat",
        levels=("jail",),
        code="""
        program = os.memfd_create("program", 1)
        with open(os.path.realpath("/bin/echo"), "rb") as echo:
            os.write(program, echo.read())
        words = (ctypes.c_char_p * 3)(b"echo", b"ESCAPED", None)
        syscall(322, program, b"", ctypes.cast(words, ctypes.c_void_p).value, 0, 0x1000)
        """,
    ),
    call(name="memfd_secret", code="escaped(syscall(447, 0))"),
    as_root(name="the log of the kernel", code="escaped(syscall(103, 10, 0, 0))"),
    as_root(name="unload a module", code="""reaches(176, b"escape_none", 0x800)"""),
    as_root(name="load a module", code="""reaches(313, -1, b"", 0)"""),
    as_root(name="load a kernel", code="reaches(320, -1, -1, 0, 0, 0)"),
    as_root(name="reboot", destructive=True, code="reaches(169, 0, 0, 0, 0)"),
    as_root(name="swapon", code="""reaches(167, b"/nonexistent-escape", 0)"""),
    as_root(name="swapoff", code="""reaches(168, b"/nonexistent-escape")"""),
    as_root(name="acct", code="""reaches(163, b"/nonexistent-escape")"""),
    as_root(name="input and output ports: iopl", code="escaped(syscall(172, 3))"),
    as_root(name="input and output ports: ioperm", code="escaped(syscall(173, 0x80, 1, 1))"),
    as_root(name="quotas", code="""reaches(179, 0x80000700, b"/nonexistent-escape", 0, 0)"""),
    as_root(name="hang up the terminal", destructive=True, code="escaped(syscall(153))"),
    call(name="change the host's name", destructive=True, code="""escaped(syscall(170, b"escaped", 7))"""),
    call(name="change the host's domain", destructive=True, code="""escaped(syscall(171, b"escaped", 7))"""),
    call(name="open_by_handle_at", code="""reaches(304, -1, bytes(16), 0)"""),
    # What an ordinary user's guest could lock the user's home with, through a file of it that it may read.
    call(name="remove an encryption key", code="reaches(16, os.open('/usr', 0), 0xC0406618, bytes(64))"),
    call(name="add an encryption key", code="reaches(16, os.open('/usr', 0), 0xC0506617, bytes(80))"),
    # What the kernel keeps in the inode, for all who share the file, and counts for nobody.
    call(
        name="mbind",
        code="""
        page = syscall(9, 0, 4096, 3, 0x22, -1, 0)
        escaped(syscall(237, page, 4096, 0, 0, 0, 0))
        """,
    ),
    call(
        name="hint how long a file's data will live",
        code="""
        with open("hinted", "w") as file:
            escaped(syscall(72, file.fileno(), 1036, (2).to_bytes(8, "little")))
        """,
    ),
    call(
        name="process_vm_readv of itself",
        code="""
        import struct
        data = ctypes.create_string_buffer(8)
        vector = struct.pack("2Q", ctypes.addressof(data), 8)
        escaped(syscall(310, os.getpid(), vector, 1, vector, 1, 0))
        """,
    ),
    call(name="pidfd_getfd of itself", code="escaped(syscall(438, os.pidfd_open(os.getpid()), 1, 0))"),
    call(name="kcmp of itself", code="escaped(syscall(312, os.getpid(), os.getpid(), 1, 0, 0))"),
    call(name="modify_ldt", code="reaches(154, 0, ctypes.create_string_buffer(16), 16)"),
    opens("vsock", 40, 1),
    opens("packet", 17, 3, 0x300),
    opens("raw", 2, 3, 1),
    opens("raw, version 6", 10, 3, 58),
    opens("xdp", 44, 3),
    opens("netlink: generic", 16, 3, 16),
    opens("netlink: netfilter", 16, 3, 12),
    opens("netlink: kernel events", 16, 3, 15),
    opens("netlink: transformations", 16, 3, 6),
    opens("netlink: socket diagnosis", 16, 3, 4),
    opens("netlink: audit", 16, 3, 9),
    opens("netlink: connector", 16, 3, 11),
)


def test_contained(attempt: Attempt, where: str, controls: Controls) -> None:
    """What programs do not need from the kernel is out of reach."""
    controls.assert_contained(attempt, where)
