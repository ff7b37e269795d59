"""The magics of one line, and the table of them: about names of a session, about files, about formats."""

from __future__ import annotations

import os
import sys

from . import cell_magics, command_line, rich
from .command_line import UsageError, number, print_line, split_line, take_options, warn
from .magics import listed
from .pretty import Printer, bounded, safe_repr, text_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from .magics import LineMagic, Magics

_NO_PACKAGES = (
    "a sandbox has no package manager; packages are installed outside it, when it is opened. "
    "What is installed can be imported."
)
_INSTALLERS = {"pip": "python3 -m pip", "uv": "uv"}  # that a notebook's cell runs as commands
_HAS_WINDOWS = ("notebook", "widget", "ipympl", "qt", "qt5", "qt6", "tk", "gtk", "gtk3", "gtk4", "wx", "osx", "nbagg")
_MAX_SUMMARY = 100
_MAX_STRING_FORM = 2000
_LAST_VALUES = ("_", "__", "___", "_i", "_ii", "_iii")


def own_names(magics: Magics, line: str = "") -> list[str]:
    """Return the names the program made, of the types in the line if any are given."""
    hidden, kinds = magics.hidden, split_line(line)
    return sorted(
        name
        for name, value in magics.host.namespace.items()
        if not name.startswith("_")
        and not (name in hidden and hidden[name] is value)
        and (not kinds or type(value).__name__ in kinds)
    )


def who(magics: Magics, line: str) -> None:
    """Print the names the program made."""
    names = own_names(magics, line)
    print_line("\t ".join(names) if names else "Interactive namespace is empty.")


def whos(magics: Magics, line: str) -> None:
    """Print a table of the names the program made, with types and values."""
    names = own_names(magics, line)
    if not names:
        return print_line("Interactive namespace is empty.")
    rows = [("Variable", "Type", "Data/Info")]
    rows += [(name, type(value := magics.host.namespace[name]).__name__, _summary(value)) for name in names]
    name_width, type_width = (max(len(row[column]) for row in rows) + 3 for column in (0, 1))
    lines = [f"{name:<{name_width}}{kind:<{type_width}}{info}" for name, kind, info in rows]
    lines.insert(1, "-" * (name_width + type_width + len(rows[0][2])))
    return print_line("\n".join(lines))


def _summary(value: Any) -> str:
    """Return a value in one short line: its shape, its size, or its text."""
    try:
        if isinstance(getattr(value, "shape", None), tuple) and not isinstance(value, type):
            return f"shape {'x'.join(str(size) for size in value.shape) or '()'}"
        if isinstance(value, (list, tuple, dict, set, frozenset)):
            return f"n={len(value)}"
    except Exception:
        return "?"  # a listing shows the other names all the same
    text = " ".join((value if isinstance(value, str) else safe_repr(value)).split())
    return text if len(text) <= _MAX_SUMMARY else f"{text[:_MAX_SUMMARY]}<...>"


def reset(magics: Magics, line: str) -> None:
    """Remove every name the program made. No user could confirm, so it does not ask."""
    options, remainder = take_options(line, flags="fs")
    if remainder:
        raise UsageError(f"%reset takes -f and -s, not {remainder}")
    namespace = magics.host.namespace
    keeps_history = "s" in options
    for name in list(namespace):
        if not (_is_of_history(name) and keeps_history):
            del namespace[name]
    namespace.update({name: value for name, value in magics.hidden.items() if not _is_of_history(name)})
    if isinstance(namespace.get("Out"), dict) and not keeps_history:
        namespace["Out"].clear()


def _is_of_history(name: str) -> bool:
    return name in _LAST_VALUES or (name.startswith("_") and name.lstrip("_i").isdigit())


def history(magics: Magics, line: str) -> None:
    """Print cells that were run: all, the last (`-l 3`), or some (`1-3 5`); with their numbers (`-n`)."""
    options, remainder = take_options(line, flags="n", valued="l")
    cells = magics.host.history
    all_numbers = range(1, len(cells))
    if "l" in options:
        all_numbers = all_numbers[-number(options["l"], "-l") :]
    chosen = (
        [number for span in remainder.split() for number in _range(span, len(cells))]
        if remainder
        else list(all_numbers)
    )
    for chosen_number in chosen:
        print_line(f"{f'{chosen_number:4}: ' if 'n' in options else ''}{cells[chosen_number]}")


def _range(span: str, count: int) -> range:
    first, dash, last = span.partition("-")
    begin = number(first, "%history")
    end = number(last, "%history") if last else (count - 1 if dash else begin)
    return range(min(begin, count), min(end + 1, count))


def inspect_line(magics: Magics, line: str) -> None:
    """Print a description of an object."""
    _inspect(magics, line, with_source=False)


def inspect_source(magics: Magics, line: str) -> None:
    """Print a description of an object, and its source."""
    _inspect(magics, line, with_source=True)


def _inspect(magics: Magics, line: str, *, with_source: bool) -> None:
    try:
        value = eval(line, magics.scope or magics.host.namespace)
    except Exception:  # the program's expression; whatever it raises, there is nothing to describe
        return print_line(f"Object `{line}` not found.")
    rows = _description(value, with_source=with_source)
    return print_line(
        "\n".join(f"{title}:{' ' if chr(10) not in text else chr(10)}{text}" for title, text in rows if text)
    )


def _description(value: Any, *, with_source: bool) -> list[tuple[str, str]]:
    import inspect

    def ask(function: Any) -> str:
        try:
            return str(function(value) or "")
        except Exception:
            return ""  # it has none, or none that can be found

    kind = value if isinstance(value, type) else type(value)
    is_plain = not callable(value)
    source = ask(inspect.getsource) if with_source else ""
    return [
        ("Signature", f"{getattr(value, '__name__', '')}{ask(inspect.signature)}" if callable(value) else ""),
        ("Type", "type" if kind is value else kind.__name__),
        ("String form", bounded(text_of(value), _MAX_STRING_FORM) if is_plain else ""),
        ("Length", ask(len) if is_plain else ""),
        ("File", ask(inspect.getsourcefile)),
        ("Source", source),
        ("Docstring", "" if source else ask(inspect.getdoc)),
    ]


def run_file(magics: Magics, line: str) -> None:
    """Run a Python file as a separate program, and take over its names; with `-i` it begins with ours.

    With `-n` its `__name__` is not `__main__`; `-e` and `-t` (ignore errors, time) are not supported.
    """
    options, remainder = take_options(line, flags="in")
    arguments = split_line(remainder)
    if not arguments:
        raise UsageError("%run takes the name of a Python file, and arguments for it")
    path = os.path.expanduser(arguments[0])
    path = path if os.path.exists(path) or path.endswith(".py") else f"{path}.py"
    try:
        with open(path, "rb") as file:
            code = compile(file.read(), path, "exec", dont_inherit=True)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    name = os.path.splitext(os.path.basename(path))[0] if "n" in options else "__main__"
    _run_as_program(magics, code, name, [path, *arguments[1:]], begins_with_ours="i" in options)


def _run_as_program(magics: Magics, code: Any, name: str, argv: list[str], *, begins_with_ours: bool) -> None:
    """Run code in a new module, with arguments and an import path like a program's."""
    namespace = magics.host.namespace
    module = type(sys)(name)
    own = {"__file__": argv[0], "__name__": name, "__builtins__": sys.modules["builtins"]}
    vars(module).update({**namespace, **own} if begins_with_ours else own)
    before = sys.argv, sys.path[:], sys.modules.get("__main__")
    sys.argv, sys.path[:0], sys.modules["__main__"] = argv, [os.path.dirname(os.path.abspath(argv[0]))], module
    try:
        exec(code, vars(module))
    except SystemExit as request:
        if request.code not in (None, 0):
            warn(f"{argv[0]} ended with exit code {request.code}")
    finally:
        sys.argv, sys.path[:] = before[:2]
        if before[2] is not None:
            sys.modules["__main__"] = before[2]
        namespace.update({key: value for key, value in vars(module).items() if not key.startswith("__")})


def _lsmagic(magics: Magics, line: str) -> None:
    del line
    print_line(f"Line magics:\n{listed('%', magics.line)}\n\nCell magics:\n{listed('%%', magics.cell)}")


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
        print_line(os.getcwd())


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
    print_line(f"env: {name}={value}")


def _matplotlib(magics: Magics, line: str) -> None:
    """Accept a choice of backend: figures are shown in any case, and there are no windows."""
    del magics
    options = split_line(line)
    if options[:1] in (["-l"], ["--list"]):
        print_line("Available matplotlib backends: ['inline', 'agg']")
    elif options and options[0] in _HAS_WINDOWS:
        warn(f"%matplotlib {options[0]}: a sandbox has no window; figures are shown as pictures when a cell ends")


def _config(magics: Magics, line: str) -> Any:
    """Set or return an option of `InlineBackend`: `figure_formats`, `print_figure_kwargs`, `close_figures`, `rc`."""
    import re

    match = re.fullmatch(r"\s*(\w+)(?:\.(\w+)\s*(?:=\s*(.+?)\s*)?)?;?\s*", line, re.DOTALL)
    owner, option, value = match.groups() if match else (line.strip(), None, None)
    if owner != "InlineBackend":
        raise UsageError(f"%config has InlineBackend only, not {owner or 'nothing'}")
    if option is None:
        return print_line("\n".join(f"InlineBackend.{name}={get()!r}" for name, (get, _) in _INLINE_OPTIONS.items()))
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
    return lambda value: setattr(rich.OPTIONS, name, kind(value))


_INLINE_OPTIONS: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {
    "figure_format": (lambda: rich.OPTIONS.formats[0], rich.set_formats),
    "figure_formats": (lambda: set(rich.OPTIONS.formats), rich.set_formats),
    "print_figure_kwargs": (lambda: rich.OPTIONS.print_options, _set_option("print_options", dict)),
    "close_figures": (lambda: rich.OPTIONS.closes, _set_option("closes", bool)),
    "rc": (lambda: rich.OPTIONS.rc, rich.set_rc),
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
        if name in _INSTALLERS and magics.host.is_notebook:
            command_line.system(f"{_INSTALLERS[name]} {line}", magics.host.namespace)
        else:
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
    "hist": history,
    "history": history,
    "ll": _shell_command("ls -lF"),
    "load_ext": _extension,
    "ls": _shell_command("ls -F"),
    "lsmagic": _lsmagic,
    "mamba": _packages("mamba"),
    "matplotlib": _matplotlib,
    "mkdir": _shell_command("mkdir"),
    "mv": _shell_command("mv"),
    "pinfo": inspect_line,
    "pinfo2": inspect_source,
    "pip": _packages("pip"),
    "precision": _precision,
    "pwd": _pwd,
    "reload_ext": _extension,
    "reset": reset,
    "rm": _shell_command("rm"),
    "rmdir": _shell_command("rmdir"),
    "run": run_file,
    "set_env": _set_env,
    "time": cell_magics.time_line,
    "timeit": cell_magics.timeit_line,
    "unload_ext": _extension,
    "uv": _packages("uv"),
    "who": who,
    "who_ls": own_names,
    "whos": whos,
}
