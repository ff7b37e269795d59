"""Write two tables into docs/e2b.md: the states of sandboxes, and every method of E2B's SDKs.

A method works here if a program of tests/harness/e2b_sdk that calls it passes; tests/integration/test_e2b_table.py
holds the document to this text. Needs the packages of `make test`.
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from cloche.server.e2b import states  # noqa: E402
from tests.harness.e2b import javascript  # noqa: E402
from tests.harness.e2b_sdk import javascript as node  # noqa: E402
from tests.harness.e2b_sdk.rows import CLASSES, all_methods, shown  # noqa: E402

DOCUMENT = ROOT / "docs/e2b.md"
HEAD = "| of | methods | Python | JavaScript | here |\n|---|---|---|---|---|"
ACRONYM = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
NO, WORKS = "—", "works"


def snake(method: str) -> str:
    """Return a JavaScript method by the name that it would have in Python."""
    label, _, name = method.partition(".")
    return f"{label}.{ACRONYM.sub('_', name).lower()}"


def python_cells() -> dict[str, str]:
    """Return for each method in which of Python's two SDKs it is."""
    blocking, awaited = set(all_methods(is_async=False)), set(all_methods(is_async=True))
    kinds = {True: "sync, async", False: "sync"}
    return {
        method: kinds[method in awaited] if method in blocking else "async" for method in sorted(blocking | awaited)
    }


def outcomes() -> Mapping[str, str]:
    """Return what is said of each method beside that it works."""
    said: dict[str, str] = {}
    for row in shown():
        said |= {method: f"differs: {why}" for method, why in row.differs.items()}
        said |= {method: f"refused: {why}" for method, why in row.refused.items()}
    return said


def methods() -> str:
    """Return the methods: a row for the methods of a class that are alike."""
    python, said = python_cells(), outcomes()
    tried = {method for row in shown() for method in row.methods} | {
        snake(method) for rows in node.PROGRAMS.values() for row in rows for method in row.methods
    }
    script = {snake(method) for method in node.methods_of(javascript("e2b"))}
    builder = {method for method in script if method.replace("Template.", "TemplateBuilder.") in python}
    script = script - builder | {method.replace("Template.", "TemplateBuilder.") for method in builder}
    groups: dict[tuple[str, str, str, str], list[str]] = defaultdict(list)
    for method in [*python, *sorted(script - python.keys())]:
        label, _, name = method.rpartition(".")
        in_script = "yes" if method in script or not label else NO
        key = (label, python.get(method, NO), in_script, said.get(method, WORKS if method in tried else "not tried"))
        groups[key].append(f"`{name}`")
    labels = [*CLASSES, ""]
    rows = sorted(groups.items(), key=lambda item: (labels.index(item[0][0]), item[0][3] != WORKS, item[0]))
    lines = [
        f"| {f'`{label}`' if label else 'functions'} | {', '.join(names)} | {in_python} | {in_script} | {what} |"
        for (label, in_python, in_script, what), names in rows
    ]
    return "\n".join([HEAD, *lines])


def requests() -> str:
    """Return what each request does in each state."""
    heading, *rows = states.rows()
    lines = ["|".join(["", *(f" {cell} " for cell in row), ""]) for row in (heading, ["---"] * len(heading), *rows)]
    return "\n".join(lines)


TABLES = {"## States": requests, "## Every method": methods}


def replaced(text: str, title: str, table: str) -> str:
    """Return a document with another table in a section."""
    before, heading, rest = text.partition(f"{title}\n")
    section, mark, after = rest.partition("\n## ")
    words = re.sub(r"^\|.*\n?", "", section, flags=re.MULTILINE).strip()
    return f"{before}{heading}\n{words}\n\n{table}\n{mark}{after}"


def main() -> int:
    """Write the document anew."""
    text = DOCUMENT.read_text()
    for title, table in TABLES.items():
        text = replaced(text, title, table())
    DOCUMENT.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
