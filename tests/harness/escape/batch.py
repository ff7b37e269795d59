"""Run attempts where starting a program takes longer than most of them: many in one run.

Theory of operation. One program (`batch_program.py`) runs them in a sandbox one after another, each in a child and a
folder of its own, and tells of each beginning and end. The verdict is given as soon as an end is heard, so what
happened on the host meanwhile is that attempt's doing. An attempt that takes the run down with it is judged by how the
run ended, and the others follow in another one. An attempt has that program for a parent, under the same id,
which no guest has: so what got out, or broke, is believed only once it was run alone, in a run of its own.
"""

from __future__ import annotations

import dataclasses
import json
import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cloche
from tests.harness.escape.attempts import Attempt, Seen, Verdict, judge, key_of
from tests.harness.escape.runners import (
    CODA,
    CONTROL_SECONDS,
    PRELUDE,
    Workspace,
    as_seen,
    new_token,
    whole_program,
)
from tests.harness.escape.targets import Canaries

PROGRAM = (Path(__file__).parent / "batch_program.py").read_text()
BATCH_S = 600.0


@dataclass(slots=True, kw_only=True)
class BatchProgram:
    """Hold the program of one batch: what it is called by in its output, and the attempts by their numbers."""

    attempts: Sequence[Attempt]
    code: str
    word: str
    tokens: Sequence[str]


def build_program(
    attempts: Sequence[Attempt],
    targets: Mapping[str, Any],
    *,
    slowness: float = 1.0,
    is_first: bool = False,
    stays: bool = False,
    waits: bool = False,
    is_shown: bool = False,
) -> BatchProgram:
    """Return the program that runs `attempts`, their first programs where `is_first`.

    `stays`: what they leave is not removed. `waits`: the program does not end by itself. `is_shown`: they write
    where the program does.
    """
    word, tokens = f"{secrets.token_hex(8)} ", [new_token() for _ in attempts]
    rows = [
        {
            "folder": token,
            "language": attempt.language,
            "code": _code(attempt.first if is_first else attempt.code, attempt.language),
            "argument": json.dumps({**targets, "token": token}),
            "timeout_s": slowness * float(attempt.limits.get("timeout", CONTROL_SECONDS)),
            "stays": stays,
        }
        for attempt, token in zip(attempts, tokens, strict=True)
    ]
    told = {"word": word, "prelude": PRELUDE, "attempts": rows, "waits": waits, "is_shown": is_shown}
    text = json.dumps({**told, "outside": os.readlink("/proc/self/ns/pid")})
    return BatchProgram(attempts=attempts, code=f"TOLD = {text!r}\n{PROGRAM}", word=word, tokens=tokens)


def _code(code: str, language: str) -> str:
    return code + CODA if language == "python" else code


@dataclass(slots=True)
class BatchOutput:
    """Take a batch's output as it comes: which attempt is being run, and what was seen of each."""

    program: BatchProgram
    on_seen: Callable[[Attempt, Seen], None]
    begun: int = -1
    ended: int = -1
    is_over: bool = False
    _rest: str = field(default="")

    def receive(self, _stream: object, data: bytes) -> None:
        """Take a piece."""
        *lines, self._rest = (self._rest + data.decode(errors="replace")).split("\n")
        for line in lines:
            _, word, row = line.partition(self.program.word)
            if word:
                self._take(json.loads(row))

    def last_seen(self, result: cloche.Result) -> Seen:
        """Return what was seen of the attempt with which the run ended: its end, and what nobody told of."""
        own = "\n".join(line for line in result.stdout.splitlines() if self.program.word not in line)
        return dataclasses.replace(as_seen(result, self.program.tokens[self.begun]), stdout=own)

    def _take(self, row: dict[str, Any]) -> None:
        self.begun = row.pop("begins", self.begun)
        self.is_over = row.pop("over", self.is_over)
        if "ended" in row:
            self.ended = row.pop("ended")
            attempt, token = self.program.attempts[self.ended], self.program.tokens[self.ended]
            self.on_seen(attempt, Seen(**row, token=token, save=lambda _: ()))


class Batch:
    """Run in one open sandbox; also a runner of one attempt at a time, each in a run of its own there."""

    patience_s = 30.0

    def __init__(self, sandbox: cloche.Sandbox, canaries: Canaries, *, slowness: float) -> None:
        canaries.neighbour()
        self.sandbox, self.canaries, self.slowness = sandbox, canaries, slowness
        self.targets = canaries.targets
        self.prepared: dict[str, Seen] = {}

    def close(self) -> None:
        """Close nothing: the sandbox is its owner's."""

    def verdicts(self, attempts: Sequence[Attempt], *, believed: Sequence[str] = ()) -> dict[str, Verdict]:
        """Return the verdict on each attempt; what got out or broke is run alone, unless it is `believed`."""
        found: dict[str, Verdict] = {}

        def take(attempt: Attempt, seen: Seen) -> None:
            found[key_of(attempt)] = judge(seen, self.canaries)

        self.run_all(attempts, take)
        for attempt in attempts:
            verdict = found[key_of(attempt)]
            is_held = verdict.stopped_by and not verdict.breach
            if not is_held and not (verdict.breach and key_of(attempt) in believed):
                found[key_of(attempt)] = judge(self.run(attempt), self.canaries)
        return found

    def run_all(
        self, attempts: Sequence[Attempt], on_seen: Callable[[Attempt, Seen], None], **how: Any
    ) -> cloche.Result:
        """Run all, in as many runs as it takes, and return the last one's result."""
        left = list(attempts)
        while True:
            program = build_program(left, self.targets, slowness=self.slowness, **how)
            output = BatchOutput(program, on_seen)
            result = self.sandbox.run(program.code, timeout=BATCH_S, on_output=output.receive)
            if output.is_over:
                return result
            assert output.begun > output.ended, f"the batch's program broke: {result.status} {result.stderr[-2000:]}"
            on_seen(left[output.begun], output.last_seen(result))
            left = left[output.begun + 1 :]

    def prepare(self, attempts: Sequence[Attempt]) -> None:
        """Run programs whose traces are looked at later, by `run` and `workspace`: they stay."""
        seen: dict[str, Seen] = {}
        result = self.run_all(attempts, lambda attempt, one: seen.__setitem__(key_of(attempt), one), stays=True)
        for key, one in seen.items():
            self.prepared[key] = dataclasses.replace(one, save=result.save)

    def run(self, attempt: Attempt, *, code: str | None = None) -> Seen:
        """Return what was seen of a prepared attempt, or run it by itself."""
        if key_of(attempt) in self.prepared:
            return self.prepared[key_of(attempt)]
        token = new_token()
        timeout = attempt.limits.get("timeout")
        result = self.sandbox.run(
            whole_program(attempt, code or attempt.code),
            language=attempt.language,
            argv=[json.dumps({**self.targets, "token": token})],
            timeout=None if timeout is None else float(timeout) * self.slowness,
        )
        return as_seen(result, token)

    def show(self, attempt: Attempt) -> bytes:
        """Refuse: what is shown on a terminal is run by the command line."""
        raise AssertionError(f"{attempt.name} is not run here")

    @contextmanager
    def workspace(self, attempt: Attempt) -> Iterator[Workspace]:
        """Reach into the sandbox, where a prepared attempt has a folder of its own."""
        runner = self

        class Live:
            def run(self, code: str) -> Seen:
                return runner.run(attempt, code=code)

            def read_file(self, path: str) -> bytes:
                return runner.sandbox.read_file(runner.own(attempt, path), max_bytes=1 << 20)

            def write_file(self, path: str, data: bytes) -> None:
                runner.sandbox.write_file(runner.own(attempt, path), data)

        yield Live()

    def own(self, attempt: Attempt, path: str) -> str:
        """Return a path as it is from the workspace."""
        prepared = self.prepared.get(key_of(attempt))
        return path if prepared is None or path.startswith("/") else f"{prepared.token}/{path}"
