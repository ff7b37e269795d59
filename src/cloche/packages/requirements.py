"""Requirements of a program: requirement lines, `requirements.txt`, PEP 723 headers, imports. Pure.

A requirement is a name with extras, versions and a marker, and nothing else: a location (a URL, a path, an index) or an
option would let the author of the requirement choose the origin of code, which is the operator's choice alone. Imports
become requirements only where `known_imports` or the operator's own list names the package: a package with the name of
an import is often an unrelated one, and attackers register names that models invent.
"""

from __future__ import annotations

import ast
import re
import sys
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from cloche.core.ceilings import normalize_package
from cloche.core.errors import BackendUnavailable, InvalidRequest, PolicyDenied
from cloche.core.record import dataclass

from .known_imports import DISTRIBUTIONS
from .npm_names import PREFIX, is_npm, parse_npm

if TYPE_CHECKING:
    from packaging.requirements import Requirement as Parsed

MOST_REQUIREMENTS = 200
MOST_LINE_CHARS = 500
MOST_FILE_BYTES = 1 << 18
MOST_MODULES, MOST_NAMED = 1000, 50  # of a program's imports, and of those in one message
MOST_CODE_CHARS = 1 << 18  # that are looked at for imports: a parser takes seconds for each megabyte, and all wait
EXTRA = "pip install 'cloche[packages]'"
_COMMENT = re.compile(r"(^|\s)#.*$")
_HEADER, _HEADER_END = re.compile(r"# /// (?P<type>[a-zA-Z0-9-]+)"), "# ///"
_URL = re.compile(r"[a-z][a-z0-9+.-]*://|[a-z]+\+[a-z]+:|file:", re.IGNORECASE)
_ARCHIVES = (".whl", ".zip", ".tar.gz", ".tar.bz2", ".tgz", ".egg")
_ONLY = "a requirement is a name, with extras, versions and a marker"


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Requirement:
    """Hold one requirement: the package's normalized name, and the whole line in one spelling."""

    name: str
    text: str

    @property
    def is_npm(self) -> bool:
        """Tell whether it is a package of npm's: its name begins with `npm:`."""
        return is_npm(self.name)

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """Hold what counts of a script's PEP 723 header: the rest of it may not choose anything here."""

    dependencies: tuple[str, ...] = ()
    requires_python: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Imports:
    """Hold the modules that a program imports: those it needs, and those without which it says it can go on."""

    needed: frozenset[str] = frozenset()
    optional: frozenset[str] = frozenset()


def parse_requirements(lines: Iterable[str]) -> tuple[Requirement, ...]:
    """Return requirements, sorted, each once. Raises InvalidRequest that names the line and its fault."""
    requirements = {parse_requirement(line) for line in lines}
    if len(requirements) > MOST_REQUIREMENTS:
        raise InvalidRequest(f"packages: {len(requirements)} are requested; at most {MOST_REQUIREMENTS} are allowed")
    return tuple(sorted(requirements))


def parse_requirement(line: str) -> Requirement:
    """Return one requirement. Raises InvalidRequest."""
    text = line.strip()
    wrong = _what_is_wrong(text)
    if wrong:
        raise InvalidRequest(f"packages: {text[:80]!r} {wrong}; {_ONLY}")
    if is_npm(text):
        return _parse_npm(text)
    parsed = _parsed(text)
    if parsed.url is not None:
        raise InvalidRequest(f"packages: {text[:80]!r} names a place to download from; {_ONLY}")
    parsed.name = normalize_package(parsed.name)
    parsed.extras = {normalize_package(extra) for extra in parsed.extras}
    return Requirement(name=parsed.name, text=str(parsed))


def _parse_npm(text: str) -> Requirement:
    try:
        name, version_range = parse_npm(text)
    except ValueError as error:
        raise InvalidRequest(f"packages: {text[:80]!r} {error}") from None
    return Requirement(name=f"{PREFIX}{name}", text=f"{PREFIX}{name}{f'@{version_range}' if version_range else ''}")


def _what_is_wrong(text: str) -> str:
    """Name the unsupported form of a line, empty for a line that may be a requirement."""
    if not text:
        return "is empty"
    if len(text) > MOST_LINE_CHARS:
        return f"has {len(text)} characters, too many for a requirement"
    if text.startswith("-"):
        return "is an option, which only the operator may set"
    if "$" in text or any(ord(char) < 32 for char in text):
        return "has characters that are not allowed in a requirement"
    if is_npm(text):
        return ""
    location = text.partition(";")[0]
    if _URL.search(location) or " @ " in location:
        return "names a place to download from"
    if "/" in location or "\\" in location or location.startswith(".") or location.rstrip().endswith(_ARCHIVES):
        return "is a path"
    return ""


def _parsed(text: str) -> Parsed:
    try:
        from packaging.requirements import InvalidRequirement
        from packaging.requirements import Requirement as Parsed
    except ImportError:
        raise BackendUnavailable("packages need the extra that brings uv.", remedy=f"Install it: {EXTRA}") from None
    try:
        return Parsed(text)
    except InvalidRequirement as error:
        why = str(error).splitlines()[0]
        raise InvalidRequest(f"packages: {text[:80]!r} is not a requirement: {why}") from None


def read_requirements_file(text: str, *, file: str) -> tuple[str, ...]:
    """Return the lines of a `requirements.txt` that are requirements. Raises InvalidRequest with the line's number."""
    if len(text) > MOST_FILE_BYTES:
        raise InvalidRequest(f"{file}: is larger than {MOST_FILE_BYTES} bytes, the maximum for a list of requirements")
    lines = []
    for number, line in enumerate(text.splitlines(), 1):
        stripped = _COMMENT.sub("", line).strip()
        if not stripped:
            continue
        if "--hash" in stripped or stripped.endswith("\\"):
            raise InvalidRequest(
                f"{file}, line {number}: hashes and continued lines are not read here; "
                'Cloche keeps hashes in its own file: "cloche packages lock"'
            )
        try:
            parse_requirement(stripped)
        except InvalidRequest as error:
            raise InvalidRequest(f"{file}, line {number}: {str(error).removeprefix('packages: ')}") from None
        lines.append(stripped)
    return tuple(lines)


def read_header(code: str) -> Header | None:
    """Return a script's PEP 723 header; None without one. Raises InvalidRequest for an invalid one."""
    blocks = [lines for kind, lines in _header_blocks(code) if kind == "script"]
    if not blocks:
        return None
    if len(blocks) > 1:
        raise InvalidRequest('packages: the program has two headers "# /// script"; keep one of them')
    text = "\n".join(line[2:] for line in blocks[0])
    from cloche.core.toml import read_toml

    try:
        document = read_toml(text)
    except ValueError as error:
        raise InvalidRequest(f'packages: the header "# /// script" is not TOML: {error}') from None
    dependencies, python = document.get("dependencies", []), document.get("requires-python", "")
    if not isinstance(dependencies, list) or not all(isinstance(entry, str) for entry in dependencies):
        raise InvalidRequest('packages: "dependencies" of the header "# /// script" is not a list of strings')
    if not isinstance(python, str):
        raise InvalidRequest('packages: "requires-python" of the header "# /// script" is not text')
    return Header(dependencies=tuple(dependencies), requires_python=python)


def _header_blocks(code: str) -> Iterator[tuple[str, list[str]]]:
    """Yield type and lines of each block that PEP 723 knows, looking at each line once.

    Comments that follow each other hold one at most: from the first line that begins one to the last that ends one.
    """
    begun: re.Match[str] | None = None
    lines: list[str] = []
    length = 0  # of the block, up to the last line that ends one
    for line in (*code.split("\n"), ""):
        is_comment = line == "#" or line.startswith("# ")
        if is_comment and begun is not None:
            length = len(lines) if line == _HEADER_END else length
            lines.append(line)
        elif is_comment:
            begun = _HEADER.fullmatch(line)
        elif begun is not None:
            if length:
                yield begun["type"], lines[:length]
            begun, lines, length = None, [], 0


def check_python(header: Header, version: str) -> None:
    """Raise InvalidRequest where a header asks for another Python than there is."""
    if not header.requires_python:
        return
    from packaging.specifiers import SpecifierSet

    specifier = header.requires_python
    try:
        if len(specifier) > MOST_LINE_CHARS:
            raise ValueError("it is too long")
        is_met = SpecifierSet(specifier).contains(version, prereleases=True)
    except ValueError:
        raise InvalidRequest(f"packages: requires-python {specifier[:80]!r} is not a range") from None
    if not is_met:
        raise InvalidRequest(f"packages: the program needs Python {specifier}, but this is {version}")


def read_imports(code: str) -> Imports:
    """Return the modules that Python code imports, dotted names whole; none of code that is not Python's.

    Those that only type checkers import do not count, and relative ones are the program's own.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return Imports()  # the run itself says what is wrong
    needed: set[str] = set()
    optional: set[str] = set()
    stack: list[tuple[ast.AST, bool]] = [(tree, False)]
    while stack:
        node, is_optional = stack.pop()
        (optional if is_optional else needed).update(_imported(node))
        stack += [(child, is_optional or is_in_try) for child, is_in_try in _children(node)]
    return Imports(needed=frozenset(needed), optional=frozenset(optional - needed))


def _imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
        return [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return []


def _children(node: ast.AST) -> Iterable[tuple[ast.AST, bool]]:
    """Yield the child nodes, and for each whether an import there may fail."""
    if isinstance(node, ast.If) and _is_for_type_checkers(node.test):
        yield from ((child, False) for child in node.orelse)
    elif isinstance(node, ast.Try | ast.TryStar):
        may_fail = any(_catches_import_errors(handler) for handler in node.handlers)
        yield from ((child, may_fail) for child in node.body)
        # What stands in a handler is a second choice.
        yield from ((child, may_fail) for handler in node.handlers for child in handler.body)
        yield from ((child, False) for child in (*node.orelse, *node.finalbody))
    else:
        yield from ((child, False) for child in ast.iter_child_nodes(node))


def _is_for_type_checkers(test: ast.expr) -> bool:
    name = test.attr if isinstance(test, ast.Attribute) else test.id if isinstance(test, ast.Name) else ""
    return name == "TYPE_CHECKING"


def _catches_import_errors(handler: ast.ExceptHandler) -> bool:
    if handler.type is None:
        return True
    names = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    caught = {"ImportError", "ModuleNotFoundError", "Exception", "BaseException"}
    return any(isinstance(name, ast.Name) and name.id in caught for name in names)


def resolve_auto(
    code: str, *, provides: Callable[[str], bool], given: Collection[str] = (), allowed: Sequence[str] = ()
) -> tuple[Requirement, ...]:
    """Return the requirements of `packages="auto"`: those of the header, and those of imports without a provider.

    `provides` tells whether the interpreter has a top-level module, `given` are the modules among the run's own files,
    `allowed` the packages that the operator lists: an import of that name means that package. Raises PolicyDenied for
    an import without a known package, unless the program has a header, which then is complete, or can go on without it.
    Raises InvalidRequest for code above the size limit.
    """
    if len(code) > MOST_CODE_CHARS:
        raise InvalidRequest(
            f'packages: the program has {len(code)} characters, and "auto" looks at {MOST_CODE_CHARS} at most; name '
            "the packages, or pass long data as a file"
        )
    header, imports = read_header(code), read_imports(code)
    names = _by_top(imports.needed | imports.optional)
    if len(names) > MOST_MODULES:
        raise InvalidRequest(
            f'packages: the program imports {len(names)} modules, and "auto" looks at {MOST_MODULES} at most; name '
            "the packages"
        )
    needed = _by_top(imports.needed)
    requirements = list(parse_requirements(header.dependencies)) if header is not None else []
    listed = {requirement.name for requirement in requirements}
    unsure = []
    same = {normalize_package(name) for name in allowed}
    for module in sorted(names):
        if module in sys.stdlib_module_names or module in given or provides(module):
            continue
        distributions = [sure for name in sorted(names[module]) if (sure := _sure_distribution(name, same))]
        for first, *further in distributions:
            if not listed & {name.partition("[")[0] for name in (first, *further)}:
                requirements.append(parse_requirement(first))
        if not distributions and header is None and module in needed:
            unsure.append(module)
    if unsure:
        raise PolicyDenied(_say_unsure(unsure))
    return tuple(sorted(set(requirements)))


def _by_top(names: Iterable[str]) -> dict[str, list[str]]:
    distributions: dict[str, list[str]] = {}
    for name in names:
        distributions.setdefault(name.partition(".")[0], []).append(name)
    return distributions


def _sure_distribution(name: str, allowed: Collection[str]) -> tuple[str, ...]:
    """Return the package that brings a module, and others that do; nothing where that is not sure."""
    while name:
        distribution = DISTRIBUTIONS.get(name)
        if distribution is not None:
            return distribution
        if "." not in name and (same := normalize_package(name)) in allowed:
            return (same,)
        name = name.rpartition(".")[0]
    return ()


def _say_unsure(modules: Sequence[str]) -> str:
    more = f" and {len(modules) - MOST_NAMED} more" if len(modules) > MOST_NAMED else ""
    names = ", ".join(modules[:MOST_NAMED]) + more
    return (
        f'packages: it is not clear which package provides the import "{names}"; a package of the same name may be '
        "a different one. Name the packages (packages=[...], --packages, or a header "
        '"# /// script"), or let the operator list them in packages_allow'
    )
