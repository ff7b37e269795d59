"""`cloche repro`: programs that show a bug, stored, and run in a sandbox."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

from cloche.core.errors import InvalidRequest
from cloche.core.escape import escape, escape_line

from ._records import Document, Kind, add_commands, opened, print_json, session_option
from .app import root
from .options import argument, json_option, option, sandbox_options
from .output import EXIT_FAILED

if TYPE_CHECKING:
    from cloche.config.options import SandboxOptions
    from cloche.records.reproductions import Reproductions

EXIT_CODES = {"passed": 0, "failed": 1, "error": EXIT_FAILED}
MOST_CODE_BYTES = 4 << 20

repro = root.group("repro", help="Bug reproductions: create, run, list.")(lambda: None)
_id = argument("id", metavar="ID", help="A reproduction's id, from `cloche repro list`.")


@repro.command("create")
@argument("file", metavar="[FILE]", required=False, help="The program; - is standard input.")
@option("--title", metavar="TEXT", required=True, help="What is wrong, in a line.")
@option("--description", metavar="TEXT", default="", help="What is wrong, at length.")
@option("--language", metavar="NAME", default="python", help="The program's language.")
@option("-c", "--code", "code", metavar="CODE", help="The program itself.")
@option("--session", metavar="LABEL", help="A label of your own, to find it by.")
@option("--exit-code", metavar="N", type=int, default=0, help="The exit code without the bug.")
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
        record = records.create(fields)
    print(json.dumps(record, indent=2) if as_json else record["id"])
    return 0


@repro.command("show")
@_id
@json_option()
def _show(id: str, as_json: bool) -> int:  # noqa: A002 - the argument's name
    """Show a reproduction and the result of its last run.

    With --json it includes the code.
    """
    with _reproductions() as records:
        record = records.get(id)
    if as_json:
        return print_json(record)
    _print_record(record)
    return 0


@repro.command("run")
@_id
@sandbox_options(but=("packages", "locked", "secrets"))
@json_option()
def _run(id: str, as_json: bool, options: SandboxOptions) -> int:  # noqa: A002
    """Run a reproduction.

    The exit code is 0 if it passed (the program ended as expected), 1 if it failed, 125 if it could not run. No
    --backend lowers the level below the configured one.
    """
    from cloche.sync_run import blocking

    keywords: dict[str, Any] = dict(options)
    backend = keywords.pop("backend", None)
    with _reproductions() as records:
        ended = blocking(records.run, name="run")(id, backend, cast("SandboxOptions", keywords))
    if as_json:
        print(json.dumps(ended, indent=2))
    else:
        _print_record(ended)
    return EXIT_CODES[ended["status"]]


@contextmanager
def _reproductions() -> Iterator[Reproductions]:
    """Open the records; a run whose process is gone gets the status `error`."""
    with opened() as database:
        from cloche.records.reproductions import Reproductions

        records = Reproductions(database)
        records.recover()
        yield records


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


def _page(**filters: Any) -> Document:  # noqa: ANN401 - the options of the command
    with _reproductions() as records:
        return records.list(**filters)


def _delete(id_: str) -> Document:
    with _reproductions() as records:
        records.delete(id_)
    return {"id": id_, "deleted": True}


_status = option("--status", metavar="STATUS", help="Only those that are queued, running, passed, failed or error.")
add_commands(
    Kind(
        group=repro, name="reproduction", plural="reproductions, the newest first", none="there is no reproduction",
        page=_page, row=lambda record: {name: record[name] for name in ("id", "status", "language", "title")},
        filters=(_status, session_option), delete=_delete, delete_help="Delete a reproduction that is not running.",
        deleted="deleted:",
    )
)  # fmt: skip
