"""The interpreter of an image, as uv and wheels name it."""

from __future__ import annotations

import pytest

from cloche.core.errors import BackendUnavailable, StartFailed
from cloche.core.layers import Target
from cloche.packages.index import Index
from cloche.packages.resolve import read_pins
from cloche.packages.target import own_target, tags, uv_arguments
from cloche.packages.unpack import unpack_step


def _target(libc: str, version: str = "3.12.4", machine: str = "x86_64") -> Target:
    tag = f"cpython-{''.join(version.split('.')[:2])}"
    return Target(
        python="/usr/bin/python3", version=version, tag=tag, platform=f"linux-{machine}", libc=libc, folder="/opt/p"
    )


@pytest.mark.parametrize(
    ("target", "name"),
    [
        (_target("glibc 2.36"), "x86_64-manylinux_2_36"),
        (_target("glibc 2.30"), "x86_64-manylinux_2_28"),
        (_target("glibc 2.99"), "x86_64-manylinux_2_40"),
        (_target("glibc 2.17", machine="aarch64"), "aarch64-manylinux_2_17"),
        (_target("musl 1.2.5"), "x86_64-unknown-linux-musl"),
        (_target("musl 1.2.5", machine="aarch64"), "aarch64-unknown-linux-musl"),
    ],
)
def test_uv_is_told_the_platform_of_an_image(target: Target, name: str) -> None:
    """The newest C library that both know, and the version of its Python; never its path, which is another's here."""
    words = uv_arguments(target)
    assert words == ["--python", own_target().python, "--python-version", target.version, "--python-platform", name]


@pytest.mark.parametrize("target", [_target("glibc 2.12"), _target("musl 1.2", machine="riscv64")])
def test_a_platform_that_uv_does_not_know_is_an_error(target: Target) -> None:
    """With what would do."""
    with pytest.raises(BackendUnavailable, match="x86_64 or aarch64"):
        uv_arguments(target)


def test_wheels_are_those_that_an_image_can_use() -> None:
    """Of its version and C library, the newest platform first, and those for any."""
    glibc, musl = tags(_target("glibc 2.36")), tags(_target("musl 1.2.5"))
    assert glibc[0] == "cp312-cp312-manylinux_2_36_x86_64"
    assert {"cp312-abi3-manylinux2014_x86_64", "py3-none-any", "cp38-abi3-manylinux_2_17_x86_64"} <= set(glibc)
    assert musl[0] == "cp312-cp312-musllinux_1_2_x86_64"
    assert not set(glibc) & {"cp313-cp313-manylinux_2_36_x86_64", "cp312-cp312-manylinux_2_37_x86_64", musl[0]}
    assert not [tag for tag in musl if "manylinux" in tag]


def test_of_several_wheels_the_one_for_the_image_is_taken() -> None:
    """And none of another C library, also where it is the only one that is listed."""
    names = [f"six-1.0-cp312-cp312-{one}_x86_64.whl" for one in ("manylinux_2_17", "musllinux_1_2", "manylinux_2_28")]
    rows = [f'{{ url = "https://a.example/f/{name}", hashes = {{ sha256 = "{"0" * 64}" }} }}' for name in names]
    text = '[[packages]]\nname = "six"\nversion = "1.0"\nwheels = [{}]\n'
    index = Index(url="https://a.example/simple")
    for libc, name in (("glibc 2.36", names[2]), ("glibc 2.20", names[0]), ("musl 1.2.5", names[1])):
        (pin,) = read_pins(text.format(", ".join(rows)), index, _target(libc))
        assert pin.file_name == name
    with pytest.raises(StartFailed, match="no wheel for this interpreter"):
        read_pins(text.format(rows[1]), index, _target("glibc 2.36"))


def test_bytecode_is_made_for_an_interpreter_of_the_same_version_alone() -> None:
    """Another one would not read it."""
    same, other = _target("glibc 2.36", version=own_target().version), _target("glibc 2.36", version="3.8.1")
    assert b'"compiles": true' in unpack_step((), "/w", "/s", same).stdin
    assert b'"compiles": false' in unpack_step((), "/w", "/s", other).stdin
