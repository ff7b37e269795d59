"""The public conformance suite over E2B's package and wire, with a server of the tests' own at the other end."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from cloche.backends.e2b import E2BBackend
from cloche.core.enforcement import Level
from cloche.core.remote import HiddenText, RemoteAccount
from cloche.testing.conformance import CHECKS, Outcome, run_conformance
from tests.harness.e2b_server import KEY, serving

pytestmark = [pytest.mark.root, pytest.mark.timeout(600)]
# What docs/limitations/e2b.md says, by name.
DEVIATIONS = {"require": "what E2B says of itself is required with accept_claimed alone"}
SKIPPED = {"rollback", "fork"}  # no checkpoints
SOME = (
    "capabilities agree",
    "every control told",
    "exit code 3",
    "survivor: daemon",
    "out of memory in children",
    "batch",
    "session",
)
SOME_LIVE = ("live: background", "live: time-out", "live: memory", "live files: content", "session")


@pytest.fixture
def backend(tmp_path: Path) -> Iterator[E2BBackend]:
    """Give the backend with an account at a server, where nothing is left."""
    with serving(tmp_path / "tls") as server:
        yield E2BBackend(
            RemoteAccount(
                provider="e2b", api_key=HiddenText(KEY), url=server.url, sandbox_url=server.url,
                ca_file=str(tmp_path / "tls" / "ca.pem"),
            )
        )  # fmt: skip
        assert not server.sandboxes


@pytest.mark.parametrize("names", [pytest.param(SOME, id="some"), pytest.param((), id="all", marks=pytest.mark.soak)])
def test_e2b_conforms(backend: E2BBackend, names: tuple[str, ...]) -> None:
    """Every check is kept, but for deviations that are named and real."""
    deviations = {} if names else DEVIATIONS
    rows = run_conformance(backend, level=Level.VM, only=names, deviations=deviations, at_once=3)
    broken = [f"{row.outcome}: {row.check.name}: {row.reason}" for row in rows if not row.ok]
    assert not broken, "\n".join(broken)
    tried = {check.name for check in CHECKS} if not names else set(names)
    assert {row.check.name for row in rows if row.outcome is Outcome.SKIPPED} == SKIPPED & tried


@pytest.mark.parametrize(
    ("names", "skipped"),
    [
        pytest.param(SOME_LIVE, set(), id="some"),
        pytest.param((), SKIPPED | {"session apart"}, id="all", marks=pytest.mark.soak),
    ],
)
def test_sandboxes_that_live_conform(backend: E2BBackend, names: tuple[str, ...], skipped: set[str]) -> None:
    """Every check is kept, without a deviation."""
    rows = run_conformance(backend, only=names, deviations={}, at_once=3, is_live=True)
    broken = [f"{row.outcome}: {row.check.name}: {row.reason}" for row in rows if not row.ok]
    assert not broken, "\n".join(broken)
    assert {row.check.name for row in rows if row.outcome is Outcome.SKIPPED} == skipped
