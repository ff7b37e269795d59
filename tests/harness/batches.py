"""Batches: inputs with programs that crash, hang and exhaust memory, processes that are killed, and their results."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

KINDS = ("crash", "hang", "memory")
_CODE = {
    "good": "print({number} * {number})",
    "crash": "import os; os.abort()",
    "hang": "while True: pass",
    "memory": "x = bytearray(1 << 30)\nfor i in range(0, len(x), 4096): x[i] = 1",
}
_STATUS = {"good": {"ok"}, "crash": {"signaled"}, "hang": {"timeout"}, "memory": {"out_of_memory", "error"}}


def kind_of(number: int) -> str:
    """Return what the program of this number does: one in a hundred is not good."""
    return KINDS[number // 100 % len(KINDS)] if number % 100 == 50 else "good"


def programs(count: int, *, is_idempotent: bool = True) -> Iterator[dict[str, Any]]:
    """Yield the programs, which may run twice unless said otherwise."""
    for number in range(count):
        kind = kind_of(number)
        code, timeout = _CODE[kind].format(number=number), 2 if kind == "hang" else 60
        yield {"id": f"p{number}", "code": code, "idempotent": is_idempotent, "timeout": timeout}


def write_programs(path: Path, count: int, *, is_idempotent: bool = True) -> None:
    """Write the programs."""
    with path.open("w") as file:
        for row in programs(count, is_idempotent=is_idempotent):
            file.write(json.dumps(row) + "\n")


def is_wrong(number: int, status: str | None, stdout: str) -> bool:
    """Tell whether a result is not what its program must give."""
    kind = kind_of(number)
    return status not in _STATUS[kind] or (kind == "good" and stdout != f"{number * number}\n")


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the complete rows of results."""
    return [json.loads(line) for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]


def wrong_rows(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the rows that are not at their place, or not what their program must give."""
    return [
        row
        for number, row in enumerate(rows)
        if (row["index"], row["id"]) != (number, f"p{number}")
        or is_wrong(number, row.get("status"), row.get("stdout", ""))
    ]


def start(folder: Path, *words: str) -> subprocess.Popen[str]:
    """Start `cloche batch run` of p.jsonl to r.jsonl in a folder."""
    command = [sys.executable, "-m", "cloche", "batch", "run", "p.jsonl", "--out", "r.jsonl", *words]
    return subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run `cloche batch run` of p.jsonl to r.jsonl in a folder, to its end."""
    process = start(folder, *words)
    out, err = process.communicate(timeout=900)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def wait_for_rows(process: subprocess.Popen[str], path: Path, count: int) -> None:
    """Wait until a running batch has written so many rows."""
    while process.poll() is None and (not path.exists() or path.read_bytes().count(b"\n") < count):
        time.sleep(0.01)


def run_killed(folder: Path, count: int, *, kills: int, words: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Run a batch that is killed so many times, resume it, and return its rows."""
    write_programs(folder / "p.jsonl", count)
    for kill in range(kills):
        process = start(folder, "--resume", *words)
        wait_for_rows(process, folder / "r.jsonl", count * (kill + 1) // (kills + 1))
        assert process.poll() is None, process.communicate()
        process.kill()
        process.communicate()
    done = run(folder, "--resume", *words)
    assert done.returncode == 0, done.stderr
    return read_rows(folder / "r.jsonl")
