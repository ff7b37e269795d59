"""The verbs of `cloche audit` and their options; what they do is in `audit`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from .commands import Verbs
from .exits import guarded

if TYPE_CHECKING:
    from .audit import Filters

verbs = Verbs(help="Look at the audit log, and prove that it is whole.", no_args_is_help=True, rich_markup_mode=None)

Folder = Annotated[
    str | None, typer.Option("--folder", metavar="DIR", help="Where the log is. Default: as configured, else yours.")
]
ConfigFile = Annotated[str | None, typer.Option("--config", metavar="FILE", help="Use this configuration file.")]
Since = Annotated[
    str | None, typer.Option(metavar="TIME", help="Events from then on: 2026-01-31, 2026-01-31T12:00, or 2h, 7d ago.")
]
Kinds = Annotated[
    list[str] | None,
    typer.Option("--kind", metavar="NAME", help="execution, approval, denial, fallback, fix_round, ... Repeatable."),
]
Statuses = Annotated[
    list[str] | None,
    typer.Option("--status", metavar="NAME", help="ok, error, timeout, ..., approved, denied. Repeatable."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def _finish(work: Callable[[], int], *, as_json: bool = False) -> None:
    raise typer.Exit(guarded(work, as_json=as_json))


def _filters(since: str | None, kinds: list[str] | None, statuses: list[str] | None) -> Filters:
    from .audit import Filters

    return Filters(since=since, kinds=_words(kinds), statuses=_words(statuses))


def _words(options: list[str] | None) -> tuple[str, ...]:
    """Make one list of a repeated option, each of whose values may be a list with commas."""
    return tuple(word.strip() for option in options or () for word in option.split(",") if word.strip())


@verbs.command("show")
def show(
    last: Annotated[int, typer.Option("-n", metavar="N", min=0, help="So many of the last ones; 0 is all.")] = 20,
    since: Since = None,
    kind: Kinds = None,
    status: Statuses = None,
    folder: Folder = None,
    config_file: ConfigFile = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per event.")] = False,
) -> None:
    """Show what was run, approved and refused, the latest at the bottom."""

    def work() -> int:
        from .audit import folder_of, show_events

        found = folder_of(folder, config_file)
        return show_events(found, _filters(since, kind, status), last=last, as_json=as_json)

    _finish(work, as_json=as_json)


@verbs.command("verify")
def verify(
    head: Annotated[
        list[str] | None, typer.Option(metavar="HEAD", help="A head that was kept elsewhere. Repeatable.")
    ] = None,
    head_file: Annotated[str | None, typer.Option(metavar="FILE", help="A file with such heads, one a line.")] = None,
    file: Annotated[
        str | None, typer.Option(metavar="FILE", help="Check this file instead, an export as jsonl for example.")
    ] = None,
    folder: Folder = None,
    config_file: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """Find changed, missing, swapped and invented events; exit code 1 when there are any.

    That the end was cut off, or everything rewritten, shows only with a head that was kept where nobody who can write
    to the log can write: cloche audit head prints it.
    """

    def work() -> int:
        from .audit import check, folder_of

        found = folder_of(folder, config_file)
        return check(found, heads=tuple(head or ()), head_file=head_file, file=file, as_json=as_json)

    _finish(work, as_json=as_json)


@verbs.command("head")
def head(folder: Folder = None, config_file: ConfigFile = None) -> None:
    """Print number and hash of the last event, to be kept elsewhere."""

    def work() -> int:
        from .audit import folder_of, print_head

        return print_head(folder_of(folder, config_file))

    _finish(work)


@verbs.command("export")
def export(
    form: Annotated[str, typer.Option("--format", metavar="NAME", help="jsonl, json or csv.")] = "jsonl",
    out: Annotated[str | None, typer.Option(metavar="FILE", help="Write to FILE, for you alone to read.")] = None,
    since: Since = None,
    kind: Kinds = None,
    status: Statuses = None,
    folder: Folder = None,
    config_file: ConfigFile = None,
) -> None:
    """Write events out, and verify the log on the way; exit code 1 when it is not whole."""

    def work() -> int:
        from .audit import export as write_out
        from .audit import folder_of

        found = folder_of(folder, config_file)
        return write_out(found, _filters(since, kind, status), form=form, out=out)

    _finish(work)
