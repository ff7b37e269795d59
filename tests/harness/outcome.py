"""What came of a session of tests, for the terminal and for scripts/gate.py: counts, failures, and what was left.

Each process that runs tests looks for what it left: the one there is, or each worker of pytest-xdist, which has an
adopter of its own then (scripts/adopt.py) and so knows its processes from those of other workers. The controller
collects what they say. What is left behind is a failure that no second look takes back.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from _pytest.nodeid import NodeId

from tests.harness.leaks import Snapshot, wait_for_leftovers

GROUP = "together-"
PATIENCE_S = 10


def keep_together(item: pytest.Item, groups: Iterable[str]) -> None:
    """Have one worker run all tests of these groups: their names, by which xdist shares them out, end with the group's.

    What xdist's own mark does, it does to a name that this pytest does not read any more.
    """
    if hasattr(item.config, "workerinput") and groups:
        item._id = NodeId.parse(f"{item.nodeid}@{GROUP}{'-'.join(sorted(groups))}")


class Outcome:
    """Hold what is known so far; `path` is where it is written to, if anywhere."""

    def __init__(self, config: pytest.Config, path: str):
        self._path = path
        self._output: dict[str, Any] | None = getattr(config, "workeroutput", None)
        is_controller = self._output is None and config.getoption("dist", "no") != "no"
        self._before = None if is_controller else Snapshot.take()
        self._passed = self._skipped = 0
        self._failed: dict[str, None] = {}
        self._left: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count a test. Its name has that of its group behind it."""
        self._passed += report.passed and report.when == "call"
        self._skipped += report.skipped
        if report.failed:
            self._failed[report.nodeid.partition(f"@{GROUP}")[0]] = None

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Count a module that cannot be read as a failure."""
        if report.failed:
            self._failed[report.nodeid] = None

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Take over what a worker found: what has no owner any more, several find."""
        found = getattr(node, "workeroutput", {}).get("left", [])
        self._left += [line for line in found if line not in self._left]

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Look for what this process left behind, and say or write down all."""
        if self._before is not None:
            self._left += wait_for_leftovers(self._before, patience_s=PATIENCE_S)
        if self._output is not None:
            self._output["left"] = self._left
            return
        if self._left and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        if self._path:
            counts = {"passed": self._passed, "skipped": self._skipped}
            Path(self._path).write_text(json.dumps({**counts, "failed": list(self._failed), "left": self._left}))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print what was left behind."""
        _print(terminalreporter, "left behind", self._left)


def _print(reporter: pytest.TerminalReporter, title: str, lines: Iterable[str]) -> None:
    if lines:
        reporter.section(title)
        for line in lines:
            reporter.line(line)
