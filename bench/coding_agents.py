"""What an agent's work costs in a sandbox of `cloche agent`, beside the same outside and in what others offer.

`python -m bench.coding_agents [--rounds N] [--folder DIR]`. Two real projects with their own tests are fetched once by
the ordinary clients of their registries: click by pip, qs by npm. A repository of 10,000 files is made. In each round
every row runs every work once, in turn; a program in the row's sandbox takes the time of the work alone. Then the
starts: from the command to the first instruction of an agent that notes the time, in the repository of 10,000 files.
Peers that are not there are left out: `srt` and `codex` on PATH.
"""

from __future__ import annotations

import argparse
import json
import os
import pty
import select
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

Rows = Mapping[str, Sequence[str]]
FILES, FOLDERS = 10_000, 100
START_S = 30.0
AGENT = """#!/bin/sh
while [ $# -gt 0 ] && [ "$1" != --work ]; do shift; done
if [ $# -gt 0 ]; then shift; exec "$@"; fi
date +%s.%N > "$PWD/started"
echo agent-is-up; read -r line
"""
TIMER = """
import json, subprocess, sys, time
seconds = {}
for name, argv in json.loads(sys.argv[1]).items():
    started = time.perf_counter()
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    seconds[name] = time.perf_counter() - started
    if done.returncode:
        sys.exit(f"{name}: {done.returncode}: {(done.stdout + done.stderr)[-600:].decode()}")
print("TIMES", json.dumps(seconds))
"""
SRT = {
    "network": {"allowedDomains": [], "deniedDomains": []},
    "filesystem": {"denyRead": [], "allowWrite": [".", "/tmp"], "denyWrite": []},
}


def main() -> None:
    """Measure and print a table; `--json FILE` writes all figures."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=Path.home() / "cloche-bench-agents")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    project = made(given.folder)
    os.environ["PATH"] = f"{given.folder}/agent/bin:{os.environ['PATH']}"
    rows = rows_of(given.folder)
    figures: dict[str, object] = {
        "work": work(rows, project, given.rounds),
        "start": starts(given.folder, given.rounds),
    }
    show(figures)
    if given.json:
        given.json.write_text(json.dumps(figures, indent=2))


def made(folder: Path) -> Path:
    """Return the project folder, made and filled if it is missing."""
    project = folder / "project"
    if not (project / "ready").exists():
        shutil.rmtree(folder, ignore_errors=True)
        project.mkdir(parents=True)
        _fetch(project)
        (folder / "agent/bin").mkdir(parents=True)
        (folder / "agent/bin" / "codex").write_text(AGENT)
        (folder / "agent/bin" / "codex").chmod(0o755)
        (folder / "srt.json").write_text(json.dumps(SRT))
        (project / "timer.py").write_text(TIMER)
        _repository(folder / "large")
        _git(project)
        (project / "ready").touch()
    return project


def _fetch(project: Path) -> None:
    """Fetch two projects with their tests: click's source distribution, and qs, whose package has its tests."""
    pip = [sys.executable, "-m", "pip"] if _has_pip() else [shutil.which("pip3") or "pip"]
    _do([*pip, "download", "-q", "--no-deps", "--no-binary", "click", "click==8.1.8"], project)
    _do(["tar", "xf", "click-8.1.8.tar.gz", "--strip-components=1"], project)
    uv = shutil.which("uv") or str(Path(sys.executable).with_name("uv"))
    _do([uv, "venv", "-q", "--python", "/usr/bin/python3", ".venv"], project)
    _do([uv, "pip", "install", "-q", "--python", ".venv/bin/python", "pytest==8.3.5", "-e", "."], project)
    (project / "js").mkdir()
    _do(["npm", "init", "-y", "--silent"], project / "js", quiet=True)
    _do(["npm", "install", "--silent", "--no-audit", "--no-fund", "qs@6.14.0", "tape@5.9.0", "has-override-mistake",
         "object-inspect", "iconv-lite", "safer-buffer", "es-value-fixtures", "mock-property", "has-bigints",
         "has-property-descriptors", "for-each", "has-proto", "has-symbols", "call-bound"], project / "js")  # fmt: skip


def _has_pip() -> bool:
    return subprocess.run([sys.executable, "-m", "pip", "--version"], capture_output=True, check=False).returncode == 0


def _repository(folder: Path) -> None:
    for number in range(FOLDERS):
        (folder / f"d{number}").mkdir(parents=True)
        for file in range(FILES // FOLDERS):
            (folder / f"d{number}" / f"f{file}.py").write_text(f"x = {number * file}\n")
    _git(folder)


def _git(folder: Path) -> None:
    (folder / ".gitignore").write_text(".venv/\nnode_modules/\n__pycache__/\n.pytest_cache/\nstarted\n")
    identity = ["-c", "user.name=Bench", "-c", "user.email=bench@example.com"]
    for words in (["init", "-q"], ["add", "-A"], [*identity, "commit", "-q", "-m", "All files of the benchmark"]):
        _do(["git", *words], folder)


def _do(command: Sequence[str], cwd: Path, *, quiet: bool = False) -> None:
    subprocess.run(command, cwd=cwd, check=True, stdout=subprocess.DEVNULL if quiet else None)


def rows_of(folder: Path) -> Rows:
    """Return the command before a program for each row that is there."""
    cloche = str(Path(sys.executable).with_name("cloche"))
    rows: dict[str, Sequence[str]] = {"outside": (), "cloche": (cloche, "agent", "codex", "--", "--work")}
    if (srt := shutil.which("srt")) is not None:
        rows["srt"] = (srt, "--settings", f"{folder}/srt.json")
    codex = next((path for path in _all("codex") if not path.startswith(str(folder))), None)
    if codex is not None:
        rows["codex sandbox"] = (codex, "sandbox", "-c", 'sandbox_mode="workspace-write"')
    return rows


def _all(name: str) -> list[str]:
    return [path for part in os.environ["PATH"].split(":") if os.access(path := f"{part}/{name}", os.X_OK)]


def work(rows: Rows, project: Path, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Return the seconds of each work in each row, in turns; a row that cannot do it is left out, with the reason."""
    node = shutil.which("node") or "node"
    works = {
        "pytest": [str(project / ".venv/bin/python"), "-m", "pytest", "-q", "-x", "tests"],
        "npm test": ["sh", "-c", f"cd js/node_modules/qs && {node} ../../node_modules/tape/bin/tape 'test/**/*.js'"],
        "git status": ["git", "-C", f"{project}", "status", "--short"],
    }
    seconds: dict[str, dict[str, list[float]]] = {row: {name: [] for name in works} for row in rows}
    for _ in range(rounds):
        for row, before in list(rows.items()):
            if row not in seconds:
                continue
            argv = [*before, "/usr/bin/python3", str(project / "timer.py"), json.dumps(works)]
            done = subprocess.run(argv, cwd=project, capture_output=True, text=True, check=False,
                                  stdin=subprocess.DEVNULL, timeout=600)  # fmt: skip
            line = next((line for line in done.stdout.splitlines() if line.startswith("TIMES ")), None)
            if line is None:
                print(f"{row} is left out: {(done.stderr or done.stdout)[-300:]}", file=sys.stderr)
                del seconds[row]
                continue
            for name, value in json.loads(line.removeprefix("TIMES ")).items():
                seconds[row][name].append(value)
    return seconds


def starts(folder: Path, rounds: int) -> dict[str, list[float]]:
    """Return the seconds from the command to the agent's first instruction: the first start of a sandbox, and again."""
    cloche, large = str(Path(sys.executable).with_name("cloche")), folder / "large"
    seconds: dict[str, list[float]] = {"python -c pass": [], "first": [], "again": []}
    name = ""
    for _ in range(rounds):
        if name:
            subprocess.run([cloche, "sandbox", "kill", "--force", name], capture_output=True, check=False)
        began = time.perf_counter()
        subprocess.run([sys.executable, "-c", "pass"], check=True)
        seconds["python -c pass"].append(time.perf_counter() - began)
        name = name or _name(cloche, large)
        for kind in ("first", "again", "again"):
            seconds[kind].append(_start([cloche, "agent", "codex"], large, cloche, name))
    subprocess.run([cloche, "sandbox", "kill", "--force", name], capture_output=True, check=False)
    return seconds


def _name(cloche: str, folder: Path) -> str:
    subprocess.run([cloche, "agent", "codex", "--", "--work", "true"], cwd=folder, check=True, capture_output=True)
    rows = json.loads(subprocess.run([cloche, "ps", "--json"], check=True, capture_output=True).stdout)
    name = next(str(row["name"]) for row in rows if row["name"].startswith("codex-large-"))
    subprocess.run([cloche, "sandbox", "kill", "--force", name], check=True, capture_output=True)
    return name


def _start(command: Sequence[str], cwd: Path, cloche: str, name: str) -> float:
    began = time.time()
    pid, fd = pty.fork()
    if pid == 0:
        os.chdir(cwd)
        os.execvp(command[0], list(command))
    shown, sent, ends = b"", False, time.time() + START_S
    while time.time() < ends and b"discard" not in shown and b"was changed" not in shown:
        if not select.select([fd], [], [], 0.2)[0]:
            continue
        try:
            shown += os.read(fd, 65536)
        except OSError:
            break
        if b"agent-is-up" in shown and not sent:
            os.write(fd, b"end\r")
            sent = True
    os.write(fd, b"k\r")
    time.sleep(0.5)
    os.close(fd)
    os.waitpid(pid, 0)
    text = subprocess.run([cloche, "exec", name, "--", "cat", f"{cwd}/started"], capture_output=True, check=True).stdout
    return float(text) - began


def show(figures: Mapping[str, object]) -> None:
    """Print medians, and their ratios to the row outside."""
    seconds = figures["work"]
    assert isinstance(seconds, dict)
    for row, works in seconds.items():
        parts = [
            f"{name} {statistics.median(values) * 1000:,.0f} ms"
            f" ({statistics.median(values) / statistics.median(seconds['outside'][name]):.2f})"
            for name, values in works.items()
        ]
        print(f"{row:15} {', '.join(parts)}")
    starting = figures["start"]
    assert isinstance(starting, dict)
    for kind, values in starting.items():
        print(f"{kind:15} {statistics.median(values) * 1000:,.0f} ms, at most {max(values) * 1000:,.0f}")


if __name__ == "__main__":
    main()
