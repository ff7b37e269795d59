"""Records are data classes to all who look, and cost less."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from cloche.core.record import dataclass

ROOT = Path(__file__).parents[3]


def test_every_record_is_what_a_data_class_would_be() -> None:
    """Signatures, fields, errors, texts, comparisons and copies are those that `dataclasses` makes of the source."""
    begun = [
        subprocess.Popen([sys.executable, "-m", "tests.harness.record_facts", *words], cwd=ROOT, stdout=subprocess.PIPE)
        for words in ((), ("dataclasses",))
    ]
    records, data_classes = (json.loads(one.communicate(timeout=600)[0]) for one in begun)
    assert len(records) > 300
    assert records.keys() == data_classes.keys()
    for name, facts in records.items():
        assert facts == data_classes[name], name


def test_all_data_classes_of_the_package_are_records() -> None:
    """One that imports `dataclasses` costs every process that defines it as much as all the others."""
    text = {path: path.read_text() for path in (ROOT / "src" / "cloche").rglob("*.py")}
    users = [
        str(path) for path, source in text.items() if "from dataclasses" in source or "import dataclasses" in source
    ]
    assert [Path(one).name for one in users] == ["record.py"]


def test_what_only_a_further_class_has_may_be_set() -> None:
    """A class that somebody derives from a record keeps attributes of its own; the fields stay as they are."""

    @dataclass(frozen=True, slots=True)
    class Point:
        x: int = 0

    class Further(Point):
        y: int

    further = Further(1)
    further.y = 2  # type: ignore[misc]
    assert (further.x, further.y) == (1, 2)
    with pytest.raises(AttributeError, match="cannot assign to field 'x'"):
        further.x = 3  # type: ignore[misc]
    with pytest.raises(AttributeError, match="cannot assign to field 'y'"):
        Point().y = 1  # type: ignore[attr-defined]


def test_a_mutable_default_is_refused() -> None:
    """All instances would share it."""
    with pytest.raises(ValueError, match="use default_factory"):

        @dataclass
        class _Wrong:
            names: list[str] = []  # noqa: RUF012
