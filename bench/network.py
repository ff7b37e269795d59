"""Measure what a sandbox's network costs: `python -m bench.network [--rounds N] [--events NAME,...] [--json FILE]`.

It needs root. All of it runs in the world of the tests (tests/harness/world.py): a host and an internet in namespaces
of their own, from which no packet comes out; the server is on the internet's side. What goes through a sandbox takes
turns with the same client on the host. Each event is measured as root and as an ordinary user. That user's sandboxes
have no control groups, so on a busy machine a client in them has no other share of it than one outside.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import cloche
from cloche.cli._bench_report import show_event, show_head
from tests.harness.internet.build import FOLDER
from tests.harness.world import ROOT, World, open_world

from . import network_client, network_host
from .network_host import EVENTS, HTTP_PORT, TCP_PORT, TLS_PORT, Event
from .targets import OF_NETWORK, USER, Target, held_against

PORTS = (HTTP_PORT, TLS_PORT, TCP_PORT)
MEMORY = "memory"
HERE_IT_RUNS = "\nprint(json.dumps({call}))"


def main() -> int:
    """Measure what is asked for on the command line."""
    return measured("python -m bench.network", __doc__ or "", EVENTS, OF_NETWORK, "memory(**ARGUMENT)")


def measured(
    name: str, description: str, events: Sequence[Event], targets: tuple[Target, ...], memory_call: str
) -> int:
    """Measure these events and the memory of the egress process, by the options of the command line."""
    options = _options(name, description, events)
    if os.geteuid() != 0:
        raise SystemExit(f"{name} needs root: it measures as root and as an ordinary user")
    wanted = options.events.split(",") if options.events else [*(event.name for event in events), MEMORY]
    report: dict[str, Any] = {"cloche": cloche.__version__, "host": _host(), "events": []}
    show_head(report)
    with open_world(left_free=PORTS) as world, _server(world):
        for event in events:
            if event.name in wanted:
                report["events"] += _held(world, event, options.rounds)
        if MEMORY in wanted:
            report[MEMORY] = _run(world, memory_call, client=inspect.getsource(network_client))
            print(f"\nthe egress process, MiB: {report[MEMORY]}")
    for line in held_against(report, targets):
        print(line)
    if options.json:
        Path(options.json).write_text(f"{json.dumps(report)}\n")
    return 0


def _options(name: str, description: str, events: Sequence[Event]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=name, description=description)
    parser.add_argument("--rounds", type=int, default=200, help="turns of small requests (default 200)")
    parser.add_argument("--events", help=f"some of {','.join(event.name for event in events)},{MEMORY} (default all)")
    parser.add_argument("--json", help="write all figures to this file")
    return parser.parse_args()


def _host() -> dict[str, Any]:
    return {"python": platform.python_version(), "kernel": platform.release(), "processors": os.cpu_count(),
            "level": "jail", "is_root": True}  # fmt: skip


@contextmanager
def _server(world: World) -> Iterator[None]:
    """Serve on the internet's side until the block ends."""
    told = {"ports": PORTS, "tls_port": TLS_PORT, "certificate": f"{FOLDER}/server.pem", "key": f"{FOLDER}/server.key"}
    module = [sys.executable, "-m", f"{__package__}.network_server", json.dumps(told)]
    words = [*world.words(on_internet=True), "env", f"--chdir={ROOT}", *module]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            assert process.stdout is not None
            if process.stdout.readline() != "ready\n":
                raise SystemExit("the server does not start")
            yield
        finally:
            process.kill()


def _held(world: World, event: Event, rounds: int) -> Iterator[dict[str, Any]]:
    """Measure an event, and show it: as root, and as an ordinary user."""
    told = {"name": event.name, "rounds": rounds, "client": inspect.getsource(network_client)}
    for user in (None, "ordinary"):
        found: dict[str, Any] = _run(world, "measure(**ARGUMENT)", user=user, **told)
        if user:
            found |= {"name": f"{event.name}{USER}", "title": f"{event.title}, an ordinary user"}
        show_event(found)
        yield found


def _run(world: World, call: str, *, user: str | None = None, **told: Any) -> Any:  # noqa: ANN401 - JSON
    return world.run(inspect.getsource(network_host) + HERE_IT_RUNS.format(call=call), told, user=user)


if __name__ == "__main__":
    sys.exit(main())
