"""The protocol of SandboxFusion (`cloche serve --sandbox-fusion`): requests, answers, words, limits. Pure.

What a program did is always an answer with status 200. `SandboxError` makes clients retry and verl score a failure of
the service, so no answer has it. A request that found no place, and of which nothing ran, gets status 504, the only one
after which verl tries again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import ConfigDict, Field, StringConstraints

from cloche.config.keys import Settings
from cloche.core.languages import LANGUAGES, Engine, Language
from cloche.core.limits import LEAST_MEMORY_BYTES, MIB, format_size
from cloche.core.record import dataclass, field
from cloche.core.result import Result, Status
from cloche.wire.exec_options import MOST_PATH, WireModel

RUN_CODE, RUN_JUPYTER, PING = "/run_code", "/run_jupyter", "/v1/ping"
PATHS = frozenset({RUN_CODE, RUN_JUPYTER, PING})
# Of runs of this mode, where the operator's settings say nothing.
DEFAULTS: Mapping[str, Any] = {"memory": "1g", "cpus": 1, "output_limit": "8m", "timeout": "5m"}
CLIENT_S = 10.0  # verl waits for the time limits of a request, and this
SPARE_S = 2.0
MOST_FETCHED = 32 << 20  # bytes of all files of an answer
MOST_OUTPUT = 32 << 20  # bytes of all cells of an answer
NOT_FOUND, NOT_RUN = 127, 126  # exit codes of a shell, for what is not there and what cannot be started (POSIX)
MOST_TIME_S = 1e6

# Their names of languages that Cloche has under another or the same name.
_NAMES: Mapping[str, str] = {
    "python": "python", "nodejs": "javascript", "typescript": "typescript", "bash": "bash", "ruby": "ruby",
    "go": "go", "rust": "rust", "csharp": "csharp",
}  # fmt: skip
_COMPILED = frozenset({"go", "rust", "csharp"})
CPP = Language(
    name="cpp",
    aliases=(),
    suffixes=(".cpp",),
    file_name="cloche-main.cpp",
    image="",
    engines=(
        Engine(
            name="g++",
            programs=("g++",),
            commands=(("{g++}", "-std=c++17", "-O2", "-o", "{build}/program", "{source}"), ("{build}/program",)),
            package="apt-get install g++",
        ),
    ),
    image_engine="g++",
)

Seconds = Annotated[float, Field(gt=0, le=MOST_TIME_S)]
Path = Annotated[str, StringConstraints(min_length=1, max_length=MOST_PATH)]


class FusionRequest(WireModel):
    """Fields of both requests. Unknown fields are ignored, as newer clients send more."""

    model_config = ConfigDict(extra="ignore", alias_generator=None)

    files: dict[Path, str | None] = Field(default_factory=dict)
    fetch_files: list[Path] = Field(default_factory=list, max_length=256)


class CodeRequest(FusionRequest):
    """A request to run one program."""

    code: str
    language: Annotated[str, StringConstraints(max_length=64)]
    stdin: str | None = None
    compile_timeout: Seconds = 10.0
    run_timeout: Seconds = 10.0
    memory_limit_MB: float | None = None  # noqa: N815 - their name

    def most_wait_s(self, *, is_compiled: bool) -> float:
        """Return how long the request may wait for its turn, so that verl still gets the answer in time."""
        own_limits = self.run_timeout + (self.compile_timeout if is_compiled else 0.0)
        return self.compile_timeout + self.run_timeout + CLIENT_S - SPARE_S - own_limits


class JupyterRequest(FusionRequest):
    """A request to run cells in one interpreter. A `cell_timeout` of 0 is none."""

    cells: list[str] = Field(max_length=4_096)
    cell_timeout: Annotated[float, Field(ge=0, le=MOST_TIME_S)] = 0.0
    total_timeout: Seconds = 45.0
    kernel: Annotated[str, StringConstraints(max_length=64)] = "python3"


def language_of(name: str) -> Language | None:
    """Return the language of one of their names, None for one that Cloche has not."""
    if name == CPP.name:
        return CPP
    return LANGUAGES.get(_NAMES.get(name, ""))


def is_compiled(language: Language) -> bool:
    """Tell whether an answer has a result of the compiler."""
    return language is CPP or language.name in _COMPILED


def is_allowed(language: Language, allowed: Sequence[str]) -> bool:
    """Tell whether the rules allow a language. C++ is compiled by commands, which need the permission of a shell."""
    return ("bash" if language is CPP else language.name) in allowed


def why_no_language(name: str, allowed: Sequence[str]) -> str:
    """Return the sentence for a language that is not there."""
    names = [name for name in (*_NAMES, CPP.name) if is_allowed(language_of(name) or CPP, allowed)]
    return f"language {name[:64]!r} is not there; this service runs {', '.join(names)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class FusionLimits:
    """Hold the amounts of one request after the service's limits, and a sentence for each one that was lowered."""

    memory_bytes: int
    seconds: Mapping[str, float]
    notes: tuple[str, ...] = ()


def limits_of(settings: Settings, *, memory_mb: float | None, seconds: Mapping[str, float]) -> FusionLimits:
    """Return the amounts that a request gets: what it asks for, up to the operator's ceiling, else to the setting."""
    notes = []
    most_memory = int(settings.ceilings.get("memory_bytes", settings.limits.memory_bytes))
    most_s = float(settings.ceilings.get("timeout_s", settings.limits.timeout_s))
    memory = settings.limits.memory_bytes
    if memory_mb is not None and memory_mb > 0:  # else theirs is "no limit"
        asked = int(min(memory_mb, 1e9) * MIB)
        memory = max(LEAST_MEMORY_BYTES, min(asked, most_memory))
        if asked > most_memory:
            notes.append(f"memory_limit_MB: {memory_mb:g} was lowered to the service's {format_size(most_memory)}")
    lowered = {name: min(amount, most_s) for name, amount in seconds.items()}
    notes += [
        f"{name}: {amount:g} s was lowered to the service's {most_s:g} s"
        for name, amount in seconds.items()
        if amount > most_s
    ]
    return FusionLimits(memory_bytes=memory, seconds=lowered, notes=tuple(notes))


@dataclass(slots=True, kw_only=True)
class FusionAnswer:
    """Hold what a request did: the results of compiler and program, files by name (base64), and sentences.

    `cells` is None for a program.
    """

    compiled: Result | None = None
    ran: Result | None = None
    cells: list[dict[str, Any]] | None = None
    files: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def deciding(self) -> Result:
        """Return the last result, which decides the status."""
        result = self.ran or self.compiled
        assert result is not None  # noqa: S101 - one of them is set before it is asked
        return result

    @property
    def size(self) -> int:
        """Return its size in bytes, roughly."""
        results = [result for result in (self.compiled, self.ran) if result is not None]
        streams = sum(len(result.stdout_bytes) + len(result.stderr_bytes) for result in results)
        cells = sum(cell_size(cell) for cell in self.cells or ())
        return streams + cells + sum(map(len, self.files.values()))

    def encode(self) -> bytes:
        """Return the answer as JSON."""
        runs = [result for result in (self.compiled, self.ran) if result is not None]
        parts: dict[str, Any]
        if self.cells is None:
            is_success = all(result.ok for result in runs)
            parts = {"compile_result": command_result(self.compiled), "run_result": command_result(self.ran)}
        else:
            is_success = all(result.exit_code == 0 for result in runs)
            parts = {"driver": command_result(self.ran), "cells": self.cells}
        sentences = [*self.notes, *(sentence for result in runs for sentence in explained(result))]
        return encoded("Success" if is_success else "Failed", "; ".join(sentences), **parts, files=self.files)


def cell_size(cell: Mapping[str, Any]) -> int:
    """Return the size of a cell's answer in bytes, roughly."""
    shown = sum(len(str(value)) for bundle in cell["display"] for value in bundle.values())
    return len(cell["stdout"]) + len(cell["stderr"]) + shown


def encoded(status: str, message: str, **parts: Any) -> bytes:  # noqa: ANN401 - JSON
    """Return an answer as JSON."""
    document = {"status": status, "message": message, "executor_pod_name": None, **parts}
    return json.dumps(document, ensure_ascii=False).encode("utf-8", "replace")


def refused(why: str, code: int = NOT_RUN, *, has_cells: bool = False) -> bytes:
    """Return the answer to a request that can never run: `Failed`, with the sentence where each client shows it."""
    status = "Finished" if code == NOT_FOUND else "Error"
    result = {
        "status": status, "execution_time": 0.0, "cpu_time": 0.0, "return_code": code, "stdout": "", "stderr": why,
    }  # fmt: skip
    parts = {"driver": result, "cells": []} if has_cells else {"compile_result": None, "run_result": result}
    return encoded("Failed", why, **parts, files={})


def command_result(result: Result | None) -> dict[str, Any] | None:
    """Return a result of compiler or program in their words."""
    if result is None:
        return None
    is_late = result.status is Status.TIMEOUT
    used = [amount for amount in (result.usage.cpu_user_s, result.usage.cpu_system_s) if amount is not None]
    return {
        "status": "TimeLimitExceeded" if is_late else "Finished",
        "execution_time": result.duration,
        "cpu_time": sum(used) if used else None,
        "return_code": None if is_late else result.exit_code,
        "stdout": result.stdout,
        "stderr": result.stderr,
    }


_REASONS: Mapping[Status, str] = {
    Status.OUT_OF_MEMORY: "the program was ended at its memory limit",
    Status.OUTPUT_LIMIT: "the program was ended, since it wrote too much",
    Status.PIDS_LIMIT: "the program reached the limit on processes",
    Status.DISK_LIMIT: "the program filled its disk",
    Status.DENIED: "the sandbox refused the program something",
}


def explained(result: Result) -> list[str]:
    """Return sentences about an end that exit code and time do not show."""
    reason = _REASONS.get(result.status or Status.OK)
    return [*([reason] if reason else []), *(["its output was cut"] if result.truncated else [])]
