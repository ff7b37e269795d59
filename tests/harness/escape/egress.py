"""Attempts to reach an internet past a policy: what one is, how many are run at once, and how they are judged.

Theory of operation. An attempt (a `Row`) is the body of a function. It carries a token of its own there where it tries
to get through and nowhere else: in a name, a path, a datagram. It is run on the host of a world (harness/world.py)
without any policy, where it must succeed, and in a sandbox, where it must not. It succeeds when its token arrives: at a
server, at the name server, or among the packets that left; `at` names the addresses that count, where the token may
come to another one. What no server can see, such as a changed route, an attempt says itself. One that crashed has
proved nothing and fails the test. All rows of a policy are run by one program (egress_program.py), in one sandbox.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.harness.world import Seen, World

PROGRAM = (Path(__file__).parent / "egress_program.py").read_text()
IN_A_SANDBOX = """
import cloche
result = cloche.run(ARGUMENT["program"], **ARGUMENT["policy"])
control = result.enforcement.controls["network"]
print(json.dumps({
    "stdout": result.stdout, "stderr": result.stderr, "status": str(result.status), "exit_code": result.exit_code,
    "network": result.meta.get("network"), "hits": dict(result.enforcement.hits),
    "state": str(control.state), "mechanism": control.mechanism, "reason": control.reason,
}))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Describe an attempt. `needs_powers`: an ordinary user needs capabilities to show that it works outside."""

    name: str
    code: str
    at: tuple[str, ...] = ()
    needs_powers: bool = False
    also_open: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Came:
    """Say what came of a row: where its token arrived, and its own word."""

    arrived: Sequence[Mapping[str, Any]]
    escaped: str
    heard: str
    refused: str
    crashed: str

    @property
    def succeeded(self) -> bool:
        return bool(self.arrived or self.escaped)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Hold what came of rows that were run together, what the world saw of them, and how the run ended."""

    came: Mapping[str, Came]
    seen: Seen
    run: Mapping[str, Any]


def run_outside(world: World, rows: Sequence[Row]) -> Mapping[str, Came]:
    """Run rows on the host without a policy."""
    came: dict[str, Came] = {}
    for has_powers in (False, True):
        some = [row for row in rows if row.needs_powers is has_powers]
        program, tokens = build_program(some)
        world.forget()
        printed = world.run(program, has_powers=has_powers) if some else {}
        came |= judge(some, tokens, printed, world.seen())
    return came


def run_inside(
    world: World, rows: Sequence[Row], policy: Mapping[str, Any], env: Mapping[str, str] | None = None
) -> Batch:
    """Run rows in one sandbox; `env` is for the program on the host that opens it."""
    program, tokens = build_program(rows)
    world.forget()
    run = world.run(IN_A_SANDBOX, {"program": program, "policy": policy}, env=env)
    seen = world.seen()
    lines = run["stdout"].splitlines()
    assert lines, run
    return Batch(came=judge(rows, tokens, json.loads(lines[-1]), seen), seen=seen, run=run)


def build_program(rows: Sequence[Row]) -> tuple[str, Mapping[str, str]]:
    """Return the program that runs rows, and the tokens by their names."""
    tokens = {row.name: f"t{secrets.token_hex(6)}" for row in rows}
    told = json.dumps([{"name": row.name, "token": tokens[row.name], "code": row.code} for row in rows])
    return f"TOLD = {told!r}\n{PROGRAM}", tokens


def judge(rows: Sequence[Row], tokens: Mapping[str, str], printed: Mapping[str, Any], seen: Seen) -> dict[str, Came]:
    """Say what came of each row."""
    came = {}
    for row in rows:
        arrived = [one for one in seen.holding(tokens[row.name]) if not row.at or one["address"] in row.at]
        said = printed.get(row.name, {"crashed": "the program never came to it"})
        words = {word: said.get(word, "") for word in ("escaped", "heard", "refused", "crashed")}
        came[row.name] = Came(arrived=arrived, **words)
    return came
