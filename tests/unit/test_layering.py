"""Imports go down only, and never in a circle. The allowed arrows stand in one literal table; any other is a failure.

Every import counts: at the top of a module, for type checkers alone, inside a function, by `import_module`.
"""

import ast
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "src" / "cloche"

# The layout: whatever moves changes this part of the file, and nothing below it.

CORE = {"core"}
BELOW_MECHANISM = CORE | {"hostfs", "sealing"}
MECHANISM = {"init", "channels", "jail", "jail/setup", "interpreter", "forkserver", "egress"}
BELOW_CONFIG = BELOW_MECHANISM | MECHANISM | {"functions", "backends", "fleets"}
KEEPER = {"keeper", "keeper/registry", "keeper/attach"}
BELOW_EXECUTION = BELOW_CONFIG | KEEPER | {"config", "audit", "blocking", "packages", "workspace", "agent/approval"}
BELOW_SYNC = BELOW_EXECUTION | {"execution"}
BELOW_AGENT = BELOW_SYNC | {"sync", "sync_run", "sync_batch"}
# "face" is `cloche/__init__.py`, the public names themselves.
RECORD_FORMATS = {"records/ids", "records/results"}  # of records, without a database
BELOW_DOORS = BELOW_AGENT | RECORD_FORMATS | {
    "agent", "coding_agents", "skills", "autofix", "records", "serving", "wire", "testing", "face",
}  # fmt: skip

# layer -> the layers it may import; itself always, except that a backend never imports another. A layer is a module, or
# a folder, also one inside of another layer.
MAY_IMPORT: dict[str, set[str]] = {
    "core": set(),
    "hostfs": CORE,
    "sealing": CORE,
    "init": set(),
    "channels": {"init"},
    "functions": CORE | {"init"},
    "jail": set(),
    "jail/setup": {"jail"},
    "interpreter": set(),
    "forkserver": BELOW_MECHANISM | {"jail", "jail/setup", "interpreter"},
    "egress": BELOW_MECHANISM | {"jail", "jail/setup"},  # its table of system calls
    "fleets": BELOW_MECHANISM,
    "backends": BELOW_MECHANISM | MECHANISM | {"fleets"},
    "backends/containers/inside": {"interpreter", "init"},
    "keeper": set(),
    "keeper/registry": BELOW_MECHANISM | {"keeper"},
    "keeper/attach": BELOW_MECHANISM | {"init", "jail/setup", "keeper/registry", "keeper"},
    "config": BELOW_CONFIG,
    "audit": BELOW_CONFIG | {"config"},
    "blocking": BELOW_CONFIG | {"config"},
    "packages": BELOW_MECHANISM | {"config"},
    "packages/inside": set(),
    "workspace": BELOW_MECHANISM | {"config"},
    "execution": BELOW_EXECUTION,
    "testing": CORE | {"execution"},
    "sync_run": BELOW_SYNC,
    "sync_batch": BELOW_SYNC,
    "sync": BELOW_SYNC | {"sync_run"},
    "agent/approval": CORE | {"audit", "blocking"},
    "agent": BELOW_AGENT,
    "coding_agents": BELOW_AGENT,
    "coding_agents/inside": set(),
    "skills": BELOW_AGENT | {"agent"},
    "autofix": BELOW_AGENT | {"agent"},
    "records/ids": CORE,
    "records/results": CORE,
    "records": BELOW_AGENT | RECORD_FORMATS | {"agent"},
    "serving": CORE,
    "wire": BELOW_AGENT | RECORD_FORMATS | {"agent", "serving"},
    "cli": BELOW_DOORS,
    "mcp": BELOW_DOORS,
    "server": BELOW_DOORS,
    "node": BELOW_DOORS - {"records", "coding_agents"},
    "bench": BELOW_DOORS,
    "integrations": BELOW_DOORS,
    "face": BELOW_DOORS - {"testing", "face"},
    "__main__": {"cli"},
}
STANDARD_LIBRARY_ONLY = {
    "core", "hostfs", "init", "keeper", "jail", "jail/setup", "interpreter", "forkserver", "backends/containers/inside",
    "packages/inside", "coding_agents/inside",
}  # fmt: skip
# What a node imports: no web framework, and no database.
WITHOUT_FRAMEWORKS = {"wire", "node"}
FRAMEWORKS = {"fastapi", "starlette", "uvicorn", "sqlalchemy", "alembic"}
# In helpers and containers these are top-level packages, also by their own name, and there is nothing else of ours.
RELATIVE_ONLY = {"init", "keeper", "jail", "jail/setup", "interpreter", "backends/containers/inside"}
# What several backends use, and so belongs to none.
SHARED_BY_BACKENDS = {
    "archive", "call_languages", "cell_outputs", "certificates", "container_profile", "containers", "enforcement",
    "file_answers", "file_operations", "garbage_collection", "host", "init_link", "layout", "live", "live_calls",
    "live_control", "live_files", "live_process", "live_runs", "live_session", "live_streams", "network", "own_loop",
    "remedies", "remote", "results", "saved_files", "secrets", "session",
    "session_languages", "subordinate_ids", "toolchain",
}  # fmt: skip
# The one file that names concrete backends.
FACTORY = "execution/registry.py"
# What a single file may import beside: the commands that start a door that is a process of its own, and `cloche bench`.
FILES_MAY_IMPORT = {
    "cli/serve.py": {"server", "mcp"},
    "cli/node.py": {"node"},
    "cli/bench.py": {"bench"},
    "cli/_bench_report.py": {"bench"},
}
# Modules that import each other. None may be added; a circle that is closed leaves the table.
KNOWN_CIRCLES: set[frozenset[str]] = set()
WRONG_ARROWS = [
    ("core/request.py", "import cloche.jail.steps"),
    ("core/request.py", "from cloche import jail"),
    ("core/request.py", "from ..execution import registry"),
    ("core/request.py", "from cloche import hostfs"),
    ("core/request.py", "def late():\n    import yaml"),
    ("hostfs.py", "from cloche.config import settings"),
    ("hostfs.py", "import yaml"),
    ("jail/guest.py", "from cloche.core.errors import StartFailed"),
    ("jail/guest.py", "from ..core.errors import StartFailed"),
    ("jail/guest.py", "from cloche.jail import steps"),
    ("jail/guest.py", "from .setup import launch"),
    ("jail/guest.py", "from .setup.launch import start_helper"),
    ("jail/setup/launch.py", "from ...core import errors"),
    ("jail/setup/launch.py", "from cloche.jail import steps"),
    ("interpreter/oneshot.py", "import numpy"),
    ("interpreter/oneshot.py", "from ..jail import steps"),
    ("interpreter/oneshot.py", "import importlib\nimportlib.import_module('jail.steps')"),
    ("egress/http.py", "from cloche.backends import network"),
    ("egress/http.py", "from cloche.forkserver import pool"),
    ("forkserver/pool.py", "from cloche.backends import host"),
    ("keeper/process.py", "from cloche.init import wire"),
    ("keeper/relay.py", "from . import registry"),
    ("backends/live.py", "from cloche.keeper import attach"),
    ("backends/local/__init__.py", "from cloche.backends.docker import backend"),
    ("backends/local/__init__.py", "from ..docker import backend"),
    ("backends/local/__init__.py", "from cloche import backends"),
    ("backends/enforcement.py", "def late():\n    from .docker import backend"),
    ("backends/local/plan.py", "import cloche.config.resolve"),
    ("backends/containers/boot.py", "from .inside import reaper"),
    ("backends/containers/inside/reaper.py", "from ..archive import unpack"),
    ("backends/containers/inside/reaper.py", "from cloche.interpreter import oneshot"),
    ("config/settings.py", "from cloche.audit import log"),
    ("config/settings.py", "from cloche.backends.local import LocalBackend"),
    ("audit/log.py", "from cloche.blocking.calls import call"),
    ("blocking/calls.py", "from cloche.agent import approval"),
    ("execution/run.py", "from cloche.backends.local import LocalBackend"),
    ("execution/run.py", "import importlib\nimportlib.import_module('cloche.agent.toolbox')"),
    ("execution/run.py", "from cloche.sync import run"),
    ("sync.py", "from cloche.agent import toolbox"),
    ("agent/toolbox.py", "from cloche.skills import run"),
    ("autofix/loop.py", "from cloche.skills import run"),
    ("testing/fake.py", "from cloche.jail import procfs"),
    ("cli/__init__.py", "from cloche.server import app"),
    ("cli/app.py", "def late():\n    from cloche.mcp.command import serve"),
    ("cli/app.py", "from cloche.bench import harness"),
    ("bench/report.py", "from cloche.cli.output import show"),
    ("mcp/command.py", "from cloche.cli.run import read_code"),
    ("server/app.py", "from ..mcp import tools"),
    ("wire/work.py", "from cloche.server import service"),
    ("wire/work.py", "def late():\n    from starlette.requests import Request"),
    ("wire/work.py", "from cloche.records import database"),
    ("__init__.py", "from cloche.cli import main"),
    ("helpers/text.py", "import cloche.core"),
]
ALLOWED_ARROWS = [
    ("core/request.py", "import os.path\nfrom cloche.core import errors\nfrom .limits import parse_size"),
    ("hostfs.py", "import os\nfrom .core.errors import InvalidRequest"),
    ("jail/guest.py", "import ctypes\nfrom . import steps\nfrom .steps import perform"),
    ("jail/setup/plan.py", "import socket\nfrom .. import steps\nfrom ..steps import perform\nfrom . import mounts"),
    ("forkserver/slot.py", "from cloche.jail.setup import launch\nfrom cloche.interpreter import preload"),
    (
        "egress/http.py",
        "import h11\nfrom .stream import Stream\nfrom cloche.core import errors",
    ),
    ("backends/local/backend.py", "from cloche.backends.local import plan\nfrom .plan import read"),
    ("backends/local/backend.py", "from ..saved_files import copy_out\nfrom cloche.backends.session import Living"),
    ("backends/local/plan.py", "from cloche.jail.setup.plan import compile_jail\nfrom cloche import hostfs"),
    (
        "backends/containers/inside/reaper.py",
        "from . import files\nimport importlib\nimportlib.import_module('interpreter.oneshot')",
    ),
    ("execution/registry.py", "from cloche.backends.local import LocalBackend"),
    ("skills/run.py", "from cloche.agent.toolbox import Toolbox\nfrom cloche.sync import Sandbox"),
    ("cli/run.py", "import cloche\nimport rich\nfrom cloche import Sandbox, autofix, hostfs, sync, testing"),
    ("wire/work.py", "import pydantic\nfrom cloche.records.ids import new_id"),
    ("cli/serve.py", "from cloche.mcp.command import serve"),
    ("cli/bench.py", "def late():\n    from cloche.bench.report import measure"),
    ("mcp/server.py", "import mcp.server\nfrom cloche.agent.toolbox import Toolbox"),
    ("__init__.py", "from cloche.core.errors import ClocheError\nfrom .sync import run"),
]

# The rules.


@dataclass(frozen=True)
class Import:
    """One import statement's target: a dotted name, and whether it was written with leading dots."""

    line: int
    target: str
    is_relative: bool


def imports_of(path: Path, package: Path) -> Iterator[Import]:
    """Yield everything a file imports, however deep in the file and behind whatever condition."""
    here = ("cloche", *path.relative_to(package).with_suffix("").parts)
    yield from _imports_of(path.read_text(encoding="utf-8"), here)


@cache
def _imports_of(text: str, here: tuple[str, ...]) -> list[Import]:
    return list(_read_imports(text, here))


def _read_imports(text: str, here: tuple[str, ...]) -> Iterator[Import]:
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Import(names=names):
                yield from (Import(node.lineno, alias.name, is_relative=False) for alias in names)
            case ast.ImportFrom(module=module, names=names, level=level):
                # `here` ends in the file's own name, also in an __init__.py, so one dot takes one part off.
                base = [*here[: len(here) - level], module] if level else [module]
                for alias in names:
                    target = ".".join(part for part in [*base, alias.name] if part)
                    yield Import(node.lineno, target, is_relative=level > 0)
            case ast.Call(
                func=ast.Name(id="import_module" | "__import__") | ast.Attribute(attr="import_module"),
                args=[ast.Constant(value=str(name)), *_],
            ):
                level = len(name) - len(name.lstrip("."))
                target = ".".join([*here[: len(here) - level], name[level:]]) if level else name
                yield Import(node.lineno, target, is_relative=level > 0)
            case _:
                pass


def layer_of(parts: Sequence[str]) -> str | None:
    """Return the innermost layer that a path below the package belongs to, None for no layer's."""
    paths = ("/".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((path for path in paths if path in MAY_IMPORT), None)


def wrong_arrow(path: Path, package: Path, found: Import) -> str | None:
    """Return what is wrong with one import, or None."""
    name = path.relative_to(package).as_posix()
    source = "face" if name == "__init__.py" else layer_of(name.removesuffix(".py").split("/"))
    if source is None:
        return f"{name} is in no layer; give it a row in MAY_IMPORT"
    first, *parts = found.target.split(".")
    if first in RELATIVE_ONLY:
        parts = [first, *parts]
    elif first != "cloche":
        if found.is_relative or (source in STANDARD_LIBRARY_ONLY and first not in sys.stdlib_module_names):
            return f"{source} uses the standard library alone, not {found.target}"
        if source in WITHOUT_FRAMEWORKS and first in FRAMEWORKS:
            return f"{source} needs no web framework and no database, not {found.target}"
        return None
    elif source in RELATIVE_ONLY and not found.is_relative:
        return f"{source} imports relatively only, not {found.target}"
    target = layer_of(parts) or "face"
    may_import = MAY_IMPORT[source] | FILES_MAY_IMPORT.get(name, set())
    if target != source and target not in may_import:
        return f"{source} must not import {target} ({found.target})"
    if target == "backends" and source != "backends" and name != FACTORY:
        return f"only {FACTORY} names concrete backends, not {name}"
    if target == source == "backends" and "".join(parts[1:2]) not in {
        *SHARED_BY_BACKENDS,
        name.split("/")[1].removesuffix(".py"),
    }:
        return f"a backend is blind to its siblings: {found.target}"
    return None


def wrong_arrows(package: Path) -> list[str]:
    """Return one line for every import in a tree that goes anywhere but down."""
    return [
        f"{path.relative_to(package)}:{found.line}: {wrong}"
        for path in sorted(package.rglob("*.py"))
        for found in imports_of(path, package)
        if (wrong := wrong_arrow(path, package, found))
    ]


def modules_of(package: Path) -> dict[str, Path]:
    """Return every module of a tree by its dotted name; a package has the name of its folder."""
    files = sorted(package.rglob("*.py"))
    names = (".".join(("cloche", *file.relative_to(package).with_suffix("").parts)) for file in files)
    return {name.removesuffix(".__init__"): file for name, file in zip(names, files, strict=True)}


def module_named(target: str, modules: Mapping[str, Path]) -> str | None:
    """Return the module that a dotted name is, or is in; None for one that is not ours."""
    if target.partition(".")[0] in RELATIVE_ONLY:
        target = f"cloche.{target}"
    while target and target not in modules:
        target = target.rpartition(".")[0]
    return target or None


def arrows(package: Path) -> dict[str, dict[str, set[int]]]:
    """Return, for every module, the others that it imports, and on which lines."""
    modules = modules_of(package)
    found: dict[str, dict[str, set[int]]] = {name: {} for name in modules}
    for name, path in modules.items():
        for one in imports_of(path, package):
            target = module_named(one.target, modules)
            if target is not None and target != name:
                found[name].setdefault(target, set()).add(one.line)
    return found


def circles(graph: Mapping[str, Mapping[str, object]]) -> list[set[str]]:
    """Return the modules that reach each other: the strongly connected components of more than one (Tarjan's)."""
    order: dict[str, int] = {}
    lowest: dict[str, int] = {}
    path: list[str] = []
    found: list[set[str]] = []

    def visit(name: str) -> None:
        order[name] = lowest[name] = len(order)
        path.append(name)
        for target in graph[name]:
            if target not in order:
                visit(target)
            if target in path:
                lowest[name] = min(lowest[name], lowest[target])
        if lowest[name] == order[name]:
            members = path[path.index(name) :]
            del path[-len(members) :]
            if len(members) > 1:
                found.append(set(members))

    for name in graph:
        if name not in order:
            visit(name)
    return found


def told_circles(package: Path, known: set[frozenset[str]]) -> list[str]:
    """Return what there is to say: of unknown circles their imports, and which known ones are gone."""
    graph = arrows(package)
    found = {frozenset(name.removeprefix("cloche.") for name in circle) for circle in circles(graph)}
    told = [f"closed, so take it out of KNOWN_CIRCLES: {sorted(circle)}" for circle in known - found]
    for circle in found - known:
        members = {name for name in graph if name.removeprefix("cloche.") in circle}
        lines = [
            f"{modules_of(package)[name].relative_to(package)}:{line} imports {target}"
            for name in sorted(members)
            for target in sorted(members & graph[name].keys())
            for line in sorted(graph[name][target])
        ]
        told.append("\n".join([f"a circle: {' <-> '.join(sorted(circle))}", *lines]))
    return sorted(told)


def test_no_modules_import_each_other() -> None:
    """No circle but the known ones: what its members do can only be understood, tested and loaded together."""
    told = told_circles(PACKAGE, KNOWN_CIRCLES)
    assert not told, "\n\n".join(told)


def test_imports_go_down_only() -> None:
    """Every import in the package is an arrow of the table."""
    assert wrong_arrows(PACKAGE) == []


@pytest.mark.parametrize(
    ("name", "statement"),
    WRONG_ARROWS,
)
def test_a_wrong_arrow_is_caught(tmp_path: Path, name: str, statement: str) -> None:
    """An import that goes up, sideways or outside fails the check."""
    file = tmp_path / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(statement)
    assert len(wrong_arrows(tmp_path)) == 1


@pytest.mark.parametrize(
    ("name", "statement"),
    ALLOWED_ARROWS,
)
def test_an_arrow_of_the_table_is_allowed(tmp_path: Path, name: str, statement: str) -> None:
    """An import that goes down passes the check."""
    file = tmp_path / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(statement)
    assert wrong_arrows(tmp_path) == []


@pytest.mark.parametrize(
    "back",
    [
        "from .first import one",
        "from . import first",
        "from ..core import first",
        "import cloche.core.first",
        "from cloche.core.first import one as another",
        "TYPE_CHECKING = False\nif TYPE_CHECKING:\n    from .first import One",
        "def late():\n    from .first import one",
        "class Late:\n    def __init__(self):\n        if self:\n            from . import first",
        "import importlib\nimportlib.import_module('cloche.core.first')",
        "def late():\n    from importlib import import_module\n    return import_module('.first', __package__).one",
    ],
)
def test_a_circle_is_found_by_every_kind_of_import(tmp_path: Path, back: str) -> None:
    """A circle is told of with its modules and lines, however the second module imports the first."""
    write_tree(tmp_path, {"core/first.py": "import os\nfrom .second import two", "core/second.py": back})
    (told,) = told_circles(tmp_path, set())
    head, *lines = told.split("\n")
    assert head == "a circle: core.first <-> core.second"
    assert lines[0] == "core/first.py:2 imports cloche.core.second"
    assert lines[1:] == [f"core/second.py:{back.count(chr(10)) + 1} imports cloche.core.first"]


def test_a_circle_through_a_package_and_the_names_inside_a_helper_is_found(tmp_path: Path) -> None:
    """A folder's own module is a member like any other, and `interpreter.x` is ours where a helper names it so."""
    files = {
        "core/__init__.py": "from .one import x",
        "core/one.py": "import importlib\nimportlib.import_module('interpreter.two')",
        "interpreter/two.py": "def late():\n    from cloche import core",
    }
    write_tree(tmp_path, files)
    (told,) = told_circles(tmp_path, set())
    assert told.startswith(
        "a circle: core <-> core.one <-> interpreter.two\ncore/__init__.py:1 imports cloche.core.one"
    )


@pytest.mark.parametrize(
    "files",
    [
        {"core/first.py": "from .second import two", "core/second.py": "import core.first, first, mcp.first"},
        {"core/first.py": "from . import second, third", "core/second.py": "from . import third", "core/third.py": ""},
        {"core/__init__.py": "", "core/first.py": "from . import second", "core/second.py": "from . import name"},
        {"core/first.py": "from .first import one"},
    ],
)
def test_what_is_no_circle_is_not_told_of(tmp_path: Path, files: dict[str, str]) -> None:
    """Neither another's module of the same name, nor two ways to the same module, nor a module's own name."""
    write_tree(tmp_path, files)
    assert told_circles(tmp_path, set()) == []


def test_the_table_of_known_circles_is_exact(tmp_path: Path) -> None:
    """A known circle is not told of; one that is gone, or has another member by now, is."""
    files = {"core/a.py": "from . import b", "core/b.py": "from . import a", "core/c.py": "from . import a"}
    write_tree(tmp_path, files)
    known = frozenset({"core.a", "core.b"})
    assert told_circles(tmp_path, {known}) == []
    write_tree(tmp_path, {"core/b.py": "from . import a, c"})
    bigger, gone = told_circles(tmp_path, {known})
    assert bigger.startswith("a circle: core.a <-> core.b <-> core.c\n")
    assert gone == "closed, so take it out of KNOWN_CIRCLES: ['core.a', 'core.b']"


def write_tree(package: Path, files: Mapping[str, str]) -> None:
    """Write modules by their paths."""
    for name, text in files.items():
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(text)
