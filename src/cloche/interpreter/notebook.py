"""A cell as a notebook runs it: variables and folder of one cell, errors as text, and values as data.

A traceback has the form that notebooks show, without colours. Data are JSON: the columns of a table of pandas, what a
figure of matplotlib draws (`charts`), and lists and dicts. Nothing here imports those libraries.
"""

from __future__ import annotations

import os
import sys

from . import charts
from .pretty import report, without_ours

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

COLUMNS, CHART = "application/vnd.cloche.columns+json", "application/vnd.cloche.chart+json"
MOST_CELLS = 1_000_000  # of a table
MOST_FRAMES, MOST_CHAINED, CONTEXT = 50, 10, 2
_METHODS = (("_repr_e2b_data_", COLUMNS), ("_repr_e2b_chart_", CHART))


class Surroundings:
    """Change variables for one cell alone, and go to the folder that it begins in."""

    def __init__(self, request: dict[str, Any]) -> None:
        self._env: dict[str, str] = request.get("env") or {}
        self._cwd: str | None = request.get("cwd")
        self._before = {name: os.environ.get(name) for name in self._env}

    def begin(self) -> None:
        """Begin. Raises OSError for the folder, ValueError for a variable."""
        if self._cwd is not None:
            os.chdir(self._cwd)
        os.environ.update(self._env)

    def end(self) -> None:
        """Restore the variables."""
        for name, value in self._before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def follow_folder(home: str) -> None:
    """Have modules of the current folder found first, and those in folders of packages that were not there before."""
    if sys.path and sys.path[0] == home:
        sys.path[0] = ""
    for path, finder in list(sys.path_importer_cache.items()):
        if finder is None:
            sys.path_importer_cache.pop(path, None)


def without_indent(source: str) -> str:
    """Return a cell without the indentation of its first line, which is taken from the others, too."""
    if source[:1] not in (" ", "\t", "\n"):
        return source
    lines = source.split("\n")
    first = next((line for line in lines if line.strip()), "")
    indent = first[: len(first) - len(first.lstrip())]
    return "\n".join(line.removeprefix(indent) for line in lines)


# Errors.


def traceback_text(error: BaseException) -> str:
    """Return a traceback as notebooks show it. Lets no ordinary exception out."""
    try:
        return "\n\n".join(_chain(error))
    except Exception as another:
        return f"{type(error).__name__}: its traceback cannot be shown ({type(another).__name__})"


def _chain(error: BaseException) -> Iterator[str]:
    errors: list[tuple[BaseException, str]] = [(error, "")]
    while len(errors) < MOST_CHAINED:
        last = errors[-1][0]
        if last.__cause__ is not None:
            errors.append((last.__cause__, "The above exception was the direct cause of the following exception:"))
        elif last.__context__ is not None and not last.__suppress_context__:
            errors.append((last.__context__, "During handling of the above exception, another exception occurred:"))
        else:
            break
    for raised, link in reversed(errors):
        yield _one(raised)
        if link:
            yield link


def _one(error: BaseException) -> str:
    import traceback

    last = "".join(traceback.format_exception_only(type(error), error)).rstrip("\n")
    frames = traceback.extract_tb(without_ours(error.__traceback__))[-MOST_FRAMES:]
    if isinstance(error, SyntaxError) and not frames:
        return last.replace(f'File "<cell {_cell_number(error.filename)}>"', f"Cell In[{_cell_number(error.filename)}]")
    name = type(error).__name__
    head = f"{'-' * 75}\n{name}{'Traceback (most recent call last)':>{max(75 - len(name), 34)}}"
    return "\n".join([head, "\n\n".join(_frame(frame) for frame in frames), "", last])


def _cell_number(name: str | None) -> str:
    is_cell = name is not None and name.startswith("<cell ")
    return name[6:-1] if is_cell and name is not None else ""


def _frame(frame: Any) -> str:
    import linecache

    number = _cell_number(frame.filename)
    where = f"Cell In[{number}], line {frame.lineno}" if number else f"File {frame.filename}:{frame.lineno}"
    inside = "" if frame.name == "<module>" else f", in {frame.name}"
    lines = []
    for shown in range(max(1, frame.lineno - CONTEXT), frame.lineno + CONTEXT + 1):
        text = linecache.getline(frame.filename, shown).rstrip("\n")
        if text or shown == frame.lineno:
            mark = f"{'-' * (5 - len(str(shown)))}> {shown}" if shown == frame.lineno else f"{shown:>7}"
            lines.append(f"{mark} {text}".rstrip())
    return "\n".join([where + inside, *lines])


# Data.


def add_data(value: Any, data: dict[str, Any]) -> None:
    """Add to a bundle what a value is as data. Lets no ordinary exception out."""
    try:
        for mime, content in _data(value):
            if content:
                data.setdefault(mime, content)
    except Exception as error:
        report(error)


def _data(value: Any) -> Iterator[tuple[str, Any]]:
    for name, mime in _METHODS:
        method = getattr(type(value), name, None)
        if callable(method):
            yield mime, method(value)
    if type(value) in (list, dict):
        yield "application/json", _json(value)
    elif isinstance(value, _class("pandas", "DataFrame")) and value.size <= MOST_CELLS:
        columns = value.to_dict(orient="list")
        yield COLUMNS, _json({str(name): [_plain(item) for item in items] for name, items in columns.items()})
    elif isinstance(value, _class("matplotlib.figure", "Figure")):
        yield CHART, charts.chart_of(value)


def _class(module: str, name: str) -> Any:
    """Return a class of a module that is loaded; else no value is of it."""
    return getattr(sys.modules.get(module), name, ())


def _json(value: Any) -> str | None:
    import json

    try:
        return json.dumps(value, default=_plain_object, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return None


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if value - value == 0 else None
    if value is None or type(value) in (str, int, bool):
        return value
    if hasattr(value, "isoformat"):
        return value.isoformat() if value == value else None  # NaT is not
    if hasattr(value, "item") and getattr(value, "ndim", 1) == 0:
        return _plain(value.item())
    return value if isinstance(value, (list, dict)) else str(value)


def _plain_object(value: Any) -> Any:
    """Return an object of a list or dict as JSON can hold it. Raises TypeError."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if hasattr(value, "isoformat"):
        return value.isoformat()
    raise TypeError(f"{type(value).__name__} is no data")


def show_saved(module: Any, display: Callable[[Any], Any], is_on: Callable[[], bool]) -> None:
    """Have pictures of Pillow displayed, too, when a cell saves one under a name."""
    save = module.Image.save

    def save_and_show(self: Any, fp: Any, format: Any = None, **params: Any) -> Any:  # noqa: A002 - Pillow's name
        if isinstance(fp, str) and is_on():
            display(self)
        return save(self, fp, format, **params)

    module.Image.save = save_and_show
