"""What runs cost in a plain container, as root and as an ordinary user: `python -m bench.container [--times N]`.

It starts a docker daemon of its own with docker's defaults, and an image of this host's packages, as the tests do
(tests/harness/containers.py); root alone can. Inside it is the contest of `python -m bench`. At the end come the cells
of README's table, a range where it was held several times.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.harness.containers import Daemon, command_inside, open_daemon

from .environments import install
from .tables import show_report
from .targets import (
    CELL,
    COLD,
    COMMAND,
    EXEC,
    EXEC_NAMED,
    FIRST,
    LIVE_COMMAND,
    NOTHING,
    OF_CONTAINER,
    PLAIN,
    WARM,
    Report,
    Rows,
    held_against,
)

USERS = {"root": "0:0", "uid 1000": "1000:1000"}
EVENTS = ("print", "start", "first", "session", "live")
IMAGE = "cloche-test:host"
PACKAGES = "/opt/site-packages"  # by that ending they are found, see environments.py
HOME = "/var/tmp/home"  # a user's own, in which what is measured of the host is kept
PROGRAM = """
import json, os, sys
from bench.environments import hold
os.mkdir(os.environ["HOME"], 0o700)
asked = json.loads(sys.argv[1])
print(json.dumps(hold(tuple(asked.pop("events")), asked)))
"""


def _over(first: str, second: str, part: str = "p50") -> Callable[[Rows], float]:
    return lambda rows: rows[first][part] / rows[second]["p50"]


def _more(rows: Rows) -> float:
    return float(rows[WARM]["per_second"] / rows[PLAIN]["per_second"])


# A row of README's, the event and the part of it, and how it is computed.
CELLS: tuple[tuple[str, str, str, Callable[[Rows], float]], ...] = (
    ("a warm run", "print", "rows", _over(WARM, PLAIN)),
    ("a warm run, p99", "print", "rows", _over(WARM, PLAIN, "p99")),
    ("a run of an open Sandbox", "print", "rows", _over("cloche, open sandbox", PLAIN)),
    ("four threads, runs a second", "print", "full_speed", _more),
    ("a cold run", "print", "rows", _over(COLD, PLAIN)),
    ("the first run of a process", "first", "rows", _over(FIRST, PLAIN)),
    ("a cell of a session", "session", "rows", _over(CELL, PLAIN)),
    ("exec in a live sandbox", "live", "rows", _over(LIVE_COMMAND, PLAIN)),
    ("cloche exec NAME -- true, processor time", "start", "rows", _over(EXEC_NAMED, NOTHING)),
    ("cloche run -c 'print(1)', processor time", "start", "rows", _over(COMMAND, NOTHING)),
    ("cloche exec -- true, processor time", "start", "rows", _over(EXEC, NOTHING)),
    ("a process with one cloche.run, processor time", "start", "rows", _over(f"{FIRST}, whole process", NOTHING)),
)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.container", description=__doc__)
    parser.add_argument("--times", type=int, default=1, help="how often all of it is held (default 1)")
    parser.add_argument("--rounds", type=int, default=100, help="turns of every contestant (default 100)")
    parser.add_argument("--runs", type=int, default=2000, help="runs from four threads, each side (default 2000)")
    parser.add_argument("--events", default=",".join(EVENTS), help=f"some of {','.join(EVENTS)} (default all)")
    options = parser.parse_args()
    asked = {"rounds": options.rounds, "runs": options.runs, "sessions": 0, "image": "", "peers_folder": None,
             "events": options.events.split(",")}  # fmt: skip
    reports: dict[str, list[Report]] = {who: [] for who in USERS}
    with open_daemon() as docker, tempfile.TemporaryDirectory(prefix="bench-", dir="/var/tmp") as folder:
        project, packages = _lay_out(Path(folder))
        for _ in range(options.times):
            for who, user in USERS.items():
                print(f"\nin a plain container, {who}", flush=True)
                reports[who].append(_hold(docker, project, packages, user, asked))
    _show_cells(reports)
    return 1 if any(report["leaks"] for held in reports.values() for report in held) else 0


def _lay_out(folder: Path) -> tuple[Path, Path]:
    """Return this benchmark as it is shown to a container, and Cloche with what it imports; both may be read by all."""
    project, packages = folder / "project", folder / "packages"
    shutil.copytree(Path(__file__).parent, project / "bench", ignore=shutil.ignore_patterns("__pycache__", "results"))
    install(packages)
    subprocess.run(["chmod", "-R", "go=rX", folder], check=True)
    return project, packages


def _hold(docker: Daemon, project: Path, packages: Path, user: str, asked: dict[str, Any]) -> Report:
    """Hold the events as a user of a container, show the report and return it."""
    options = [
        f"--user={user}",
        f"--volume={packages}:{PACKAGES}:ro",
        f"--env=PYTHONPATH=/opt/cloche:{PACKAGES}",
        f"--env=HOME={HOME}",
    ]
    words = ["python3", "-c", PROGRAM, json.dumps(asked)]
    command = command_inside(docker, project, words, image=docker.image(IMAGE), options=options)
    done = subprocess.run(command, stdout=subprocess.PIPE, check=False)
    if done.returncode != 0:
        raise SystemExit("the contest did not come to its end; what it said is above")
    report: Report = json.loads(done.stdout)
    show_report(report)
    for line in held_against(report, OF_CONTAINER):
        print(line)
    return report


def _show_cells(reports: dict[str, list[Report]]) -> None:
    """Print a row for each cell: over the plain process of the same turns."""
    print(f"\n| in a plain container | {' | '.join(reports)} |")
    print(f"|---|{'---|' * len(reports)}")
    for meaning, event, part, compute in CELLS:
        print(f"| {meaning} | {' | '.join(_range(held, event, part, compute) for held in reports.values())} |")


def _range(held: list[Report], event: str, part: str, compute: Callable[[Rows], float]) -> str:
    """Return the least and the most of all reports; "-" where a contestant was left out."""
    figures = []
    for one in (one for report in held for one in report["events"] if one["name"] == event):
        with contextlib.suppress(KeyError):
            figures.append(compute(one[part]))
    if not figures:
        return "-"
    least, most = f"{min(figures):.2f}", f"{max(figures):.2f}"
    return least if least == most else f"{least} to {most}"


if __name__ == "__main__":
    sys.exit(main())
