"""`cloche workspace-snapshot`: record the files of a workspace, compare two records, restore one; without a server.

Names of files are untrusted: the output is escaped.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from time import monotonic
from typing import TYPE_CHECKING, Any

from cloche.core.escape import escape_name

from ._acts import audit_log, require_yes, yes_option
from ._records import Document, Kind, add_commands, folder, opened, print_json, session_option
from .app import root
from .options import argument, flag, json_option, option
from .output import say

if TYPE_CHECKING:
    from cloche.records.workspace import WorkspaceSnapshots

MOST_SECONDS = 600.0
REFUSAL = "{} cannot be opened: {}; name a folder with --workspace"

snapshots = root.group(
    "workspace-snapshot", help="Snapshots of a folder: make, compare, restore, delete."
)(lambda: None)  # fmt: skip
_id = argument("id_", metavar="ID", help="A snapshot's id.")


@snapshots.command("create")
@option("--workspace", metavar="DIR", default=".", help="The folder.")
@option("--session", metavar="LABEL", help="A label of your own, at most 64 characters.")
@flag("--contents", help="Store the files' contents, so that they can be restored.")
@json_option()
def _create(workspace: str, session: str | None, contents: bool, as_json: bool) -> int:
    """Record the files of a folder with their hashes, and print the id."""
    with _opened() as records, folder(workspace, REFUSAL) as fd:
        document = records.create(
            fd, workspace_path=os.path.abspath(workspace), session_id=session, contents=contents,
            deadline=monotonic() + MOST_SECONDS,
        )  # fmt: skip
    if as_json:
        return print_json(document)
    if document["isPartial"]:
        say(f"the snapshot is not complete: {_reasons(document)}")
    print(document["id"])
    return 0


@snapshots.command("show")
@_id
@json_option()
def _show(id_: str, as_json: bool) -> int:
    """Show a snapshot with its files."""
    with _opened() as records:
        document = records.get(id_)
    if as_json:
        return print_json(document)
    for name, value in _row(document).items():
        print(f"{name}: {escape_name(str(value))}")
    for entry in document["files"]:
        content = f"-> {_path(entry, 'link')}" if entry.keys() & {"link", "linkBase64"} else str(entry["sha256"])
        print(f"{entry.get('mode', ''):4} {entry.get('size', ''):>10} {_path(entry)} {content}")
    return 0


@snapshots.command("diff")
@argument("id1", metavar="ID1", help="The earlier one.")
@argument("id2", metavar="ID2", help="The later one.")
@json_option()
def _diff(id1: str, id2: str, as_json: bool) -> int:
    """Compare two snapshots.

    One line each: + added, - removed, M modified, m another mode, ? unknown.
    """
    with _opened() as records:
        comparison = records.diff(id1, id2)
    if as_json:
        return print_json(comparison)
    for sign, key in (("+", "added"), ("-", "removed"), ("M", "modified"), ("m", "modeChanged"), ("?", "unknown")):
        for entry in comparison[key]:
            modes = f" {entry['from']} -> {entry['to']}" if key == "modeChanged" else ""
            print(f"{sign} {_path(entry)}{modes}")
    return 0


@snapshots.command("restore")
@_id
@option("--workspace", metavar="DIR", help="The folder. Default: the snapshot's.")
@flag("--prune", help="Remove files that are not in the snapshot.")
@flag("--manifest-only", help="Change no file; write only the report.")
@yes_option
@json_option()
def _restore(id_: str, workspace: str | None, prune: bool, manifest_only: bool, yes: bool, as_json: bool) -> int:
    """Restore the files whose content was stored.

    The report is .cloche-ws-restore.json, in the folder.
    """
    with _opened() as records:
        path = workspace or str(records.get(id_)["workspacePath"])
        with folder(path, REFUSAL) as fd:
            require_yes(_restore_question(id_, path, prune=prune), yes=yes or manifest_only)
            if (audit := audit_log()) is not None:
                audit.record("restore", snapshot=id_, path=os.path.abspath(path))
            outcome = records.restore(
                id_, fd, prune=prune, manifest_only=manifest_only, deadline=monotonic() + MOST_SECONDS
            )  # fmt: skip
    if as_json:
        return print_json(outcome)
    counts = Counter(entry["result"].partition(":")[0] for entry in outcome["results"])
    for result in outcome["results"]:
        if result["result"] != "unchanged":
            print(f"{result['result']} {_path(result)}")
    print(", ".join(f"{number} {name}" for name, number in sorted(counts.items())) or "there are no files in it")
    return 0


def _restore_question(id_: str, folder: str, *, prune: bool) -> str:
    more = ", and removes files that are not in it" if prune else ""
    return f"Restore {escape_name(id_)}? That overwrites files in {escape_name(os.path.abspath(folder))}{more}."


@contextmanager
def _opened() -> Iterator[WorkspaceSnapshots]:
    with opened() as database:
        from cloche.records.workspace import WorkspaceSnapshots

        yield WorkspaceSnapshots(database)


def _row(record: Document) -> dict[str, object]:
    partial = {"left out by": _reasons(record)} if "files" in record and record["isPartial"] else {}
    return {
        "id": record["id"], "created": record["createdAt"], "session": record["sessionId"] or "",
        "workspace": record["workspacePath"], "files": record["totals"]["files"], "bytes": record["totals"]["bytes"],
        "contents": "kept" if record["contents"] else "not kept",
        "whole": "no" if record["isPartial"] else "yes", **partial,
    }  # fmt: skip


def _reasons(document: Document) -> str:
    return ", ".join(f"the limit of {reason}" for reason in document["partialReasons"])


def _path(entry: object, key: str = "path") -> str:
    """Return a path for a terminal, in base64 if it is not UTF-8."""
    if isinstance(entry, str):
        return escape_name(entry)
    named: Document = entry if isinstance(entry, Mapping) else {}
    return escape_name(named[key]) if key in named else f"base64:{named[f'{key}Base64']}"


def _page(**filters: Any) -> Document:  # noqa: ANN401 - the options of the command
    with _opened() as records:
        return records.list(**filters)


def _delete(id_: str) -> Document:
    with _opened() as records:
        removed = records.delete(id_)
    if removed is None:
        say("its contents are removed with the next snapshot: some are being used now")
    return {"id": id_, "removedContents": removed}


add_commands(
    Kind(
        group=snapshots, name="snapshot", plural="snapshots, the newest first", none="there are no snapshots",
        page=_page, row=_row, filters=(session_option,), delete=_delete,
        delete_help="Delete a snapshot, and contents that no other one needs.",
    )
)  # fmt: skip
