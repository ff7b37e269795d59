"""Run the project's own benchmark: `python -m bench [--rounds N] [--runs N] [--peers] [--json FILE] [--plot FILE]`.

It is that of `cloche bench` and more, in fresh virtual environments, so that no package of the development environment
slows any contestant. Contestants take turns, so that a slow moment of the machine hits all of them. From root an
ordinary user runs the first part of it, before all else: that is who Cloche is for.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from cloche.bench.report import check_plot, write_plot
from cloche.core.errors import ClocheError
from cloche.hostfs import open_named

from .environments import ORDINARY_USER, Report, hold, hold_as_user
from .tables import show_report
from .targets import OF_ORDINARY_USER, held_against

PEERS_FOLDER = "~/.cache/cloche-bench"  # where scripts/bench_peers.sh installs them
IMAGE_VARIABLE = "CLOCHE_BENCH_IMAGE"
IMAGE = "cloche-bench:local"
OF_OUTPUT = ("lines 100", "lines 1000", "lines 10000", "lines million", "answered")
BARE = ("print", "command", "start", "import", "first", "session", *OF_OUTPUT)
WITH_PACKAGES = ("pandas", "data")
OF_PEERS = ("peers", "containers", "peer cells")
OF_USER = ("print", "command", "start", "first")


def main() -> int:
    options = _options()
    if options.plot:
        try:
            check_plot(options.plot)
        except ClocheError as error:
            raise SystemExit(str(error)) from None
    users = _measure_as_user(options) if os.geteuid() == 0 else {}
    report = _measure(options)
    if users:
        report["ordinary_user"] = users
        report["leaks"] += users["leaks"]
    show_report(report)
    for line in held_against(report):
        print(line)
    if options.json:
        open_named(options.json, f"{json.dumps(report)}\n".encode()).close()
    if options.plot:
        write_plot(report, options.plot)
    return 1 if report["leaks"] else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--rounds", type=int, default=100, help="turns of every contestant (default 100)")
    parser.add_argument("--runs", type=int, default=2000, help="runs from four threads, each side (default 2000)")
    parser.add_argument("--sessions", type=int, default=0, help="live sessions at once (default 0: not measured)")
    parser.add_argument(
        "--events",
        help=f"some of {','.join((*BARE, *WITH_PACKAGES))} (default all); with "
        f"--peers of {','.join(OF_PEERS)} too (all, unless one is named)",
    )
    parser.add_argument("--peers", action="store_true", help="let the peers take part that are installed")
    parser.add_argument("--peers-folder", default=PEERS_FOLDER, help=f"where they are (default {PEERS_FOLDER})")
    parser.add_argument("--json", help="write all figures to this file")
    parser.add_argument("--plot", help="draw them to this file, .png or .svg; needs matplotlib")
    return parser.parse_args()


def _asked(options: argparse.Namespace) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Return the events that are wanted, and the setting of them all."""
    wanted = tuple(options.events.split(",")) if options.events is not None else (*BARE, *WITH_PACKAGES)
    image = os.environ.get(IMAGE_VARIABLE) or IMAGE
    return wanted, {"rounds": options.rounds, "runs": options.runs, "peers_folder": None, "sessions": options.sessions,
                    "image": image}  # fmt: skip


def _measure_as_user(options: argparse.Namespace) -> Report:
    """Hold and show what an ordinary user holds, if any of it is wanted; else return nothing."""
    wanted, asked = _asked(options)
    events = tuple(name for name in wanted if name in OF_USER)
    if not events:
        return {}
    try:
        report = hold_as_user(events, asked | {"sessions": 0})
    except LookupError as error:
        print(f"as an ordinary user: left out: {error}")
        return {}
    print(f"as an ordinary user (uid {ORDINARY_USER})")
    show_report(report)
    for line in held_against(report, OF_ORDINARY_USER):
        print(line)
    print("\nas root")
    return report


def _measure(options: argparse.Namespace) -> Report:
    """Hold the events in the environments that they need, and return one report."""
    wanted, asked = _asked(options)
    second = hold(tuple(name for name in wanted if name in WITH_PACKAGES), asked, has_packages=True)
    if options.peers:
        asked["peers_folder"] = str(Path(options.peers_folder).expanduser().resolve())
    report = hold(tuple(name for name in wanted if name in (*BARE, *OF_PEERS)), asked)
    own = sum(event["name"] in BARE for event in report["events"])  # what follows are peers
    report["events"][own:own] = second["events"]
    report["leaks"] += second["leaks"]
    return report


if __name__ == "__main__":
    sys.exit(main())
