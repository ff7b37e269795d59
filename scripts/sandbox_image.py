"""Write a container image of Debian packages that are installed here, as `docker load` takes it.

    sandbox_image.py NAME OUT.tar PACKAGE... [--program PATH...] [--tree FOLDER] [--command WORDS]

The image holds the files of the packages and of all that they depend on, and single programs besides. Nothing is
fetched. It is what the tests run in, where no registry is at hand.
"""

import argparse
import hashlib
import io
import json
import os
import platform
import re
import shlex
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable
from pathlib import Path

ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
PATH = "/usr/local/bin:/usr/bin:/bin"
# What no program needs to run: it would make the image several times as large.
LEFT_OUT = re.compile(
    r"/usr/share/(?:doc|man|info|locale|i18n|icons|lintian|bash-completion|perl5|go-[\d.]+/test)/|/usr/include/node/"
    r"|/usr/lib/python3[\d.]*/(?:test|idlelib|tkinter)/|/__pycache__/"
    r"|/usr/lib/go-[\d.]+/pkg/(?:\w+/cmd/|tool/\w+/(?!asm$|buildid$|cgo$|compile$|link$))|/usr/share/go-[\d.]+/api/"
    # Nothing here is written in C, or linked with link-time optimisation; the linker alone is needed.
    r"|/usr/lib/gcc/[\w-]+/\d+/(?:cc1|cc1plus|lto1|lib[atl]san\.a|libubsan\.a)$|/usr/bin/[\w-]+-lto-dump"
    r"|/usr/lib/[\w-]+/lib[atl]san\.so|/usr/bin/rustdoc$"
)
FOLDERS = ("tmp", "workspace", "proc", "sys", "dev", "root", "home", "run", "var/tmp")
FILES = {
    "etc/passwd": "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/sh\n",
    "etc/group": "root:x:0:\nnogroup:x:65534:\n",
}
# What dpkg's own lists do not name: the links of alternatives, and what packages make when they are installed.
MADE_LATER = ("/etc/alternatives", "/etc/mono", "/usr/lib/mono/gac", "/etc/ld.so.conf", "/etc/ld.so.conf.d")
LINKED_FOLDERS = {"bin": "usr/bin", "sbin": "usr/sbin", "lib": "usr/lib", "lib64": "usr/lib64"}


def main() -> int:
    """Pack the files as the only layer, and write the image."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name")
    parser.add_argument("target", type=Path)
    parser.add_argument("packages", nargs="*", metavar="PACKAGE")
    parser.add_argument(
        "--program", action="append", default=[], type=Path, help="a single program, for /usr/local/bin"
    )
    parser.add_argument("--busybox", type=Path, help="a busybox, linked under all of its names that are still free")
    parser.add_argument("--tree", type=Path, help="a folder whose files have their places from the root on")
    parser.add_argument("--command", default="sh", help="what a container of it runs")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="sandbox-image-", dir="/var/tmp") as folder:
        layer = Path(folder, "layer.tar")
        with tarfile.open(layer, "w") as archive:
            paths = sorted(files_of(closure(given.packages)))
            add_skeleton(archive)
            add_folders(archive, [*(path.lstrip("/") for path in paths), *FILES, "usr/local/bin/program"])
            for path in paths:
                add_file(archive, path, path.lstrip("/"))
            for program in given.program:  # /usr/local/bin is empty but for these
                add_file(archive, str(program.resolve()), f"usr/local/bin/{program.name}")
            if given.busybox:
                add_busybox(archive, given.busybox)
            if given.tree:
                add_tree(archive, given.tree)
        write_image(Path(folder), given.name, layer, given.target, shlex.split(given.command))
    return 0


def closure(packages: Iterable[str]) -> set[str]:
    """Return the packages and all installed ones that they depend on."""
    listing = subprocess.run(
        ["dpkg-query", "--show", "--showformat", r"${Package}\t${Provides}\t${Pre-Depends}, ${Depends}\n"],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    needs: dict[str, set[str]] = {}
    for line in listing.splitlines():
        name, provided, wanted = line.split("\t")
        for provider in (name, *re.findall(r"[a-z0-9][a-z0-9+.-]+(?=[\s,(]|$)", provided)):
            needs.setdefault(provider, set()).update({name} - {provider})
        needs[name] |= set(re.findall(r"(?:^|[,|])\s*([a-z0-9][a-z0-9+.-]+)", wanted))
    found: set[str] = set()
    pending = list(packages)
    while pending:
        name = pending.pop()
        if name in needs and name not in found:
            found.add(name)
            pending += needs[name]
    missing = set(packages) - found
    if missing:
        sys.exit(f"sandbox_image: not installed: {', '.join(sorted(missing))}")
    return found


def files_of(packages: set[str]) -> set[str]:
    """Return the paths of all files and links of the packages."""
    found = set()
    for name in packages:
        done = subprocess.run(["dpkg-query", "--listfiles", name], capture_output=True, text=True, check=False)
        found |= {real_place(path) for path in done.stdout.splitlines()}
    for place in MADE_LATER:
        found |= {str(path) for path in [Path(place), *Path(place).rglob("*")]}
    found = {path for path in found if not path.startswith("/usr/local/")}
    links = {f"/usr/bin/{name}" for name in os.listdir("/usr/bin") if is_alternative(f"/usr/bin/{name}")}
    return {
        path for path in found | links if not LEFT_OUT.search(path) and os.path.lexists(path) and not is_folder(path)
    }


def is_alternative(path: str) -> bool:
    """Tell whether a program's name is a link that Debian's alternatives manage."""
    return os.path.islink(path) and os.readlink(path).startswith("/etc/alternatives/")


def is_folder(path: str) -> bool:
    """Tell a folder from a link to one."""
    return os.path.isdir(path) and not os.path.islink(path)


def real_place(path: str) -> str:
    """Return a path with its folder's links followed: /lib/x is /usr/lib/x."""
    folder, _, name = path.rpartition("/")
    return f"{os.path.realpath(folder or '/').rstrip('/')}/{name}"


def add_skeleton(archive: tarfile.TarFile) -> None:
    """Add the folders that every container expects, with /bin and /lib as links into /usr."""
    for name in FOLDERS:
        member = tarfile.TarInfo(name)
        member.type, member.mode = tarfile.DIRTYPE, 0o1777 if name in ("tmp", "workspace", "var/tmp") else 0o755
        archive.addfile(member)
    for name, target in LINKED_FOLDERS.items():
        member = tarfile.TarInfo(name)
        member.type, member.linkname = tarfile.SYMTYPE, target
        archive.addfile(member)
    for name, text in FILES.items():
        member = tarfile.TarInfo(name)
        member.size = len(text)
        archive.addfile(member, io.BytesIO(text.encode()))


def add_folders(archive: tarfile.TarFile, names: Iterable[str]) -> None:
    """Add the folders that files are in: where none is named, some storage drivers make one for root alone."""
    parents = {str(parent) for name in names for parent in Path(name).parents}
    for name in sorted(parents - {".", *FOLDERS, *LINKED_FOLDERS}):
        member = tarfile.TarInfo(name)
        member.type, member.mode = tarfile.DIRTYPE, 0o755
        archive.addfile(member)


def add_file(archive: tarfile.TarFile, path: str, name: str) -> None:
    """Add a file or link, as root's and readable by all; sets no user or group on execution."""
    if name in FILES or name in LINKED_FOLDERS or name in FOLDERS:
        return
    member = archive.gettarinfo(path, name)
    if member is None or not (member.isreg() or member.issym() or member.islnk()):
        return
    member.uid = member.gid = 0
    member.uname = member.gname = "root"
    if member.islnk():  # of files that may be left out: each stands for itself
        member.type, member.size = tarfile.REGTYPE, os.stat(path).st_size
    if member.isreg():
        member.mode = (member.mode & 0o755) | 0o444
        with open(path, "rb") as file:
            archive.addfile(member, file)
    else:
        archive.addfile(member)


def add_busybox(archive: tarfile.TarFile, program: Path) -> None:
    """Add one program under all of its names."""
    add_file(archive, str(program), "usr/bin/busybox")
    taken = set(archive.getnames())
    for name in subprocess.run([program, "--list"], capture_output=True, text=True, check=True).stdout.split():
        if f"usr/bin/{name}" not in taken:
            member = tarfile.TarInfo(f"usr/bin/{name}")
            member.type, member.linkname = tarfile.SYMTYPE, "busybox"
            archive.addfile(member)


def add_tree(archive: tarfile.TarFile, tree: Path) -> None:
    """Add all files below a folder."""
    files = {str(path.relative_to(tree)): path for path in tree.rglob("*") if not is_folder(str(path))}
    add_folders(archive, files)
    for name, path in files.items():
        add_file(archive, str(path), name)


def write_image(folder: Path, name: str, layer: Path, target: Path, command: list[str]) -> None:
    """Write what `docker save` would: the layer, what it is called, and how it is run."""
    with layer.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    config = {
        "architecture": ARCHITECTURES.get(platform.machine(), platform.machine()),
        "os": "linux",
        "config": {"Env": [f"PATH={PATH}"], "Cmd": command},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]},
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="ascii")
    manifest = [{"Config": "config.json", "RepoTags": [name], "Layers": ["layer.tar"]}]
    (folder / "manifest.json").write_text(json.dumps(manifest), encoding="ascii")
    with tarfile.open(target, "w") as archive:
        for part in ("manifest.json", "config.json", "layer.tar"):
            archive.add(folder / part, part)


if __name__ == "__main__":
    sys.exit(main())
