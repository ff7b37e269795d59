"""Build an image from a distribution's packages: kernel, initial file system, root disk (`cloche images build`).

The distribution's own tools download and verify the packages. They are unpacked into a folder without being installed,
so an ordinary user can do it, and no package of this machine changes.

The kernel is decompressed here, once, because that takes an emulated machine seconds; every monitor can load the
resulting ELF image. The modules that the root disk needs are in the initial file system, with a busybox that loads
them.
"""

from __future__ import annotations

import bz2
import gzip
import hashlib
import json
import lzma
import os
import platform
import re
import shutil
import stat
import struct
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from cloche.core.errors import BackendUnavailable, StartFailed
from cloche.core.events import Progress, report_progress
from cloche.core.languages import LANGUAGES
from cloche.core.limits import MIB
from cloche.core.record import dataclass

from .plan import DISK, FORMAT, INITRD, KERNEL, MANIFEST, MachineImage, find_image, place_of_images, point_to

KERNEL_PACKAGE = "linux-image-cloud-amd64"
BUSYBOX = "busybox-static"
USERLAND = ("bash", "coreutils", "dash", "diffutils", "findutils", "grep", "gzip", "python3", "sed", "tar")
TOOLS = {"apt-get": "apt", "apt-cache": "apt", "dpkg-deb": "dpkg", "tar": "tar", "mke2fs": "e2fsprogs"}
PLACES = ("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin")
UPDATE = 'Refresh the lists first: "sudo apt-get update".'

# Kernel image and initramfs. Offsets: Documentation/arch/x86/boot.rst.
SECTOR = 512
SETUP_SECTORS_AT, MAGIC_AT, PAYLOAD_AT = 0x1F1, 0x202, 0x248
ELF = b"\x7fELF"
# The ELF note of the PVH entry point: owner "Xen", type 18 (XEN_ELFNOTE_PHYS32_ENTRY).
ENTRY_NOTES = tuple(struct.pack("<III", 4, size, 18) + b"Xen\0" for size in (4, 8))
# In load order; dependencies are inserted before them.
WANTED_MODULES = (
    "virtio_mmio", "virtio_blk", "virtio_console", "vmw_vsock_virtio_transport", "crc32c_generic", "ext4",
)  # fmt: skip
_DEPENDS = re.compile(rb"\0depends=([^\0]*)\0")
TRAILER = "TRAILER!!!"
# The first program: it loads modules, finds the root disk, and goes there. What fails is said in the kernel's log, as
# critical: what is written to a terminal may not have left the machine when it restarts.
INIT = """\
#!/bin/busybox sh
export PATH=/bin
say() { echo "<2>cloche: $*" > /dev/kmsg; }
busybox mount -t proc proc /proc
busybox mount -t sysfs sysfs /sys
busybox mount -t devtmpfs devtmpfs /dev
while read -r module; do busybox insmod "/modules/$module" || say "cannot load $module"; done < /modules/order
tries=0
while [ ! -b /dev/vda ] && [ $tries -lt 500 ]; do tries=$((tries+1)); busybox usleep 10000; done
busybox mount -t ext4 -o ro,nosuid,nodev,noatime /dev/vda /root || { say "no root disk"; busybox reboot -f; }
for place in proc sys dev; do busybox mount --move /$place /root/$place; done
exec busybox switch_root /root /usr/bin/python3 -I -S -B /usr/lib/cloche/guest.py
"""

# The root disk.
FOLDERS = (
    "dev", "proc", "sys", "run", "tmp", "workspace", "root", "home/sandbox", "opt", "srv", "usr/lib/cloche", "var/tmp",
)  # fmt: skip
LINKED_FOLDERS = {"bin": "usr/bin", "sbin": "usr/sbin", "lib": "usr/lib", "lib64": "usr/lib64"}
FILES = {
    "etc/passwd": "root:x:0:0:root:/root:/bin/sh\nsandbox:x:1000:1000:sandbox:/workspace:/bin/sh\n"
    "nobody:x:65534:65534:nobody:/:/bin/sh\n",
    "etc/group": "root:x:0:\nsandbox:x:1000:\nnogroup:x:65534:\n",
    "etc/hosts": "127.0.0.1 localhost sandbox\n",
    "etc/hostname": "sandbox\n",
    "etc/resolv.conf": "",
}
# Files that no program needs at run time.
LEFT_OUT = ("usr/share/doc", "usr/share/man", "usr/share/info", "usr/share/locale", "usr/share/lintian", "boot",
            "usr/share/bash-completion", "var/lib/dpkg", "var/cache")  # fmt: skip
SPARE_BYTES = 8 * MIB
INODES_SPARE = 512

# Packages whose name differs from the program's.
_PACKAGE_OF = {"node": "nodejs", "go": "golang-go", "mcs": "mono-mcs", "mono": "mono-runtime", "sh": "dash"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """A downloaded package: its archive, name and version."""

    file: Path
    name: str
    version: str


def tool(name: str) -> str:
    """Return the path of a program that a build needs. Raises BackendUnavailable that names its package."""
    path = shutil.which(name, path=":".join(PLACES))
    if path is None:
        raise BackendUnavailable(
            f"an image is built with {name}, which is not here.",
            remedy=f'On Debian and Ubuntu: "apt-get install {TOOLS.get(name, name)}"; elsewhere, build it there and '
            "name its folder in CLOCHE_MICROVM_IMAGE.",
        )
    return path


def check_tools() -> None:
    """Raise BackendUnavailable if a program that a build needs is missing."""
    for name in TOOLS:
        tool(name)


def called(arguments: Sequence[str], *, cwd: Path | None = None) -> str:
    """Run one of the distribution's programs and return its output. Raises StartFailed with the end of its errors."""
    process = subprocess.run(list(arguments), cwd=cwd, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    if process.returncode != 0:
        errors = (process.stderr or process.stdout).decode("utf-8", "replace").strip()
        raise StartFailed(f"{Path(arguments[0]).name} failed with exit code {process.returncode}: {errors[-600:]}")
    return process.stdout.decode("utf-8", "replace")


def real_kernel_package() -> str:
    """Return the package that contains the distribution's kernel for virtual machines. Raises StartFailed."""
    output = called([tool("apt-cache"), "depends", KERNEL_PACKAGE])
    match = re.search(r"Depends: (linux-image-\S+)", output)
    if match is None:
        raise StartFailed(f"the package lists of this machine have no {KERNEL_PACKAGE}. {UPDATE}")
    return match[1]


def fetch_alone(names: Sequence[str], folder: Path) -> list[Package]:
    """Download packages without their dependencies. Raises StartFailed."""
    folder.mkdir(parents=True, exist_ok=True)
    called([tool("apt-get"), "-q", "-o", "APT::Sandbox::User=root", "download", *names], cwd=folder)
    return _fetched(folder)


def fetch_closure(names: Sequence[str], folder: Path) -> list[Package]:
    """Download packages with all dependencies, as if no package were installed. Raises StartFailed."""
    archives = folder / "archives"
    (archives / "partial").mkdir(parents=True, exist_ok=True)
    nothing = folder / "status"
    nothing.touch()
    settings = {
        "Dir::State::status": nothing,
        "Dir::Cache": folder,
        "Dir::Cache::archives": archives,
        "Debug::NoLocking": "true",
        "APT::Sandbox::User": "root",
        "APT::Install-Recommends": "false",
    }
    options = [argument for name, value in settings.items() for argument in ("-o", f"{name}={value}")]
    called([tool("apt-get"), "-q", "-y", *options, "--download-only", "install", *names])
    return _fetched(archives)


def _fetched(folder: Path) -> list[Package]:
    versions = []
    for file in sorted(folder.glob("*.deb")):
        output = called([tool("dpkg-deb"), "--show", "--showformat=${Package} ${Version}", str(file)])
        name, _, version = output.partition(" ")
        versions.append(Package(file=file, name=name, version=version))
    if not versions:
        raise StartFailed(f"nothing was fetched. {UPDATE}")
    return versions


def unpack(packages: Sequence[Package], folder: Path) -> None:
    """Unpack archives into a folder; symbolic links to folders are kept. Raises StartFailed."""
    for package in packages:
        reading = subprocess.Popen([tool("dpkg-deb"), "--fsys-tarfile", str(package.file)], stdout=subprocess.PIPE)
        arguments = [tool("tar"), "-x", "-f", "-", "-C", str(folder), "--keep-directory-symlink", "--no-same-owner"]
        process = subprocess.run(arguments, stdin=reading.stdout, capture_output=True, check=False)
        if reading.stdout is not None:
            reading.stdout.close()
        if reading.wait() != 0 or process.returncode != 0:
            raise StartFailed(f"package {package.name} cannot be unpacked: {process.stderr.decode(errors='replace')}")


def upstream(version: str) -> str:
    """Return the version without what the distribution adds to it.

    >>> upstream("2:1.19~1")
    '1.19'
    """
    match = re.match(r"[0-9.]*[0-9]", version.partition(":")[2] or version)
    return match[0] if match else version


def _by_zstd(data: bytes) -> bytes:
    program = shutil.which("zstd")
    if program is None:
        raise StartFailed('this kernel is packed with zstd, which is not here; install it: "apt-get install zstd"')
    return subprocess.run([program, "-dcq"], input=data, capture_output=True, check=False).stdout


def _by_xz(data: bytes) -> bytes:
    return lzma.LZMADecompressor().decompress(data)


def _by_lz4(data: bytes) -> bytes:
    """Unpack the legacy format of `lz4`, which kernels use: blocks, each preceded by its length."""
    unpacked, position = bytearray(), 4
    while position + 4 <= len(data):
        (size,) = struct.unpack_from("<I", data, position)
        if size == 0 or position + 4 + size > len(data):  # the last block is followed by the total length
            break
        _unpack_block(data, position + 4, position + 4 + size, unpacked)
        position += 4 + size
    return bytes(unpacked)


def _unpack_block(data: bytes, position: int, end: int, unpacked: bytearray) -> None:
    """Append one unpacked block of `lz4` to `unpacked`: literals and copies of earlier output, in turns."""
    while position < end:
        token = data[position]
        size, position = _length(data, position + 1, token >> 4)
        unpacked += data[position : position + size]
        position += size
        if position >= end:
            return
        back = data[position] | data[position + 1] << 8
        size, position = _length(data, position + 2, token & 15)
        size += 4
        start = len(unpacked) - back
        if back >= size:
            unpacked += unpacked[start : start + size]
        else:  # the copy overlaps its own output
            unpacked += (unpacked[start:] * (size // back + 1))[:size]


def _length(data: bytes, position: int, size: int) -> tuple[int, int]:
    """Return a length whose first part is a field of four bits, and the position after it."""
    if size == 15:
        while data[position] == 255:
            size += 255
            position += 1
        size += data[position]
        position += 1
    return size, position


# By their first bytes.
UNPACKERS: Mapping[bytes, Callable[[bytes], bytes]] = {
    b"\xfd7zXZ": _by_xz,
    b"\x5d\0\0": _by_xz,
    b"\x1f\x8b": gzip.decompress,
    b"BZh": bz2.decompress,
    b"\x28\xb5\x2f\xfd": _by_zstd,
    b"\x02\x21\x4c\x18": _by_lz4,
}


def unpack_kernel(image: bytes) -> bytes:
    """Return the ELF image in a bootable kernel image, if monitors can enter it; else the image unchanged.

    Raises StartFailed if a required decompressor is missing.
    """
    if image[MAGIC_AT : MAGIC_AT + 4] != b"HdrS" or len(image) < PAYLOAD_AT + 8:
        return image
    start = (image[SETUP_SECTORS_AT] + 1) * SECTOR
    offset, length = struct.unpack_from("<II", image, PAYLOAD_AT)
    payload = image[start + offset : start + offset + length]
    for magic, unpack in UNPACKERS.items():
        if payload.startswith(magic):
            kernel = unpack(payload)
            is_fit = kernel.startswith(ELF) and any(note in kernel for note in ENTRY_NOTES)
            return kernel if is_fit else image
    return image


def module_order(folder: Path, names: Iterable[str] = WANTED_MODULES) -> list[Path]:
    """Return the files of modules, dependencies first. Built-in modules need no file.

    Raises StartFailed for a module that is neither available nor built in.
    """
    available = {_name(path): path for path in sorted(folder.rglob("*.ko*"))}
    listed = folder / "modules.builtin"
    built_in = {_name(Path(line)) for line in listed.read_text().split()} if listed.exists() else set[str]()
    ordered: dict[str, Path] = {}

    def add(name: str) -> None:
        if name in ordered or name in built_in:
            return
        if name not in available:
            raise StartFailed(f"this kernel has no module {name!r}; build with the package of another one")
        depends = _DEPENDS.search(module_bytes(available[name]))
        for dependency in depends[1].decode().split(",") if depends else ():
            if dependency:
                add(dependency)
        ordered[name] = available[name]

    for name in names:
        add(name)
    return list(ordered.values())


def _name(path: Path) -> str:
    return path.name.partition(".")[0].replace("-", "_")


def module_bytes(path: Path) -> bytes:
    """Return a module's uncompressed content."""
    data = path.read_bytes()
    unpack = next((unpack for magic, unpack in UNPACKERS.items() if data.startswith(magic)), None)
    return unpack(data) if unpack is not None else data


def first_file_system(busybox: bytes, modules: Iterable[Path]) -> bytes:
    """Return the initramfs archive, which the kernel unpacks into memory and starts from."""
    order = list(modules)
    entries: list[tuple[str, int, bytes]] = [
        *((name, stat.S_IFDIR | 0o755, b"") for name in ("bin", "dev", "modules", "proc", "root", "sys")),
        ("dev/console", stat.S_IFCHR | 0o600, bytes((5, 1))),
        ("bin/busybox", stat.S_IFREG | 0o755, busybox),
        ("init", stat.S_IFREG | 0o755, INIT.encode()),
        ("modules/order", stat.S_IFREG | 0o644, "".join(f"{_name(path)}.ko\n" for path in order).encode()),
        *((f"modules/{_name(path)}.ko", stat.S_IFREG | 0o644, module_bytes(path)) for path in order),
    ]
    return pack_archive(entries)


def pack_archive(entries: Iterable[tuple[str, int, bytes]]) -> bytes:
    """Return a `newc` archive of (name, mode, content). A device's content is its major and minor number."""
    packed = bytearray()
    rows = [*entries, (TRAILER, 0, b"")]
    for number, (name, mode, content) in enumerate(rows, 1):
        is_device = stat.S_ISCHR(mode)
        data = b"" if is_device else content
        major, minor = content if is_device else (0, 0)
        links = 2 if stat.S_ISDIR(mode) else 1
        fields = (number, mode, 0, 0, links, 0, len(data), 0, 0, major, minor, len(name) + 1, 0)
        packed += b"070701" + b"".join(b"%08x" % value for value in fields) + name.encode() + b"\0"
        packed += bytes(-len(packed) % 4)
        packed += data
        packed += bytes(-len(packed) % 4)
    return bytes(packed)


def build_image(packages: Sequence[str] = ()) -> MachineImage:
    """Build the image, with `packages` besides the default ones, and make it the current one.

    Raises BackendUnavailable if a required program is missing, StartFailed if a package cannot be downloaded.
    """
    if platform.machine() != "x86_64":
        raise BackendUnavailable(f"images are built for x86-64 only in this version, and this is {platform.machine()}.")
    check_tools()
    images = place_of_images()
    images.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".new-", dir=images) as folder:
        try:
            _build(Path(folder), packages)
        finally:
            report_progress(Progress(what="building", is_over=True))
        return _take_over(images, Path(folder) / "image")


def _build(folder: Path, extra: Sequence[str]) -> None:
    """Run the steps of a build. Each writes to the folder that the next reads."""
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


def _say(text: str) -> None:
    report_progress(Progress(what=text))


def _make_boot_files(boot: Path, ready: Path) -> None:
    """Make the kernel's image and its initial file system."""
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
    """Unpack the packages, and add the files that their installation would have created."""
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
    guest.write_text((files("cloche.backends.microvm") / "guest_init.py").read_text(encoding="utf-8"))


def _compile(root: Path) -> str:
    """Compile the standard library with the image's own interpreter, as its installation would; return the version.

    The disk is read-only, so each machine would otherwise compile the modules again.
    """
    library = next(iter(sorted((root / "usr/lib").glob("python3.*"))), None)
    if library is None:
        raise StartFailed("the packages hold no Python 3")
    loader = root / "usr/lib64/ld-linux-x86-64.so.2"
    if not loader.exists():
        loader = root / "usr/lib/x86_64-linux-gnu/ld-linux-x86-64.so.2"
    libraries = ":".join(str(root / folder) for folder in ("usr/lib/x86_64-linux-gnu", "usr/lib"))
    interpreter = [str(loader), "--library-path", libraries, str(root / "usr/bin" / library.name)]
    arguments = [*interpreter, "-s", "-S", "-m", "compileall", "-q", "-s", str(root), "-p", "/",
             "--invalidation-mode", "unchecked-hash", "-x", r"/(test|idlelib|lib2to3/tests)/",
             str(library), str(root / "usr/lib/cloche")]  # fmt: skip
    env = {"PYTHONHOME": str(root / "usr"), "PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"}
    process = subprocess.run(arguments, env=env, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    if not next(iter((library / "__pycache__").glob("os.*.pyc")), None):
        errors = (process.stderr or process.stdout).decode("utf-8", "replace").strip()
        raise StartFailed(f"the image's own Python does not run here: {errors[-600:]}")
    return library.name.removeprefix("python")


def _write_disk(root: Path, disk: Path) -> None:
    """Write a file system that is never written to again: no journal, no free space."""
    size, count = 0, INODES_SPARE
    for folder, names, file_names in os.walk(root):
        count += len(names) + len(file_names)
        size += 4096 + sum(-(-os.lstat(os.path.join(folder, name)).st_size // 4096) * 4096 for name in file_names)
    blocks = (size + count * 256 + size // 32 + SPARE_BYTES) // 4096
    features = "^has_journal,^resize_inode,^metadata_csum,^64bit"
    called(
        [tool("mke2fs"), "-q", "-F", "-t", "ext4", "-b", "4096", "-m", "0", "-N", str(count), "-O", features,
         "-E", "root_owner=0:0,no_copy_xattrs", "-L", "cloche", "-d", str(root), str(disk), str(blocks)]
    )  # fmt: skip


def _write_manifest(ready: Path, root: Path, packages: Sequence[Package], python: str) -> None:
    """Write the manifest. The image's id is the hash of its files."""
    digest = hashlib.sha256()
    for name in (KERNEL, INITRD, DISK):
        (ready / name).chmod(0o644)  # the monitor may run as another user
        with (ready / name).open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    programs = _programs(root)
    versions = {package.name: upstream(package.version) for package in packages}
    manifest: Mapping[str, Any] = {
        "format": FORMAT,
        "id": digest.hexdigest(),
        "python": python,
        "programs": programs,
        "versions": {name: version for name in programs if (version := versions.get(_PACKAGE_OF.get(name, name)))},
        "packages": {package.name: package.version for package in packages},
    }
    (ready / MANIFEST).write_text(json.dumps(manifest, indent=1))


def _programs(root: Path) -> dict[str, str]:
    """Return the programs that run languages, with their paths inside."""
    names = {name for language in LANGUAGES.values() for engine in language.engines for name in engine.programs}
    folders = ("usr/local/bin", "usr/bin")
    return {
        name: f"/{folder}/{name}"
        for name in sorted(names)
        for folder in folders
        if os.path.lexists(root / folder / name)
    }


def _take_over(images: Path, ready: Path) -> MachineImage:
    """Move a finished image to the folder of images, make it the current one, and delete older ones."""
    name = json.loads((ready / MANIFEST).read_text())["id"][:16]
    target = images / name
    if not target.exists():
        ready.rename(target)
    point_to(name)
    for old in images.iterdir():
        if old.is_dir() and old.name != name and not old.name.startswith("."):
            shutil.rmtree(old, ignore_errors=True)  # running machines have its files open
    return find_image()
