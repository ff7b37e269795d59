"""A link that is cut without a word: both sides notice it in the time that the account names.

Caller and service are in a network namespace of the test, whose only link is set down while code runs.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from threading import Event

import pytest

import cloche
from cloche.backends.cloche import ClocheBackend
from cloche.core.errors import OutcomeUnknown
from cloche.core.remote import SILENCE_S, HiddenText, RemoteAccount
from tests.harness.remote import account_at
from tests.harness.service import serving

ROOT = Path(__file__).parents[2]
PATIENCE_S = 90.0
LATE_S = 20.0  # for a machine that does other things, too; what was silent for a minute was noticed after more
IN_A_NAMESPACE = ("unshare", "--net", "sh", "-c", 'ip link set lo up; exec "$@"', "sh")
SLEEPS = "print('up', flush=True)\nimport time; time.sleep(1000)"


def inside(home: str, silence_s: float) -> dict[str, float]:
    """Cut the link while code runs; return after how many seconds each side has noticed. Runs in the namespace."""
    with serving(Path(home)) as service:
        account = account_at(service.address, service.key, silence_s=silence_s)
        up, cut_at = Event(), 0.0

        def cut(*_: object) -> None:
            nonlocal cut_at
            subprocess.run(["ip", "link", "set", "lo", "down"], check=True)
            cut_at = time.monotonic()
            up.set()

        with pytest.raises(OutcomeUnknown, match="nothing was heard") as lost:
            cloche.run(SLEEPS, backend=ClocheBackend(account), timeout=600, on_output=cut)
        noticed_s = time.monotonic() - cut_at
        number = str(lost.value).partition("It is run ")[2].partition(":")[0]
        ended_s = _ended(service.database, number) - cut_at
        subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
        assert cloche.run("print(1)", backend=ClocheBackend(account)).ok  # the next one goes over a new connection
    return {"caller": noticed_s, "service": ended_s}


def _ended(database: Path, number: str) -> float:
    """Wait until the service has ended a run, as its records say, and return when."""
    import sqlite3

    ends = time.monotonic() + PATIENCE_S
    while time.monotonic() < ends:
        with sqlite3.connect(f"file:{database}?mode=ro", uri=True) as records:
            row = records.execute("SELECT status FROM runs WHERE id = ?", (number,)).fetchone()
        if row is not None and row[0] == "cancelled":
            return time.monotonic()
        time.sleep(0.05)
    raise AssertionError(f"the service has not ended {number}: {row}")


@pytest.mark.root
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "silence_s", [pytest.param(2.0, id="set"), pytest.param(SILENCE_S, id="default", marks=pytest.mark.soak)]
)
def test_a_link_that_is_cut_is_noticed_by_both_sides_in_time(tmp_path: Path, silence_s: float) -> None:
    """The caller gets OutcomeUnknown and the service ends the run, each when it has heard nothing for so long."""
    assert RemoteAccount(provider="cloche", api_key=HiddenText("key")).silence_s <= 10.0
    done = subprocess.run(
        [*IN_A_NAMESPACE, sys.executable, "-m", __name__, str(tmp_path), str(silence_s)],
        cwd=ROOT, capture_output=True, text=True, timeout=250, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    for side, seconds in json.loads(done.stdout.splitlines()[-1]).items():
        assert seconds < silence_s + LATE_S, f"the {side} noticed after {seconds:.1f} s"


if __name__ == "__main__":
    print(json.dumps(inside(sys.argv[1], float(sys.argv[2]))))
