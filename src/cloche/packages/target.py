"""The interpreter that packages are for, as uv and wheels name it. Pure but for `own_target`."""

from __future__ import annotations

import functools
import os
import platform
import sys
import sysconfig
from collections.abc import Iterator

from cloche.core.errors import BackendUnavailable
from cloche.core.layers import Target

# What uv knows of the C library of another machine: GNU's by its minor version, musl's by none.
UV_GLIBC = (40, 39, 38, 37, 36, 35, 34, 33, 32, 31, 28, 17)
MACHINES = ("x86_64", "aarch64")
_OLD_NAMES = {17: "manylinux2014", 12: "manylinux2010", 5: "manylinux1"}  # by the minor version of GNU's library
OLDEST_GLIBC = 5


@functools.cache
def own_target() -> Target:
    """Return the caller's own interpreter, which runs Python in the local jail."""
    is_environment = sys.prefix != sys.base_prefix
    name, version = platform.libc_ver()
    return Target(
        python=os.path.abspath(sys.executable) if is_environment else os.path.realpath(sys.executable),
        version=platform.python_version(),
        tag=sys.implementation.cache_tag or sys.implementation.name,
        platform=sysconfig.get_platform(),
        libc=f"{name} {version}" if name else "musl",
    )


def is_own(target: Target) -> bool:
    """Tell whether it is the caller's own interpreter."""
    return not target.folder


def uv_arguments(target: Target) -> list[str]:
    """Return uv's options for it. Raises BackendUnavailable for one that uv does not know."""
    if is_own(target):
        return ["--python", target.python]
    machine, libc, minor = _parts(target)
    baseline = next((release for release in UV_GLIBC if release <= minor), None) if libc == "glibc" else None
    if machine not in MACHINES or (libc == "glibc" and baseline is None):
        raise BackendUnavailable(
            f"packages: cannot be resolved for Python {target.version} on {target.platform} with {target.libc}.",
            remedy=f"Use an image for {' or '.join(MACHINES)} with GNU's C library 2.{UV_GLIBC[-1]} or later, or musl.",
        )
    name = f"{machine}-unknown-linux-musl" if libc == "musl" else f"{machine}-manylinux_2_{baseline}"
    python = own_target().python  # which uv asks for what no option says
    return ["--python", python, "--python-version", target.version, "--python-platform", name]


def tags(target: Target) -> list[str]:
    """Return the tags of wheels that it can use, best first."""
    from packaging.tags import compatible_tags, cpython_tags, sys_tags

    if is_own(target):
        return [str(tag) for tag in sys_tags()]
    major, minor = map(int, target.version.split(".")[:2])
    platforms = list(_platforms(target))
    target_tags = [*cpython_tags((major, minor), platforms=platforms)]
    target_tags += compatible_tags((major, minor), f"cp{major}{minor}", platforms)
    return [str(tag) for tag in target_tags]


def _platforms(target: Target) -> Iterator[str]:
    machine, libc, newest = _parts(target)
    if libc == "musl":
        yield from (f"musllinux_1_{minor}_{machine}" for minor in range(newest, -1, -1))
    else:
        for minor in range(newest, OLDEST_GLIBC - 1, -1):
            yield f"manylinux_2_{minor}_{machine}"
            if minor in _OLD_NAMES:
                yield f"{_OLD_NAMES[minor]}_{machine}"
    yield f"linux_{machine}"


def _parts(target: Target) -> tuple[str, str, int]:
    """Return the machine, the C library, and the minor version of that."""
    libc, _, version = target.libc.partition(" ")
    minor = version.split(".")[1] if "." in version else "0"
    return target.platform.removeprefix("linux-"), libc, int(minor) if minor.isdigit() else 0
