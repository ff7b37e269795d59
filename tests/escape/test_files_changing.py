"""Attempts to change what belongs to the host: mounts old and new, roots, system files, settings, identities."""

from functools import partial

from tests.harness.escape.attempts import BOTH, Attempt
from tests.harness.escape.controls import Controls

change = partial(Attempt, family="files")
metadata = partial(Attempt, family="metadata", levels=BOTH)
mount = partial(Attempt, family="files", destructive=True, levels=BOTH)

ATTEMPTS = (
    change(name="change the times of the host's device", code="os.utime('/dev/null'); escaped()"),
    metadata(
        name="change mode, owner, times and attributes of a file",
        code="""
        ways = {
            "chmod": lambda path: os.chmod(path, 0o644),
            "chown": lambda path: os.chown(path, os.geteuid(), os.getegid()),
            "utime": lambda path: os.utime(path, (1, 1)),
            "setxattr": lambda path: os.setxattr(path, "user.cloche", b"1"),
            "removexattr": lambda path: os.removexattr(path, "user.cloche"),
        }
        for name, way in ways.items():
            for path in (T["public"], os.path.relpath(T["public"]), "/proc/self/root" + T["public"]):
                try:
                    way(path)
                    escaped(f"{name} of {path}")
                except OSError as error:
                    last = error
        raise last
        """,
    ),
    metadata(
        name="bring a file into the folder and change it there",
        code="""
        own, (folder, name) = os.getcwd(), os.path.split(T["public"])
        os.symlink(T["public"], "link")
        os.symlink(folder, "folder")
        os.chdir(folder)
        ways = [
            lambda: os.chmod(name, 0o644),
            lambda: os.utime(f"{own}/link", (1, 1)),
            lambda: os.link(T["public"], f"{own}/hard"),
            lambda: os.chmod(f"{own}/folder/{name}", 0o644),
            lambda: os.utime(name, (1, 1), dir_fd=os.open(folder, os.O_PATH)),
            lambda: os.chmod(f"/proc/self/fd/{os.open(name, os.O_PATH)}", 0o644),
            lambda: os.utime(os.open(name, os.O_RDONLY), (1, 1)),
        ]
        for way in ways:
            try:
                way()
                escaped()
            except OSError as error:
                last = error
        raise last
        """,
    ),
    mount(
        name="mount a tmpfs",
        code="""
        os.mkdir("m")
        escaped(syscall(165, b"none", b"m", b"tmpfs", 0, 0))
        """,
    ),
    mount(
        name="bind the root",
        code="""
        os.mkdir("m")
        escaped(syscall(165, b"/", b"m", 0, 0x1000 | 0x4000, 0))
        """,
    ),
    mount(
        name="a fresh proc",
        code="""
        os.mkdir("m")
        escaped(syscall(165, b"proc", b"m", b"proc", 0, 0))
        """,
    ),
    mount(
        name="mount sys",
        code="""
        os.mkdir("m")
        escaped(syscall(165, b"sysfs", b"m", b"sysfs", 0, 0))
        """,
    ),
    mount(
        name="mount control groups",
        code="""
        os.mkdir("m")
        escaped(syscall(165, b"cgroup2", b"m", b"cgroup2", 0, 0))
        """,
    ),
    mount(
        name="mount an overlay",
        code="""
        os.mkdir("t")
        try:
            syscall(165, b"none", b"t", b"tmpfs", 0, 0)
        except OSError:
            pass
        os.chdir("t")
        for name in "luwm":
            os.mkdir(name)
        escaped(syscall(165, b"overlay", b"m", b"overlay", 0, b"lowerdir=l,upperdir=u,workdir=w"))
        """,
    ),
    mount(
        name="make what is read-only writable",
        code="""
        for path in (b"/", b"/usr", b"/proc"):
            try:
                escaped(syscall(165, 0, path, 0, 0x20 | 0x1000, 0))
            except OSError as error:
                last = error
        raise last
        """,
    ),
    mount(name="spread mounts to the host", code="""escaped(syscall(165, 0, b"/", 0, (1 << 20) | 0x4000, 0))"""),
    mount(name="move a mount", code="""os.mkdir("m"); escaped(syscall(165, b"/proc", b"m", 0, 0x2000, 0))"""),
    mount(
        name="uncover what lies below a mount",
        code="""
        for path in (b"/proc/sys", b"/proc", b"/dev", b"/workspace"):
            try:
                escaped(syscall(166, path, 2))
            except OSError as error:
                last = error
        raise last
        """,
    ),
    mount(name="new mounts: fsopen", code="""escaped(syscall(430, b"tmpfs", 0))"""),
    mount(name="new mounts: open_tree", code="""escaped(syscall(428, -100, b"/", 1 | 0x8000))"""),
    mount(
        name="new mounts: move_mount",
        code="""
        os.mkdir("m")
        tree = syscall(428, -100, b"/proc", 1)
        escaped(syscall(429, tree, b"", -100, b"m", 4))
        """,
    ),
    mount(name="new mounts: fspick", code="""escaped(syscall(433, -100, b"/", 0))"""),
    mount(
        name="new mounts: mount_setattr",
        code="""
        import struct
        for path in (b"/", b"/proc"):
            try:
                escaped(syscall(442, -100, path, 0, struct.pack("4Q", 0, 1, 0, 0), 32))
            except OSError as error:
                last = error
        raise last
        """,
    ),
    mount(name="change the root", code="""os.mkdir("cell"); os.chroot("cell"); escaped()"""),
    mount(
        name="pivot the root",
        code="""
        os.mkdir("m")
        try:
            syscall(165, b"none", b"m", b"tmpfs", 0, 0)
        except OSError:
            pass
        os.mkdir("m/old")
        escaped(syscall(155, b"m", b"m/old"))
        """,
    ),
    change(
        name="write to a file of the host",
        levels=BOTH,
        code="""
        with open(T["victim"], "w") as file:
            file.write("harm")
        """,
    ),
    change(
        name="leave a file in the host's tmp",
        levels=BOTH,
        code="""
        with open(os.path.join(os.path.dirname(T["victim"]), "left"), "w") as file:
            file.write("x")
        os.unlink(file.name)
        escaped()
        """,
        root_only="the folder is its owner's",
    ),
    change(
        name="poison the system's folders",
        root_only="they are root's",
        levels=BOTH,
        code="""
        for folder in ("/usr/bin", "/usr/lib", "/etc", "/bin", "/lib", "/"):
            path = os.path.join(folder, T["token"])
            try:
                os.close(os.open(path, os.O_CREAT | os.O_WRONLY))
            except OSError as error:
                last = error
                continue
            os.unlink(path)
            escaped(f"wrote to {folder}")
        raise last
        """,
    ),
    change(
        name="poison the standard library",
        root_only="an ordinary user's standard library is the system's",
        levels=BOTH,
        code="""
        path = os.path.join(os.path.dirname(os.__file__), T["token"])
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY))
        os.unlink(path)
        escaped()
        """,
    ),
    change(
        name="poison the installed packages",
        root_only="an ordinary user's packages may be somebody else's",
        levels=BOTH,
        code="""
        path = os.path.join(T["site"], T["token"] + ".pth")
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY))
        os.unlink(path)
        escaped()
        """,
    ),
    change(
        name="open a system program for writing",
        root_only="they are root's",
        levels=BOTH,
        code="""
        for path in ("/usr/bin/env", "/bin/cat", "/usr/bin/id"):
            if os.path.exists(path):
                os.open(path, os.O_RDWR)
                escaped(f"opened {path}")
        """,
    ),
    change(
        name="a kernel setting",
        root_only="they are root's",
        levels=BOTH,
        code="""
        with open("/proc/sys/vm/panic_on_oom") as file:
            same = file.read()
        with open("/proc/sys/vm/panic_on_oom", "w") as file:
            file.write(same)
        escaped("wrote back the value it had")
        """,
    ),
    change(
        name="the program that takes core dumps",
        root_only="it is root's",
        levels=BOTH,
        code="""os.open("/proc/sys/kernel/core_pattern", os.O_WRONLY); escaped("opened, not written")""",
    ),
    change(
        name="any kernel setting at all",
        root_only="they are root's",
        code="""
        for folder, _, names in os.walk("/proc/sys"):
            for name in names:
                path = os.path.join(folder, name)
                try:
                    os.close(os.open(path, os.O_WRONLY))
                except OSError:
                    continue
                escaped(f"opened {path} for writing")
        """,
    ),
    change(
        name="switches in sys",
        root_only="they are root's",
        levels=BOTH,
        code="""
        for path in ("/sys/power/state", "/sys/kernel/mm/ksm/run", "/sys/kernel/profiling"):
            try:
                os.open(path, os.O_WRONLY)
            except OSError as error:
                last = error
                continue
            escaped(f"opened {path} for writing")
        raise last
        """,
    ),
    change(
        name="control groups of the host",
        root_only="they are root's",
        levels=BOTH,
        code="""
        for folder, _, names in os.walk("/sys/fs/cgroup"):
            for name in ("release_agent", "cgroup.procs", "tasks"):
                if name in names:
                    os.open(os.path.join(folder, name), os.O_WRONLY)
                    escaped(f"opened {name} for writing")
        """,
    ),
    change(
        name="a set-user-ID program of its own",
        code="""
        import shutil
        shutil.copy("/bin/sh", "sh")
        os.chmod("sh", 0o6755)
        if os.stat("sh").st_mode & 0o4000 and not os.statvfs("sh").f_flag & os.ST_NOSUID:
            escaped("it would take effect")
        """,
    ),
    change(
        name="a set-user-ID program of the system",
        levels=BOTH,
        code="""
        import glob
        status = open("/proc/self/status").read()
        programs = [p for p in glob.glob("/usr/bin/*") if os.path.exists(p) and os.stat(p).st_mode & 0o4000]
        if programs and "NoNewPrivs:\\t0" in status and not os.statvfs(programs[0]).f_flag & os.ST_NOSUID:
            escaped(f"{programs[0]} would take effect")
        """,
    ),
    change(name="become user 0", levels=BOTH, code="""os.setresuid(0, 0, 0); escaped()"""),
    change(name="become group 0", levels=BOTH, code="""os.setresgid(0, 0, 0); escaped()"""),
    change(
        name="join other groups",
        root_only="setgroups needs CAP_SETGID",
        levels=BOTH,
        code="""os.setgroups([0, 4, 42]); escaped()""",
    ),
    change(
        name="take capabilities back",
        levels=BOTH,
        code="""
        import struct
        wanted = struct.pack("6I", *[1 << 21] * 3, 0, 0, 0)
        escaped(syscall(126, struct.pack("Ii", 0x20080522, 0), wanted))
        """,
    ),
    change(
        name="be the host's root under another number",
        root_only="only root is",
        code="""
        inner, outer, count = map(int, open("/proc/self/uid_map").read().split()[:3])
        if outer + os.getuid() - inner == 0:
            escaped("user 0 outside")
        """,
    ),
)


def test_contained(attempt: Attempt, where: str, controls: Controls) -> None:
    """What the guest changes, it changes for itself alone."""
    controls.assert_contained(attempt, where)
