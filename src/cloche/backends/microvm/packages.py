"""A distribution's packages: fetched and checked by its own tools, and unpacked into a folder without being installed.

An ordinary user can do it: nothing of this machine's own packages is touched.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cloche.core.errors import BackendUnavailable, StartFailed

KERNEL = "linux-image-cloud-amd64"
BUSYBOX = "busybox-static"
USERLAND = ("bash", "coreutils", "dash", "diffutils", "findutils", "grep", "gzip", "python3", "sed", "tar")
TOOLS = {"apt-get": "apt", "apt-cache": "apt", "dpkg-deb": "dpkg", "tar": "tar", "mke2fs": "e2fsprogs"}
PLACES = ("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin")
UPDATE = 'Refresh the lists first: "sudo apt-get update".'


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """Name a fetched package: its archive, name and version."""

    file: Path
    name: str
    version: str


def tool(name: str) -> str:
    """Return the path of a program that a build needs. Raises BackendUnavailable naming its package."""
    found = shutil.which(name, path=":".join(PLACES))
    if found is None:
        raise BackendUnavailable(
            f"an image is built with {name}, which is not here.",
            remedy=f'On Debian and Ubuntu: "apt-get install {TOOLS.get(name, name)}"; elsewhere, build it there and '
            "name its folder in CLOCHE_MICROVM_IMAGE.",
        )
    return found


def check_tools() -> None:
    """Raise BackendUnavailable when a program is missing that a build needs."""
    for name in TOOLS:
        tool(name)


def called(words: Sequence[str], *, cwd: Path | None = None) -> str:
    """Run one of the distribution's programs and return what it says. Raises StartFailed with its last words."""
    done = subprocess.run(list(words), cwd=cwd, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    if done.returncode != 0:
        said = (done.stderr or done.stdout).decode("utf-8", "replace").strip()
        raise StartFailed(f"{Path(words[0]).name} failed with exit code {done.returncode}: {said[-600:]}")
    return done.stdout.decode("utf-8", "replace")


def real_kernel_package() -> str:
    """Return the package that the distribution's kernel for virtual machines is in. Raises StartFailed."""
    said = called([tool("apt-cache"), "depends", KERNEL])
    found = re.search(r"Depends: (linux-image-\S+)", said)
    if found is None:
        raise StartFailed(f"the package lists of this machine have no {KERNEL}. {UPDATE}")
    return found[1]


def fetch_alone(names: Sequence[str], folder: Path) -> list[Package]:
    """Fetch packages without what they depend on. Raises StartFailed."""
    folder.mkdir(parents=True, exist_ok=True)
    called([tool("apt-get"), "-q", "-o", "APT::Sandbox::User=root", "download", *names], cwd=folder)
    return _fetched(folder)


def fetch_closure(names: Sequence[str], folder: Path) -> list[Package]:
    """Fetch packages with all that they depend on, as if nothing was installed. Raises StartFailed."""
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
    words = [word for name, value in settings.items() for word in ("-o", f"{name}={value}")]
    called([tool("apt-get"), "-q", "-y", *words, "--download-only", "install", *names])
    return _fetched(archives)


def _fetched(folder: Path) -> list[Package]:
    found = []
    for file in sorted(folder.glob("*.deb")):
        said = called([tool("dpkg-deb"), "--show", "--showformat=${Package} ${Version}", str(file)])
        name, _, version = said.partition(" ")
        found.append(Package(file=file, name=name, version=version))
    if not found:
        raise StartFailed(f"nothing was fetched. {UPDATE}")
    return found


def unpack(packages: Sequence[Package], folder: Path) -> None:
    """Unpack archives into a folder; links that stand for folders stay. Raises StartFailed."""
    for package in packages:
        reading = subprocess.Popen([tool("dpkg-deb"), "--fsys-tarfile", str(package.file)], stdout=subprocess.PIPE)
        words = [tool("tar"), "-x", "-f", "-", "-C", str(folder), "--keep-directory-symlink", "--no-same-owner"]
        done = subprocess.run(words, stdin=reading.stdout, capture_output=True, check=False)
        if reading.stdout is not None:
            reading.stdout.close()
        if reading.wait() != 0 or done.returncode != 0:
            raise StartFailed(f"package {package.name} cannot be unpacked: {done.stderr.decode(errors='replace')}")


def upstream(version: str) -> str:
    """Return the version without what the distribution adds to it.

    >>> upstream("2:1.19~1")
    '1.19'
    """
    found = re.match(r"[0-9.]*[0-9]", version.partition(":")[2] or version)
    return found[0] if found else version
