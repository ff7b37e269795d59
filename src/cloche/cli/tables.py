"""The commands that show something: tables for people, --json for programs."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from cloche.core.plain import plain, plain_line

Row = Mapping[str, Any]


PIPED_COLUMNS = 200  # where each row shall stay one line, for those who look for it with grep
READ_COLUMNS = 100  # where rows are read, or stand below one another in a log


def show(
    rows: Sequence[Row],
    *,
    as_json: bool,
    title: str = "",
    piped_columns: int = PIPED_COLUMNS,
    below: Sequence[str] = (),
) -> None:
    """Print rows that share their keys, as a table or as JSON.

    `piped_columns` is how wide the table may be where there is no terminal. What stands under the keys `below` are
    sentences, paths and commands: they follow the table, each on a line of its own that is not broken.
    """
    if as_json:
        print(json.dumps([dict(row) for row in rows], default=str, indent=2))
        return
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Column, Table

    names = [name for name in (rows[0] if rows else ()) if name not in below]
    columns = [Column(name, overflow="fold") for name in names]  # nothing of a long word is lost
    table = Table(*columns, title=title or None, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for row in rows:
        table.add_row(*(_cell(row[name]) for name in names))
    wide = None if sys.stdout.isatty() else piped_columns
    Console(markup=False, highlight=False, emoji=False, width=wide).print(table)
    for row in rows:
        for name in below:
            if row[name]:
                print(plain_line(f"{_cell(row[names[0]])}: {name}: {_cell(row[name])}"))


def _cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return plain(", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value))


def show_presets(*, as_json: bool) -> int:
    """List the presets with what each sets."""
    from cloche.core.presets import PRESETS

    rows = [
        {
            "preset": preset.name,
            "summary": preset.summary,
            "sets": [_amount(name, value) for name, value in {**preset.limits, **preset.policy}.items()],
        }
        for preset in PRESETS.values()
    ]
    show(rows, as_json=as_json)
    return 0


def _amount(name: str, value: object) -> str:
    from cloche.core.units import format_size

    return f"{name}={format_size(value) if name.endswith('_bytes') and isinstance(value, int) else value}"


def show_backends(*, as_json: bool) -> int:
    """List every backend with whether it can be used here, why not, and what to do about it."""
    from cloche.core.policy import Policy
    from cloche.core.tiers import BACKEND_ROWS
    from cloche.runtime.selection import Wish, describe
    from cloche.runtime.settings import load_settings

    wish = Wish(policy=Policy(), images=load_settings().images)
    found = {name: describe(name, wish) for name in BACKEND_ROWS}
    rows = [
        {
            "backend": name,
            "available": found[name].available,
            "level": str(found[name].level) if found[name].available else None,
            "summary": row.summary,
            "reason": found[name].reason,
            "remedy": found[name].remedy,
        }
        for name, row in BACKEND_ROWS.items()
    ]
    show(rows, as_json=as_json, piped_columns=READ_COLUMNS, below=("reason", "remedy"))
    return 0


def show_languages(*, as_json: bool) -> int:
    """List the languages with the engine that runs each here, or the command that installs one."""
    from cloche.core.languages import LANGUAGES
    from cloche.runtime.doctor import find_toolchains

    rows = [
        {
            "language": language.name,
            "aliases": language.aliases,
            "suffixes": language.suffixes,
            "engine": found.engine or None,
            "note": found.note,
            "image": language.image,
        }
        for language, found in zip(LANGUAGES.values(), find_toolchains(), strict=True)
    ]
    show(rows, as_json=as_json)
    return 0


def show_settings(options: Mapping[str, Any], *, as_json: bool) -> int:
    """Show every setting with its value and its origin."""
    from cloche.runtime.settings import load_settings

    settings = load_settings(options)
    rows = [{"key": key, "value": value, "origin": origin} for key, value, origin in settings.as_rows()]
    show(rows, as_json=as_json)
    return 0
