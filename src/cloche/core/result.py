"""The result of a run: its output, status, files, the controls in force, and the report of auto-fix.

`decide` sets the status from the observed facts. It is pure, and the one place that knows the precedence.
"""

from __future__ import annotations

import enum
import os
from collections.abc import Callable, Mapping
from typing import Any

from .enforcement import Enforcement
from .errors import InvalidRequest
from .escape import utf8_safe, utf8_safe_data
from .record import asdict, dataclass, field, replace

EXIT_TIMEOUT = -1
SIGKILL, SIGXFSZ = 9, 25
TIMEOUT_NOTE = "Execution timed out"
MOST_COMPARED_LINES = 2_000  # comparing takes time with the square of it
# What a report's JSON says of the run of a round; the last one's enforcement and meta stand in the result itself.
_REPORTED_FIELDS = ("status", "exit_code", "stdout", "stderr", "duration", "truncated", "timed_out")


class Status(enum.StrEnum):
    """Say how the guest ended; listed by precedence, the first that applies wins."""

    TIMEOUT = "timeout"
    OUT_OF_MEMORY = "out_of_memory"
    OUTPUT_LIMIT = "output_limit"
    PIDS_LIMIT = "pids_limit"
    DISK_LIMIT = "disk_limit"
    SIGNALED = "signaled"
    DENIED = "denied"
    ERROR = "error"
    OK = "ok"


class FixStop(enum.StrEnum):
    """Say why auto-fix ended. FIXED and NOT_NEEDED leave a program that works."""

    NOT_NEEDED = "not_needed"  # the first run ended well
    FIXED = "fixed"
    MAX_ROUNDS = "max_rounds"
    SAME_ERROR = "same_error"
    UNCHANGED_CODE = "unchanged_code"
    NO_CODE = "no_code"  # the answer held nothing that could be run
    TOKEN_BUDGET = "token_budget"  # noqa: S105 - the tokens of a language model
    TIME_BUDGET = "time_budget"
    MODEL_ERROR = "model_error"  # the endpoint or the callable failed
    LOST_STATE = "lost_state"  # the session's interpreter has ended, and what earlier cells defined with it
    NOT_ISOLATED = "not_isolated"  # the sandbox is too weak for code that a model writes


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord:
    """Describe a file that the run created or changed in /workspace: path below it, bytes, SHA-256 in hex."""

    path: str
    size: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Measure a run: seconds of wall clock and CPU, the tree's peak memory in bytes, the most processes at once.

    None means that this backend cannot measure it.
    """

    wall_s: float = 0.0
    cpu_user_s: float | None = None
    cpu_system_s: float | None = None
    peak_memory_bytes: int | None = None
    processes: int | None = None


_UNITS: Mapping[type, str] = {str: "characters", bytes: "bytes"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """Hold one rich output: a MIME bundle, content by MIME type."""

    data: Mapping[str, str | bytes]
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        shown = ", ".join(f"{kind}: {len(content)} {_UNITS[type(content)]}" for kind, content in self.data.items())
        return f"Output({shown})"

    def _repr_mimebundle_(self, **_: object) -> tuple[Mapping[str, str | bytes], Mapping[str, Any]]:
        """Return the bundle, which notebooks display."""
        return self.data, self.metadata


SaveFiles = Callable[["str | os.PathLike[str]"], "tuple[str, ...]"]


@dataclass(slots=True)
class Result:
    """Hold a run's output, its end, and the controls in force (R1: the first four fields are positional).

    `stdout` and `stderr` are text with undecodable bytes as U+FFFD, at most `Limits.output_bytes` each; the exact bytes
    kept are in `stdout_bytes` and `stderr_bytes`. `duration` is in seconds. `exit_code` is the program's own, 128+n for
    signal n, and -1 on time-out. `value` is the last expression, as the guest reports it: decoded JSON, or its repr
    where `value_is_repr`. `files` may lack some: `meta["files_skipped"]` counts the files left out, links and the like
    among them, and `meta["files_partial"]` says why: `time` (the walk takes at most half of the run's time-out, one to
    five seconds), `entries` (200,000), `files` (10,000), `bytes` (the disk limit), `paths` (8 million characters
    together), `depth` (64 folders), `access`. In a live sandbox they are the files requested, and
    `meta["files_shared"]` says that others may have changed them, too. `fix` is the report of auto-fix, where it was
    requested.
    """

    stdout: str
    stderr: str
    exit_code: int
    duration: float
    truncated: bool = field(default=False, kw_only=True)
    timed_out: bool = field(default=False, kw_only=True)
    meta: dict[str, Any] = field(default_factory=dict, kw_only=True)
    status: Status | None = field(default=None, kw_only=True)
    value: Any = field(default=None, kw_only=True)
    value_is_repr: bool = field(default=False, kw_only=True)
    outputs: tuple[Output, ...] = field(default=(), kw_only=True)
    files: tuple[FileRecord, ...] = field(default=(), kw_only=True)
    usage: Usage = field(default_factory=Usage, kw_only=True)
    enforcement: Enforcement = field(default_factory=Enforcement, kw_only=True)
    fix: FixReport | None = field(default=None, kw_only=True, repr=False, compare=False)
    stdout_bytes: bytes = field(default=b"", kw_only=True, repr=False)
    stderr_bytes: bytes = field(default=b"", kw_only=True, repr=False)
    save_files: SaveFiles | None = field(default=None, kw_only=True, repr=False, compare=False)

    def __post_init__(self) -> None:
        self.stdout_bytes = self.stdout_bytes or self.stdout.encode("utf-8", "surrogateescape")
        self.stderr_bytes = self.stderr_bytes or self.stderr.encode("utf-8", "surrogateescape")
        if self.status is None:
            self.status = Status.TIMEOUT if self.timed_out else Status.OK if self.exit_code == 0 else Status.ERROR

    @property
    def ok(self) -> bool:
        """Tell whether the program ended with exit code 0."""
        return self.status is Status.OK

    @property
    def network_refused(self) -> list[Mapping[str, Any]]:
        """Return the rows of `meta["network"]` that the rules refused: `host`, `port`, `why`, `connections`."""
        return [row for row in self.meta.get("network", ()) if not row["is_allowed"]]

    def save(self, directory: str | os.PathLike[str]) -> tuple[str, ...]:
        """Copy `files` into `directory` (created when missing) and return their paths below it.

        Regular files only, never through links, never outside `directory`; all files of `files`, or none. Raises
        InvalidRequest when this result lists files but holds none to copy (it was read back from JSON, say). Files of a
        session's cell are in the session's workspace: where a later cell, or a process that still runs, has removed or
        changed a file, SandboxFileError names it; save before the next cell, or give that cell `out`.
        """
        if self.save_files is None:
            if self.files:
                raise InvalidRequest("this result no longer holds its files; pass out=DIR to the run instead")
            os.makedirs(directory, exist_ok=True)
            return ()
        return self.save_files(directory)

    def as_dict(self) -> dict[str, Any]:
        """Return plain data, ready for JSON; output as text, names of files that are no UTF-8 with escapes."""
        return {
            "status": str(self.status),
            "exit_code": self.exit_code,
            "stdout": self.stdout,
            "stderr": self.stderr,
            "duration": self.duration,
            "truncated": self.truncated,
            "timed_out": self.timed_out,
            "value": self.value,
            "value_is_repr": self.value_is_repr,
            "outputs": [output_as_dict(output) for output in self.outputs],
            "files": [{"path": utf8_safe(f.path), "size": f.size, "sha256": f.sha256} for f in self.files],
            "usage": asdict(self.usage),
            "enforcement": self.enforcement.as_dict(),
            "meta": utf8_safe_data(self.meta),
            **({"fix": utf8_safe_data(self.fix.as_dict())} if self.fix is not None else {}),
        }

    def summary(self, *, max_chars: int = 400) -> str:
        """Say in one short line what happened, for an agent's memory."""
        line = f"{self.status} (exit {self.exit_code}, {self.duration:.2f} s)"
        text = (self.stdout if self.ok else self.stderr or self.stdout).strip()
        return f"{line}: {text}"[:max_chars] if text else line


@dataclass(frozen=True, slots=True, kw_only=True)
class FixRound:
    """Hold one request to the model and its outcome.

    `reply` is the model's text, bounded; `code` the program taken from it, empty if there was none; `diff` the unified
    diff from the code before. `result` is the run's, None when nothing ran, and `refusal` then says why. `tokens` and
    `duration_s` are the round's cost and seconds, the request included.
    """

    number: int
    reply: str = field(repr=False)
    code: str = field(default="", repr=False)
    diff: str = field(default="", repr=False)
    result: Result | None = None
    refusal: str = ""
    tokens: int = 0
    duration_s: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """Return plain data, ready for JSON."""
        return {
            "number": self.number,
            "reply": self.reply,
            "code": self.code,
            "diff": self.diff,
            "result": run_as_dict(self.result),
            "refusal": self.refusal,
            "tokens": self.tokens,
            "duration_s": self.duration_s,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class FixReport:
    """Say what auto-fix did: why it ended, in a word and in words, and each round.

    `code` is the program that ran last, `diff` what changed in it since the first, `first` the first run. `model` and
    `host` say where code and output went, empty for a callable. `tokens` counts all rounds.
    """

    stop: FixStop
    message: str
    code: str = field(repr=False)
    diff: str = field(default="", repr=False)
    first: Result | None = field(default=None, repr=False)
    rounds: tuple[FixRound, ...] = ()
    model: str = ""
    host: str = ""
    tokens: int = 0
    duration_s: float = 0.0

    @property
    def ok(self) -> bool:
        """Tell whether the program works now."""
        return self.stop in (FixStop.FIXED, FixStop.NOT_NEEDED)

    def as_dict(self) -> dict[str, Any]:
        """Return plain data, ready for JSON."""
        return {
            "stop": str(self.stop),
            "ok": self.ok,
            "message": self.message,
            "code": self.code,
            "diff": self.diff,
            "first": run_as_dict(self.first),
            "rounds": [fix_round.as_dict() for fix_round in self.rounds],
            "model": self.model,
            "host": self.host,
            "tokens": self.tokens,
            "duration_s": self.duration_s,
        }


_UP = "\x1b[A"
_ERASE = ("\x1b[K", "\x1b[0K", "\x1b[2K")  # the rest of a line, or all of it


def as_on_screen(text: str) -> str:
    r"""Return the text that a terminal shows in the end where `\r` and moves up overwrite other text.

    Progress bars are drawn this way. All other text, and `\r\n` at the end of a line, is unchanged.
    """
    if "\r" not in text and _UP not in text:
        return text
    if _UP not in text:
        return "\n".join(_shown_line(line) if "\r" in line else line for line in text.split("\n"))
    rows: list[list[str]] = [[]]  # of each line, all that was written from its beginning on
    ends: list[str] = [""]
    position = 0
    for number, line in enumerate(text.split("\n")):
        position += min(number, 1)
        if position == len(rows):
            rows.append([])
            ends.append("")
        body = line.rstrip("\r")
        for is_next, segment in enumerate(body.split(_UP)):
            position = max(0, position - min(is_next, 1))
            rows[position] += segment.split("\r")
        ends[position] = line[len(body) :]
    return "\n".join(_overlaid(row) + end for row, end in zip(rows, ends, strict=True))


def _shown_line(line: str) -> str:
    body = line.rstrip("\r")
    return _overlaid(body.split("\r")) + line[len(body) :]


def _overlaid(segments: list[str]) -> str:
    """Return the visible rest of texts written over each other; each character is looked at once."""
    segments = [segment for segment in segments if segment]
    if len(segments) < 2:
        return "".join(segments)
    shown = ""
    for part in reversed(segments):
        text = part
        if "\x1b" in part:
            for code in _ERASE:
                text = text.replace(code, "")
        elif len(part) <= len(shown):
            continue
        shown += text[len(shown) :]
        if text != part:
            break
    return shown.rstrip(" ")


def output_as_dict(output: Output) -> dict[str, Any]:
    """Return plain data, ready for JSON."""
    return {"data": _as_text(output.data), "metadata": dict(output.metadata)}


def _as_text(data: Mapping[str, str | bytes]) -> dict[str, str]:
    """Encode binary content of a MIME bundle as base64, as notebooks do."""
    import base64

    return {mime: v if isinstance(v, str) else base64.b64encode(v).decode("ascii") for mime, v in data.items()}


def run_as_dict(result: Result | None) -> dict[str, Any] | None:
    """Return the fields of a run that the report of auto-fix contains."""
    if result is None:
        return None
    return {name: getattr(result, name) if name != "status" else str(result.status) for name in _REPORTED_FIELDS}


def code_diff(before: str, after: str) -> str:
    """Return the unified diff between two programs; of very long ones only that they differ."""
    import difflib  # which few results need

    old, new = before.splitlines(), after.splitlines()
    if old == new:
        return ""
    if len(old) + len(new) > MOST_COMPARED_LINES:
        return f"--- before\n+++ after\n(too long to compare: {len(old)} lines before, {len(new)} after)\n"
    lines = difflib.unified_diff(old, new, "before", "after", lineterm="")
    return "\n".join(lines) + "\n"


ExecutionResult = Result


class KillCause(enum.StrEnum):
    """Say why Cloche killed the guest. The code that kills sets the cause; it is never inferred from a signal.

    Listed by precedence, for two causes at once.
    """

    TIMEOUT = "timeout"
    OUT_OF_MEMORY = "out_of_memory"
    OUTPUT_LIMIT = "output_limit"
    DISK_LIMIT = "disk_limit"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """Hold the facts of one ended run.

    `exit_code` and `signal` come from the kernel's wait status: exactly one of them is not None, unless the whole
    sandbox was killed before the main process could be waited for. The counters are rises during this run. `denied`
    counts refusals by the policy that the kernel, or a process out of the guest's reach, has seen; `network_refused`
    counts the connections and names that the egress process refused.
    """

    exit_code: int | None = None
    signal: int | None = None
    cause: KillCause | None = None
    oom_kills: int = 0
    pids_hits: int = 0
    workspace_full: bool = False
    denied: int = 0
    network_refused: int = 0

    def with_refusal(self, refused: str) -> Observed:
        """Return the facts with the reason why output was no longer read, which then ended the run."""
        return replace(self, cause=self.cause or KillCause.OUTPUT_LIMIT) if refused else self


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Hold the status, the exit code to report, and every limit that was hit."""

    status: Status
    exit_code: int
    hits: Mapping[str, int] = field(default_factory=dict)


def decide(observed: Observed) -> Verdict:
    """Return the verdict, by the precedence of `Status`. Exit 0 is `ok`, even if a limit was reached."""
    raw = (
        128 + observed.signal
        if observed.signal is not None
        else observed.exit_code
        if observed.exit_code is not None
        else 128 + SIGKILL
    )
    hits = _hits(observed)
    if observed.cause is KillCause.TIMEOUT:
        return Verdict(status=Status.TIMEOUT, exit_code=EXIT_TIMEOUT, hits=hits)
    if observed.cause is None and raw == 0:
        return Verdict(status=Status.OK, exit_code=0, hits=hits)
    if observed.cause is KillCause.OUT_OF_MEMORY or observed.oom_kills:
        return Verdict(status=Status.OUT_OF_MEMORY, exit_code=128 + SIGKILL, hits=hits)
    if observed.cause is KillCause.OUTPUT_LIMIT:
        return Verdict(status=Status.OUTPUT_LIMIT, exit_code=128 + SIGKILL, hits=hits)
    if observed.pids_hits:
        return Verdict(status=Status.PIDS_LIMIT, exit_code=raw, hits=hits)
    if observed.cause is KillCause.DISK_LIMIT or observed.signal == SIGXFSZ or observed.workspace_full:
        return Verdict(status=Status.DISK_LIMIT, exit_code=raw or 128 + SIGKILL, hits=hits)
    if observed.signal is not None or observed.exit_code is None:
        return Verdict(status=Status.SIGNALED, exit_code=raw, hits=hits)
    if observed.denied or observed.network_refused:
        return Verdict(status=Status.DENIED, exit_code=raw, hits=hits)
    return Verdict(status=Status.ERROR, exit_code=raw, hits=hits)


def _hits(observed: Observed) -> dict[str, int]:
    counts = {
        "timeout": int(observed.cause is KillCause.TIMEOUT),
        "out_of_memory": observed.oom_kills + int(observed.cause is KillCause.OUT_OF_MEMORY),
        "output_limit": int(observed.cause is KillCause.OUTPUT_LIMIT),
        "pids_limit": observed.pids_hits,
        "disk_limit": int(
            observed.workspace_full or observed.cause is KillCause.DISK_LIMIT or observed.signal == SIGXFSZ
        ),
        "denied": observed.denied,
        "network": observed.network_refused,
    }
    return {name: count for name, count in counts.items() if count}
