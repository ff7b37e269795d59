"""The public conformance suite over a service: `cloche serve` in a process of its own, and its wire over TLS."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from cloche.backends.cloche import ClocheBackend
from cloche.core.protocols import Backend
from cloche.core.remote import RemoteAccount
from cloche.testing.conformance import CHECKS, LIVE_CHECKS, Outcome, run_conformance
from tests.harness.node import Node
from tests.harness.remote import serving_tls

# What docs/limitations/cloche.md says, by name.
OWN_LIMIT = "a service settles the sizes of /tmp and of a flood by itself"
CLAIMED = "what a service says of itself is claimed: it may be required with accept_claimed alone"
DEVIATIONS = {
    **dict.fromkeys(("out of memory in children", "output limit", "flood on stderr", "output is true"), OWN_LIMIT),
    "cell floods": OWN_LIMIT,
    "require": CLAIMED,
    "capabilities agree": "nobody is asked before the first run, so what a service says comes with its results",
}
LIVE_DEVIATIONS = {"live: disk": OWN_LIMIT, "cell floods": OWN_LIMIT}
# What tells nothing here: CPU time on a busy machine; what is left on this host, where the service keeps things ready;
# and what is in /tmp, where the service was started from a folder below it.
UNTELLING = ("cpu is true", "nothing left", "live files: streams")
# What is part of each test run.
ALWAYS = (
    "exact bytes", "value", "silence", "signal kill", "exit code 3", "timeout", "truncation", "modes", "odd names out",
    "survivor: child", "workspace lives", "cancellation", "file errors", "streaming", "every control told", "batch",
)  # fmt: skip
LIVE_ALWAYS = (
    "live: background", "live: terminal", "live: ports", "live: attach", "live: fresh runs", "live: cancelled",
    "live files: content", "live files: watch", "live files: errors", "live files: stopped", "cell shows", "session",
    "fork",
)  # fmt: skip


@pytest.fixture(scope="module")
def account(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RemoteAccount]:
    """Serve for all tests of this module."""
    with serving_tls(tmp_path_factory.mktemp("service")) as (_, one):
        yield one


@pytest.mark.timeout(900)
@pytest.mark.parametrize("names", [pytest.param(ALWAYS, id="some"), pytest.param((), id="all", marks=pytest.mark.soak)])
def test_a_service_conforms(account: RemoteAccount, names: tuple[str, ...]) -> None:
    """Every check is kept, but for deviations that are named and real; throwaway sandboxes have no sessions."""
    chosen = names or tuple(check.name for check in CHECKS if check.name not in UNTELLING)
    check(ClocheBackend(account), chosen, DEVIATIONS, skipped={one.name for one in CHECKS if one.family == "sessions"})


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "names", [pytest.param(LIVE_ALWAYS, id="some"), pytest.param((), id="all", marks=pytest.mark.soak)]
)
def test_sandboxes_that_live_conform(account: RemoteAccount, names: tuple[str, ...]) -> None:
    """Every check is kept, but for deviations that are named and real."""
    chosen = names or tuple(check.name for check in LIVE_CHECKS if check.name not in UNTELLING)
    check(ClocheBackend(account), chosen, LIVE_DEVIATIONS, is_live=True)


@pytest.mark.timeout(900)
@pytest.mark.soak
def test_a_node_of_a_fleet_conforms(tmp_path: Path) -> None:
    """The same by a lease, over the wire of `cloche node`."""
    node = Node(tmp_path)
    try:
        node.ask("node.keep", denied=["10.77.0.1"], ttl=900)
        backend = node.backend(for_s=900)
        check(backend, ALWAYS, DEVIATIONS)
        check(backend, LIVE_ALWAYS, LIVE_DEVIATIONS, is_live=True)
    finally:
        node.end()


def check(
    backend: Backend,
    names: tuple[str, ...],
    deviations: dict[str, str],
    *,
    skipped: set[str] = frozenset(),  # type: ignore[assignment]
    is_live: bool = False,
) -> None:
    """Try the checks, and expect that no other is skipped."""
    named = {name: why for name, why in deviations.items() if name in names}
    rows = run_conformance(backend, only=names, deviations=named, at_once=3, is_live=is_live)
    broken = [f"{row.outcome}: {row.check.name}: {row.reason}" for row in rows if not row.ok]
    assert not broken, "\n".join(broken)
    assert {row.check.name for row in rows if row.outcome is Outcome.SKIPPED} <= skipped
