"""How the command line ends, again and again."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.soak


def test_no_end_is_aborted() -> None:
    """Threads of a library's own come back at any time, also into an interpreter that is being taken apart."""
    program = [sys.executable, "-m", "cloche", "gc"]
    for _ in range(20):
        running = [
            subprocess.Popen(program, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) for _ in range(4)
        ]
        ends = [(one.communicate(timeout=60)[1], one.returncode) for one in running]
        assert [code for _, code in ends] == [0] * 4, ends
