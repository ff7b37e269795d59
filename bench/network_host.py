"""What `bench.network` and `bench.secrets` measure on the host of their world, where the text of this module runs.

A client is the same text in both places: in a process of the host's, and in a session of a live sandbox. It times
what it does by itself, so how it is asked does not count.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from typing import Any, Protocol

import cloche
from cloche.bench.harness import Case, Measurement, measure_interleaved, memory_of, processes_below, row, timed
from cloche.bench.scenarios import library_call, output_of
from cloche.config.options import SandboxOptions
from cloche.egress.client import process_id

HOST, LARGE_BYTES, SMALL_BYTES, CONNECTIONS = "good.example", 100_000_000, 1000, 200
HTTP_PORT, TLS_PORT, TCP_PORT = 80, 443, 9000
DIRECT, INSIDE = "direct", "in a sandbox"
SPLICED, OPENED = "spliced, in a sandbox", "opened, in a sandbox"
HTTP2_BYTES = 10_000_000  # of a body by HTTP/2, whose library in Python is what takes time
ALONE, BESIDE, GREEDY = "alone", "beside", 30  # connections
OFF, LISTED = "network off", "allowlist"
SETTLE_S, ALONE_ROUNDS = 1.0, 200
NETWORK: SandboxOptions = {"network": "allowlist", "network_allow": (HOST, f"{HOST}:{TCP_PORT}")}
POLICIES: Mapping[str, SandboxOptions] = {OFF: {}, LISTED: NETWORK}
# What the machine has, not the usual half of a processor: that would be measured instead.
ROOMY: SandboxOptions = {**NETWORK, "cpus": os.cpu_count() or 1, "memory": "1g", "timeout": 60}
SECRETS = {"API_KEY": cloche.Secret(value="abcdefghij0123456789", hosts=(HOST,))}
SECRET: SandboxOptions = {"secrets": SECRETS}
WAYS: Mapping[str, SandboxOptions] = {SPLICED: ROOMY, OPENED: {**ROOMY, "network_allow": (), **SECRET}}
CODE = "print(1)"
CONNECT = f"""
import socket
with socket.create_connection(({HOST!r}, {HTTP_PORT})) as connection:
    connection.sendall(b"GET /bytes/10 HTTP/1.1\\r\\nHost: {HOST}\\r\\nConnection: close\\r\\n\\r\\n")
    print(int(b"200" in connection.recv(4096)))
"""
ANSWER = "import json, sys\nfor call in sys.stdin: print(json.dumps(eval(call)), flush=True)"
FIRST_RUN = """
import time; begun = time.perf_counter()
import cloche; cloche.run({code!r}, **{options!r})
print(time.perf_counter() - begun)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """Name a way to the server."""

    name: str
    scheme: str
    port: int


TLS = Route(name="TLS", scheme="https", port=TLS_PORT)
HTTP = Route(name="HTTP", scheme="http", port=HTTP_PORT)
TCP = Route(name="TCP", scheme="http", port=TCP_PORT)


class Client(Protocol):
    """Be who runs the client's text, and evaluates a call of its functions."""

    def ask(self, call: str) -> list[float]: ...


class Process:
    """Run the client in a process of the host's."""

    def __init__(self, stack: ExitStack, client: str):
        words = [sys.executable, "-c", f"{client}\n{ANSWER}"]
        options: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        # As what serves a sandbox: on a busy machine the kernel gives each session its share (autogroup).
        self._process = stack.enter_context(subprocess.Popen(words, start_new_session=True, **options))
        stack.callback(self._process.kill)
        self.ask("[0, 0]")

    def ask(self, call: str) -> list[float]:
        """Evaluate a call."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(call, file=self._process.stdin, flush=True)
        found: list[float] = json.loads(self._process.stdout.readline())
        return found


class Session:
    """Run the client in a session of a sandbox of its own."""

    def __init__(self, stack: ExitStack, client: str, options: SandboxOptions = ROOMY):
        sandbox = stack.enter_context(cloche.Sandbox(live=True, **options))
        self._session = sandbox.session()
        self._run(client)

    def ask(self, call: str) -> list[float]:
        """Evaluate a call."""
        found: list[float] = self._run(call)
        return found

    def _run(self, code: str) -> Any:  # noqa: ANN401 - a cell's value
        result = self._session.run(code)
        assert str(result.status) == "ok", f"{result.status}: {result.stderr} {result.meta}"
        return result.value


Entry = Callable[[ExitStack, str], Iterator[Case]]
CLIENTS: Mapping[str, Callable[[ExitStack, str], Client]] = {DIRECT: Process, INSIDE: Session}


def _asked(client: Client, call: str) -> Measurement:
    ms, count = client.ask(call)
    return Measurement(ms, str(count).encode())


def _call_of(route: Route, size: int) -> str:
    return f"fetch({route.scheme!r}, {HOST!r}, {route.port}, '/bytes/{size}')"


def fetched(route: Route, size: int, stack: ExitStack, client: str) -> Iterator[Case]:
    """Yield one answer of so many bytes, by a connection of its own, of a client that is there already."""
    call = _call_of(route, size)
    for name, start in CLIENTS.items():
        measure = partial(_asked, start(stack, client), call)
        yield Case(name=name, call=call, measure=measure, expected=str(size).encode())


def first_fetched(route: Route, _stack: ExitStack, client: str) -> Iterator[Case]:
    """Yield the first connection of a client, and of its sandbox."""
    call = _call_of(route, SMALL_BYTES)

    def measure(start: Callable[[ExitStack, str], Client]) -> Measurement:
        with ExitStack() as stack:
            return _asked(start(stack, client), call)

    for name, start in CLIENTS.items():
        yield Case(name=name, call=call, measure=partial(measure, start), expected=str(SMALL_BYTES).encode())


def fetched_at_once(route: Route, stack: ExitStack, client: str) -> Iterator[Case]:
    """Yield many connections at once."""
    call = f"fetch_many({route.scheme!r}, {HOST!r}, {route.port}, '/bytes/{SMALL_BYTES}', {CONNECTIONS})"
    for name, start in CLIENTS.items():
        measure = partial(_asked, start(stack, client), call)
        yield Case(name=name, call=call, measure=measure, expected=str(CONNECTIONS).encode())


def fetched_beside(stack: ExitStack, client: str) -> Iterator[Case]:
    """Yield a small request of one sandbox beside another one whose connections take much to follow.

    Those are not ended at once, so the figures without them were taken before.
    """
    neighbour, greedy = Session(stack, client), Session(stack, client)
    call, expected = _call_of(HTTP, SMALL_BYTES), str(SMALL_BYTES).encode()
    alone = cycle([_asked(neighbour, call) for _ in range(ALONE_ROUNDS)])
    yield Case(name=ALONE, call=call, measure=partial(next, alone), expected=expected)
    for path in ("/continue", "/chunks"):
        greedy.ask(f"hold({HOST!r}, {HTTP_PORT}, {path!r}, {GREEDY // 2})")
    yield Case(name=BESIDE, call=call, measure=partial(_asked, neighbour, call), expected=expected)


def opened(call: str, expected: int, with_direct: bool, stack: ExitStack, client: str) -> Iterator[Case]:
    """Yield a call of the same client outside, where a sandbox's connection is spliced, and where it is opened."""
    clients: dict[str, Client] = {DIRECT: Process(stack, client)} if with_direct else {}
    clients |= {name: Session(stack, client, options) for name, options in WAYS.items()}
    for name, client_there in clients.items():
        yield Case(name=name, call=call, measure=partial(_asked, client_there, call), expected=str(expected).encode())


def nothing() -> None:
    """Be a function of the host."""


def warm_runs_with_a_secret(_stack: ExitStack, _client: str) -> Iterator[Case]:
    """Yield warm runs with one tool, where a host is in the allow list, and where it has a secret."""
    for name, options in {SPLICED: {"network_allow": (HOST,)}, OPENED: SECRET}.items():
        told: Any = {**options, "tools": [nothing]}
        yield library_call(name, f"cloche.run({CODE!r}), one tool, {name}", CODE, b"1\n", told)


def first_runs_with_a_secret(_stack: ExitStack, _client: str) -> Iterator[Case]:
    """Yield the first run of a process, with a host in the allow list, and with a secret of it."""
    spliced = FIRST_RUN.format(code=CODE, options={"network_allow": (HOST,)})
    secret = FIRST_RUN.format(code=CODE, options={"secrets": [f"API_KEY@{HOST}"]})
    for name, program in ((SPLICED, spliced), (OPENED, f"import os; os.environ['API_KEY'] = 'a1' * 10{secret}")):
        yield Case(
            name=name, call=f"the first run, {name}", measure=partial(_own_time, [sys.executable, "-c", program])
        )


def warm_runs(_stack: ExitStack, _client: str) -> Iterator[Case]:
    """Yield warm runs that use no network, without one and with."""
    for name, options in POLICIES.items():
        yield library_call(name, f"cloche.run({CODE!r}), {name}", CODE, b"1\n", options)


def cold_runs(_stack: ExitStack, _client: str) -> Iterator[Case]:
    """Yield cold runs that use no network, without one and with."""
    for name, options in POLICIES.items():
        call = f"cloche.run({CODE!r}, warm=False), {name}"
        yield library_call(name, call, CODE, b"1\n", {**options, "warm": False})


def connecting_runs(_stack: ExitStack, _client: str) -> Iterator[Case]:
    """Yield whole programs that make one connection."""
    command = [sys.executable, "-c", CONNECT]
    yield Case(name=DIRECT, call="a plain subprocess", measure=timed(partial(output_of, command)))
    yield library_call(LISTED, f"cloche.run(CONNECT), {LISTED}", CONNECT, b"1\n", NETWORK)


def first_runs(_stack: ExitStack, _client: str) -> Iterator[Case]:
    """Yield the first run of a process, which times itself."""
    for name, options in POLICIES.items():
        program = FIRST_RUN.format(code=CODE, options=options)
        measure = partial(_own_time, [sys.executable, "-c", program])
        yield Case(name=name, call=f"import cloche; cloche.run({CODE!r}), {name}", measure=measure)


def _own_time(command: list[str]) -> Measurement:
    return Measurement(float(output_of(command)) * 1000, b"1\n")


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Name cases that take turns; the first is the one that the others are compared to."""

    name: str
    title: str
    enter: Entry
    share: float = 1.0  # of the rounds


def _events_of_route(route: Route) -> Iterator[Event]:
    name = route.name
    large, small, many = f"{LARGE_BYTES // 1_000_000} MB", "a small request", f"{CONNECTIONS} connections at once"
    enter = partial(fetched, route)
    yield Event(name=f"large {name}", title=f"{large}, {name}", enter=partial(enter, LARGE_BYTES), share=0.1)
    yield Event(name=f"small {name}", title=f"{small}, {name}", enter=partial(enter, SMALL_BYTES))
    yield Event(name=f"first {name}", title=f"{small}, the first, {name}", enter=partial(first_fetched, route),
                share=0.1)  # fmt: skip
    yield Event(name=f"many {name}", title=f"{many}, {name}", enter=partial(fetched_at_once, route), share=0.1)


EVENTS = (
    *(event for route in (TLS, HTTP, TCP) for event in _events_of_route(route)),
    Event(name="beside", title=f"a small request beside {GREEDY} connections of another sandbox", enter=fetched_beside),
    Event(name="warm", title="a warm run that uses no network", enter=warm_runs, share=2.0),
    Event(name="cold", title="a cold run that uses no network", enter=cold_runs, share=0.2),
    Event(name="connecting", title="a run that makes a connection", enter=connecting_runs, share=0.5),
    Event(name="process", title="the first run of a process", enter=first_runs, share=0.1),
)

_SECURE = f"{HOST!r}, {TLS_PORT}"
_LARGE, _SMALL = f"{LARGE_BYTES // 1_000_000} MB", "a small request"


def _opened(name: str, title: str, call: str, size: int, *, share: float = 1.0, with_direct: bool = True) -> Event:
    return Event(name=f"opened {name}", title=title, enter=partial(opened, call, size, with_direct), share=share)


OPENED_EVENTS = (
    _opened("first byte", "the first byte of a stream of events, by a new connection",
                  f"first_byte({_SECURE}, '/events')", 1),
    _opened("small", f"{_SMALL}, by a new connection", _call_of(TLS, SMALL_BYTES), SMALL_BYTES, with_direct=False),
    _opened("again", f"{_SMALL}, by a connection that is kept", f"fetch_again({_SECURE}, '/bytes/{SMALL_BYTES}')",
                  SMALL_BYTES, with_direct=False),
    _opened("large", _LARGE, _call_of(TLS, LARGE_BYTES), LARGE_BYTES, share=0.1),
    _opened("small HTTP/2", f"{_SMALL} by HTTP/2, by a connection that is kept",
                  f"fetch_http2({_SECURE}, '/bytes/{SMALL_BYTES}')", SMALL_BYTES, with_direct=False),
    _opened("large HTTP/2", f"{HTTP2_BYTES // 1_000_000} MB by HTTP/2",
                  f"fetch_http2({_SECURE}, '/bytes/{HTTP2_BYTES}')", HTTP2_BYTES, share=0.1),
    Event(name="opened warm", title="a warm run with one tool", enter=warm_runs_with_a_secret, share=2.0),
    Event(name="opened process", title="the first run of a process", enter=first_runs_with_a_secret, share=0.1),
)  # fmt: skip


def measure(name: str, rounds: int, client: str) -> dict[str, Any]:
    """Measure an event, and return it in the form of the other benchmarks' reports."""
    event = next(one for one in (*EVENTS, *OPENED_EVENTS) if one.name == name)
    with ExitStack() as stack:
        cases = list(event.enter(stack, client))
        times, _ = measure_interleaved(cases, max(5, int(rounds * event.share)), reference=cases[0].name)
    first = times[cases[0].name]
    rows = {one.name: {"call": one.call, **row(times[one.name], first)} for one in cases}
    for found, timed_case in zip(rows.values(), times.values(), strict=True):
        found["ms"] = [round(ms, 3) for ms in timed_case.ms]
    return {"name": name, "title": event.title, "reference": cases[0].name, "rows": rows, "left_out": {},
            "full_speed": {}}  # fmt: skip


def memory(client: str) -> dict[str, dict[str, float]]:
    """Return the memory of the egress process at rest, after one run and after many connections, in MiB."""
    found = {}
    cloche.run(CODE, **NETWORK)
    time.sleep(SETTLE_S)
    found["after one run"] = _memory_of_egress()
    with ExitStack() as stack:
        session = Session(stack, client)
        for route in (TLS, HTTP, TCP):
            session.ask(f"fetch_many({route.scheme!r}, {HOST!r}, {route.port}, '/bytes/10', {CONNECTIONS})")
            session.ask(_call_of(route, LARGE_BYTES))
    time.sleep(SETTLE_S)
    found["after all kinds of connections"] = _memory_of_egress()
    return found


def memory_with_secrets(client: str) -> dict[str, dict[str, float]]:
    """Return that of the egress process with secrets: at rest, and after connections and bodies, in MiB."""
    cloche.run(CODE, **SECRET)
    time.sleep(SETTLE_S)
    found = {"after one run": _memory_of_egress(has_secrets=True)}
    with ExitStack() as stack:
        session = Session(stack, client, WAYS[OPENED])
        session.ask(f"fetch_many('https', {HOST!r}, {TLS_PORT}, '/bytes/10', {CONNECTIONS})")
        session.ask(_call_of(TLS, LARGE_BYTES))
    time.sleep(SETTLE_S)
    return {**found, "after all kinds of connections": _memory_of_egress(has_secrets=True)}


def _memory_of_egress(*, has_secrets: bool = False) -> dict[str, float]:
    return memory_of(frozenset(processes_below(os.getpid())) - {process_id(has_secrets=has_secrets)})
