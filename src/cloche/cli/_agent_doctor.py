"""`cloche agent doctor`: what an agent lacks here, may reach, will see, and tries in vain."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

from cloche.core.escape import escape_line, escape_name

from ._agents import agent
from .options import argument, json_option, option
from .output import show

if TYPE_CHECKING:
    from cloche.coding_agents.boundaries import Row
    from cloche.coding_agents.doctor import Examination

MOST_HIDDEN = 10
WORDS = {"refused": "refused", "reached": "FAILS", "untried": "NOT TRIED"}


@agent.command("doctor")
@argument("name", metavar="NAME", help="An agent of cloche agent list.")
@option("--allow", metavar="HOST", multiple=True, help="As cloche agent NAME has it.")
@option("--also", metavar="DIR", multiple=True, help="As cloche agent NAME has it.")
@option("--host-port", "host_ports", metavar="127.0.0.1:PORT", multiple=True, help="As cloche agent NAME has it.")
@json_option()
def _doctor(
    name: str, allow: tuple[str, ...], also: tuple[str, ...], host_ports: tuple[str, ...], as_json: bool
) -> int:
    """Try an agent's boundaries from inside; say what it needs.

    It also says what the agent may reach, and what it will see of this host.
    """
    import asyncio

    from cloche.coding_agents.doctor import examine
    from cloche.coding_agents.plan import AgentOptions
    from cloche.execution.host_ports import read_host_ports

    options = AgentOptions(hosts=allow, also=also, host_ports=read_host_ports(host_ports))
    found = asyncio.run(examine(name, os.getcwd(), options))
    if as_json:
        print(json.dumps(found.as_dict(), indent=2))
    else:
        _print(found)
    return 0 if found.is_sound else 1


def _print(found: Examination) -> None:
    rows = [
        {
            "needs": one.name,
            "here": _met(one.is_met, is_needed=one.is_needed),
            "detail": one.detail,
            "to do": one.remedy,
        }
        for one in found.requirements
    ]
    show(rows, as_json=False, title=f"What {found.title} needs")
    if found.problem:
        print(escape_line(f"\nno sandbox could be opened: {found.problem}"))
        return
    print("\nIt may reach")
    for line in _reached(found):
        print(f"  {line}")
    print("\nIt sees")
    for line in _seen(found):
        print(f"  {line}")
    if found.boundaries is None:
        return
    print()
    show(
        [_boundary(row) for row in found.boundaries.rows], as_json=False,
        title=f"What was tried from inside, in {found.boundaries.seconds * 1000:.0f} ms",
    )  # fmt: skip
    failed = found.boundaries.failed
    print(
        f"\n{len(failed)} of {len(found.boundaries.rows)} boundaries do not hold"
        if failed
        else "\nevery boundary holds"
    )


def _met(is_met: bool, *, is_needed: bool) -> str:
    return "yes" if is_met else "MISSING" if is_needed else "no"


def _reached(found: Examination) -> list[str]:
    lines = [escape_line(f"host {rule}") for rule in found.reach.rules]
    lines += [escape_line(f"secret {name}, used at {', '.join(hosts)}") for name, hosts in found.reach.secrets.items()]
    lines += [f"port {port} of this host's loopback" for port in found.reach.host_ports]
    return lines or ["nothing"]


def _seen(found: Examination) -> list[str]:
    view = found.view
    hidden = ", ".join(map(escape_name, view.hidden[:MOST_HIDDEN])) + (", ..." if view.hidden[MOST_HIDDEN:] else "")
    count = f"{len(view.hidden)} paths are hidden: {hidden}" if view.hidden else "no path is hidden"
    lines = [f"{escape_name(view.project)}, to be changed after your review; {count}"]
    lines += [f"{escape_name(path)}, read-only" for path in (*view.shown, *view.also, *view.toolchains)]
    lines += [f"{escape_name(path)}, a copy" for path in view.copied]
    return [*lines, f"nothing of the other {view.unseen} entries of {escape_name(view.home)}"]


def _boundary(row: Row) -> dict[str, str]:
    works = "" if row.outside is None else "{} of {} work".format(*row.outside)
    return {
        "boundary": row.name, "inside": WORDS[row.state], "how": row.how, "here outside": works, "what": row.meaning
    }  # fmt: skip
