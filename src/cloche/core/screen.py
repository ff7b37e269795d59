"""A look at Python code before it runs (R3): advice, not an isolation boundary.

The screen reads the syntax tree for imports and calls that model-written code seldom needs inside a sandbox. Code that
means to hide from it can: `getattr(__builtins__, "ev" + "al")` passes, and so does anything that is decoded before it
runs. What keeps the code in is the sandbox; the screen saves a run and tells a model early.
"""

from __future__ import annotations

import ast
import warnings
from collections.abc import Iterator, Mapping

from .errors import PolicyDenied
from .languages import language_named
from .policy import ScreenMode
from .record import dataclass

# Importing one of these, or anything below it, is a finding. Writing a file is none; the workspace is for it.
MODULES: Mapping[str, str] = {
    "os": "reaches processes, the environment and the file system",
    "subprocess": "starts programs",
    "shutil": "copies and deletes whole trees",
    "pathlib": "reaches the file system",
    "socket": "opens network connections",
    "ctypes": "calls native code",
    "posix": "is os under another name",
    "pty": "starts programs on a terminal",
}

# Calling one of these is a finding, under whatever name it was imported. A name that ends in a dot covers all
# below it, and those in _FAMILIES cover the names that begin like them (os.execv, pickle.loads).
CALLS: Mapping[str, str] = {
    "eval": "runs text as code",
    "exec": "runs text as code",
    "compile": "turns text into code",
    "breakpoint": "waits for input of a debugger",
    "os.system": "starts a shell",
    "os.popen": "starts a shell",
    "os.exec": "replaces the program",
    "os.spawn": "starts a program",
    "os.posix_spawn": "starts a program",
    "os.fork": "starts a process",
    "os.kill": "signals processes",
    "os.remove": "deletes files",
    "os.unlink": "deletes files",
    "os.rmdir": "deletes folders",
    "shutil.rmtree": "deletes a whole tree",
    "subprocess.": "starts programs",
    "pty.": "starts programs on a terminal",
    "socket.": "opens network connections",
    "ctypes.": "calls native code",
    "pickle.load": "runs what the data says",
    "marshal.load": "runs what the data says",
}
_FAMILIES = ("os.exec", "os.spawn", "os.posix_spawn", "os.fork", "pickle.load", "marshal.load")
_IMPORTERS = ("__import__", "importlib.import_module")
MOST_CHARS = 1 << 16  # of a program: a parser holds the interpreter's lock, a second for some hundred thousand


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Finding:
    """Point at one construct: line and column counted from 1, its name, and why it is listed."""

    line: int
    column: int
    what: str
    why: str

    def __str__(self) -> str:
        return f"line {self.line}: {self.what} {self.why}"


def apply_screen(mode: ScreenMode, language: str, code: str) -> tuple[Finding, ...]:
    """Screen `code` as `mode` says and return the findings; only Python is screened.

    Raises PolicyDenied naming the lines when the mode is `block` and anything was found.
    """
    if mode == "off" or language_named(language).name != "python":
        return ()
    findings = screen_code(code)
    if mode == "block" and findings:
        listed = "; ".join(str(finding) for finding in findings[:20])
        more = f"; and {len(findings) - 20} more" if len(findings) > 20 else ""
        raise PolicyDenied(
            f"the screen refuses this code: {listed}{more}. Rewrite it, or set screen to warn or off (--screen off)"
        )
    return findings


def screen_code(code: str) -> tuple[Finding, ...]:
    """Return the constructs that the tables above list, in order of appearance; nothing for code that does not parse.

    A program above the size limit is one finding.
    """
    if len(code) > MOST_CHARS:
        why = f"is longer than {MOST_CHARS}, the most that are screened; give its data as files"
        return (Finding(line=1, column=1, what=f"a program of {len(code)} characters", why=why),)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the code's own warnings are for whoever runs it
            tree = ast.parse(code)
        nodes = list(ast.walk(tree))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ()
    names = _imported_names(nodes)
    return tuple(sorted({finding for node in nodes for finding in _findings(node, names)}))


def _imported_names(nodes: list[ast.AST]) -> dict[str, str]:
    """Map names bound by imports to their origin: `from os import popen as p` gives p: os.popen."""
    names: dict[str, str] = {}
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                names |= {alias.asname: alias.name} if alias.asname else {}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return names


def _findings(node: ast.AST, names: Mapping[str, str]) -> Iterator[Finding]:
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield from _module_finding(node, alias.name)
    elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
        yield from _module_finding(node, node.module)
    elif isinstance(node, ast.Call):
        called = _dotted(node.func, names)
        if called in _IMPORTERS:
            yield from _module_finding(node, _literal(node))
        why = _why_call(called)
        if why:
            yield _finding(node, f"{called}()", why)


def _module_finding(node: ast.stmt | ast.expr, module: str) -> Iterator[Finding]:
    why = MODULES.get(module.partition(".")[0])
    if why:
        yield _finding(node, f"import of {module}", why)


def _finding(node: ast.stmt | ast.expr, name: str, why: str) -> Finding:
    return Finding(line=node.lineno, column=node.col_offset + 1, what=name, why=why)


def _literal(call: ast.Call) -> str:
    """Return the call's first argument, by position or as `name`, when it is a text written out."""
    values = [*call.args[:1], *(keyword.value for keyword in call.keywords if keyword.arg == "name")]
    names = [value.value for value in values if isinstance(value, ast.Constant) and isinstance(value.value, str)]
    return names[0] if names else ""


def _dotted(node: ast.expr, names: Mapping[str, str]) -> str:
    """Return `a.b.c` with imported names resolved; empty for anything but names and attributes."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return ""
    dotted = ".".join((names.get(node.id, node.id), *reversed(parts)))
    return dotted.removeprefix("builtins.")


def _why_call(called: str) -> str:
    if called in CALLS:
        return CALLS[called]
    families = (*_FAMILIES, *(name for name in CALLS if name.endswith(".")))
    return next((CALLS[name] for name in families if called.startswith(name)), "")
