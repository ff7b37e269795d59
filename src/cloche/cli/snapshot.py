"""`cloche snapshot`: record the environment of a workspace, compare two records, write one as a script; no server.

Names of branches and packages and values are untrusted: the output is escaped.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from cloche.core.errors import InvalidRequest
from cloche.core.escape import escape_name

from ._acts import audit_log
from ._records import Document, Kind, add_commands, folder, opened, print_json, session_option
from .app import root
from .options import argument, flag, json_option, option
from .output import say

snapshots = root.group("snapshot", help="Snapshots of an environment: compare, replicate.")(lambda: None)
_id = argument("id_", metavar="ID", help="A snapshot's id.")


@snapshots.command("create")
@option("--workspace", metavar="DIR", default=".", help="The folder.")
@option("--session", metavar="LABEL", help="A label of your own, at most 64 characters.")
@option("--label", metavar="TEXT", help="A description, at most 200 characters.")
@option("--env", "names", metavar="NAME", multiple=True, help="Record this variable of yours. Repeatable.")
@flag("--all-env", help="Record all of your variables.")
@json_option()
def _create(
    workspace: str, session: str | None, label: str | None, names: tuple[str, ...], all_env: bool, as_json: bool
) -> int:
    """Record variables, dependencies, git's state and settings.

    It prints the id. Without --env and --all-env it records the variables that a guest gets. Secrets are masked.
    """
    from cloche.config.settings import load_settings
    from cloche.records.environment import take_snapshot

    env = _environment(names, is_all=all_env)
    with opened() as database, folder(workspace) as fd:
        document = take_snapshot(
            database, fd, workspace_path=os.path.abspath(workspace), settings=load_settings(), env=env,
            session_id=session, label=label,
        )  # fmt: skip
    if as_json:
        return print_json(document)
    for note in _notes(document):
        say(note)
    print(document["id"])
    return 0


@snapshots.command("show")
@_id
@json_option()
def _show(id_: str, as_json: bool) -> int:
    """Show a snapshot."""
    from cloche.records.environment import get_snapshot

    with opened() as database:
        document = get_snapshot(database, id_)
    if as_json:
        return print_json(document)
    for name, value in {**_row(document), "head": document["git"]["head"]}.items():
        _print_line(f"{name}: {'' if value is None else value}")
    for name, value in document["env"].items():
        _print_line(f"env {name}={value}")
    for variable in document["skippedEnv"]:
        _print_line(f"left out {variable['key']}: {variable['reason']}")
    for dependency in document["dependencies"]:
        _print_line(f"dependency {_named(dependency)} ({dependency['source']})")
    for line in document["git"]["status"]:
        _print_line(f"git {line}")
    for note in _notes(document):
        say(note)
    return 0


@snapshots.command("compare")
@argument("id1", metavar="ID1", help="The earlier one.")
@argument("id2", metavar="ID2", help="The later one.")
@json_option()
def _compare(id1: str, id2: str, as_json: bool) -> int:
    """Compare variables and dependencies of two snapshots.

    One line each: + added, - removed, M changed, ? masked (it may have changed).
    """
    from cloche.records.environment import compare_snapshots

    with opened() as database:
        comparison = compare_snapshots(database, id1, id2)
    if as_json:
        return print_json(comparison)
    env, dependencies = comparison["env"], comparison["dependencies"]
    for sign, key in (("+", "added"), ("-", "removed")):
        for name, value in env[key].items():
            _print_line(f"{sign} {name}={value}")
        for dependency in dependencies[key]:
            _print_line(f"{sign} {_named(dependency)}")
    for name, (before, after) in env["changed"].items():
        _print_line(f"M {name}: {before} -> {after}")
    for dependency in dependencies["changed"]:
        _print_line(f"M {dependency['ecosystem']} {dependency['name']}: {dependency['from']} -> {dependency['to']}")
    for name in env.get("unknown", ()):
        _print_line(f"? {name}")
    return 0


@snapshots.command("replicate")
@_id
@option("--workspace", metavar="DIR", help="The folder. Default: the snapshot's.")
@flag("--overwrite", help="Replace an existing script.")
@json_option()
def _replicate(id_: str, workspace: str | None, overwrite: bool, as_json: bool) -> int:
    """Write a shell script that sets the variables again.

    The script is .cloche-env-replication.sh in the folder. Secrets are empty in it: fill them in.
    """
    from cloche.records.environment import get_snapshot
    from cloche.records.replication import render_script, write_script

    with opened() as database:
        document = get_snapshot(database, id_)
    script = render_script(document)
    path = workspace or str(document["workspacePath"])
    with folder(path) as fd:
        if (audit := audit_log()) is not None:
            audit.record("replicate", snapshot=id_, path=os.path.abspath(path))
        write_script(fd, script, overwrite=overwrite)
    summary = script.as_dict()
    if as_json:
        return print_json(summary)
    print(f"written: {summary['path']}, {summary['variables']} variables")
    if script.placeholders:
        say(f"to be filled in: {', '.join(script.placeholders)}")
    for name, reason in script.skipped:
        say(f"left out: {name} ({reason})")
    return 0


def _environment(names: Sequence[str], *, is_all: bool) -> Mapping[str, str] | None:
    """Return the selected variables of this process; None without a selection. Raises InvalidRequest."""
    if is_all and names:
        raise InvalidRequest("--all-env and --env exclude each other; give one")
    missing = [name for name in names if name not in os.environ]
    if missing:
        raise InvalidRequest(f"--env: there is no variable {escape_name(missing[0])}; leave it out, or set it")
    if is_all:
        return dict(os.environ)
    return {name: os.environ[name] for name in names} or None


def _row(document: Document) -> dict[str, object]:
    return {
        "snapshot": document["id"], "created": document["createdAt"], "session": document["sessionId"],
        "label": document["label"], "workspace": document["workspacePath"], "branch": document["git"]["branch"],
        "variables": len(document["env"]),
    }  # fmt: skip


def _notes(document: Document) -> Iterator[str]:
    if document.get("fileMissing"):
        yield f"the file {document['file']} is missing; the row is whole"
    if document["git"]["isPartial"]:
        yield f"git's state is incomplete: {document['git']['reason']}"
    yield from document["notes"]


def _named(dependency: Document) -> str:
    return f"{dependency['ecosystem']} {dependency['name']} {dependency['version'] or '(no version)'}"


def _print_line(text: str) -> None:
    print(escape_name(text))


def _page(**filters: Any) -> Document:  # noqa: ANN401 - the options of the command
    from cloche.records.environment import list_snapshots

    with opened() as database:
        return list_snapshots(database, **filters)


def _delete(id_: str) -> Document:
    from cloche.records.environment import delete_snapshot

    with opened() as database:
        delete_snapshot(database, id_)
    return {"id": id_}


add_commands(
    Kind(
        group=snapshots, name="snapshot", plural="snapshots, the newest first", none="there are no snapshots",
        page=_page, row=_row, filters=(session_option,), delete=_delete,
        delete_help="Delete a snapshot, its file and its row.",
    )
)  # fmt: skip
