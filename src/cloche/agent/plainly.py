"""What whoever approves is shown: nothing that cannot be seen, and in words what will hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cloche.core.plain import is_seen

from .approval import ON_HOST, ApprovalRequest

MANY_LINES, COLUMNS = 30, 80  # from here on some of the code may have left the screen


def rules_in_words(request: ApprovalRequest) -> str:
    """Say what will hold, and where nothing does, that."""
    policy, limits = _mapping(request.rules.get("policy")), _mapping(request.rules.get("limits"))
    told = [f"network {policy['network']}"] if "network" in policy else []
    for name, words in (("network_allow", "to"), ("packages", "packages"), ("best_effort", "not required:")):
        if named := policy.get(name):
            told.append(f"{words} {named if isinstance(named, str) else ', '.join(map(str, named))}")
    if request.rules.get("runs_on") == ON_HOST:
        told.append("no sandbox: all of the host's files and network")
    if isinstance(limits.get("timeout_s"), int | float):
        told.append(f"at most {limits['timeout_s']:g} s")
    if isinstance(limits.get("memory_bytes"), int):
        told.append(f"{limits['memory_bytes'] >> 20} MiB of memory")
    if isinstance(interpreter := request.rules.get("interpreter"), str):
        told.append(f"an interpreter that {interpreter}")
    return ", ".join(told)


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def cautions(text: str) -> str:
    """Say what one could overlook, a line each: code that is longer than a screen, characters that are not seen."""
    told = ""
    lines = text.split("\n")
    rows = sum(1 + len(line.expandtabs()) // COLUMNS for line in lines)
    if rows > MANY_LINES:  # a long row of blanks takes what is before it off the screen as lines do
        told += f"{len(lines)} lines, {len(text)} characters: scroll up for all of it\n"
    hidden = sorted({char for char in text if not is_seen(char)})
    if hidden:
        named = ", ".join(f"U+{ord(char):04X}" for char in hidden[:10])
        told += f"careful: what cannot be seen is shown as an escape above: {named}\n"
    return told
