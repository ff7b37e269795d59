"""What is copied for the Python of another image."""

from importlib import metadata
from pathlib import Path

import pytest

from cloche.node.copying import needed, parts_of, required

BUILT = ("cpython-311-x86_64-linux-gnu", "cpython-313-x86_64-linux-gnu")


def test_the_requirements_of_other_extras_are_left_out() -> None:
    """A requirement without an extra is one, also with another marker or an extra of its own; one of this extra is."""
    lines = ["a>=1", 'b>=2; extra == "node"', 'c[x]>=2 ; extra == "server"', 'd; python_version < "3.12"', "e[y]<3,>=2"]
    assert list(required(lines, "node")) == ["a", "b", "d", "e"]
    assert list(required(lines, "")) == ["a", "d", "e"]


def test_compiled_parts_of_all_versions_are_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A distribution names the compiled parts of its own Python; those of other versions beside them go along."""
    (tmp_path / "one").mkdir()
    info = tmp_path / "one-1.0.dist-info"
    info.mkdir()
    names = [f"_one.{tag}.so" for tag in BUILT]
    for name in names:
        (tmp_path / name).touch()
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: one\nVersion: 1.0\nRequires-Dist: nowhere-to-be-found\n"
    )
    (info / "RECORD").write_text(f"{names[0]},,\none/a.py,,\n../../bin/one,,\none-1.0.dist-info/RECORD,,\n")
    monkeypatch.syspath_prepend(tmp_path)
    (one,) = needed(metadata.distribution("one"))
    assert sorted(path.name for path in parts_of(one)) == sorted([*names, "one", "one-1.0.dist-info"])
