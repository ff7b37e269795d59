"""What a session of tests left behind: a failure that no second look takes back.

Each process that runs tests looks for what it left: the one there is, or each worker of pytest-xdist or of
scripts/gate.py. Those of the latter have an adopter of their own (scripts/adopt.py), and so know their processes from
others' workers'.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.harness.leaks import Snapshot, wait_for_leftovers

PATIENCE_S = 10


class Outcome:
    """Hold what was there before, and what was `left` in the end."""

    def __init__(self, config: pytest.Config):
        self._output: dict[str, Any] | None = getattr(config, "workeroutput", None)
        is_controller = self._output is None and config.getoption("dist", "no") != "no"
        self._before = None if is_controller else Snapshot.take()
        self.left: list[str] = []

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Take over what a worker found: what has no owner any more, several find."""
        found = getattr(node, "workeroutput", {}).get("left", [])
        self.left += [line for line in found if line not in self.left]

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Look for what this process left behind, unless somebody interrupted it, who would wait for that."""
        if self._before is not None and session.exitstatus != pytest.ExitCode.INTERRUPTED:
            self.left += wait_for_leftovers(self._before, patience_s=PATIENCE_S)
        if self._output is not None:
            self._output["left"] = self.left
        elif self.left and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print what was left behind."""
        if self.left:
            terminalreporter.section("left behind")
            for line in self.left:
                terminalreporter.line(line)
