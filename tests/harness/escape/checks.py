"""What is looked at besides an attempt's output: processes, time, files, a terminal."""

from __future__ import annotations

import os
import stat
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.harness.escape.attempts import Attempt, Verdict, judge
from tests.harness.escape.runners import Live, end_survivors, survivors

if TYPE_CHECKING:
    from tests.harness.escape.runners import Runner
    from tests.harness.escape.targets import Canaries

HANGS = (TimeoutError, subprocess.TimeoutExpired)
# Set the title or the clipboard, ask for an answer, a device string, clear, reset, and the one-byte forms.
COMMANDS = (b"\x1b]", b"\x1b[6n", b"\x1b[c", b"\x1bP", b"\x1b[2J", b"\x1bc", b"\xc2\x9b", b"\xc2\x9d")
LAST_WORD = b"CONTAINED looked everywhere"
BROKEN = 70  # the prelude's exit code for an attempt that is itself wrong
MAX_SAVED_BYTES = 96 << 20
GUEST_S = 60.0  # for a guest that changes a file for less than a second to have done so


def outlives(attempt: Attempt, runner: Runner, canaries: Canaries) -> Verdict:
    """Run, then look on the host for processes of that run; of a live sandbox, when it is closed."""
    seen = runner.run(attempt)
    if isinstance(runner, Live):
        runner.close()
    left = {pid for _ in range(3) for pid in survivors(seen.token)}
    end_survivors(seen.token)
    return Verdict(breach=f"{len(left)} processes outlived the run") if left else judge(seen, canaries)


def returns_by(seconds: float) -> Callable[[Attempt, Runner, Canaries], Verdict]:
    """Return a check in which the host must not wait longer than `seconds`, or than its patience with the runner.

    Whoever is to keep it waiting does so for `T["lingers_s"]`: in a sandbox much longer than the host's patience.
    """

    def check(attempt: Attempt, runner: Runner, canaries: Canaries) -> Verdict:
        began = time.monotonic()
        seen = runner.run(attempt)
        waited = time.monotonic() - began
        end_survivors(seen.token)
        late = Verdict(breach=f"the host waited {waited:.1f} s; {seen.status}")
        return late if waited > max(seconds, runner.patience_s) else judge(seen, canaries)

    return check


def captures_at_most(count: int) -> Callable[[Attempt, Runner, Canaries], Verdict]:
    """Return a check in which the host must not hold more than `count` characters of output."""

    def check(attempt: Attempt, runner: Runner, canaries: Canaries) -> Verdict:
        seen = runner.run(attempt)
        held = len(seen.stdout) + len(seen.stderr)
        if held > count:
            return Verdict(breach=f"the host holds {held} characters")
        verdict = judge(seen, canaries)
        return verdict if verdict.breach or seen.exit_code == BROKEN else Verdict(stopped_by=f"held {held} characters")

    return check


def saved(attempt: Attempt, runner: Runner, canaries: Canaries) -> Verdict:
    """Run, copy the files out, and look at what arrived."""
    return _save_into(attempt, runner, canaries, planted={})


def saved_over(planted: dict[str, str]) -> Callable[[Attempt, Runner, Canaries], Verdict]:
    """Return a check whose target already holds links: name to a key of the targets."""

    def check(attempt: Attempt, runner: Runner, canaries: Canaries) -> Verdict:
        return _save_into(attempt, runner, canaries, planted=planted)

    return check


def reads(path: str) -> Callable[[Attempt, Runner, Canaries], Verdict]:
    """Return a check in which the host reads a file back from a live workspace."""
    return _touches(lambda workspace, target: workspace.read_file(target), path)


def writes(path: str) -> Callable[[Attempt, Runner, Canaries], Verdict]:
    """Return a check in which the host writes a file into a live workspace."""
    return _touches(lambda workspace, target: workspace.write_file(target, b"harm\n"), path)


def _touches(touch: Callable[[Any, str], object], path: str) -> Callable[[Attempt, Runner, Canaries], Verdict]:
    def check(attempt: Attempt, runner: Runner, canaries: Canaries) -> Verdict:
        with runner.workspace(attempt) as workspace:
            seen = workspace.run(attempt.code)
            first = judge(seen, canaries)
            if first.breach or not first.stopped_by:
                return first
            return _look(lambda: touch(workspace, path.format(**canaries.targets)), runner, canaries)

    return check


def races(act: str) -> Callable[[Attempt, Runner, Canaries], Verdict]:
    """Return a check in which the host reads or writes `loot` while the guest keeps changing what it is."""

    def check(attempt: Attempt, runner: Runner, canaries: Canaries) -> Verdict:
        with runner.workspace(attempt) as workspace:
            guest = threading.Thread(target=workspace.run, args=(attempt.code,), daemon=True)
            guest.start()
            verdict = Verdict(stopped_by="lost every race")
            while guest.is_alive() and not verdict.breach:
                if act == "read":
                    verdict = _look(lambda: workspace.read_file("loot"), runner, canaries)
                else:
                    verdict = _look(lambda: workspace.write_file("loot", b"harm\n"), runner, canaries)
            guest.join(GUEST_S)
            return verdict

    return check


def _look(act: Callable[[], Any], runner: Runner, canaries: Canaries) -> Verdict:
    """Do something on the host, and say whether it hung, gave a secret away or did harm."""
    outcome = bounded(act, runner.patience_s)
    if isinstance(outcome, HANGS):
        return Verdict(breach="the host hangs")
    harm = canaries.harm() + [f"read {name}" for name, s in canaries.secrets.items() if s.encode() in _bytes(outcome)]
    return Verdict(breach="; ".join(harm), stopped_by=f"host: {_shown(outcome)}")


def _shown(outcome: object) -> str:
    """Return what may be printed: of content only its size, for it could be anything of the host's."""
    return f"{len(outcome)} bytes" if isinstance(outcome, bytes) else repr(outcome)[:200]


def _bytes(outcome: object) -> bytes:
    return outcome if isinstance(outcome, bytes) else b""


def bounded(act: Callable[[], Any], patience_s: float) -> Any:
    """Return what `act` returns or raises, or a TimeoutError when it takes too long."""
    outcome: list[Any] = [TimeoutError("took too long")]

    def work() -> None:
        try:
            outcome[0] = act()
        except Exception as error:
            outcome[0] = error

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(patience_s)
    return outcome[0]


def _save_into(attempt: Attempt, runner: Runner, canaries: Canaries, *, planted: dict[str, str]) -> Verdict:
    seen = runner.run(attempt)
    first = judge(seen, canaries)
    if first.breach or not first.stopped_by:
        return first
    # Where the host hangs it still writes there.
    with tempfile.TemporaryDirectory(prefix="escape-", dir="/tmp", ignore_cleanup_errors=True) as out:
        for name, target in planted.items():
            os.symlink(canaries.targets[target], os.path.join(out, name))
        outcome = bounded(lambda: seen.save(out), runner.patience_s + 10)  # a copier outside ends by its own bound
        if isinstance(outcome, HANGS):
            return Verdict(breach="the host hangs")
        found = [*canaries.harm(), *_arrived(Path(out), canaries, ignoring=set(planted))]
    return Verdict(breach="; ".join(found), stopped_by=f"{first.stopped_by}; host: {_shown(outcome)}")


def _arrived(out: Path, canaries: Canaries, *, ignoring: set[str]) -> list[str]:
    """Say what is wrong with the files that arrived."""
    found, total = [], 0
    for folder, folders, names in os.walk(out):
        for path in (Path(folder, name) for name in (*folders, *names) if name not in ignoring):
            facts = path.lstat()
            total += facts.st_blocks * 512
            found += _wrong(path, facts, canaries)
    return found + ([f"{total} bytes arrived"] if total > MAX_SAVED_BYTES else [])


def _wrong(path: Path, facts: os.stat_result, canaries: Canaries) -> list[str]:
    if stat.S_ISDIR(facts.st_mode):
        return []
    if not stat.S_ISREG(facts.st_mode):
        return [f"{path.name} arrived as {stat.filemode(facts.st_mode)}"]
    content = path.read_bytes() if facts.st_size < 1 << 20 else b""
    special = ["a set-user-ID file arrived"] if facts.st_mode & (stat.S_ISUID | stat.S_ISGID) else []
    return special + [f"{name} arrived" for name, secret in canaries.secrets.items() if secret.encode() in content]


def prints_to_terminal(attempt: Attempt, runner: Runner, canaries: Canaries) -> Verdict:
    """Run as a person would, on a terminal, and look for commands among what the terminal gets."""
    seen = runner.show(attempt)
    found = [repr(command) for command in COMMANDS if command in seen]
    if found:
        return Verdict(breach=f"the terminal got {found}")
    has_run = LAST_WORD in seen
    return Verdict(stopped_by="no command reached the terminal" if has_run else "", trace=seen.decode(errors="replace"))
