"""What the page shows, as plain values for its templates: forms read, runs, outputs, the audit log's part of a run.

What a guest made is text for the templates, which escape it; pictures become `data:` addresses once they are base64;
HTML and SVG are only ever shown in a frame of their own (`framed`). Pure but for reading the audit log.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

from starlette.datastructures import FormData, UploadFile

from cloche.agent.queue import Entry
from cloche.agent.terminal import changes_told, what_changes_are
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
MOST_SHORT_CHARS = 80  # of an argument that stands in one line
MOST_AUDIT_BYTES = 4 << 20  # of the log's end, in which a run's events are looked for
MOST_AUDIT_EVENTS = 200
_SHA256_CHARS = 64
# The first type that an output has is shown; pictures as such, and what could be more than text in a frame.
_PICTURES = ("image/png", "image/jpeg", "image/gif", "image/webp")
_FRAMES = ("text/html", "image/svg+xml")
# No two parts of it may take the same character: a guest chooses the text, and trying all ways takes its square.
_BASE64 = re.compile(r"[A-Za-z0-9+/\s]*(?:=\s*){0,2}")
_FRAME_ROWS = (2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 14, 16)  # a frame is as high as one of these needs; else `high`
# What may act in a frame: nothing. The page's own policy keeps it from going anywhere else.
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
# Fields of the form for a run: its name, the request's, and whether it is a list.
_FORM_FIELDS = (
    ("code", "code", False), ("language", "language", False), ("timeout", "timeout", False),
    ("memoryLimit", "memoryLimit", False), ("cpuLimit", "cpuLimit", False), ("network", "network", False),
    ("networkAllow", "networkAllow", True), ("packages", "packages", True), ("sessionId", "sessionId", False),
    ("stdin", "stdin", False),
)  # fmt: skip
_TONES: Mapping[str, str] = {"ok": "good", "queued": "busy", "running": "busy", "cancelled": "quiet"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownOutput:
    """Hold one rich output: a `picture` with a `data:` address, a `frame` by its number, or `text`."""

    kind: str
    number: int
    label: str
    content: str
    height: str = ""


def tone(status: str) -> str:
    """Return how a status looks: `good`, `bad`, `busy` or `quiet`."""
    return _TONES.get(status, "bad")


# forms


async def read_run_form(form: FormData) -> dict[str, Any]:
    """Return the fields of a request to run, as the wire has them."""
    asked: dict[str, Any] = {}
    for name, field, is_list in _FORM_FIELDS:
        text = str(form.get(name, ""))
        if name == "code" or text.strip():
            asked[field] = re.split(r"[\s,]+", text.strip()) if is_list else text
    asked["code"] = asked["code"].replace("\r\n", "\n")  # how forms send every line
    if asked.get("packages") == ["auto"]:
        asked["packages"] = "auto"
    files = [one for one in form.getlist("file") if isinstance(one, UploadFile) and one.filename]
    if files:
        asked["files"] = [
            {"path": file.filename, "base64": base64.b64encode(await file.read()).decode()} for file in files
        ]
    return asked


def run_form(settings: Settings, languages: Sequence[str], asked: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the form for a run offers, what is filled in, and what holds where nothing is.

    `asked` is a run's request as it is kept, or empty.
    """
    limits, policy = settings.limits, settings.policy
    filled = {name: asked.get(field, "") for name, field, _ in _FORM_FIELDS}
    return {
        "languages": list(dict.fromkeys([*languages, *([asked["language"]] if "language" in asked else [])])),
        "left_out": asked.get("leftOut", ()),
        "filled": {name: _as_typed(one) for name, one in filled.items()},
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


def show_row(found: RunFacts) -> dict[str, Any]:
    """Return a run as a line of a list."""
    document, meta = found.document, found.document.get("meta", {})
    return {
        "id": found.id, "status": found.status, "tone": tone(found.status), "created_at": found.created_at,
        "session_id": found.session_id, "language": document.get("language", ""),
        "duration": _seconds(document.get("duration")), "backend": meta.get("backend", ""),
        "level": meta.get("level", ""), "by": found.api_key or "browser", "is_over": found.status not in UNFINISHED,
    }  # fmt: skip


def show_run(found: RunFacts) -> dict[str, Any]:
    """Return a run as its own page has it."""
    document = found.document
    controls = document.get("enforcement", {})
    outputs = [show_output(one, at) for at, one in enumerate(document.get("outputs", ())[:MOST_OUTPUTS])]
    return {
        **show_row(found),
        "ended_at": found.ended_at,
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
    """Return the last expression's value, None where an output shows it already."""
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
    return next((f"rows-{most}" for most in _FRAME_ROWS if 0 < rows <= most), "high")


def framed(document: Mapping[str, Any], number: int) -> str | None:
    """Return the HTML of an output for its frame, None where there is none."""
    outputs = document.get("outputs", ())
    if not 0 <= number < min(len(outputs), MOST_OUTPUTS):
        return None
    data = outputs[number].get("data", {})
    text = next((data[kind] for kind in _FRAMES if isinstance(data.get(kind), str)), None)
    return None if text is None or len(text) > MOST_FRAME_CHARS else _FRAME_HEAD + text


# the audit log


def audit_chain(settings: Settings, document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the events of a run with their place in the chain, and what was found on the way. Blocks."""
    audited = document.get("meta", {}).get("audit") or {}
    run = audited.get("run")
    if audit_for(settings) is None or run is None:
        return {"run": run, "events": [], "faults": [], "why": "the audit log is off, or this run never began"}
    reading = Reading(folder_for(settings), most_bytes=MOST_AUDIT_BYTES)
    events = list(islice(_of_run(reading, run), MOST_AUDIT_EVENTS))
    faults = [str(fault) for fault in reading.report.faults[:5]]
    why = "" if events else "its events are further back than the part of the log that is read here; cloche audit show"
    return {"run": run, "events": events, "faults": faults, "why": why}


def _of_run(reading: Reading, run: str) -> Any:  # noqa: ANN401 - a generator of plain data
    for line in reading:
        event = line.fields()
        if event.get("run") == run:
            hidden = ("seq", "time", "kind", "hash", "prev", "run")
            more = {name: value for name, value in event.items() if name not in hidden and value not in (None, "", {})}
            yield {**{name: event.get(name) for name in hidden}, "more": more}


# approvals


def show_approval(entry: Entry) -> dict[str, Any]:
    """Return a request as the page has it."""
    request, first = entry.request, entry.first_decision
    arguments = [(name, _readable(value)) for name, value in request.arguments.items()]
    rules = {name: value for name, value in request.rules.items() if name not in ("changes", "dangers")}
    if dangers := request.rules.get("dangers"):  # above what is dangerous, the gravest reason first
        arguments.append(("dangerous", _readable(dangers)))
    if told := changes_told(request):  # long, whatever they are: what is dangerous is among them
        arguments.append(("changes to the folder", "\n".join([*told, ""])))
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
    }


def flat(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Return nested mappings as rows of a name with dots and text; empty ones are left out."""
    rows: list[tuple[str, str]] = []
    for name, value in values.items():
        if isinstance(value, Mapping):
            rows += flat(value, f"{prefix}{name}.")
        elif value not in (None, "", [], ()):
            rows.append((f"{prefix}{name}", _readable(value)))
    return rows[:MOST_ROWS]


def _readable(value: object) -> str:
    if isinstance(value, list | tuple) and not any(isinstance(one, list | tuple | Mapping) for one in value):
        return ", ".join(map(str, value))
    return value if isinstance(value, str) else json.dumps(value, indent=2, ensure_ascii=False, default=str)


def _is_short(text: str) -> bool:
    return len(text) <= MOST_SHORT_CHARS and "\n" not in text


def instant(seconds: float) -> str:
    """Return seconds since 1970 as text, nothing for what is no time."""
    from datetime import UTC, datetime

    try:
        return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")
    except (OverflowError, ValueError):
        return ""


def diff_lines(diff: str, most: int = 500) -> Sequence[tuple[str, str]]:
    """Return the lines of a unified diff, each with what it is: `added`, `removed`, or nothing."""
    kinds = {"+": "added", "-": "removed"}
    lines = [("" if line[:3] in ("+++", "---") else kinds.get(line[:1], ""), line) for line in diff.split("\n")]
    return lines if len(lines) <= most else [*lines[:most], ("", f"({len(lines) - most} more lines)")]


# snapshots


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Hold rows of one kind of difference: `added`, `removed`, `changed` or `unknown`; each name, before and after."""

    title: str
    kind: str
    rows: Sequence[tuple[str, str, str]]
    left_out: int


def show_comparison(found: Mapping[str, Any], *, is_files: bool) -> list[Group]:
    """Return the groups of a comparison of two snapshots that are not empty."""
    groups = _groups_of_files(found) if is_files else _groups_of_environments(found)
    return [
        Group(title=title, kind=kind, rows=rows[:MOST_ROWS], left_out=max(0, len(rows) - MOST_ROWS))
        for title, kind, rows in groups
        if rows
    ]


_Rows = list[tuple[str, str, str]]


def _groups_of_environments(found: Mapping[str, Any]) -> list[tuple[str, str, _Rows]]:
    env, dependencies = found["env"], found["dependencies"]

    def named(one: Mapping[str, Any]) -> str:
        return f"{one['name']} ({one['ecosystem']})"

    return [
        ("Variables, changed", "changed", [(name, *values) for name, values in env["changed"].items()]),
        ("Variables, added", "added", [(name, "", value) for name, value in env["added"].items()]),
        ("Variables, removed", "removed", [(name, value, "") for name, value in env["removed"].items()]),
        ("Variables of which it is not known", "unknown", [(name, "", "") for name in env.get("unknown", ())]),
        ("Dependencies, changed", "changed",
         [(named(one), one["from"] or "any", one["to"] or "any") for one in dependencies["changed"]]),
        ("Dependencies, added", "added",
         [(named(one), "", one["version"] or "any") for one in dependencies["added"]]),
        ("Dependencies, removed", "removed",
         [(named(one), one["version"] or "any", "") for one in dependencies["removed"]]),
    ]  # fmt: skip


def _groups_of_files(found: Mapping[str, Any]) -> list[tuple[str, str, _Rows]]:
    def rows(key: str) -> _Rows:
        return [(_path(one), _brief(one, "from"), _brief(one, "to")) for one in found[key]]

    return [
        ("Files, modified", "changed", rows("modified")), ("Files, added", "added", rows("added")),
        ("Files, removed", "removed", rows("removed")), ("Modes, changed", "changed", rows("modeChanged")),
        ("Files of which it is not known", "unknown", rows("unknown")),
    ]  # fmt: skip


def _brief(one: object, key: str) -> str:
    text = str(one.get(key, "")) if isinstance(one, Mapping) else ""
    return f"{text[:12]}…" if len(text) == _SHA256_CHARS else text


def _path(one: object) -> str:
    """Return the path of a file as the records have it, one that is no text with escapes."""
    if not isinstance(one, Mapping):
        return str(one)
    if "pathBase64" in one:
        return base64.b64decode(one["pathBase64"]).decode("utf-8", "backslashreplace")
    return str(one.get("path", ""))


def show_files(document: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return the first files of a snapshot, or of what a restoration did, as rows."""
    return [
        {
            "path": _path(one), "size": format_size(one["size"]) if "size" in one else "", "mode": one.get("mode", ""),
            "what": one.get("result") or (f"link to {one['link']}" if "link" in one else one.get("sha256", "link")),
        }
        for one in document["files"][:MOST_ROWS]
    ]  # fmt: skip


def read_number(text: str) -> int:
    """Return the number of a request. Raises InvalidRequest."""
    if not (text.isascii() and text.isdigit() and len(text) < 19):
        raise InvalidRequest("this is no number of an approval")
    return int(text)
