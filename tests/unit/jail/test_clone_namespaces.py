"""What is read of a clone's memory in the kernel's list of it, whose last column anybody may write."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from cloche.jail import clone_namespaces, procfs
from cloche.jail.clone_namespaces import ForkTreeError

USUAL = (
    "5564508e3000-5564508e4000 r--p 00000000 fe:00 1234                       /usr/bin/python3.11\n"
    "5564510a2000-5564512c4000 rw-p 00000000 00:00 0                          [heap]\n"
    "7fcbd0000000-7fcbf0000000 rw-p 00000000 00:00 0 \n"
)
SHARED = "7fcbf1000000-7fcbf1001000 rw-s 00000000 00:01 1027                       /dev/zero (deleted)\n"
OF_SYSTEM = "7fcbf2000000-7fcbf2007000 r--s 00000000 fe:00 77                         /usr/lib/gconv-modules.cache\n"
OWN = "7fcbf3000000-7fcbf3001000 r--p 00000000 00:2f 12                         /workspace/data.bin\n"
DRESSED_UP = "7fcbf4000000-7fcbf4001000 rw-s 00000000 00:01 9                          /memfd:x rw-p 00000000\n"
SPACED = "7fcbf5000000-7fcbf5001000 r--p 00000000 00:2f 13                         /tmp/a b\x0bc\n"
NO_CAPABILITIES = "".join(f"{name}\t0000000000000000\n" for name in clone_namespaces.CAPABILITIES)
Check = Callable[[str], None]


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> Check:
    """Return what checks a clone with these maps, of which all else is as it should be."""

    def check_maps(maps: str) -> None:
        monkeypatch.setattr(
            clone_namespaces, "text_of", lambda path: maps if path.endswith("/maps") else NO_CAPABILITIES
        )
        monkeypatch.setattr(
            clone_namespaces.posix, "readlink", lambda path: "/usr/bin/python" if "exe" in path else "/"
        )
        monkeypatch.setattr(clone_namespaces.posix, "listdir", lambda _: ["1"])
        monkeypatch.setattr(procfs, "children", lambda _: [])
        clone_namespaces.check_rest(1)

    return check_maps


@pytest.mark.parametrize("maps", [USUAL, USUAL + OF_SYSTEM, OF_SYSTEM + USUAL])
def test_what_is_private_or_the_systems_may_stay(check: Check, maps: str) -> None:
    """Shared memory of a file that nobody can write to reveals nothing."""
    check(maps)


@pytest.mark.parametrize("line", [SHARED, OWN, DRESSED_UP, SPACED])
@pytest.mark.parametrize("around", [("", USUAL), (USUAL, ""), (USUAL, OF_SYSTEM), (USUAL, USUAL)])
def test_what_is_shared_is_found(check: Check, line: str, around: tuple[str, str]) -> None:
    """Wherever it stands, whatever its name looks like, and as the last line without its end."""
    before, after = around
    for maps in (before + line + after, (before + line + after).rstrip("\n")):
        with pytest.raises(ForkTreeError, match=r"shares memory|mapped"):
            check(maps)


def test_maps_that_are_hidden_are_not_taken_for_empty(check: Check) -> None:
    """What cannot be looked at cannot go on."""
    with pytest.raises(ForkTreeError, match="cannot be looked at"):
        check("")


def test_a_name_is_no_line_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """What ends a line for Python does not for the kernel, which leaves it in the name that a process gives itself."""
    status = "Name:\tx\x0bNSpid:\t1 7\nNSpid:\t4711\t12\n"
    monkeypatch.setattr(clone_namespaces, "text_of", lambda _: status)
    assert clone_namespaces.number_inside(4711) == 12


@pytest.mark.parametrize("name", ["x\x0bCapEff:", "x\x0bCapEff:\t0", "x\x1cCapPrm:\tz", "x\x85CapInh:"])
@pytest.mark.parametrize(
    ("capabilities", "may_go_on"), [(NO_CAPABILITIES, True), (NO_CAPABILITIES.replace("0\nCapBnd", "1\nCapBnd"), False)]
)
def test_a_name_neither_gives_nor_hides_powers(
    monkeypatch: pytest.MonkeyPatch, check: Check, name: str, capabilities: str, *, may_go_on: bool
) -> None:
    """Nor does it keep anybody from looking."""
    check(USUAL)
    status = f"Name:\t{name}\n{capabilities}"
    monkeypatch.setattr(clone_namespaces, "text_of", lambda path: USUAL if path.endswith("/maps") else status)
    if may_go_on:
        clone_namespaces.check_rest(1)
    else:
        with pytest.raises(ForkTreeError, match="kept capabilities"):
            clone_namespaces.check_rest(1)


def test_what_cannot_be_read_to_its_end_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of a list of what is shared would be taken for the whole."""
    pieces = iter([USUAL.encode()])
    monkeypatch.setattr(clone_namespaces.posix, "read", lambda *_: next(pieces, None) or _fail())
    assert procfs.text_of("/proc/self/maps") == ""


def _fail() -> bytes:
    raise OSError(12, "no memory")
