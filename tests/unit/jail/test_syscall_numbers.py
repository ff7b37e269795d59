"""Numbers of system calls, which nobody sees that are wrong before another machine runs them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from cloche.jail import syscalls
from cloche.jail.setup import seccomp

HEADERS = {
    "x86_64": Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"),
    "aarch64": Path("/usr/include/asm-generic/unistd.h"),  # which that architecture takes as it is
}


def numbers_in(header: Path) -> dict[str, int]:
    """Return the numbers of a header of the kernel's, those by another name of its own too."""
    text = header.read_text()
    found = {name: int(number) for name, number in re.findall(r"#define (__NR\w*_\w+)\s+(\d+)\b", text)}
    also = {
        name: found[other] for name, other in re.findall(r"#define (__NR_\w+)\s+(__NR3264_\w+)", text) if other in found
    }
    return {name.removeprefix("__NR_"): number for name, number in {**found, **also}.items()}


@pytest.mark.parametrize("machine", HEADERS)
def test_numbers_of_system_calls_are_those_of_the_kernels_headers(machine: str) -> None:
    """Every name of the filter and of our own calls has the header's number; only younger ones are not there."""
    if not HEADERS[machine].exists():
        pytest.skip(
            f"there is no {HEADERS[machine]}: the kernel's headers for this machine's programs are not installed"
        )
    header = numbers_in(HEADERS[machine])
    for table in (seccomp.ALLOWED[machine], syscalls.NUMBERS[machine]):
        assert {name: number for name, number in table.items() if header.get(name, number) != number} == {}
        unknown = {name for name in table if name not in header}
        assert all(table[name] > max(header.values()) - 1 for name in unknown), unknown
    newest = max(header.values())
    assert {number for number in seccomp.REPORTED[machine] if number < newest} <= set(header.values())
