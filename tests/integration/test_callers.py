"""Processes that call Cloche and have signals and limits of their own: sandboxes work, or an error says why not."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import zipapp
from pathlib import Path
from typing import Any

import pytest

import cloche

pytestmark = pytest.mark.user_soak

PROJECT = Path(__file__).parents[2]
# A caller that blocks all it can in its first thread, and ignores the rest: which processes of ours, and which guests,
# would begin with that? A terminal's interrupt has no handler here, as a server's has none.
SIGNALS = """
import json, os, signal, sys, cloche
from tests.harness.processes import descendants
level = sys.argv[1]
for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD}:
    signal.signal(number, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
SHOWS = '''
import signal
print(sorted(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, ()))),
    [int(one) for one in signal.valid_signals() if signal.getsignal(one) == signal.SIG_IGN])
'''
said = []
for warm in (False, True):
    options = {"level": level, "timeout": 60, "warm": warm}
    said += [cloche.run(SHOWS, **options).stdout]
    ends = cloche.run("kill -HUP $$; kill -INT $$; echo survived", language="bash", **options)
    said += [ends.exit_code, ends.stdout, cloche.run("yes | head -1", language="bash", **options).stderr]
if level == "jail":
    with cloche.Sandbox(network=["example.com"]) as sandbox:  # whose network has a process of its own
        said += [sandbox.exec(shell="kill -INT $$; echo survived").exit_code]
        with sandbox.session() as session:
            said += [session.run(SHOWS).stdout]
        blocking = []
        for pid in descendants(os.getpid()):
            with open(f"/proc/{pid}/status") as file:
                rows = dict(row.split(":", 1) for row in file)
            if int(rows["SigBlk"], 16):
                blocking.append(rows["Name"])
        said += [blocking]
print(json.dumps(said))
"""
# A guest closes the link by which its session is asked, and a caller with SIGPIPE's default asks it something.
BROKEN_LINK = """
import signal, cloche
signal.signal(signal.SIGPIPE, signal.SIG_DFL)
CLOSES = '''
import os
for fd in os.listdir("/proc/self/fd"):
    try:
        if os.readlink("/proc/self/fd/" + fd).startswith("socket:"): os.close(int(fd))
    except OSError: pass
'''
with cloche.Sandbox(live=False) as sandbox, sandbox.session() as session:
    try:
        session.run(CLOSES)
        session.run("1")
    except cloche.ClocheError as error:
        pass
print("lives")
"""
LIMITS = """
import json, resource, cloche
said = []
def limited(name, most, level, **options):
    before = resource.getrlimit(name)
    resource.setrlimit(name, (most, before[1]))
    try:
        result = cloche.run("print(1)", level=level, warm=False, **options)
        said.append(result.stdout or result.stderr)
    except cloche.ClocheError as error:
        said.append(f"{type(error).__name__}: {error}")
    finally:
        resource.setrlimit(name, before)
limited(resource.RLIMIT_FSIZE, 100_000, "jail")
limited(resource.RLIMIT_FSIZE, 2_000_000, "jail")
limited(resource.RLIMIT_FSIZE, 2_000_000, "jail", stdin=bytes(3_000_000))
limited(resource.RLIMIT_NOFILE, 24, "jail")
limited(resource.RLIMIT_NOFILE, 24, "confined")
limited(resource.RLIMIT_NOFILE, 64, "jail")
limited(resource.RLIMIT_AS, 300 << 20, "jail")
print(json.dumps(said))
"""

PACKED = """
import sys, cloche
try:
    cloche.run("print(1)")
except cloche.BackendUnavailable as error:
    print(error.reason, error.remedy, sep="|")
"""


def call(program: str, *words: str) -> str:
    """Run a program that calls Cloche, and return what it has printed."""
    done = subprocess.run(
        [sys.executable, "-c", program, *words], capture_output=True, text=True, check=False, timeout=200, cwd=PROJECT
    )
    assert done.returncode == 0, (done.returncode, done.stdout, done.stderr)
    return done.stdout


@pytest.mark.parametrize("level", ["jail", "confined"])
def test_a_callers_signal_mask_and_ignored_signals_reach_no_process_of_ours(level: str) -> None:
    """Finished code is no time-out, an interrupt ends a program, and Python alone ignores what it always ignores."""
    said = json.loads(call(SIGNALS, level))
    of_one_start = ["[] [13, 25]\n", 129, "", ""]
    of_a_life = [130, "[] [13, 25]\n", []] if level == "jail" else []
    assert said == [*of_one_start, *of_one_start, *of_a_life]


def test_a_guest_that_closes_its_link_ends_no_caller_with_the_default_of_sigpipe() -> None:
    """What is sent to it is an error, as it is where SIGPIPE is ignored."""
    assert call(BROKEN_LINK) == "lives\n"


def test_limits_of_the_caller_are_kept_or_named() -> None:
    """Runs work with few files, small files and few addresses; where they cannot, the error names limit and amount."""
    no_modules, small, no_stdin, no_jail, few, usual, narrow = json.loads(call(LIMITS))
    assert (small, few, usual, narrow) == ("1\n",) * 4
    assert no_modules.startswith("BackendUnavailable: ")
    assert "may write files of 100000 bytes (RLIMIT_FSIZE, ulimit -f)" in no_modules
    assert no_stdin.startswith("StartFailed: ")
    assert "may write files of 2000000 bytes" in no_stdin
    assert "may have 24 files open (RLIMIT_NOFILE, ulimit -n)" in no_jail


def test_in_a_zipapp_the_error_says_that_modules_must_be_files(tmp_path: Path) -> None:
    """What sandboxes start with is read as files, and an archive has none."""
    ours = Path(cloche.__file__).parent
    shutil.copytree(ours, tmp_path / "app/cloche", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "app/__main__.py").write_text(PACKED)
    zipapp.create_archive(tmp_path / "app", tmp_path / "app.pyz")
    done = subprocess.run([sys.executable, str(tmp_path / "app.pyz")], capture_output=True, text=True, check=True)
    reason, remedy = done.stdout.strip().split("|")
    assert reason == f"Cloche is imported from an archive, {tmp_path}/app.pyz, but its modules must be files."
    assert remedy == "Install Cloche with pip into a virtual environment, and run that one's python."


@pytest.mark.parametrize(
    ("begin", "reason"),
    [("sys.frozen = True", "this program was frozen"), ('sys.executable = ""', "this program embeds")],
)
def test_a_program_without_an_interpreter_starts_nothing(begin: str, reason: str) -> None:
    """Started again with an interpreter's words, a frozen program would run itself once more, and so on."""
    assert call(PACKED.replace("import sys, cloche", f"import sys; {begin}; import cloche")).startswith(reason)


@pytest.mark.parametrize(
    "make",
    [lambda: cloche.arun("print(1)"), lambda: cloche.AsyncSandbox().__aenter__(), lambda: cloche.AsyncSandbox().open()],
)
def test_without_asyncio_a_coroutine_says_what_to_do(make: Any) -> None:
    """In trio it is awaited as here, with no event loop of asyncio: the error names the blocking call in a thread."""
    with pytest.raises(cloche.InvalidRequest, match=r"await trio.to_thread.run_sync\(cloche.run, code\)"):
        make().send(None)
