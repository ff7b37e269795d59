"""Run the benchmark in this interpreter and print the report as JSON: the program of a fresh environment.

Its only argument is a setting as JSON; `paths` are added to its search path, and no contestant's interpreter sees them.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .setting import Setting

PEER_RUNS = 200


def main() -> None:
    asked = json.loads(sys.argv[1])
    paths = asked.pop("paths")
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # which has `bench` in it
    sys.path += paths  # after start-up
    from bench.setting import Setting

    folder = asked.pop("peers_folder")
    setting = Setting(
        import_path=os.pathsep.join(paths) or None, peers_folder=Path(folder) if folder else None, **asked
    )
    answers = os.dup(1)
    os.dup2(2, 1)
    found: dict[str, Any] = {}
    try:
        measure_all(setting, found, lambda text: print(f"measuring {text}", file=sys.stderr, flush=True))
    finally:
        with os.fdopen(answers, "w", encoding="utf-8") as file:
            json.dump(found, file)


def measure_all(setting: Setting, report: dict[str, Any], log: Callable[[str], None]) -> None:
    """Run the events of a setting, and then peers, so that what they leave behind is not taken for Cloche's."""
    from bench.commands import COMMAND_EVENTS
    from bench.live import LIVE_EVENTS
    from bench.output import OUTPUT_EVENTS
    from bench.peers import PEER_EVENTS
    from bench.sessions import SESSION_EVENTS
    from cloche.bench.report import measure, run_events
    from cloche.bench.scenarios import EVENTS
    from cloche.core.record import replace

    own = (*EVENTS, *COMMAND_EVENTS, *SESSION_EVENTS, *LIVE_EVENTS, *OUTPUT_EVENTS)
    measure(setting, report, log, events=[event for event in own if event.name in setting.events])
    if setting.peers_folder is not None:
        peers = [event for event in PEER_EVENTS if event.name in setting.events] or PEER_EVENTS
        of_peers = replace(setting, runs=min(setting.runs, PEER_RUNS))
        report["left_after_peers"] = run_events(peers, of_peers, report, log)


if __name__ == "__main__":
    main()
