"""A class is found by its name: within one layer no public class name stands twice."""

import ast
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "src" / "cloche"

# "layer/Name": why both must have this name. A layer is a folder or a module directly below the package.
REPEATED: Mapping[str, str] = {}


def _places() -> Mapping[str, list[str]]:
    places: dict[str, list[str]] = defaultdict(list)
    for path in sorted(PACKAGE.rglob("*.py")):
        module = path.relative_to(PACKAGE)
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[f"{module.parts[0]}/{node.name}"].append(str(module))
    return places


def test_no_public_class_name_stands_twice_within_a_layer() -> None:
    """Every repeated name is listed with its reason, and nothing is listed that is not repeated."""
    repeated = {name: modules for name, modules in _places().items() if len(modules) > 1}
    assert {name: modules for name, modules in repeated.items() if name not in REPEATED} == {}
    assert set(REPEATED) <= set(repeated)
