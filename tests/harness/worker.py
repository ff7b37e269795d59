"""Run the files of tests that scripts/gate.py hands out, one after the other, in one session of pytest.

A line of JSON asks for files or tests, and lines of JSON say what came of them. Each file is read by the process that
runs it alone. What is open for the whole session stays open from one file to the next: a daemon, a server, an image.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import socket
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.harness.outcome import Outcome

CPU = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)


class Nothing(pytest.Item):
    """Come after each file, so that what is open for the session stays, and in the end last of all."""

    def runtest(self) -> None:
        """Do nothing."""


class Worker:
    """Hold the connection by which it is asked; each engine's tests are of one worker, so that it is there once."""

    def __init__(self, config: pytest.Config, descriptor: int, outcome: Outcome):
        os.set_inheritable(descriptor, False)
        self._connection = socket.socket(fileno=descriptor)
        self._lines = self._connection.makefile("rb")
        self._config, self._outcome = config, outcome
        self._folders: dict[Path, pytest.Collector] = {}

    def _say(self, **fields: Any) -> None:
        self._connection.sendall(json.dumps(fields).encode() + b"\n")

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self, session: pytest.Session) -> bool:
        """Read nothing before it is asked for."""
        session.items = []
        return True

    @pytest.hookimpl(wrapper=True)
    def pytest_collect_directory(self, path: Path) -> Generator[None, pytest.Collector | None, pytest.Collector | None]:
        """Return the same node for a folder each time: to it belongs what its conftest.py defines."""
        folder = yield
        return folder and self._folders.setdefault(path, folder)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Run what is asked for until there is no more."""
        self._end = Nothing.from_parent(session, name="nothing")
        for line in self._lines:
            job = json.loads(line)
            used = self._used()
            try:
                other = self._run(session, job["tests"], job["engine"])
            except pytest.UsageError as error:
                self._say(failed=job["tests"][0], why=str(error), seconds=0.0)
                other = {}
            self._say(done=True, used=self._used() - used, other=other)
        self._protocol(self._end, None)
        return True

    def _run(self, session: pytest.Session, tests: Sequence[str], engine: str) -> dict[str, list[str]]:
        """Run tests, and return those of engines that another worker has, by engine."""
        gc.disable()
        try:
            items = session.perform_collect(tests)
        finally:
            gc.freeze()  # what stays to the end is left to no collector
            gc.enable()
        mine, other = [], dict[str, list[str]]()
        for item in items:
            needed = engine_of(item)
            if engine in ("any", needed):
                mine.append(item)
            else:
                other.setdefault(needed, []).append(item.nodeid)
        self._say(count=len(mine))
        for item, following in zip(mine, [*mine, self._end][1:], strict=True):
            self._protocol(item, following)
        return other

    def _protocol(self, item: pytest.Item, following: pytest.Item | None) -> None:
        self._config.hook.pytest_runtest_protocol(item=item, nextitem=following)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Say what begins, in case that nothing else is said any more."""
        self._say(begun=nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Say what came of a part of a test."""
        if report.failed:
            self._say(failed=report.nodeid, why=report.longreprtext, seconds=report.duration)
        elif report.skipped:
            expected = getattr(report, "wasxfail", None)
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
            self._say(skipped=report.nodeid, why=reason if expected is None else f"fails as expected: {expected}")
        elif report.nodeid != self._end.nodeid:
            self._say(passed=report.nodeid, part=report.when, seconds=report.duration)

    def pytest_deselected(self, items: Sequence[pytest.Item]) -> None:
        """Say what an ordinary user leaves out."""
        for item in items if os.geteuid() != 0 else ():
            if item.get_closest_marker("root") and not item.get_closest_marker("soak"):
                self._say(skipped=item.nodeid, why="needs root")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Say what cannot be read."""
        if report.failed:
            self._say(failed=report.nodeid, why=report.longreprtext, seconds=0.0)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self) -> None:
        """Say what was left behind."""
        self._say(left=self._outcome.left)

    @staticmethod
    def _used() -> float:
        used = [resource.getrusage(who) for who in CPU]
        return sum(one.ru_utime + one.ru_stime for one in used)


def engine_of(item: pytest.Item) -> str:
    """Return the engine that a test needs, gVisor's where it needs both kinds of container, or an empty text."""
    return next((name for name in ("machine", "gvisor", "docker") if name in item.stash.get(ENGINES_OF, ())), "")


ENGINES_OF = pytest.StashKey[frozenset[str]]()
