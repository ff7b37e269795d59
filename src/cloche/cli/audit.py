"""`cloche audit`: show, verify, prune and export the log, and print its head, to be stored elsewhere.

Reasons and names of tools are untrusted: terminal output is escaped.
"""

from __future__ import annotations

import io
import json
import os
import re
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import IO, TYPE_CHECKING

import click

from cloche.audit.export import FORMATS, texts_of
from cloche.audit.query import Filters, LogEvent, check_values, status_of
from cloche.core.errors import ClocheError, InvalidRequest
from cloche.core.escape import escape, escape_line, escape_name

from ._acts import require_yes, yes_option
from .app import root
from .options import Decorator, Function, flag, json_option, option, sandbox_options
from .output import say, show

if TYPE_CHECKING:
    from cloche.audit.prune import Pruned
    from cloche.audit.verify import VerifyReport
    from cloche.config.options import SandboxOptions

EXIT_FAULTS = 1
MOST_SHOWN_FAULTS = 20
MOST_UNFINISHED = 10_000
audit = root.group("audit", help="Show the audit log, and verify that it is whole.")(lambda: None)


def folder_of(folder: str | None, options: SandboxOptions) -> str:
    """Return the folder of the log: the named one, else the configured one, else this user's."""
    if folder is not None:
        return os.path.abspath(os.path.expanduser(folder))
    from cloche.audit.log import folder_for
    from cloche.config.settings import load_settings

    return folder_for(load_settings(options))


def show_events(folder: str, filters: Filters, *, last: int, as_json: bool) -> int:
    """Print the last matching events. A `start` is shown only if its run has no end, or if kind `start` is selected."""
    from cloche.audit.verify import Reading

    check_values(folder, filters, prefix="--")
    reading = Reading(folder)
    events = (line.fields() for line in reading)
    has_starts = "start" in filters.kinds or as_json
    is_wanted = filters.wanted(prefix="--")
    if as_json and not last:  # streamed: a log may be larger than memory
        for wanted_event in filter(is_wanted, events):
            print(json.dumps(wanted_event))
        _warn(reading.report)
        return 0
    shown = deque(filter(is_wanted, events), maxlen=last or None) if has_starts else _over(events, is_wanted, last)
    _warn(reading.report)
    if as_json:
        for event in shown:
            print(json.dumps(event))
        return 0
    if not shown:
        print(f"no such events in {folder}" if reading.report.events else f"no events in {folder}")
        return 0
    show([_row(event) for event in shown], as_json=False)
    return 0


def _over(events: Iterator[LogEvent], is_wanted: Callable[[LogEvent], bool], last: int) -> Sequence[LogEvent]:
    """Return the last matching events; a `start` only if the log has no end of its run."""
    started: dict[str, LogEvent] = {}
    shown: deque[LogEvent] = deque(maxlen=last or None)
    for event in events:
        if event["kind"] == "start":
            started[str(event.get("run"))] = event
            if len(started) > MOST_UNFINISHED:
                del started[next(iter(started))]
            continue
        if event["kind"] == "execution":
            started.pop(str(event.get("run")), None)
        if is_wanted(event):
            shown.append(event)
    every = sorted([*shown, *filter(is_wanted, started.values())], key=lambda event: int(event["seq"]))
    return every[-last:]


def _row(event: LogEvent) -> dict[str, str]:
    code, duration = event.get("code_sha256"), event.get("duration_s")
    fields = {
        "event": event["seq"],
        "time": str(event["time"])[:19].replace("T", " "),
        "kind": event["kind"],
        "status": status_of(event),
        "exit": event.get("exit_code"),
        "seconds": f"{duration:.2f}" if isinstance(duration, int | float) else None,
        "what": " ".join(str(event[name]) for name in ("tool", "what", "language") if event.get(name)),
        "where": " ".join(str(event[name]) for name in ("backend", "level") if event.get(name)),
        "code": str(code)[:12] if code else None,
        "by": event.get("by") or event.get("approved_by") or event.get("door"),
        "reason": event.get("reason"),
    }
    return {name: "" if value is None else escape_line(str(value))[:200] for name, value in fields.items()}


def check(folder: str, *, heads: Sequence[str], head_file: str | None, file: str | None, as_json: bool) -> int:
    """Verify a log and print the result; return 1 if it is not whole or does not exist."""
    from cloche.audit.verify import read_heads, verify

    heads_given = [head for text in heads for head in read_heads(text, name="--head")]
    if head_file is not None:
        heads_given += read_heads(_read(head_file), name=head_file)
    report = verify(folder, heads=heads_given, file=file)
    is_good = report.is_good
    if as_json:
        print(json.dumps(report.as_dict(), indent=2))
        return 0 if is_good else EXIT_FAULTS
    log_path = file or folder
    if not report.events and report.is_whole:
        print(f"there is no audit log in {log_path}")
    for fault in report.faults[:MOST_SHOWN_FAULTS]:
        print(escape(str(fault)))
    if report.fault_count > MOST_SHOWN_FAULTS:
        print(f"and {report.fault_count - MOST_SHOWN_FAULTS} more")
    for note in _notes(report):
        print(escape_line(note))
    if report.last is not None:
        summary = (
            "whole"
            if is_good
            else f"NOT whole, {report.fault_count} {'fault' if report.fault_count == 1 else 'faults'}"
        )
        print(escape_line(f"{report.events} events from {report.first_time} to {report.last_time}: {summary}"))
        print(f"head {report.last}")
    return 0 if is_good else EXIT_FAULTS


def _notes(report: VerifyReport) -> Iterator[str]:
    if report.dropped:
        yield f"events 1 to {report.dropped} were dropped with files that were too many, as the log says"
    if report.removed:
        verb = _was_or_were(report.removed)
        yield f"{report.removed} of what was kept beside the log {verb} removed, as the log says"
    if report.interrupted:
        writes = "write" if report.interrupted == 1 else "writes"
        yield f"{report.interrupted} {writes} {_was_or_were(report.interrupted)} interrupted, as the log says"
    if report.is_cut_off:
        yield "the last write was interrupted; the next event will say so"
    yield from report.notes


def _was_or_were(count: int) -> str:
    return "was" if count == 1 else "were"


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(1 << 20)
    except OSError as error:
        raise InvalidRequest(f"cannot read {path}: {error.strerror}") from error


def print_head(folder: str) -> int:
    """Print the number and hash of the last event."""
    from cloche.audit.log import Audit

    head = Audit(folder).head()
    if head is None:
        raise InvalidRequest(f"there is no audit log in {folder}")
    print(head)
    return 0


def remove_artifacts(
    folder: str | None,
    options: SandboxOptions,
    *,
    older_than: str | None,
    keep_size: str | None,
    is_trial: bool,
    yes: bool,
    as_json: bool,
) -> int:
    """Remove stored code and output by the options, else by the configuration; return 1 if foreign files are found."""
    from cloche.audit.log import Audit
    from cloche.audit.prune import prune
    from cloche.config.settings import load_settings
    from cloche.core.limits import parse_duration, parse_size

    settings = load_settings(options)
    age_s = parse_duration(older_than, name="--older-than") if older_than else settings.audit_keep_age_s
    size = parse_size(keep_size, name="--keep-size") if keep_size else settings.audit_keep_bytes
    if age_s is None and size is None:
        raise InvalidRequest(
            "nothing says what has to go, as audit_keep_age and audit_keep_size are none: give --older-than or "
            "--keep-size"
        )
    log = Audit(folder_of(folder, options))
    require_yes(f"Remove old code and output from {escape_name(log.folder)}?", yes=yes or is_trial)
    pruned = prune(log, most_age_s=age_s, most_bytes=size, is_trial=is_trial)
    if as_json:
        counts = {"removed": pruned.removed, "removed_bytes": pruned.removed_bytes, "left": pruned.left}
        print(
            json.dumps({**counts, "left_bytes": pruned.left_bytes, "odd": pruned.odd, "is_trial": is_trial}, indent=2)
        )
    else:
        _print_pruned(pruned, "would be removed" if is_trial else "removed")
    return EXIT_FAULTS if pruned.odd else 0


def _print_pruned(pruned: Pruned, verb: str) -> None:
    from cloche.core.limits import format_size

    remaining = f"{pruned.left} ({format_size(pruned.left_bytes)}) left"
    print(f"{pruned.removed} ({format_size(pruned.removed_bytes)}) {verb}, {remaining}")
    for path in pruned.odd:
        say(f"{path} does not belong to the log, and was not removed")


def export(folder: str, filters: Filters, *, form: str, out: str | None) -> int:
    """Export events and verify them at the same time; return 1 if the log is not whole."""
    if form not in FORMATS:
        raise InvalidRequest(f"--format {form}: use one of {', '.join(FORMATS)}")
    if out is not None and _is_of_log(folder, out):
        raise InvalidRequest(f"--out {out} would overwrite a file of the log; name another file")
    from cloche.audit.verify import Reading
    from cloche.hostfs import open_named

    check_values(folder, filters, prefix="--")
    reading = Reading(folder, checks_artifacts=True)
    selected = filter(filters.wanted(prefix="--"), (line.fields() for line in reading))
    try:
        if out is None:
            _write(selected, form, sys.stdout)
            sys.stdout.flush()
        else:
            opened = open_named(out, is_private=True)  # also replaces a file that others may read
            with io.TextIOWrapper(opened, encoding="utf-8", newline="") as file:
                _write(selected, form, file)
    except BrokenPipeError:
        raise
    except OSError as error:
        if out is None:
            raise  # `guarded` reports it and discards the buffer
        raise ClocheError(f"cannot write {out}: {error.strerror}") from error
    _warn(reading.report)
    return 0 if reading.report.is_whole else EXIT_FAULTS


def _is_of_log(folder: str, path: str) -> bool:
    directory, name = os.path.split(os.path.abspath(path))
    return os.path.realpath(directory) == os.path.realpath(folder) and re.fullmatch(r"audit.*\.jsonl", name) is not None


def _write(events: Iterable[LogEvent], form: str, to: IO[str]) -> None:
    render = escape if form == "csv" and to.isatty() else str
    for text in texts_of(events, form):
        to.write(render(text))


def _warn(report: VerifyReport) -> None:
    if not report.is_whole:
        say(f"the audit log is NOT whole: {report.faults[0]}; cloche audit verify shows all")


def _of_log() -> Decorator:
    """Give a command --folder and --config."""

    def add(function: Function) -> Function:
        text = "The folder of the log. Default: as configured, else this user's."
        return option("--folder", metavar="DIR", help=text)(sandbox_options("config")(function))

    return add


def _filtered() -> Decorator:
    """Give a command --since, --kind and --status."""
    rows = (
        ("--since", "TIME", "Events since then: 2026-01-31, 2026-01-31T12:00, or 2h, 7d ago."),
        ("--kind", "NAME", "execution, approval, denial, fallback, fix_round, removal, ... Repeatable."),
        ("--status", "NAME", "ok, error, timeout, ..., approved, denied. Repeatable."),
    )

    def add(function: Function) -> Function:
        for name, metavar, text in reversed(rows):
            function = option(name, metavar=metavar, multiple=name != "--since", help=text)(function)
        return function

    return add


def _filters(since: str | None, kinds: tuple[str, ...], statuses: tuple[str, ...]) -> Filters:
    return Filters(since=since, kinds=_split_values(kinds), statuses=_split_values(statuses))


def _split_values(values: tuple[str, ...]) -> tuple[str, ...]:
    """Return one list of a repeated option; each value may be a list with commas."""
    return tuple(item.strip() for value in values for item in value.split(",") if item.strip())


@audit.command("show")
@option("-n", "last", metavar="N", type=click.IntRange(min=0), default=20, help="Show the last N events; 0 shows all.")
@_filtered()
@_of_log()
@json_option("Print one JSON object per event.")
def _show(
    last: int,
    since: str | None,
    kind: tuple[str, ...],
    status: tuple[str, ...],
    folder: str | None,
    options: SandboxOptions,
    as_json: bool,
) -> int:
    """Show runs, approvals and refusals, the latest at the bottom."""
    return show_events(folder_of(folder, options), _filters(since, kind, status), last=last, as_json=as_json)


@audit.command("verify")
@option("--head", metavar="HEAD", multiple=True, help="A head that was stored elsewhere. Repeatable.")
@option("--head-file", metavar="FILE", help="A file with heads, one per line.")
@option("--file", metavar="FILE", help="Check this file instead, for example a jsonl export.")
@_of_log()
@json_option()
def _verify(
    head: tuple[str, ...],
    head_file: str | None,
    file: str | None,
    folder: str | None,
    options: SandboxOptions,
    as_json: bool,
) -> int:
    """Find changed, missing, swapped and forged events.

    The exit code is 1 if there are any.

    A cut-off end or a completely rewritten log is detected only with a head (cloche audit head) that was stored where
    users with write access to the log cannot write.
    """
    return check(folder_of(folder, options), heads=head, head_file=head_file, file=file, as_json=as_json)


@audit.command("head")
@_of_log()
def _head(folder: str | None, options: SandboxOptions) -> int:
    """Print the number and hash of the last event, to be stored elsewhere."""
    return print_head(folder_of(folder, options))


@audit.command("prune")
@option("--older-than", metavar="TIME", help="Remove files last used before that: 30d, 12h. Default: audit_keep_age.")
@option("--keep-size", metavar="SIZE", help="Remove the oldest until this size is left: 1g. Default: audit_keep_size.")
@flag("--dry-run", "is_trial", help="Print what would be removed, and remove nothing.")
@yes_option
@_of_log()
@json_option()
def _prune(
    older_than: str | None,
    keep_size: str | None,
    is_trial: bool,
    yes: bool,
    folder: str | None,
    options: SandboxOptions,
    as_json: bool,
) -> int:
    """Remove old code and output that is stored beside the log.

    Events stay. A new event records what was removed, so the log stays whole. Files of the last minute stay, too. The
    exit code is 1 if the folder holds files that do not belong to the log.
    """
    return remove_artifacts(
        folder, options, older_than=older_than, keep_size=keep_size, is_trial=is_trial, yes=yes, as_json=as_json
    )


@audit.command("export")
@option("--format", "form", metavar="NAME", default="jsonl", help="jsonl, json or csv.")
@option("--out", metavar="FILE", help="Write to FILE, readable only by you.")
@_filtered()
@_of_log()
def _export(
    form: str,
    out: str | None,
    since: str | None,
    kind: tuple[str, ...],
    status: tuple[str, ...],
    folder: str | None,
    options: SandboxOptions,
) -> int:
    """Export events, and verify the log.

    The exit code is 1 if the log is not whole.
    """
    return export(folder_of(folder, options), _filters(since, kind, status), form=form, out=out)
