"""`cloche repro`: programs that show a bug, stored, and run in a sandbox."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

from cloche.core.errors import InvalidRequest
from cloche.core.escape import escape, escape_line, escape_name

from ._acts import require_yes, yes_option
from .app import root
from .options import argument, json_option, option, sandbox_options
from .output import EXIT_FAILED, show

if TYPE_CHECKING:
    from cloche.config.options import SandboxOptions
    from cloche.records.reproductions import Reproductions

EXIT_CODES = {"passed": 0, "failed": 1, "error": EXIT_FAILED}
MOST_CODE_BYTES = 4 << 20

repro = root.group("repro", help="Bug reproductions: create, run, list.")(lambda: None)
_id = argument("id", metavar="ID", help="A reproduction's id, of `cloche repro list`.")


@repro.command("create")
@argument("file", metavar="[FILE]", required=False, help="The program; - is standard input.")
@option("--title", metavar="TEXT", required=True, help="What is wrong, in a line.")
@option("--description", metavar="TEXT", default="", help="What is wrong, at length.")
@option("--language", metavar="NAME", default="python", help="The program's language.")
@option("-c", "--code", "code", metavar="CODE", help="The program itself.")
@option("--session", metavar="LABEL", help="A label of your own, to find it by.")
@option("--exit-code", metavar="N", type=int, default=0, help="The exit code that it has once the bug is gone.")
@json_option()
def _create(
    file: str | None, title: str, description: str, language: str, code: str | None, session: str | None,
    exit_code: int, as_json: bool,
) -> int:  # fmt: skip
    """Store a reproduction, and print its id."""
    fields = {
        "title": title, "description": description, "language": language, "code": _code(file, code),
        "sessionId": session, "expect": {"exitCode": exit_code},
    }  # fmt: skip
    with _reproductions() as records:
        made = records.create(fields)
    print(json.dumps(made, indent=2) if as_json else made["id"])
    return 0


@repro.command("list")
@option("--status", metavar="STATUS", help="Only those that are queued, running, passed, failed or error.")
@option("--session", metavar="LABEL", help="Only those with this label.")
@option("--limit", type=int, default=50, metavar="N", help="So many at most, up to 200.")
@option("--cursor", metavar="ID", help="Go on behind this one.")
@json_option()
def _list(status: str | None, session: str | None, limit: int, cursor: str | None, as_json: bool) -> int:
    """List reproductions, the newest first."""
    with _reproductions() as records:
        page = records.list(status=status, session_id=session, limit=limit, cursor=cursor)
    if as_json:
        print(json.dumps(page, indent=2))
        return 0
    rows = [{name: one[name] for name in ("id", "status", "language", "title")} for one in page["items"]]
    if rows:
        show(rows, as_json=False)
    else:
        print("there is no reproduction")
    if page["nextCursor"]:
        print(f"there are more: --cursor {page['nextCursor']}")
    return 0


@repro.command("show")
@_id
@json_option()
def _show(id: str, as_json: bool) -> int:  # noqa: A002 - the argument's name
    """Show one whole, with its code and the result of its last run."""
    with _reproductions() as records:
        found = records.get(id)
    if as_json:
        print(json.dumps(found, indent=2))
        return 0
    _print_record(found)
    return 0


@repro.command("run")
@_id
@sandbox_options(but=("packages", "locked"))
@json_option()
def _run(id: str, as_json: bool, options: SandboxOptions) -> int:  # noqa: A002
    """Run one.

    The exit code is 0 when it passed (the program ended as expected), 1 when it failed, 125 when it could not be run.
    The level is never below the configured one, whatever backend is named.
    """
    from cloche.sync_run import blocking

    given: dict[str, Any] = dict(options)
    backend = given.pop("backend", None)
    with _reproductions() as records:
        ended = blocking(records.run, name="run")(id, backend, cast("SandboxOptions", given))
    if as_json:
        print(json.dumps(ended, indent=2))
    else:
        _print_record(ended)
    return EXIT_CODES[ended["status"]]


@repro.command("delete")
@_id
@yes_option
@json_option()
def _delete(id: str, yes: bool, as_json: bool) -> int:  # noqa: A002
    """Delete one that does not run."""
    require_yes(f"Delete reproduction {escape_name(id)}?", yes=yes)
    with _reproductions() as records:
        records.delete(id)
    print(json.dumps({"id": id, "deleted": True}) if as_json else f"deleted: {id}")
    return 0


@contextmanager
def _reproductions() -> Iterator[Reproductions]:
    """Open the records; what ran in a process that is gone has status `error` from then on."""
    from cloche.records import require_extra

    require_extra()
    from cloche.records.database import Database
    from cloche.records.reproductions import Reproductions

    database = Database()
    try:
        records = Reproductions(database)
        records.recover()
        yield records
    finally:
        database.close()


def _code(file: str | None, code: str | None) -> str:
    import sys

    if (file is None) == (code is None):
        raise InvalidRequest("give the program: either a file, or its code with -c")
    if code is not None:
        return code
    try:
        if file == "-":
            data = sys.stdin.buffer.read(MOST_CODE_BYTES + 1)
        else:
            with open(str(file), "rb") as opened:
                data = opened.read(MOST_CODE_BYTES + 1)
        return data.decode()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"cannot read {file!r}: {error}") from None


def _print_record(record: dict[str, Any]) -> None:
    result = record["result"] or {}
    print(escape_line(f"{record['id']}: {record['status']}: {record['title']}"))
    if record["error"]:
        print(escape_line(f"error: {record['error']}"))
    if result:
        print(escape_line(f"exit code {result['exitCode']}, expected {record['expect']['exitCode']}"))
    for name in ("stdout", "stderr"):
        if result.get(name):
            print(escape(f"{name}:\n{result[name].rstrip()}"))
