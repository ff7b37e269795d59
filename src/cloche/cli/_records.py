"""Shared by commands of records: the database, opening a folder of the user's, and `list` and `delete`."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from cloche.core.errors import InvalidRequest
from cloche.core.escape import escape_name
from cloche.core.record import dataclass

from ._acts import require_yes, yes_option
from .options import Decorator, argument, json_option, option
from .output import say, show

if TYPE_CHECKING:
    from cloche.records.database import Database

Document = Mapping[str, Any]
session_option = option("--session", "session_id", metavar="LABEL", help="Only those with this label.")
_limit = option("--limit", metavar="N", type=int, default=50, help="The number of rows, 200 at most.")
_cursor = option("--cursor", metavar="ID", help="Continue after this one: the nextCursor of the page before.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """Describe the commands `list` and `delete` for one kind of records.

    `page` returns a page of documents, `row` the table row of a document. `delete` returns the document that --json
    prints.
    """

    group: click.Group
    name: str
    plural: str
    none: str
    page: Callable[..., Document]
    row: Callable[[Document], Mapping[str, object]]
    filters: tuple[Decorator, ...] = ()
    below: tuple[str, ...] = ()
    delete: Callable[[str], Document] | None = None
    delete_help: str = ""
    deleted: str = "deleted"


def add_commands(kind: Kind) -> None:
    """Add the commands to the group."""

    def list_(as_json: bool, **filters: object) -> int:
        page = kind.page(**filters)
        if as_json:
            return print_json(page)
        if page["items"]:
            show([dict(kind.row(item)) for item in page["items"]], as_json=False, below=kind.below)
        else:
            print(kind.none)
        if page["nextCursor"]:
            say(f"there are more: --cursor {page['nextCursor']}")
        return 0

    def delete(id_: str, yes: bool, as_json: bool) -> int:
        require_yes(f"Delete {kind.name} {escape_name(id_)}?", yes=yes)
        report = kind.delete(id_) if kind.delete is not None else {}
        if as_json:
            return print_json(report)
        print(f"{kind.deleted} {id_}")
        return 0

    _add(kind.group, "list", f"List the {kind.plural}.", list_, *kind.filters, _limit, _cursor, json_option())
    if kind.delete is not None:
        parameters = (argument("id_", metavar="ID", help=f"The {kind.name}'s id."), yes_option, json_option())
        _add(kind.group, "delete", kind.delete_help, delete, *parameters)


def _add(group: click.Group, name: str, text: str, function: Callable[..., int], *decorators: Decorator) -> None:
    function.__doc__ = text
    for decorate in reversed(decorators):
        function = decorate(function)
    group.command(name)(function)


@contextmanager
def opened(location: str | None = None) -> Iterator[Database]:
    """Open the database of records. Raises InvalidRequest if its packages are not installed, RecordsFailed."""
    from cloche.records import require_extra

    require_extra()
    from cloche.records.database import Database

    database = Database(location)
    try:
        yield database
    finally:
        database.close()


@contextmanager
def folder(path: str, refusal: str = "--workspace: {} cannot be opened: {}") -> Iterator[int]:
    """Open a folder that the user named. Raises InvalidRequest with its name and the reason."""
    from cloche.hostfs import open_folder

    try:
        fd = open_folder(path, follows_link=True)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise InvalidRequest(refusal.format(escape_name(path), why)) from None
    try:
        yield fd
    finally:
        os.close(fd)


def print_json(document: Document) -> int:
    """Print a document, and return the exit code."""
    print(json.dumps(document, indent=2))
    return 0
