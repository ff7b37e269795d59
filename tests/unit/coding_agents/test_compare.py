"""Two versions of a file side by side, and what is printed of a guest's text."""

from collections.abc import Sequence

import pytest

from cloche.cli._agent_compare import _print
from cloche.coding_agents.compare import ComparedFile, Comparison, paired
from cloche.core.changes import Change
from cloche.workspace.lines import Work


def _texts(first: str, second: str) -> list[list[tuple[str | None, str | None]]]:
    lines: Sequence[list[str]] = [[f"{word}\n" for word in text.split()] for text in (first, second)]
    found = paired(lines[0], lines[1], Work(10_000))
    return [[(pair.first, pair.second) for pair in region if not pair.is_equal] for region in found]


def test_lines_that_differ_stand_beside_each_other() -> None:
    """A changed line is beside the other version, an added one beside nothing; far regions are apart."""
    assert _texts("a b c", "a x c d") == [[("b\n", "x\n"), (None, "d\n")]]
    middle = " ".join(map(str, range(20)))
    assert _texts(f"a {middle} b", f"x {middle} y") == [[("a\n", "x\n")], [("b\n", "y\n")]]
    assert _texts("same", "same") == []


def test_a_comparison_is_printed_without_a_control_character(capsys: pytest.CaptureFixture[str]) -> None:
    """Names and lines of a guest are escaped, and a long line says that it is cut."""
    change = Change(path="\x1b[2Jname", what="modified", kind="file")
    (region,) = paired(["    one\r\x1b[31mtwo\n"], ["b" * 5000 + "\n"], Work(100))
    file = ComparedFile(path="\x1b[2Jname", whose="both", first=change, second=change, pairs=(region,))
    _print(Comparison(folder="/p\x1b", names=("a", "b"), files=(file,)), with_lines=True)
    printed = capsys.readouterr().out
    assert not {char for char in printed if char < " "} - {"\n"}
    assert "\\x1b[2Jname" in printed
    assert "     one\\x0d\\x1b[31mtwo" in printed
    assert "b..." in printed
