"""The magics of a session: `%name line` and `%%name line` over a cell, and the tables of their names.

A magic is a function of the session's `Magics`, the line, and for a cell its body. What it returns is its value.
"""

from __future__ import annotations

import os
import sys

from . import cells, commands, figures, names, timing
from .pretty import Printer
from .rewriting import cell_magic, rewrite
from .usage import UsageError, say, warn, words

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, Protocol

    from .rich import Display

    class Host(Protocol):
        """The session, as magics see it."""

        @property
        def namespace(self) -> dict[str, Any]:
            """The program's names."""
            ...

        @property
        def display(self) -> Display:
            """The session's display, already installed."""
            ...

        @property
        def history(self) -> list[str]:
            """The cells so far, `In`: the first element is empty."""
            ...

        def run_cell(self, source: str) -> Any:
            """Run a text as a cell within this one, with magics; return its last expression's value, or raise."""

    LineMagic = Callable[["Magics", str], Any]

__all__ = ["Magics", "UsageError", "cell_magic", "rewrite"]

# Their lines are code, or patterns, in which braces mean something else.
_NOT_EXPANDED = ("time", "timeit", "config", "pinfo", "pinfo2")
_NO_PACKAGES = (
    "a sandbox has no package manager; packages are installed outside it, when it is opened. "
    "What is installed can be imported."
)
_HAS_WINDOWS = ("notebook", "widget", "ipympl", "qt", "qt5", "qt6", "tk", "gtk", "gtk3", "gtk4", "wx", "osx", "nbagg")


class Magics:
    """The magics of one session. `hidden` is what its namespace held at the beginning, which is not the program's."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.hidden = dict(host.namespace)
        self.line: dict[str, LineMagic] = dict(LINE_MAGICS)
        self.cell: dict[str, cells.CellMagic] = dict(CELL_MAGICS)
        self.scope: dict[str, Any] = {}  # the names that the line running now sees
        self.folder_before = ""
        if host.display.shell is not None:
            host.display.shell.magics = self

    def run_line(self, name: str, line: str, scope: dict[str, Any] | None = None) -> Any:
        """Run `%name line`; `scope` is what the line sees, the namespace when it is not given. Raises UsageError."""
        if name not in self.line:
            hint = f"; there is a cell magic %%{name}, for the first line of a cell" if name in self.cell else ""
            raise UsageError(f"there is no line magic %{name}{hint}. Known: {_listed('%', self.line)}")
        return self._in_scope(scope, lambda: self.line[name](self, self._expanded(name, line)))

    def run_cell(self, name: str, line: str, body: str, scope: dict[str, Any] | None = None) -> Any:
        """Run `%%name line` over a body. Raises UsageError."""
        if name not in self.cell:
            hint = f"; there is a line magic %{name}" if name in self.line else ""
            raise UsageError(f"there is no cell magic %%{name}{hint}. Known: {_listed('%%', self.cell)}")
        return self._in_scope(scope, lambda: self.cell[name](self, self._expanded(name, line), body))

    def _in_scope(self, scope: dict[str, Any] | None, run: Callable[[], Any]) -> Any:
        before, self.scope = self.scope, self.host.namespace if scope is None else scope
        try:
            return run()
        finally:
            self.scope = before

    def _expanded(self, name: str, line: str) -> str:
        return line if name in _NOT_EXPANDED else commands.expand(line, self.scope)

    def system(self, command: str) -> None:
        """Run a command of the shell, as it stands; `_exit_code` in the namespace says how it ended."""
        commands.system(command, self.host.namespace)

    def getoutput(self, command: str) -> commands.SList:
        """Run a command of the shell, as it stands, and return the lines it printed."""
        return commands.getoutput(command, self.host.namespace)

    def add(self, kind: str, name: str, function: Callable[..., Any]) -> None:
        """Add a program's own magic: a function of the line, for kind `cell` also of the body."""
        if kind not in ("line", "cell", "line_cell"):
            raise UsageError(f"a magic is of kind line, cell or line_cell, not {kind}")
        if kind != "cell":
            self.line[name] = lambda _magics, line: function(line)
        if kind != "line":
            self.cell[name] = lambda _magics, line, body: function(line, body)


def _listed(mark: str, known: dict[str, Any]) -> str:
    return " ".join(f"{mark}{name}" for name in sorted(known))


def _lsmagic(magics: Magics, line: str) -> None:
    """Print the magics there are."""
    del line
    say(f"Line magics:\n{_listed('%', magics.line)}\n\nCell magics:\n{_listed('%%', magics.cell)}")


def _pwd(magics: Magics, line: str) -> str:
    del magics, line
    return os.getcwd()


def _cd(magics: Magics, line: str) -> None:
    """Change the folder: to the home without a name, back with `-`, quietly with `-q`."""
    is_quiet = line.split()[:1] == ["-q"]
    text = line.strip().removeprefix("-q").strip() if is_quiet else line.strip()
    target = text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"" else text
    target = magics.folder_before if target == "-" else os.path.expanduser(target or "~")
    if not target:
        raise UsageError("there is no folder to go back to")
    before = os.getcwd()
    try:
        os.chdir(target)
    except OSError as error:
        raise UsageError(f"cannot go to {target}: {error.strerror}") from None
    magics.folder_before = before
    if not is_quiet:
        say(os.getcwd())


def _shell_command(command: str) -> LineMagic:
    """Make a magic of a command of the shell."""

    def run(magics: Magics, line: str) -> None:
        magics.system(f"{command} {line}")

    return run


def _env(magics: Magics, line: str) -> Any:
    """Return the environment or one variable of it, or set one."""
    text = line.strip()
    if not text:
        return dict(os.environ)
    if "=" in text or " " in text:
        return _set_env(magics, text)
    if text not in os.environ:
        raise UsageError(f"the environment has no variable {text}")
    return os.environ[text]


def _set_env(magics: Magics, line: str) -> None:
    del magics
    text = line.strip()
    name, _, value = text.partition("=") if "=" in text.split(" ")[0] or " " not in text else text.partition(" ")
    name, value = name.strip(), value.strip()
    if not name or ("=" not in text and " " not in text) or any(sign.isspace() for sign in name):
        raise UsageError("%set_env takes NAME=value or NAME value")
    os.environ[name] = value
    say(f"env: {name}={value}")


def _matplotlib(magics: Magics, line: str) -> None:
    """Accept a choice of backend: figures are shown in any case, and there are no windows."""
    del magics
    options = words(line)
    if options[:1] in (["-l"], ["--list"]):
        say("Available matplotlib backends: ['inline', 'agg']")
    elif options and options[0] in _HAS_WINDOWS:
        warn(f"%matplotlib {options[0]}: a sandbox has no window; figures are shown as pictures when a cell ends")


def _config(magics: Magics, line: str) -> Any:
    """Set or return an option of `InlineBackend`: `figure_formats`, `print_figure_kwargs`, `close_figures`, `rc`."""
    import re

    found = re.fullmatch(r"\s*(\w+)(?:\.(\w+)\s*(?:=\s*(.+?)\s*)?)?;?\s*", line, re.DOTALL)
    owner, option, value = found.groups() if found else (line.strip(), None, None)
    if owner != "InlineBackend":
        raise UsageError(f"%config has InlineBackend only, not {owner or 'nothing'}")
    if option is None:
        return say("\n".join(f"InlineBackend.{name}={get()!r}" for name, (get, _) in _INLINE_OPTIONS.items()))
    if option not in _INLINE_OPTIONS:
        raise UsageError(f"InlineBackend has no option {option}. Known: {' '.join(_INLINE_OPTIONS)}")
    get, change = _INLINE_OPTIONS[option]
    if value is None:
        return get()
    try:
        return change(eval(value, dict(magics.scope)))
    except (NameError, SyntaxError, TypeError, ValueError) as error:
        raise UsageError(f"InlineBackend.{option}: {error}") from None


def _set_option(name: str, kind: type) -> Callable[[Any], None]:
    return lambda value: setattr(figures.OPTIONS, name, kind(value))


_INLINE_OPTIONS: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {
    "figure_format": (lambda: figures.OPTIONS.formats[0], figures.set_formats),
    "figure_formats": (lambda: set(figures.OPTIONS.formats), figures.set_formats),
    "print_figure_kwargs": (lambda: figures.OPTIONS.print_options, _set_option("print_options", dict)),
    "close_figures": (lambda: figures.OPTIONS.closes, _set_option("closes", bool)),
    "rc": (lambda: figures.OPTIONS.rc, figures.set_rc),
}


def _extension(magics: Magics, line: str) -> None:
    """Answer to the name of an extension."""
    del magics
    name = line.strip()
    if name == "autoreload":
        return  # what follows it is `%autoreload`, which answers
    warn(f"extension {name or '(none)'} was not loaded: a session in a sandbox has its own magics alone, see %lsmagic")


def _autoreload(magics: Magics, line: str) -> None:
    del magics, line
    warn("modules are not reloaded by themselves here; importlib.reload(module) does it")


def _packages(name: str) -> LineMagic:
    def answer(magics: Magics, line: str) -> None:
        del magics, line
        warn(f"%{name}: {_NO_PACKAGES}")

    return answer


def _precision(magics: Magics, line: str) -> str:
    """Set how floats are shown: a number of digits, a format such as %.3f, or nothing for all digits."""
    del magics
    text = line.strip()
    form = f"%.{text}f" if text.isdigit() else text
    try:
        _ = form and form % 3.14159
    except (TypeError, ValueError):
        raise UsageError(f"%precision takes a number of digits or a format such as %.3f, not {text}") from None
    Printer.float_format = form
    if "numpy" in sys.modules:
        sys.modules["numpy"].set_printoptions(precision=int(text) if text.isdigit() else 8)
    return form or "%r"


LINE_MAGICS: dict[str, LineMagic] = {
    "autoreload": _autoreload,
    "cat": _shell_command("cat"),
    "cd": _cd,
    "conda": _packages("conda"),
    "config": _config,
    "cp": _shell_command("cp"),
    "env": _env,
    "hist": names.history,
    "history": names.history,
    "ll": _shell_command("ls -lF"),
    "load_ext": _extension,
    "ls": _shell_command("ls -F"),
    "lsmagic": _lsmagic,
    "mamba": _packages("mamba"),
    "matplotlib": _matplotlib,
    "mkdir": _shell_command("mkdir"),
    "mv": _shell_command("mv"),
    "pinfo": names.inspect_line,
    "pinfo2": names.inspect_source,
    "pip": _packages("pip"),
    "precision": _precision,
    "pwd": _pwd,
    "reload_ext": _extension,
    "reset": names.reset,
    "rm": _shell_command("rm"),
    "rmdir": _shell_command("rmdir"),
    "run": names.run_file,
    "set_env": _set_env,
    "time": timing.time_line,
    "timeit": timing.timeit_line,
    "unload_ext": _extension,
    "uv": _packages("uv"),
    "who": names.who,
    "who_ls": names.own_names,
    "whos": names.whos,
}
CELL_MAGICS: dict[str, cells.CellMagic] = {
    **cells.CELL_MAGICS,
    "time": timing.time_cell,
    "timeit": timing.timeit_cell,
}
