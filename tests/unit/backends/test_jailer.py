"""A monitor is never left without the keeper that ends it, nor a machine's /tmp as it was when it cannot be closed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cloche.backends import microvm
from cloche.backends.microsandbox.machine import plan_machine
from cloche.core.limits import Limits
from cloche.core.policy import Policy

KEEPER = Path(microvm.__file__).with_name("jailer.py")
BECOME = """
import os, runpy, sys
become = runpy.run_path(sys.argv[1])["become_monitor"]
keeper = os.fork()
if keeper == 0:
    os.close(1)  # which is waited for
    os.read(int(sys.argv[3]), 1)
    os._exit(0)
watched = os.pidfd_open(keeper)
if sys.argv[2] == "dead":
    os.kill(keeper, 9)
    os.waitid(os.P_PID, keeper, os.WEXITED | os.WNOWAIT)
become({"argv": ["/bin/sh", "-c", "echo started"], "user": 0, "cell": {}}, watched)
"""


@pytest.mark.parametrize(("state", "said"), [("dead", b""), ("alive", b"started\n")])
def test_a_monitor_starts_only_while_its_keeper_lives(state: str, said: bytes) -> None:
    """In a process namespace of its own no parent's number tells, for that is 0 before and after."""
    held, end = os.pipe()
    try:
        done = subprocess.run(
            [sys.executable, "-c", BECOME, str(KEEPER), state, str(held)],
            pass_fds=(held,),
            stdout=subprocess.PIPE,
            timeout=60,
            check=False,
        )
    finally:
        os.close(end)
        os.close(held)
    assert (done.stdout, done.returncode) == (said, 1 if state == "dead" else 0)


@pytest.mark.parametrize("refused", ["chown", "0700", "0755", "1777"])
@pytest.mark.parametrize("writable", [(), ("/tmp",)])
def test_what_cannot_be_prepared_in_a_machine_is_an_error(
    tmp_path: Path, refused: str, writable: tuple[str, ...]
) -> None:
    """Each step counts: a /tmp that stays open is not what was asked for."""
    for name in ("chown", "chmod"):
        (tmp_path / name).write_text(f'#!/bin/sh\necho "${{0##*/}} $*" >> {tmp_path}/done\ncase "{name} $*" in\n'
                                     f"  *{refused}*) exit 1 ;;\nesac\n")  # fmt: skip
        (tmp_path / name).chmod(0o755)
    policy = Policy(writable_paths=("/workspace", "/dev/shm", *writable))
    plan = plan_machine(policy, Limits(), image="some:1", labels={})
    done = subprocess.run(["/bin/sh", *plan.preparation()], env={"PATH": str(tmp_path)}, timeout=60, check=False)
    is_asked = refused in (tmp_path / "done").read_text()
    assert is_asked or refused == "0755"
    assert (done.returncode != 0) == is_asked
