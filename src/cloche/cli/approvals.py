"""`cloche approvals`: what waits for a human in the queue, and the human's word."""

from __future__ import annotations

import asyncio
import getpass
import json
import os
import sqlite3
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from cloche.agent.approval import Decision
from cloche.agent.plainly import rules_in_words
from cloche.agent.queue import ApprovalQueue, Entry, as_dict, default_path
from cloche.agent.risk import Risk
from cloche.agent.terminal import AskTerminal, show_request
from cloche.core.errors import InvalidRequest
from cloche.core.plain import plain, plain_line

from .exits import say
from .tables import show

LOOK_S = 0.2
MOST_SHOWN = 60  # characters of a call, in the table
_STATES = {"approved": "let through", "denied": "not run", "expired": "nobody answered in time: not run"}


def list_approvals(queue: str | None, *, is_all: bool, as_json: bool) -> int:
    """List what waits, or everything that is kept, the oldest first."""
    with _opened(queue) as found:
        entries = found.entries() if is_all else found.waiting()
    if as_json:
        print(json.dumps([_as_dict(one) for one in entries], indent=2, default=str))
    elif entries:
        show([_row(one) for one in entries], as_json=False)
    else:
        print("nothing is kept" if is_all else "nothing waits")
    return 0


def show_approval(queue: str | None, number: int, *, as_json: bool) -> int:
    """Show one request: what is asked for, the rules that will hold, what changed since the last one."""
    with _opened(queue) as found:
        entry = found.entry(number)
    if as_json:
        print(json.dumps(_as_dict(entry), indent=2, default=str))
        return 0
    from rich.console import Console

    request = entry.request
    console = Console(emoji=False, width=None if sys.stdout.isatty() else 200)
    asks = "Confirm it once more" if request.is_confirmation else "Approve it"
    where = plain(str(request.rules.get("runs_on")))
    console.print(f"{entry.number}: {plain(request.tool)} ({request.risk}, on {where})", style="bold", markup=False)
    show_request(request, console)
    if entry.state == "waiting":
        told = f"{asks}? It waits {_left(entry)} longer: cloche approvals approve {number}, or deny {number}"
    else:
        told = f"{entry.state}: {_STATES[entry.state]}{_decided(entry)}"
    console.print(told, markup=False, highlight=False)
    return 0


def decide(queue: str | None, number: int, *, is_approved: bool, reason: str = "", is_remembered: bool = False) -> int:
    """Approve or deny a request that waits, and say which one it was."""
    decision = Decision(is_approved=is_approved, by=_by(), reason=reason, is_remembered=is_remembered)
    with _opened(queue) as found:
        request = found.entry(number).request
        if is_remembered and request.risk is not Risk.HIGH:
            raise InvalidRequest(f"approval {number} is {request.risk}: only high calls can be remembered")
        found.decide(number, decision)
    done = "approved" if is_approved else "denied"
    remembered = "; the same call is not asked for again" if is_remembered else ""
    print(f"{done} {number}: {plain(request.tool)} ({request.risk}){remembered}")
    if is_approved and request.risk is Risk.CRITICAL and not request.is_confirmation:
        print("it is critical, and will be asked for once more")
    return 0


def watch(queue: str | None) -> int:
    """Ask at the terminal about each call as it comes, until Ctrl-C."""
    if not sys.stdin.isatty():
        raise InvalidRequest("watch asks at a terminal, and there is none; use list, show, approve and deny")
    with _opened(queue) as found:
        say("asking about each call that waits; Ctrl-C ends")
        asyncio.run(_ask_about_each(found))
    return 0


async def _ask_about_each(queue: ApprovalQueue) -> None:
    asked: set[int] = set()
    while sys.stdin.isatty():  # its end may be lost among the signals, and nobody could answer any more
        entry = next((one for one in queue.waiting() if one.number not in asked), None)
        if entry is None:
            await asyncio.sleep(LOOK_S)
            continue
        asked.add(entry.number)
        try:
            decision = await asyncio.wait_for(AskTerminal()(entry.request), max(0.0, entry.expires_at - time.time()))
            queue.decide(entry.number, replace(decision, by=_by()))
        except TimeoutError:
            print(f"\n{entry.number}: its time is over, which is a no")
        except InvalidRequest as error:  # somebody else decided, or whoever asked is gone
            print(plain_line(str(error)))


@contextmanager
def _opened(queue: str | None) -> Iterator[ApprovalQueue]:
    named = queue or os.environ.get("CLOCHE_APPROVALS")
    if named and not os.path.exists(named):
        raise InvalidRequest(f"there is no queue {named}; it is made by whoever asks")
    try:
        yield ApprovalQueue(queue)
    except sqlite3.Error as error:
        raise InvalidRequest(f"{named or default_path()} cannot be used as a queue of approvals: {error}") from error


def _row(entry: Entry) -> dict[str, Any]:
    request = entry.request
    called = request.arguments.get("code", request.arguments.get("command", ""))
    text = plain_line(str(called))
    return {
        "number": entry.number,
        "tool": plain(request.tool),
        "risk": f"{request.risk}, to confirm" if request.is_confirmation else str(request.risk),
        "runs on": plain(str(request.rules.get("runs_on", ""))),
        "asked": time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(entry.asked_at)),
        "state": f"waits {_left(entry)}" if entry.state == "waiting" else f"{entry.state}{_decided(entry)}",
        "asks for": text if len(text) <= MOST_SHOWN else f"{text[: MOST_SHOWN - 1]}…",
    }


def _left(entry: Entry) -> str:
    return f"{max(0, round(entry.expires_at - time.time()))} s"


def _decided(entry: Entry) -> str:
    if entry.decision is None:
        return ""
    reason = f": {plain(str(entry.decision.reason))}" if entry.decision.reason else ""
    return f" by {plain(str(entry.decision.by))}{reason}"


def _as_dict(entry: Entry) -> dict[str, Any]:
    request, decision = entry.request, entry.decision
    return {
        "number": entry.number, "state": entry.state, "asked_at": entry.asked_at, "expires_at": entry.expires_at,
        "tool": request.tool, "risk": str(request.risk), "arguments": dict(request.arguments),
        "rules": dict(request.rules), "rules_in_words": rules_in_words(request), "changes": request.changes,
        "is_confirmation": request.is_confirmation, "fingerprint": request.fingerprint,
        "decision": None if decision is None else as_dict(decision),
    }  # fmt: skip


def _by() -> str:
    try:
        return f"{getpass.getuser()} (command line)"
    except (KeyError, OSError):  # a user without a name
        return f"user {os.geteuid()} (command line)"
