"""E2B's own SDK for JavaScript, unmodified: every method; `make soak AREA=e2b` has it of half a year before, too."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.harness.e2b import E2BService, javascript, run_node, serving
from tests.harness.e2b_sdk.javascript import FOLDER, PROGRAMS, methods_of

LONG = {"templates": pytest.mark.soak}
PACKAGES = ("e2b", pytest.param("e2b-older", marks=pytest.mark.soak))


@pytest.fixture(scope="module")
def e2b(tmp_path_factory: pytest.TempPathFactory) -> Iterator[E2BService]:
    """Serve for all tests here."""
    with serving(tmp_path_factory.mktemp("e2b")) as service:
        yield service


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize("name", [pytest.param(name, marks=LONG.get(name, ())) for name in PROGRAMS])
def test_programs_of_the_sdk_work(e2b: E2BService, package: str, name: str, tmp_path: Path) -> None:
    """Each asserts what E2B's documents promise, and calls the methods that it stands for in docs/e2b.md."""
    outcomes, called = outcomes_of(e2b, package, name, tmp_path)
    failed = {name: row["error"] for name, row in outcomes.items() if row["error"]}
    assert not failed, "\n\n".join(f"{name}: {error}" for name, error in failed.items())
    here = methods_of(javascript(package))
    missing = [
        method for row in outcomes.values() for method in row["shows"] if method in here and not called.get(method)
    ]
    assert not missing


def outcomes_of(e2b: E2BService, package: str, name: str, folder: Path) -> tuple[Mapping[str, Any], Mapping[str, int]]:
    """Run the programs of a file, and return how each ended and how often each method was called."""
    for path in FOLDER.glob("*.mjs"):
        shutil.copy(path, folder)
    env = e2b.environment(folder)
    printed = run_node(FOLDER / "run.mjs", javascript(package), env, folder, f"{name}.mjs")
    result = json.loads(printed.splitlines()[-1])
    return result["outcomes"], result["called"]


@pytest.mark.parametrize("package", PACKAGES)
def test_every_method_has_a_program(package: str) -> None:
    """A method of a new SDK is not in the table until a program calls it."""
    shown = {method for rows in PROGRAMS.values() for row in rows for method in row.methods}
    assert methods_of(javascript(package)) - shown == set()
