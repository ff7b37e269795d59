"""What a distribution's kernel package holds, made fit for a virtual machine: an ELF image, and a first file system.

Decompressing a kernel takes an emulated machine seconds, so it is done here, once; and an ELF image is what every
monitor can load. The modules that the root disk needs go into the first file system with a busybox that loads them.
"""

from __future__ import annotations

import bz2
import gzip
import lzma
import re
import shutil
import stat
import struct
import subprocess
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from cloche.core.errors import StartFailed

SECTOR = 512
SETUP_SECTORS_AT, MAGIC_AT, PAYLOAD_AT = 0x1F1, 0x202, 0x248
ELF = b"\x7fELF"
# The note by which a kernel says where a monitor may enter it: owner "Xen", type 18.
ENTRY_NOTES = tuple(struct.pack("<III", 4, size, 18) + b"Xen\0" for size in (4, 8))
# In the order in which they are loaded; what they depend on comes before them.
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


def _by_zstd(data: bytes) -> bytes:
    program = shutil.which("zstd")
    if program is None:
        raise StartFailed('this kernel is packed with zstd, which is not here; install it: "apt-get install zstd"')
    return subprocess.run([program, "-dcq"], input=data, capture_output=True, check=False).stdout


def _by_xz(data: bytes) -> bytes:
    return lzma.LZMADecompressor().decompress(data)


def _by_lz4(data: bytes) -> bytes:
    """Unpack the old format of `lz4`, in which kernels are packed: blocks, each after its length."""
    found, at = bytearray(), 4
    while at + 4 <= len(data):
        (size,) = struct.unpack_from("<I", data, at)
        if size == 0 or at + 4 + size > len(data):  # behind the last block comes the length of it all
            break
        _unpack_block(data, at + 4, at + 4 + size, found)
        at += 4 + size
    return bytes(found)


def _unpack_block(data: bytes, at: int, end: int, found: bytearray) -> None:
    """Unpack one block of `lz4`: literals, then a copy of what came so far back, again and again."""
    while at < end:
        token = data[at]
        size, at = _length(data, at + 1, token >> 4)
        found += data[at : at + size]
        at += size
        if at >= end:
            return
        back = data[at] | data[at + 1] << 8
        size, at = _length(data, at + 2, token & 15)
        size += 4
        start = len(found) - back
        if back >= size:
            found += found[start : start + size]
        else:  # it reaches into what it makes
            found += (found[start:] * (size // back + 1))[:size]


def _length(data: bytes, at: int, size: int) -> tuple[int, int]:
    """Return a length that begins in four bits, and where what follows it is."""
    if size == 15:
        while data[at] == 255:
            size += 255
            at += 1
        size += data[at]
        at += 1
    return size, at


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
    """Return the ELF image inside of a bootable one, where monitors can enter it; else the image as it is.

    Raises StartFailed when it needs a program that is not here.
    """
    if image[MAGIC_AT : MAGIC_AT + 4] != b"HdrS" or len(image) < PAYLOAD_AT + 8:
        return image
    start = (image[SETUP_SECTORS_AT] + 1) * SECTOR
    offset, length = struct.unpack_from("<II", image, PAYLOAD_AT)
    payload = image[start + offset : start + offset + length]
    for magic, unpack in UNPACKERS.items():
        if payload.startswith(magic):
            found = unpack(payload)
            is_fit = found.startswith(ELF) and any(note in found for note in ENTRY_NOTES)
            return found if is_fit else image
    return image


def module_order(folder: Path, wanted: Iterable[str] = WANTED_MODULES) -> list[Path]:
    """Return the files of modules in an order in which they can be loaded; what is built in needs no file.

    Raises StartFailed for one that is neither there nor built in.
    """
    there = {_name(path): path for path in sorted(folder.rglob("*.ko*"))}
    listed = folder / "modules.builtin"
    built_in = {_name(Path(line)) for line in listed.read_text().split()} if listed.exists() else set[str]()
    found: dict[str, Path] = {}

    def add(name: str) -> None:
        if name in found or name in built_in:
            return
        if name not in there:
            raise StartFailed(f"this kernel has no module {name!r}; build with the package of another one")
        depends = _DEPENDS.search(module_bytes(there[name]))
        for other in depends[1].decode().split(",") if depends else ():
            if other:
                add(other)
        found[name] = there[name]

    for name in wanted:
        add(name)
    return list(found.values())


def _name(path: Path) -> str:
    return path.name.partition(".")[0].replace("-", "_")


def module_bytes(path: Path) -> bytes:
    """Return a module as the kernel loads it, unpacked."""
    data = path.read_bytes()
    unpack = next((unpack for magic, unpack in UNPACKERS.items() if data.startswith(magic)), None)
    return unpack(data) if unpack is not None else data


def first_file_system(busybox: bytes, modules: Iterable[Path]) -> bytes:
    """Return the archive that a kernel unpacks into memory and starts from."""
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
    """Return a `newc` archive of names, modes and contents; a device's content is its two numbers."""
    packed = bytearray()
    rows = [*entries, (TRAILER, 0, b"")]
    for number, (name, mode, content) in enumerate(rows, 1):
        is_device = stat.S_ISCHR(mode)
        data = b"" if is_device else content
        major, minor = content if is_device else (0, 0)
        links = 2 if stat.S_ISDIR(mode) else 1
        fields = (number, mode, 0, 0, links, 0, len(data), 0, 0, major, minor, len(name) + 1, 0)
        packed += b"070701" + b"".join(b"%08x" % one for one in fields) + name.encode() + b"\0"
        packed += bytes(-len(packed) % 4)
        packed += data
        packed += bytes(-len(packed) % 4)
    return bytes(packed)
