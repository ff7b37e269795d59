"""A failure whose cause is the sandbox, and whose message misleads, comes with advice."""

from __future__ import annotations

import subprocess
import sys

import pytest

import cloche

pytestmark = [pytest.mark.both_users, pytest.mark.usefixtures("settings_of_nobody")]
MISLEADING = {
    "a file in /tmp": ("open('/tmp/a', 'w')", "$TMPDIR"),
    "a file that the caller wrote to /tmp": ("open('/tmp/page.txt')", "$TMPDIR"),
    "the workspace by its name": ("import os; os.listdir('/workspace')", "working directory"),
    "by a shell": ("import os; exit(os.system('echo > /tmp/a') >> 8)", "$TMPDIR"),
    "shared memory": ("open('/dev/shm/a', 'w')", "/dev/shm"),
    "a terminal": ("import os; os.openpty()", "terminal"),
    "a child's own process": (
        "import subprocess, sys; subprocess.run(['cat', '/proc/self/stat'], check=True)",
        "/proc",
    ),
}
NOT_OURS = {
    "the host's": "open('/etc/shadow')",
    "a name below its own": "open('missing')",
    "its own folder, by its path": "import os; open(os.path.abspath('missing'))",
    "its own temporary one": "import tempfile; open(tempfile.gettempdir() + '/missing')",
}


@pytest.mark.parametrize("name", MISLEADING)
def test_level_confined_says_what_helps(name: str) -> None:
    """What is the sandbox's own at level `jail` is the host's there; a result has the way round in its `meta`."""
    code, word = MISLEADING[name]
    result = cloche.run(code, level="confined", timeout=60)
    assert not result.ok
    assert word in result.meta["advice"], result.stderr


@pytest.mark.parametrize("name", NOT_OURS)
def test_what_does_not_mislead_has_no_advice(name: str) -> None:
    """The same words about another file are the program's own failure."""
    result = cloche.run(NOT_OURS[name], level="confined", timeout=60)
    assert (result.ok, result.meta.get("advice")) == (False, None), result.stderr


def test_a_module_that_is_missing_is_said_with_the_options_that_bring_it() -> None:
    """On the command line: where packages, and modules of the user's own, come from."""
    words = [sys.executable, "-m", "cloche", "run", "-c", "import no_such_module.below"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "no_such_module is not in the sandbox: --packages" in done.stderr.splitlines()[-1]
