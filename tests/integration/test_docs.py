"""The examples in the documents are run, so that none of them can lie.

A ```python block is a program that must end with exit code 0. In a ```console block every line that begins with `$ ` is
given to a shell, and what it prints must match the lines below it; `...` there stands for anything, and runs of
blanks count as one. The console blocks of one document share a folder.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from cloche.config.keys import LIMIT_FIELDS, VARIABLE_READERS, YAML_READERS
from cloche.core.result import Status
from tests.harness.texts import blocks, commands, matches

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
HELD_ELSEWHERE = "cloche bench "  # takes half a minute, which test_bench.py spends already


def examples(kind: str) -> Iterator[object]:
    """Yield each block of a kind, named by its document and number: the README's, and the first of each page.

    The soak has the others (`make soak AREA=service`): most begin as the first does, and have tests of their own.
    """
    for document in DOCUMENTS:
        for number, text in enumerate(blocks(document, kind), 1):
            marks = pytest.mark.soak if number > 1 and document.parent != ROOT else ()
            yield pytest.param(text, id=f"{document.relative_to(ROOT)}-{number}", marks=marks)


@pytest.fixture
def surroundings(tmp_path: Path) -> Mapping[str, str]:
    """Return an environment with this interpreter's programs first and nobody's settings."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith(("CLOCHE_", "SANDBOX_"))}
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    folders = {"XDG_CONFIG_HOME": str(tmp_path / "settings"), "XDG_STATE_HOME": str(tmp_path / "state")}
    return {**ours, **folders, "PATH": path, "COLUMNS": "200"}


@pytest.mark.parametrize("text", list(examples("python")))
def test_a_program_in_the_documents_runs(text: str, tmp_path: Path, surroundings: Mapping[str, str]) -> None:
    """A Python example is complete, and what it asserts holds."""
    done = subprocess.run(
        [sys.executable, "-c", text],
        cwd=tmp_path,
        env=surroundings,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "document",
    [
        pytest.param(d, id=str(d.relative_to(ROOT)), marks=pytest.mark.soak if "service" in d.parts else ())
        for d in DOCUMENTS
        if blocks(d, "console")
    ],
)
def test_a_terminal_session_in_the_documents_is_true(
    document: Path, tmp_path: Path, surroundings: Mapping[str, str], cloche_imported: Path
) -> None:
    """Each command prints what the document says it prints; the project's examples lie where they do in a checkout."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    for command, expected in commands(document):
        if command.startswith(HELD_ELSEWHERE):
            continue
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=tmp_path,
            env={**surroundings, "PATH": f"{cloche_imported}:{surroundings['PATH']}"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=200,
            check=False,
        )
        assert matches(expected, done.stdout), f"$ {command}\n{done.stdout}\nis not\n{expected}"


def test_the_comparison_is_not_blind() -> None:
    """Dots stand for anything; everything else must be there, in order."""
    assert matches("a ... c", "a b  c\n")
    assert matches("...", "")
    assert not matches("a ... d", "a b c")
    assert not matches("", "something")


def test_every_status_stands_in_the_design() -> None:
    """The table of statuses is the enumeration, in the order of precedence."""
    found = re.findall(r"^\| `(\w+)` \|", (ROOT / "docs/design.md").read_text(), re.MULTILINE)
    assert [name for name in found if name in set(Status)] == [str(status) for status in Status]


def test_every_key_and_variable_is_documented() -> None:
    """Whatever a file or the environment may say is in the table, under each of its spellings."""
    text = (ROOT / "docs/configuration.md").read_text()
    words = set(re.findall(r"`(\w+)", text))
    variables = {name for name in VARIABLE_READERS if not name.startswith("CLOCHE_IMAGE_")}
    assert {*LIMIT_FIELDS, *YAML_READERS, *variables} - words == set()


def test_every_link_leads_somewhere() -> None:
    """A relative link names a file or folder that exists, and with `#` a heading in it."""
    for document in DOCUMENTS:
        for name, anchor in re.findall(r"\]\(([^)#:\s]*)(?:#([^)]*))?\)", document.read_text()):
            target = document.parent / name if name else document
            assert target.exists(), f"{document.relative_to(ROOT)} links to {name}"
            if anchor and target.suffix == ".md":
                assert anchor in anchors(target), f"{document.relative_to(ROOT)} links to {name}#{anchor}"


def anchors(document: Path) -> set[str]:
    """Return the anchor of each heading, as GitHub makes them."""
    prose = re.sub(r"^```.*?^```", "", document.read_text(), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*)", prose, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_reference_is_what_the_docstrings_say() -> None:
    """docs/api.md is generated; after a change run scripts/api_reference.py."""
    spec = importlib.util.spec_from_file_location("api_reference", ROOT / "scripts" / "api_reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert (ROOT / "docs/api.md").read_text() == module.render()
