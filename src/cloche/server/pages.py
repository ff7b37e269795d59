"""Values for the page's templates: the run form, runs, outputs, a run's events in the audit log.

A guest's output is text, which the templates escape. Pictures become `data:` URLs if they are valid base64. HTML and
SVG are shown only in a sandboxed frame (`framed`). Pure, except for reading the audit log.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

from starlette.datastructures import FormData, UploadFile

from cloche.agent.queue import QueueEntry
from cloche.agent.terminal import changes_told, choices, what_changes_are
from cloche.audit.log import audit_for, folder_for
from cloche.audit.verify import Reading
from cloche.config.keys import Settings
from cloche.core.errors import InvalidRequest
from cloche.core.limits import format_size
from cloche.core.record import dataclass
from cloche.records.runs import UNFINISHED, RunFacts

MOST_OUTPUTS = 50
MOST_PICTURE_CHARS = 8 << 20
MOST_FRAME_CHARS = 4 << 20
MOST_FILES = MOST_ROWS = 500
MOST_SHORT_CHARS = 80  # of an argument shown in one line
MOST_AUDIT_BYTES = 4 << 20  # of the log's end, which is searched for a run's events
MOST_AUDIT_EVENTS = 200
_SHA256_CHARS = 64
# The first type that an output has is shown: pictures as images, active content in a frame.
_PICTURES = ("image/png", "image/jpeg", "image/gif", "image/webp")
_FRAMES = ("text/html", "image/svg+xml")
# No two parts may match the same character: a guest chooses the text, and backtracking would be quadratic.
_BASE64 = re.compile(r"[A-Za-z0-9+/\s]*(?:=\s*){0,2}")
_FRAME_ROWS = (2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 14, 16)  # a frame's height is one of these; else `high`
# A frame has no active content. The page's own policy prevents navigation.
FRAME_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'unsafe-inline'; img-src data:; form-action 'none'; base-uri 'none'; "
        "frame-ancestors 'self'; sandbox"
    ),
    "X-Frame-Options": "SAMEORIGIN",
}
_FRAME_HEAD = (
    '<!doctype html><meta charset="utf-8"><meta name="color-scheme" content="light dark"><style>'
    "body{font:14px/1.45 system-ui,sans-serif;margin:8px}table{border-collapse:collapse;border:0}"
    "th,td{padding:2px 10px;text-align:right;border:0;border-bottom:1px solid #8886}svg{max-width:100%;height:auto}"
    "</style>"
)
# Fields of the run form: name in the form, name in the request, whether it is a list.
_FORM_FIELDS = (
    ("code", "code", False), ("language", "language", False), ("timeout", "timeout", False),
    ("memoryLimit", "memoryLimit", False), ("cpuLimit", "cpuLimit", False), ("network", "network", False),
    ("networkAllow", "networkAllow", True), ("packages", "packages", True), ("sessionId", "sessionId", False),
    ("stdin", "stdin", False),
)  # fmt: skip
_TONES: Mapping[str, str] = {"ok": "good", "queued": "busy", "running": "busy", "cancelled": "quiet"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownOutput:
    """Hold one rich output: a `picture` with a `data:` URL, a `frame` by its number, or `text`."""

    kind: str
    number: int
    label: str
    content: str
    height: str = ""


def tone(status: str) -> str:
    """Return the style of a status: `good`, `bad`, `busy` or `quiet`."""
    return _TONES.get(status, "bad")


# forms


async def read_run_form(form: FormData) -> dict[str, Any]:
    """Return the fields of a request to run, by the wire's names."""
    request: dict[str, Any] = {}
    for name, field, is_list in _FORM_FIELDS:
        text = str(form.get(name, ""))
        if name == "code" or text.strip():
            request[field] = re.split(r"[\s,]+", text.strip()) if is_list else text
    request["code"] = request["code"].replace("\r\n", "\n")  # forms send CRLF (HTML standard)
    if request.get("packages") == ["auto"]:
        request["packages"] = "auto"
    files = [upload for upload in form.getlist("file") if isinstance(upload, UploadFile) and upload.filename]
    if files:
        request["files"] = [
            {"path": file.filename, "base64": base64.b64encode(await file.read()).decode()} for file in files
        ]
    return request


def run_form(settings: Settings, languages: Sequence[str], request: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of the run form: the choices, the filled fields, and the defaults of empty ones.

    `request` is the stored request of another run, or empty.
    """
    limits, policy = settings.limits, settings.policy
    filled = {name: request.get(field, "") for name, field, _ in _FORM_FIELDS}
    return {
        "languages": list(dict.fromkeys([*languages, *([request["language"]] if "language" in request else [])])),
        "left_out": request.get("leftOut", ()),
        "filled": {name: _as_typed(value) for name, value in filled.items()},
        "held": {
            "timeout": f"{limits.timeout_s:g}s",
            "memory": format_size(limits.memory_bytes),
            "cpus": f"{limits.cpus:g}",
            "network": policy.network,
            "backend": settings.backend,
            "packages": policy.packages if isinstance(policy.packages, str) else " ".join(policy.packages),
        },
    }


def _as_typed(value: Any) -> str:  # noqa: ANN401 - JSON
    if isinstance(value, bool):  # of the network
        return "open" if value else "off"
    return ", ".join(value) if isinstance(value, list) else str(value)


# runs


def show_row(run: RunFacts) -> dict[str, Any]:
    """Return a run as a row of a list."""
    document, meta = run.document, run.document.get("meta", {})
    return {
        "id": run.id, "status": run.status, "tone": tone(run.status), "created_at": run.created_at,
        "session_id": run.session_id, "language": document.get("language", ""),
        "duration": _seconds(document.get("duration")), "backend": meta.get("backend", ""),
        "level": meta.get("level", ""), "by": run.api_key or "browser", "is_over": run.status not in UNFINISHED,
    }  # fmt: skip


def show_run(run: RunFacts) -> dict[str, Any]:
    """Return a run for its own page."""
    document = run.document
    controls = document.get("enforcement", {})
    outputs = [show_output(output, number) for number, output in enumerate(document.get("outputs", ())[:MOST_OUTPUTS])]
    return {
        **show_row(run),
        "ended_at": run.ended_at,
        "exit_code": document.get("exitCode"),
        "error": document.get("error"),
        "stdout": document.get("stdout", ""),
        "stderr": document.get("stderr", ""),
        "value": _own_value(document),
        "is_truncated": document.get("truncated", False),
        "outputs": outputs,
        "outputs_left_out": max(0, len(document.get("outputs", ())) - MOST_OUTPUTS),
        "controls": [{"name": name, **measure} for name, measure in controls.items()],
        "hits": document.get("hits", {}),
        "files": [{**file, "size": format_size(file["size"])} for file in document.get("files", ())[:MOST_FILES]],
        "files_left_out": max(0, len(document.get("files", ())) - MOST_FILES),
        "usage": _usage(document.get("usage", {})),
        "meta": document.get("meta", {}),
    }


def _own_value(document: Mapping[str, Any]) -> Any:  # noqa: ANN401 - JSON
    """Return the value of the last expression, None if an output already shows it."""
    value = document.get("value")
    shown = [output["data"].get("text/plain") for output in document.get("outputs", ())]
    return None if value in shown else value


def _usage(usage: Mapping[str, Any]) -> list[tuple[str, str]]:
    user, system = usage.get("cpuUserS"), usage.get("cpuSystemS")
    memory, processes = usage.get("peakMemoryBytes"), usage.get("processes")
    rows = [
        ("processor time", _seconds(user + system) if user is not None and system is not None else None),
        ("peak memory", format_size(memory) if memory is not None else None),
        ("processes", str(processes) if processes is not None else None),
    ]
    return [(name, text) for name, text in rows if text]


def _seconds(value: Any) -> str:  # noqa: ANN401 - JSON
    if not isinstance(value, int | float):
        return ""
    return f"{value * 1000:.0f} ms" if value < 1 else f"{value:.2f} s"


# outputs


def show_output(output: Mapping[str, Any], number: int) -> ShownOutput:
    """Return how one rich output is shown."""
    data = {kind: text for kind, text in output.get("data", {}).items() if isinstance(text, str)}
    for kind in _PICTURES:
        text = data.get(kind)
        if text is not None and len(text) <= MOST_PICTURE_CHARS and _BASE64.fullmatch(text):
            address = f"data:{kind};base64,{''.join(text.split())}"
            return ShownOutput(kind="picture", number=number, label=f"Figure {number + 1}", content=address)
    for kind in _FRAMES:
        if kind in data and len(data[kind]) <= MOST_FRAME_CHARS:
            label = f"{'Drawing' if kind == 'image/svg+xml' else 'Table or HTML'} {number + 1}"
            return ShownOutput(kind="frame", number=number, label=label, content="", height=_height(data[kind]))
    text = data.get("text/plain") or next((data[kind] for kind in data if kind not in (*_PICTURES, *_FRAMES)), "")
    about = text or f"an output of {', '.join(data) or 'no type'} that cannot be shown here"
    return ShownOutput(kind="text", number=number, label=f"Output {number + 1}", content=about)


def _height(html: str) -> str:
    rows = html.lower().count("<tr")
    return next((f"rows-{max_rows}" for max_rows in _FRAME_ROWS if 0 < rows <= max_rows), "high")


def framed(document: Mapping[str, Any], number: int) -> str | None:
    """Return the HTML of an output for its frame, None without any."""
    outputs = document.get("outputs", ())
    if not 0 <= number < min(len(outputs), MOST_OUTPUTS):
        return None
    data = outputs[number].get("data", {})
    text = next((data[kind] for kind in _FRAMES if isinstance(data.get(kind), str)), None)
    return None if text is None or len(text) > MOST_FRAME_CHARS else _FRAME_HEAD + text


# the audit log


def audit_chain(settings: Settings, document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the audit events of a run, and the faults found while the log was read. Blocks."""
    audited = document.get("meta", {}).get("audit") or {}
    run = audited.get("run")
    if audit_for(settings) is None or run is None:
        return {"run": run, "events": [], "faults": [], "why": "the audit log is off, or this run was never started"}
    reading = Reading(folder_for(settings), most_bytes=MOST_AUDIT_BYTES)
    events = list(islice(_of_run(reading, run), MOST_AUDIT_EVENTS))
    faults = [str(fault) for fault in reading.report.faults[:5]]
    why = "" if events else "its events are older than the part of the log that is read here; cloche audit show"
    return {"run": run, "events": events, "faults": faults, "why": why}


def _of_run(reading: Reading, run: str) -> Any:  # noqa: ANN401 - a generator of plain data
    for line in reading:
        event = line.fields()
        if event.get("run") == run:
            hidden = ("seq", "time", "kind", "hash", "prev", "run")
            more = {name: value for name, value in event.items() if name not in hidden and value not in (None, "", {})}
            yield {**{name: event.get(name) for name in hidden}, "more": more}


# approvals


def show_approval(entry: QueueEntry) -> dict[str, Any]:
    """Return an approval request for the page."""
    request, first = entry.request, entry.first_decision
    arguments = [(name, _readable(value)) for name, value in request.arguments.items()]
    rules = {name: value for name, value in request.rules.items() if name not in ("changes", "dangers")}
    if dangers := request.rules.get("dangers"):  # dangerous changes first, the gravest reason at the top
        arguments.append(("dangerous", _readable(dangers)))
    if changes := changes_told(request):  # always shown as long text: dangerous changes are among them
        arguments.append(("changes to the folder", "\n".join([*changes, ""])))
    return {
        "number": entry.number,
        "version": entry.version,
        "asked_by": entry.asked_by,
        "asked_at": instant(entry.asked_at),
        "expires_at": instant(entry.expires_at),
        "tool": request.tool,
        "risk": str(request.risk),
        "short": [pair for pair in arguments if _is_short(pair[1])],
        "long": [pair for pair in arguments if not _is_short(pair[1])],
        "rules": flat(rules),
        "changes": diff_lines(request.changes),
        "changes_are": what_changes_are(request),
        "first": None if first is None else f"approved by {first.by} from {first.address}",
        "is_again": request.is_confirmation or first is not None,
        "kinds": [(field, text) for field, _, text in choices(request)],
    }


def flat(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Return nested mappings as rows of a dotted name and text, without the empty ones."""
    rows: list[tuple[str, str]] = []
    for name, value in values.items():
        if isinstance(value, Mapping):
            rows += flat(value, f"{prefix}{name}.")
        elif value not in (None, "", [], ()):
            rows.append((f"{prefix}{name}", _readable(value)))
    return rows[:MOST_ROWS]


def _readable(value: object) -> str:
    if isinstance(value, list | tuple) and not any(isinstance(item, list | tuple | Mapping) for item in value):
        return ", ".join(map(str, value))
    return value if isinstance(value, str) else json.dumps(value, indent=2, ensure_ascii=False, default=str)


def _is_short(text: str) -> bool:
    return len(text) <= MOST_SHORT_CHARS and "\n" not in text


def instant(seconds: float) -> str:
    """Return seconds since 1970 as ISO text, empty if they are out of range."""
    from datetime import UTC, datetime

    try:
        return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")
    except (OverflowError, ValueError):
        return ""


def diff_lines(diff: str, max_lines: int = 500) -> Sequence[tuple[str, str]]:
    """Return the lines of a unified diff, each with its kind: `added`, `removed` or empty."""
    kinds = {"+": "added", "-": "removed"}
    lines = [("" if line[:3] in ("+++", "---") else kinds.get(line[:1], ""), line) for line in diff.split("\n")]
    return lines if len(lines) <= max_lines else [*lines[:max_lines], ("", f"({len(lines) - max_lines} more lines)")]


# snapshots


@dataclass(frozen=True, slots=True, kw_only=True)
class DifferenceGroup:
    """Hold rows (name, old value, new value) of one kind: `added`, `removed`, `changed` or `unknown`."""

    title: str
    kind: str
    rows: Sequence[tuple[str, str, str]]
    left_out: int


def show_comparison(comparison: Mapping[str, Any], *, is_files: bool) -> list[DifferenceGroup]:
    """Return the non-empty groups of a comparison of two snapshots."""
    groups = _groups_of_files(comparison) if is_files else _groups_of_environments(comparison)
    return [
        DifferenceGroup(title=title, kind=kind, rows=rows[:MOST_ROWS], left_out=max(0, len(rows) - MOST_ROWS))
        for title, kind, rows in groups
        if rows
    ]


_Rows = list[tuple[str, str, str]]


def _groups_of_environments(comparison: Mapping[str, Any]) -> list[tuple[str, str, _Rows]]:
    env, dependencies = comparison["env"], comparison["dependencies"]

    def named(row: Mapping[str, Any]) -> str:
        return f"{row['name']} ({row['ecosystem']})"

    return [
        ("Variables, changed", "changed", [(name, *values) for name, values in env["changed"].items()]),
        ("Variables, added", "added", [(name, "", value) for name, value in env["added"].items()]),
        ("Variables, removed", "removed", [(name, value, "") for name, value in env["removed"].items()]),
        ("Masked variables, which may have changed", "unknown", [(name, "", "") for name in env.get("unknown", ())]),
        ("Dependencies, changed", "changed",
         [(named(row), row["from"] or "any", row["to"] or "any") for row in dependencies["changed"]]),
        ("Dependencies, added", "added",
         [(named(row), "", row["version"] or "any") for row in dependencies["added"]]),
        ("Dependencies, removed", "removed",
         [(named(row), row["version"] or "any", "") for row in dependencies["removed"]]),
    ]  # fmt: skip


def _groups_of_files(comparison: Mapping[str, Any]) -> list[tuple[str, str, _Rows]]:
    def rows(key: str) -> _Rows:
        return [(_path(file), _brief(file, "from"), _brief(file, "to")) for file in comparison[key]]

    return [
        ("Files, modified", "changed", rows("modified")), ("Files, added", "added", rows("added")),
        ("Files, removed", "removed", rows("removed")), ("Modes, changed", "changed", rows("modeChanged")),
        ("Files that cannot be compared", "unknown", rows("unknown")),
    ]  # fmt: skip


def _brief(file: object, key: str) -> str:
    text = str(file.get(key, "")) if isinstance(file, Mapping) else ""
    return f"{text[:12]}…" if len(text) == _SHA256_CHARS else text


def _path(file: object) -> str:
    if not isinstance(file, Mapping):
        return str(file)
    if "pathBase64" in file:
        return base64.b64decode(file["pathBase64"]).decode("utf-8", "backslashreplace")
    return str(file.get("path", ""))


def show_files(document: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return the first files of a snapshot or of a restoration as rows."""
    return [
        {
            "path": _path(row), "size": format_size(row["size"]) if "size" in row else "", "mode": row.get("mode", ""),
            "what": row.get("result") or (f"link to {row['link']}" if "link" in row else row.get("sha256", "link")),
        }
        for row in document["files"][:MOST_ROWS]
    ]  # fmt: skip


def read_number(text: str) -> int:
    """Return the number of an approval request. Raises InvalidRequest."""
    if not (text.isascii() and text.isdigit() and len(text) < 19):
        raise InvalidRequest("this is not the number of an approval")
    return int(text)
