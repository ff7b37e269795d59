"""Build a kernel and a root disk of a distribution's packages: `cloche images build`."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from cloche.core.errors import BackendUnavailable, StartFailed
from cloche.core.languages import LANGUAGES
from cloche.core.progress import Progress, tell
from cloche.core.units import MIB

from .image import DISK, FORMAT, INITRD, KERNEL, MANIFEST, Image, find_image, place_of_images, point_to
from .kernel import first_file_system, module_order, unpack_kernel
from .packages import (
    BUSYBOX,
    USERLAND,
    Package,
    called,
    check_tools,
    fetch_alone,
    fetch_closure,
    real_kernel_package,
    tool,
    unpack,
    upstream,
)

FOLDERS = ("dev", "proc", "sys", "run", "tmp", "workspace", "root", "home", "usr/lib/cloche", "var/tmp")
LINKED_FOLDERS = {"bin": "usr/bin", "sbin": "usr/sbin", "lib": "usr/lib", "lib64": "usr/lib64"}
FILES = {
    "etc/passwd": "root:x:0:0:root:/root:/bin/sh\nsandbox:x:1000:1000:sandbox:/workspace:/bin/sh\n"
    "nobody:x:65534:65534:nobody:/:/bin/sh\n",
    "etc/group": "root:x:0:\nsandbox:x:1000:\nnogroup:x:65534:\n",
    "etc/hosts": "127.0.0.1 localhost sandbox\n",
    "etc/hostname": "sandbox\n",
    "etc/resolv.conf": "",
}
# What no program needs to run.
LEFT_OUT = ("usr/share/doc", "usr/share/man", "usr/share/info", "usr/share/locale", "usr/share/lintian", "boot",
            "usr/share/bash-completion", "var/lib/dpkg", "var/cache")  # fmt: skip
SPARE_BYTES = 8 * MIB
INODES_SPARE = 512


def build_image(packages: Sequence[str] = ()) -> Image:
    """Build the image, with `packages` besides the usual ones, and use it from now on.

    Raises BackendUnavailable when a program for it is missing, StartFailed when a package cannot be had.
    """
    if platform.machine() != "x86_64":
        raise BackendUnavailable(f"images are built for x86-64 only in this version, and this is {platform.machine()}.")
    check_tools()
    place = place_of_images()
    place.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".new-", dir=place) as folder:
        try:
            _build(Path(folder), packages)
        finally:
            tell(Progress(what="building", is_over=True))
        return _take_over(place, Path(folder) / "image")


def _build(folder: Path, extra: Sequence[str]) -> None:
    """Do the steps, each into the folder that the next one reads."""
    ready, root, boot = folder / "image", folder / "root", folder / "boot"
    ready.mkdir()
    _say("fetching the kernel")
    kernel = fetch_alone([real_kernel_package(), BUSYBOX], folder / "kernel")
    _say("fetching packages")
    userland = fetch_closure([*USERLAND, *extra], folder / "packages")
    _say("unpacking")
    boot.mkdir()
    unpack(kernel, boot)
    _make_boot_files(boot, ready)
    _make_root(root, userland)
    _say("compiling the standard library")
    python = _compile(root)
    _say("writing the disk")
    _write_disk(root, ready / DISK)
    _write_manifest(ready, root, [*kernel, *userland], python)


def _say(what: str) -> None:
    tell(Progress(what=what))


def _make_boot_files(boot: Path, ready: Path) -> None:
    """Make the kernel's image and its first file system."""
    image = next(iter(sorted((boot / "boot").glob("vmlinuz-*"))), None)
    modules = next(iter(sorted((boot / "lib" / "modules").glob("*"))), None)
    if modules is None:
        modules = next(iter(sorted((boot / "usr" / "lib" / "modules").glob("*"))), None)
    if image is None or modules is None:
        raise StartFailed("the kernel's package holds no kernel; is it a signed one with its files?")
    busybox = next(path for path in (boot / "bin" / "busybox", boot / "usr" / "bin" / "busybox") if path.exists())
    (ready / KERNEL).write_bytes(unpack_kernel(image.read_bytes()))
    (ready / INITRD).write_bytes(first_file_system(busybox.read_bytes(), module_order(modules)))


def _make_root(root: Path, packages: Sequence[Package]) -> None:
    """Unpack the packages, and add what their installation would have made."""
    root.mkdir(mode=0o755)
    for target in (*LINKED_FOLDERS.values(), *FOLDERS):
        (root / target).mkdir(parents=True, exist_ok=True)
    for name, target in LINKED_FOLDERS.items():
        (root / name).symlink_to(target)
    unpack(packages, root)
    for name in LEFT_OUT:
        shutil.rmtree(root / name, ignore_errors=True)
    for name, text in FILES.items():
        (root / name).write_text(text)
    shell = root / "usr/bin/sh"
    if not shell.is_symlink() and not shell.exists():
        shell.symlink_to("dash")
    guest = root / "usr/lib/cloche/guest.py"
    guest.write_text((files("cloche.backends.microvm") / "guest.py").read_text(encoding="utf-8"))


def _compile(root: Path) -> str:
    """Compile the standard library with the image's own interpreter, as installing it would; return its version.

    The disk cannot be written to, so what is not compiled now would be compiled anew in each machine.
    """
    library = next(iter(sorted((root / "usr/lib").glob("python3.*"))), None)
    if library is None:
        raise StartFailed("the packages hold no Python 3")
    loader = root / "usr/lib64/ld-linux-x86-64.so.2"
    if not loader.exists():
        loader = root / "usr/lib/x86_64-linux-gnu/ld-linux-x86-64.so.2"
    libraries = ":".join(str(root / place) for place in ("usr/lib/x86_64-linux-gnu", "usr/lib"))
    interpreter = [str(loader), "--library-path", libraries, str(root / "usr/bin" / library.name)]
    words = [*interpreter, "-s", "-S", "-m", "compileall", "-q", "-s", str(root), "-p", "/",
             "--invalidation-mode", "unchecked-hash", "-x", r"/(test|idlelib|lib2to3/tests)/",
             str(library), str(root / "usr/lib/cloche")]  # fmt: skip
    env = {"PYTHONHOME": str(root / "usr"), "PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"}
    done = subprocess.run(words, env=env, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    if not next(iter((library / "__pycache__").glob("os.*.pyc")), None):
        said = (done.stderr or done.stdout).decode("utf-8", "replace").strip()
        raise StartFailed(f"the image's own Python does not run here: {said[-600:]}")
    return library.name.removeprefix("python")


def _write_disk(root: Path, disk: Path) -> None:
    """Write a file system that is never written to again: no journal, no room to spare."""
    size, count = 0, INODES_SPARE
    for folder, names, others in os.walk(root):
        count += len(names) + len(others)
        size += 4096 + sum(-(-os.lstat(os.path.join(folder, name)).st_size // 4096) * 4096 for name in others)
    blocks = (size + count * 256 + size // 32 + SPARE_BYTES) // 4096
    features = "^has_journal,^resize_inode,^metadata_csum,^64bit"
    called(
        [tool("mke2fs"), "-q", "-F", "-t", "ext4", "-b", "4096", "-m", "0", "-N", str(count), "-O", features,
         "-E", "root_owner=0:0,no_copy_xattrs", "-L", "cloche", "-d", str(root), str(disk), str(blocks)]
    )  # fmt: skip


def _write_manifest(ready: Path, root: Path, packages: Sequence[Package], python: str) -> None:
    """Write down what the image holds, and its name: that of its contents."""
    digest = hashlib.sha256()
    for name in (KERNEL, INITRD, DISK):
        (ready / name).chmod(0o644)  # a monitor may be somebody else
        with (ready / name).open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    programs = _programs(root)
    versions = {package.name: upstream(package.version) for package in packages}
    manifest: Mapping[str, Any] = {
        "format": FORMAT,
        "id": digest.hexdigest(),
        "python": python,
        "programs": programs,
        "versions": {name: version for name in programs if (version := _version(name, versions))},
        "packages": {package.name: package.version for package in packages},
    }
    (ready / MANIFEST).write_text(json.dumps(manifest, indent=1))


def _programs(root: Path) -> dict[str, str]:
    """Return the programs that run languages, with their paths inside."""
    names = {name for language in LANGUAGES.values() for engine in language.engines for name in engine.programs}
    places = ("usr/local/bin", "usr/bin")
    return {
        name: f"/{place}/{name}" for name in sorted(names) for place in places if os.path.lexists(root / place / name)
    }


# Where a program's package has another name.
_PACKAGE_OF = {"node": "nodejs", "go": "golang-go", "mcs": "mono-mcs", "mono": "mono-runtime", "sh": "dash"}


def _version(program: str, versions: Mapping[str, str]) -> str:
    return versions.get(_PACKAGE_OF.get(program, program), "")


def _take_over(place: Path, ready: Path) -> Image:
    """Put a finished image in its place, and point to it; those before it go."""
    name = json.loads((ready / MANIFEST).read_text())["id"][:16]
    target = place / name
    if not target.exists():
        ready.rename(target)
    point_to(name)
    for other in place.iterdir():
        if other.is_dir() and other.name != name and not other.name.startswith("."):
            shutil.rmtree(other, ignore_errors=True)  # a machine that runs holds its files open
    return find_image()
