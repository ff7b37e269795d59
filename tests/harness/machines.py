"""Virtual machines: images for them, and Firecracker's stand-in as a program that can be started."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import zipapp
from importlib.resources import files
from pathlib import Path
from shutil import copy, copytree, ignore_patterns

import pytest

from cloche.backends.microvm import counter
from cloche.backends.microvm.backend import FirecrackerBackend
from cloche.backends.microvm.firecracker import Firecracker
from cloche.backends.microvm.image_build import INIT, TOOLS, build_image, pack_archive
from cloche.backends.microvm.plan import DISK, FIRST_ID, IDS, INITRD, MANIFEST, HostAcceleration
from cloche.core.errors import StartFailed
from tests.harness.leaks import is_of_this_suite

SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def build_once(cache: Path) -> Path:
    """Return the folder of an image in a cache of the tests' own. Skips the test, naming what is missing."""
    needed = ("qemu-system-x86_64", *TOOLS)
    lacks = [name for name in needed if shutil.which(name, path=SYSTEM_PATH) is None]
    if lacks:
        pytest.skip(f"missing: {', '.join(lacks)} (make setup-system)")
    before = os.environ.get("XDG_CACHE_HOME")
    os.environ["XDG_CACHE_HOME"] = str(cache)
    try:
        return build_image().folder
    except StartFailed as error:
        pytest.skip(f"missing: packages to build an image of ({error})")
    finally:
        if before is None:
            del os.environ["XDG_CACHE_HOME"]
        else:
            os.environ["XDG_CACHE_HOME"] = before


def monitors() -> set[int]:
    """Return the numbers of this suite's monitors that are this user's: root's have an id that nobody has."""
    ours = range(FIRST_ID, FIRST_ID + IDS) if os.geteuid() == 0 else (os.geteuid(),)
    found = set()
    for entry in os.listdir("/proc"):
        try:
            words = Path(f"/proc/{entry}/cmdline").read_bytes().split(b"\0") if entry.isdigit() else []
            is_ours = _uid(entry) in ours if words[:1] else False
        except OSError:
            continue
        is_monitor = is_ours and words[0].endswith(b"qemu-system-x86_64") and b"cloche" in words
        if is_monitor and is_of_this_suite(int(entry)):
            found.add(int(entry))
    return found


def _uid(entry: str) -> int:
    rows = Path(f"/proc/{entry}/status").read_text().splitlines()
    return next(int(row.split()[1]) for row in rows if row.startswith("Uid:"))


def with_root(image: Path, folder: Path) -> Path:
    """Return a copy of an image whose first process gives nothing up: what runs in its places is the machine's root.

    The machine's own port stays open in the first process of each place, too, where root can take it.
    """
    debugfs = shutil.which("debugfs", path=SYSTEM_PATH)
    if debugfs is None:
        pytest.skip("missing: debugfs (e2fsprogs, make setup-system)")
    copy = folder / image.name
    shutil.copytree(image, copy)
    text = files("cloche.backends.microvm").joinpath("guest_init.py").read_text()
    for line in ("        give_up(settings)\n", "        os.closerange(3, 1024)\n"):
        assert text.count(line) == 1
        text = text.replace(line, "")
    guest, orders, place = folder / "guest.py", folder / "orders", "/usr/lib/cloche/guest.py"
    guest.write_text(text)
    orders.write_text(f"rm {place}\nwrite {guest} {place}\n")
    subprocess.run([debugfs, "-w", "-f", str(orders), str(copy / DISK)], check=True, capture_output=True)
    return copy


def with_late_ports(image: Path, folder: Path, *, after_s: int) -> Path:
    """Return a copy of an image whose ports come so many seconds late: while the first process asks for them."""
    copy = with_own_id(image, folder)
    archive = (copy / INITRD).read_bytes()
    assert b"modules/virtio_console.ko" in archive, "this kernel's ports cannot come late: they are built in"
    late = (
        "busybox cp /bin/busybox /modules/virtio_console.ko /dev\n"  # only what is mounted outlives the change of root
        f"cd /dev; (busybox sleep {after_s}; ./busybox insmod ./virtio_console.ko; ./busybox rm busybox *.ko) & cd /\n"
    )
    words = INIT.replace("while read", "busybox grep -v virtio_console /modules/order | while read")
    words = words.replace("done < /modules/order", "done").replace("for place in proc", f"{late}for place in proc")
    assert words.count("virtio_console") == 3
    archive += bytes(-len(archive) % 512)  # the kernel unpacks one archive after the other
    (copy / INITRD).write_bytes(archive + pack_archive([("init", stat.S_IFREG | 0o755, words.encode())]))
    return copy


def with_own_id(image: Path, folder: Path) -> Path:
    """Return a copy of an image of which nothing is remembered for the image itself."""
    copy = folder / image.name
    shutil.copytree(image, copy)
    manifest = json.loads((copy / MANIFEST).read_text())
    (copy / MANIFEST).write_text(json.dumps({**manifest, "id": os.urandom(32).hex()}))
    return copy


PACE = 8.0  # emulated
MAIN = "import sys\nfrom stand_in.program import main\nsys.exit(main())\n"


def pack_stand_in(folder: Path) -> Path:
    """Return the stand-in, packed into one program."""
    source = folder / "source"
    copytree(Path(__file__).with_name("stand_in"), source / "stand_in", ignore=ignore_patterns("__pycache__"))
    copy(counter.__file__, source / "counter.py")
    (source / "__main__.py").write_text(MAIN)
    program = folder / "firecracker"
    zipapp.create_archive(source, program, "/usr/bin/python3 -IS")
    program.chmod(0o755)
    return program


def stand_in_backend(program: Path) -> FirecrackerBackend:
    """Return the backend over a stand-in, which needs no KVM."""
    return FirecrackerBackend(given=(Firecracker(program=str(program), pace=PACE), HostAcceleration(kind="kvm")))


def programs_of(caller: int) -> set[int]:
    """Return the numbers of the stand-ins that a process has started."""
    return {one for one in _numbers() if _is_stand_in(one) and _parent(_parent(one)) == caller}


def machines_of(caller: int) -> set[int]:
    """Return them with what they run machines with."""
    programs = programs_of(caller)
    return programs | {one for one in _numbers() if _parent(one) in programs}


def _numbers() -> list[int]:
    return [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]


def are_there(processes: set[int]) -> bool:
    """Tell whether any of these still runs."""
    return any(_parent(one) for one in processes)


def _is_stand_in(process: int) -> bool:
    try:
        words = Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return b"/firecracker" in words and b"--api-sock" in words


def _parent(process: int) -> int:
    try:
        return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0
