"""Simulate a large fleet: `python -m bench.fleet_simulation [--nodes N] [--programs N] [--json FILE]`.

The decisions are the coordinator's real ones (`cloche.fleets.decisions`). Engine, nodes, workers, programs and time are
simulated: no program runs, and nothing is sent. Nodes are lost and come back, and the coordinator is started anew from
the engine's table and the nodes' lists. Of each decision the processor time is measured.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from heapq import heappop, heappush
from itertools import count
from pathlib import Path
from typing import Any, Literal

from cloche.fleets.decisions import Action, AskBlock, Decisions, EndLease, GiveBack, Grant, PlacingRules, Refuse, Sublet
from cloche.fleets.placing import NOTHING, ResourceSize
from cloche.fleets.waiting import SPARE_ENTRIES, LeaseRequest

MIB = 1 << 20
SHARE = ResourceSize(8000, 16_384 * MIB)
SIZES = [ResourceSize(1000, 512 * MIB)] * 16 + [ResourceSize(2000, 1024 * MIB)] * 3 + [ResourceSize(4000, 8192 * MIB)]
KEYS = 50
PROGRAM_S, TTL_S, TICK_S, BLOCK_S = 2.0, 60.0, 0.5, 0.02
SILENT_S, AWAY_S, RESTART_S = 3.0, 30.0, 2.3  # until a lost node is noticed; until it is back; without a coordinator
MOST_SPARE = 2 * (SPARE_ENTRIES + 1)  # entries that are out of date, in the heaps of times
IDLE_S = 400.0  # at the end: until the last blocks have gone back
Mode = Literal["lease for each program", "lease for each worker"]
MODES: tuple[Mode, ...] = ("lease for each program", "lease for each worker")


@dataclass
class Figures:
    """What one simulation measured. Times of decisions are processor time."""

    mode: str
    nodes: int
    programs: int
    workers: int
    decisions: int = 0
    decisions_a_second: float = 0.0
    p50_us: float = 0.0
    p99_us: float = 0.0
    longest_us: float = 0.0
    longest_tick_us: float = 0.0
    tick_s: float = 0.0
    longest_restart_ms: float = 0.0
    memory_mib: float = 0.0
    virtual_s: float = 0.0
    real_s: float = 0.0
    most_waiting: int = 0
    node_losses: int = 0
    restarts: int = 0
    repeated: int = 0
    actions: dict[str, int] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)


@dataclass
class Worker:
    """A client that runs programs one after the other."""

    key: str
    size: ResourceSize
    program: int = -1
    lease: str = ""
    node: str = ""


class Times:
    """The processor times of decisions, in a histogram of one per cent steps."""

    def __init__(self) -> None:
        self.buckets: Counter[int] = Counter()
        self.total_ns = self.longest_ns = self.number = 0

    def add(self, ns: int) -> None:
        self.number += 1
        self.total_ns += ns
        self.longest_ns = max(self.longest_ns, ns)
        bits = max(ns.bit_length() - 7, 0)
        self.buckets[(ns >> bits) << bits] += 1

    def percentile_us(self, part: float) -> float:
        seen = 0
        for ns, number in sorted(self.buckets.items()):
            seen += number
            if seen >= part * self.number:
                return ns / 1000
        return 0.0


class Simulation:
    """A fleet in virtual time."""

    def __init__(self, mode: Mode, nodes: int, programs: int, *, seed: int = 1, losses: int = 20, restarts: int = 3):
        self.mode, self.programs, self.random = mode, programs, random.Random(seed)
        self.now, self.order, self.ids = 0.0, count(), count(1)
        self.events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self.nodes: dict[str, dict[str, tuple[Sublet, float]]] = {f"n{number}": {} for number in range(nodes)}
        self.down: set[str] = set()
        self.blocks: dict[str, tuple[str, ResourceSize]] = {}
        self.results = bytearray(programs)
        self.next_program, self.ended, self.again = 0, 0, deque[int]()
        self.workers = [
            Worker(key=f"k{number % KEYS}", size=self.random.choice(SIZES)) for number in range(max(nodes * 7, 2))
        ]
        self.asking: dict[str, Worker] = {}
        self.working = len(self.workers)
        self.times, self.actions, self.tick_ns = Times(), Counter[str](), 0
        self.deferred: list[tuple[Callable[..., None], tuple[Any, ...]]] | None = None  # while no coordinator runs
        self.figures = Figures(mode=mode, nodes=nodes, programs=programs, workers=len(self.workers))
        self.decisions = self.new_decisions()
        expected_s = programs * PROGRAM_S / len(self.workers)
        self.longest_s = 5 * expected_s + 600.0
        for _ in range(losses):
            self.at(self.random.uniform(0.05, 0.9) * expected_s, self.lose_node)
        for number in range(restarts):
            self.at((number + 1) / (restarts + 1) * expected_s, self.stop_coordinator)

    # Time

    def at(self, after_s: float, what: Callable[..., None], *words: Any) -> None:  # noqa: ANN401 - of any event
        heappush(self.events, (self.now + after_s, next(self.order), what, words))

    def run(self) -> Figures:
        began, memory_before = time.perf_counter(), resident_mib()
        for worker in self.workers:
            self.at(self.random.uniform(0, PROGRAM_S), self.next_of, worker)
        self.at(TICK_S, self.tick)
        while self.working or self.now < self.figures.virtual_s + IDLE_S:
            if self.now > self.longest_s:
                raise AssertionError(f"{self.working} workers are not done after {self.now:.0f} s")
            self.now, _, what, words = heappop(self.events)
            what(*words)
            if self.working:
                self.figures.virtual_s = self.now
        self.measure(time.perf_counter() - began, resident_mib() - memory_before)
        self.figures.faults = list(self.faults())
        return self.figures

    def tick(self) -> None:
        self.decide("tick", self.now)
        self.figures.most_waiting = max(self.figures.most_waiting, len(self.decisions.waiting))
        self.at(TICK_S, self.tick)

    # The coordinator

    def decide(self, name: str, *words: Any) -> Any:  # noqa: ANN401 - of any decision
        """Make a decision, time it, and carry it out; it waits while there is no coordinator."""
        if self.deferred is not None:
            self.deferred += [] if name == "tick" else [(self.decide, (name, *words[:-1], None))]
            return None
        words = (*words[:-1], self.now)
        began = time.thread_time_ns()
        answer = getattr(self.decisions, name)(*words)
        self.note_time(name, time.thread_time_ns() - began)
        if name != "renew":
            self.carry_out(answer)
        return answer

    def note_time(self, name: str, ns: int) -> None:
        if name == "tick":
            self.figures.longest_tick_us = max(self.figures.longest_tick_us, ns / 1000)
            self.tick_ns += ns
        else:
            self.times.add(ns)

    def carry_out(self, actions: Sequence[Action]) -> None:
        for action in actions:
            self.actions[type(action).__name__] += 1
            if isinstance(action, Grant):
                self.granted(action)
            elif isinstance(action, Refuse):
                raise AssertionError(f"refused: {action.reason}")
            elif isinstance(action, AskBlock):
                self.at(BLOCK_S, self.take_block, action, self.decisions)
            elif isinstance(action, GiveBack):
                self.blocks.pop(action.block, None)
            elif isinstance(action, EndLease):
                self.nodes[action.node].pop(action.lease, None)

    def take_block(self, ask: AskBlock, asker: Decisions) -> None:
        block = f"b{next(self.ids)}"
        self.blocks[block] = (ask.node, ask.size)
        if asker is self.decisions and self.deferred is None:
            self.decide("block_taken", ask.ask, block, ask.node, ask.size, None)

    def new_decisions(self) -> Decisions:
        """Start a coordinator from the engine's table and the nodes' own lists."""
        began = time.perf_counter()
        decisions = Decisions(PlacingRules(block_idle_s=300.0))
        present = [name for name in self.nodes if name not in self.down]
        actions: list[Action] = []
        for name in present:
            actions += decisions.node_known(name, SHARE, self.now)
        for block, (name, size) in self.blocks.items():
            actions += decisions.block_found(block, name, size, self.now)
        for name in present:
            actions += decisions.adopt(name, self.nodes[name].values(), self.now)
            actions += decisions.node_ready(name, self.now)
        actions += decisions.resume(self.now)
        self.decisions = decisions
        self.figures.longest_restart_ms = max(self.figures.longest_restart_ms, (time.perf_counter() - began) * 1000)
        self.carry_out(actions)
        return decisions

    def stop_coordinator(self) -> None:
        if self.deferred is not None:
            return
        self.figures.restarts += 1
        asking = list(self.asking.values())
        self.asking.clear()
        self.deferred = [(self.ask, (worker,)) for worker in asking]  # they notice, and ask the next coordinator
        self.decisions = Decisions()  # that decides nothing
        self.at(RESTART_S, self.start_coordinator)

    def start_coordinator(self) -> None:
        deferred, self.deferred = self.deferred or [], None
        self.new_decisions()
        for what, words in deferred:
            what(*words)

    # Nodes

    def lose_node(self) -> None:
        name = self.random.choice(sorted(self.nodes.keys() - self.down))
        self.figures.node_losses += 1
        self.down.add(name)
        self.nodes[name].clear()
        self.at(SILENT_S, self.notice_loss, name)
        self.at(AWAY_S, self.come_back, name)

    def notice_loss(self, name: str) -> None:
        self.decide("node_lost", name, None)

    def come_back(self, name: str) -> None:
        self.down.discard(name)
        self.decide("node_known", name, SHARE, None)
        self.decide("node_ready", name, None)

    # Workers

    def next_of(self, worker: Worker) -> None:
        """Give a worker its next program, and a lease if it has none."""
        if worker.program < 0:
            if self.again:
                worker.program = self.again.popleft()
            elif self.next_program < self.programs:
                worker.program, self.next_program = self.next_program, self.next_program + 1
        if worker.program < 0:
            self.give_up(worker)
        elif worker.lease:
            self.at(self.random.uniform(0.5, 1.5) * PROGRAM_S, self.program_ended, worker, worker.lease)
        else:
            self.ask(worker)

    def give_up(self, worker: Worker) -> None:
        if worker.lease:
            self.release(worker)
        if self.ended < self.programs:  # another worker's program may have to be repeated
            self.at(PROGRAM_S, self.next_of, worker)
        else:
            self.working -= 1

    def ask(self, worker: Worker) -> None:
        if self.deferred is not None:
            self.deferred.append((self.ask, (worker,)))
            return
        request = LeaseRequest(
            id=f"l{next(self.ids)}", key=worker.key, size=worker.size, ttl_s=TTL_S, arrived=self.now, wait_s=3600.0
        )
        self.asking[request.id] = worker
        self.decide("ask", request, None)

    def granted(self, grant: Grant) -> None:
        worker = self.asking.pop(grant.request.id)
        worker.lease, worker.node = grant.request.id, grant.node
        if grant.node not in self.down:
            sublet = self.decisions.leases[worker.lease]
            self.nodes[grant.node][worker.lease] = (sublet, grant.until)
        if self.mode == "lease for each worker":
            self.at(TTL_S / 3, self.renew, worker, worker.lease)
        self.next_of(worker)

    def renew(self, worker: Worker, lease: str) -> None:
        if worker.lease != lease:
            return
        until = self.decide("renew", lease, TTL_S, None)
        if until is not None and lease in self.nodes[worker.node]:
            self.nodes[worker.node][lease] = (self.nodes[worker.node][lease][0], until)
        self.at(TTL_S / 3, self.renew, worker, lease)

    def program_ended(self, worker: Worker, lease: str) -> None:
        held = self.nodes[worker.node].get(lease)
        if held is None or held[1] <= self.now:  # NodeLost: repeated elsewhere
            self.figures.repeated += 1
            self.again.append(worker.program)
            worker.program, worker.lease = -1, ""
        else:
            self.results[worker.program] += 1
            self.ended += 1
            worker.program = -1
            if self.mode == "lease for each program":
                self.release(worker)
        self.next_of(worker)

    def release(self, worker: Worker) -> None:
        lease, worker.lease = worker.lease, ""
        self.decide("release", lease, None)

    # The end

    def measure(self, real_s: float, memory_mib: float) -> None:
        figures, times = self.figures, self.times
        figures.real_s, figures.memory_mib, figures.actions = real_s, memory_mib, dict(self.actions)
        figures.decisions, figures.decisions_a_second = times.number, times.number / times.total_ns * 1e9
        figures.p50_us, figures.p99_us = times.percentile_us(0.5), times.percentile_us(0.99)
        figures.longest_us, figures.tick_s = times.longest_ns / 1000, self.tick_ns / 1e9

    def faults(self) -> Sequence[str]:
        """Return what must not be: programs without exactly one result, and things that are left."""
        decisions, wrong = self.decisions, self.programs - self.results.count(1)
        left = {
            "leases": len(decisions.leases),
            "requests": len(decisions.waiting),
            "leases at nodes": sum(map(len, self.nodes.values())),
            "blocks": len(self.blocks),
            "nodes that are in use": sum(node.used != NOTHING for node in decisions.nodes.values()),
            "entries of leases": max(len(decisions._end_times) + len(decisions._wait_times) - MOST_SPARE, 0),
        }
        faults = [f"{wrong} programs without exactly one result"] if wrong else []
        return faults + [f"left: {number} {name}" for name, number in left.items() if number]


def resident_mib() -> float:
    """Return the memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / MIB


def show(figures: Figures) -> None:
    rows = {
        "decisions": f"{figures.decisions:,}, {figures.decisions_a_second:,.0f} a second of processor time",
        "one decision": f"p50 {figures.p50_us:.0f}, p99 {figures.p99_us:.0f}, longest {figures.longest_us:,.0f} us",
        "ticks": f"two a simulated second, {figures.tick_s:.1f} s in all, longest {figures.longest_tick_us:,.0f} us",
        "memory": f"{figures.memory_mib:.0f} MiB more than before, with the simulated world",
        "time": f"{figures.virtual_s:,.0f} s simulated in {figures.real_s:,.0f} s",
        "most waiting": f"{figures.most_waiting:,} requests",
        "node losses": f"{figures.node_losses}, {figures.repeated:,} programs repeated",
        "restarts": f"{figures.restarts} of the coordinator, the longest in {figures.longest_restart_ms:.0f} ms",
        "actions": ", ".join(f"{name} {number:,}" for name, number in figures.actions.items()),
        "end": "; ".join(figures.faults) or "each program has exactly one result, and nothing is left",
    }
    print(f"{figures.mode}: {figures.programs:,} programs, {figures.workers:,} workers, {figures.nodes:,} nodes")
    for name, text in rows.items():
        print(f"  {name:<14}{text}")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.fleet_simulation", description=__doc__)
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--programs", type=int, default=1_000_000)
    parser.add_argument("--json", help="a file for the figures")
    options = parser.parse_args()
    rows = []
    for mode in MODES:
        rows.append(Simulation(mode, options.nodes, options.programs).run())
        show(rows[-1])
    if options.json:
        Path(options.json).write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    return 1 if any(row.faults for row in rows) else 0


if __name__ == "__main__":
    raise SystemExit(main())
