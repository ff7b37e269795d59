"""Write a minimal container image of this very interpreter, as `docker load` takes it: `bench_image.py NAME OUT.tar`.

What a container starts in the benchmark is then the same Python that the plain subprocess starts. The image
holds the interpreter with its standard library, the shared libraries it was linked with, a shell and the few
programs that container libraries call. Nothing is fetched.
"""

import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
from collections.abc import Iterable
from pathlib import Path

PROGRAMS = (
    "sh", "cat", "chmod", "chown", "cp", "env", "head", "id", "ln", "ls", "mkdir", "mv", "rm", "rmdir", "sleep", "tar",
    "test", "timeout", "touch", "true", "uname", "which",
)  # fmt: skip
LEFT_OUT = shutil.ignore_patterns(
    "test", "tests", "site-packages", "dist-packages", "idlelib", "tkinter", "turtledemo", "lib2to3", "config-*"
)
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
PREFIX = "usr/local"
# Where llm-sandbox would make a virtual environment in each container, which needs the network for pip.
VENV = "sandbox/.sandbox-venv"
FOLDERS = ("usr/bin", "usr/lib", "usr/lib64", "etc", "root", "proc", "sys", "dev")
FILES = {
    "etc/passwd": "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/sh\n",
    "etc/group": "root:x:0:\nnogroup:x:65534:\n",
    "etc/ld.so.conf": f"/{PREFIX}/lib\n",
}


def main() -> int:
    """Build the tree in a temporary folder, pack it as the only layer, and write the image."""
    name, target = sys.argv[1:]
    with tempfile.TemporaryDirectory(prefix="bench-image-", dir="/var/tmp") as folder:
        root, layer = Path(folder) / "root", Path(folder) / "layer.tar"
        root.mkdir()
        make_folders(root)
        make_interpreter(root)
        make_programs(root)
        subprocess.run(["/sbin/ldconfig", "-r", str(root)], check=True)
        with tarfile.open(layer, "w") as archive:
            for entry in sorted(root.iterdir()):
                archive.add(entry, entry.name, filter=owned_by_root)
        write_image(Path(folder), name, layer, Path(target))
    return 0


def write_image(folder: Path, name: str, layer: Path, target: Path) -> None:
    """Write what `docker save` would: the layer, what it is called, and how it is run."""
    with layer.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    config = {
        "architecture": ARCHITECTURES.get(platform.machine(), platform.machine()),
        "os": "linux",
        "config": {"Env": [f"PATH=/{PREFIX}/bin:/usr/bin:/bin"], "Cmd": ["python3"]},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]},
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="ascii")
    manifest = [{"Config": "config.json", "RepoTags": [name], "Layers": ["layer.tar"]}]
    (folder / "manifest.json").write_text(json.dumps(manifest), encoding="ascii")
    with tarfile.open(target, "w") as archive:
        for part in ("manifest.json", "config.json", "layer.tar"):
            archive.add(folder / part, part, filter=owned_by_root)


def make_folders(root: Path) -> None:
    """Make the folders that every container expects, with /bin and /lib as links into /usr."""
    for name in (*FOLDERS, f"{PREFIX}/bin", f"{PREFIX}/lib", f"{VENV}/bin"):
        (root / name).mkdir(parents=True, exist_ok=True)
    for name in ("tmp", "workspace"):
        (root / name).mkdir()
        (root / name).chmod(0o1777)
    for name in ("bin", "lib", "lib64"):
        (root / name).symlink_to(f"usr/{name}")
    for name, text in FILES.items():
        (root / name).write_text(text, encoding="ascii")


def make_interpreter(root: Path) -> None:
    """Copy the interpreter and its standard library below /usr/local, and all that they are linked with."""
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    program = Path(os.path.realpath(sys.executable))
    library = root / PREFIX / "lib" / version
    shutil.copytree(sysconfig.get_path("stdlib"), library, symlinks=False, ignore=LEFT_OUT)
    (library / "site-packages").mkdir()
    shutil.copy2(program, root / PREFIX / "bin" / version)
    for name in ("python3", "python"):
        (root / PREFIX / "bin" / name).symlink_to(version)
        (root / VENV / "bin" / name).symlink_to(f"/{PREFIX}/bin/{version}")
    (root / VENV / "pyvenv.cfg").write_text(f"home = /{PREFIX}/bin\n", encoding="ascii")
    copy_libraries(root, [program, *library.glob("lib-dynload/*.so")])


def make_programs(root: Path) -> None:
    """Copy the shell and the other programs, those of them that this machine has."""
    found = [Path(path) for name in PROGRAMS if (path := shutil.which(name, path="/usr/bin:/bin"))]
    for path in found:
        shutil.copy2(path, root / "usr/bin" / path.name)
    copy_libraries(root, [path for path in found if path.read_bytes()[:4] == b"\x7fELF"])


def copy_libraries(root: Path, programs: Iterable[Path]) -> None:
    """Copy what the dynamic linker would load, each to its place; a private prefix becomes /usr/local/lib."""
    listing = subprocess.run(
        ["ldd", *map(str, programs)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=False
    ).stdout
    for path in sorted(set(re.findall(r"(/\S+\.so\S*) \(0x", listing))):
        is_standard = path.startswith(("/lib", "/usr/lib"))
        place = root / (path.lstrip("/") if is_standard else f"{PREFIX}/lib/{os.path.basename(path)}")
        place.parent.mkdir(parents=True, exist_ok=True)
        if not place.exists():
            shutil.copy2(os.path.realpath(path), place)


def owned_by_root(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """Let everything in the image be root's, whoever builds it."""
    member.uid = member.gid = 0
    member.uname = member.gname = "root"
    return member


if __name__ == "__main__":
    sys.exit(main())
