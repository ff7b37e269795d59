"""`cloche debug`: the debug namespaces of the service, stored in the database that its workers follow."""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING

import click

from .app import root
from .options import argument, json_option, option
from .output import READ_COLUMNS, show

if TYPE_CHECKING:
    from cloche.core.debugging import DebugState


@root.command("debug")
@argument("action", metavar="ACTION", help="show, on or off.", type=click.Choice(["show", "on", "off"]), default="show")
@argument("namespaces", metavar="NAMESPACE...", help="The namespaces. Default: all.", nargs=-1, required=False)
@option("--database", metavar="FILE", help="The database file. Default: in the user's state folder.")
@json_option()
def _debug(action: str, namespaces: tuple[str, ...], database: str | None, as_json: bool) -> int:
    """Show or switch debug namespaces of the service.

    The switches are stored in the database; workers of `cloche serve` follow within a second. CLOCHE_DEBUG=jail,warm
    (or *) switches namespaces on for one process, with any command.
    """
    from cloche.core.debugging import VARIABLE, DebugState, check_namespaces, read_namespaces
    from cloche.records.debugging import read_switches, store_switches

    from ._records import opened

    names = check_namespaces(namespaces or ["*"], where="NAMESPACE")
    with opened(database) as records:
        if action != "show":
            with records.writing() as session:
                store_switches(session, dict.fromkeys(sorted(names), action == "on"), by="cli")
        with records.reading() as session:
            stored = read_switches(session)
    state = DebugState(environment=read_namespaces(os.environ.get(VARIABLE, "")), stored=stored)
    _print(state, as_json=as_json)
    return 0


def _print(state: DebugState, *, as_json: bool) -> None:
    from cloche.core.debugging import NAMESPACES

    if as_json:
        print(json.dumps(state.as_dict(), indent=2))
        return
    on = state.on
    rows = [{"namespace": name, "on": name in on, "what": description} for name, description in NAMESPACES.items()]
    show(rows, as_json=False, piped_columns=READ_COLUMNS)
    print("helpers, egress processes and keepers follow at their next start", file=sys.stderr)
