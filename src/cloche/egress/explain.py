"""Why a host is refused, told to the guest by its own question: what it would read if it tried, and nothing is tried.

On port 80 of the name server's address a guest sends one line, `HOST PORT [METHOD TARGET]`, and gets a line of JSON:
`host`, `port`, `is_allowed` and `why`. The program inside that asks is `interpreter/why.py`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from cloche.core.network import NetworkRules
from cloche.core.refusals import not_allowed
from cloche.core.request_rules import RequestRefused, check_request

from .callers import Questions
from .errors import Refused
from .host_ports import is_host_port
from .stream import SocketStream

if TYPE_CHECKING:
    from .opened import SandboxSecrets

ADDRESS, PORT = "198.18.0.1", 80
MOST_LINE, LINE_S = 4096, 5.0
Explain = Callable[[str, int, str, str], dict[str, Any]]


async def answer(guest: SocketStream, explain: Explain) -> None:
    """Answer one question. What is not understood gets no answer."""
    line = b""
    async with asyncio.timeout(LINE_S):
        while not line.endswith(b"\n") and len(line) < MOST_LINE and (more := await guest.receive(MOST_LINE)):
            line += more
        words = line[:MOST_LINE].decode("ascii", "replace").split()
        if len(words) in (2, 4) and words[1].isdecimal() and len(words[1]) <= 5:
            told = explain(words[0], int(words[1]), *(words[2:] or ("", "")))
            await guest.send(json.dumps(told).encode() + b"\n")


def explain(
    rules: NetworkRules, secrets: SandboxSecrets | None, questions: Questions | None,
    host: str, port: int, method: str, target: str,
) -> dict[str, Any]:  # fmt: skip
    """Return the decision on a connection or a request. Without `questions` nobody is asked about hosts."""
    name = host.lower().removesuffix(".")
    if is_host_port(rules, "127.0.0.1" if name == "localhost" else name, port):
        return _told(name, port, f"{name}:{port} is a port of the user's own machine, given to this sandbox", True)
    decision = rules.decide(name, port)
    if not decision.is_allowed:
        asked = questions.state(name, port) if questions is not None and not rules.denies(name, port) else None
        if asked == "":
            return _told(name, port, f"{name}:{port} was approved by the user", True)
        return _told(name, port, f"{decision.why}; {asked}" if asked else decision.why, False)
    if port not in rules.served_ports:
        ports = ", ".join(map(str, rules.served_ports))
        return _told(
            name, port, not_allowed(f"{name}:{port}", f"the ports of this sandbox are {ports}", "use one"), False
        )
    try:
        if secrets is not None:
            secrets.check(name, port)
        if decision.rule is not None and decision.rule.requests and method:
            check_request(method, target, (), decision.rule.requests, name)
    except Refused as refused:
        return _told(name, port, refused.reason, False)
    except RequestRefused as refused:
        return _told(name, port, f"{name}:{port}: {refused.what} is not allowed; {refused.why}", False)
    return _told(name, port, decision.why, True)


def _told(host: str, port: int, why: str, is_allowed: bool) -> dict[str, Any]:
    return {"host": host, "port": port, "is_allowed": is_allowed, "why": why}
