"""Which runtime of a daemon a container gets, by what the daemon says of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest

from cloche.backends.docker.daemon import Daemon
from cloche.backends.docker.runtimes import choose_runtime, gvisor_runtime, why_not_preferred
from cloche.core.enforcement import Level
from cloche.core.errors import BackendUnavailable
from cloche.core.policy import Policy

SERVED = "runsc-network"


def a_daemon(default: str = "runc", **arguments: list[str]) -> Daemon:
    """Return a daemon that knows runtimes by these names, with underscores for dashes, and their arguments."""
    known = {"runc": {"path": "runc"}} | {
        name.replace("_", "-"): {"path": "runsc", "runtimeArgs": words} for name, words in arguments.items()
    }
    return cast(Daemon, SimpleNamespace(info={"Runtimes": known, "DefaultRuntime": default}))


@pytest.mark.parametrize(
    ("daemon", "name"),
    [
        (a_daemon(), ""),
        (a_daemon(runsc=[]), ""),
        (a_daemon(runsc=["--network=none"], runsc_network=["--network=host"]), SERVED),
        (a_daemon(runsc_network=["--debug", "-network", "host"]), SERVED),
        (a_daemon(runsc_network=["--network=host", "--network=none"]), ""),
        (a_daemon(runsc_network=["--overlay-network=host"]), ""),
        (a_daemon(runsc_network=["--network=hosted"]), ""),
        (a_daemon(runsc=["--network=host"]), "runsc"),
    ],
)
def test_a_network_is_served_on_a_runtime_with_the_hosts_stack(daemon: Daemon, name: str) -> None:
    """A stack of gVisor's own is out of reach, so it takes `--network=host` as the last word about it."""
    assert gvisor_runtime(daemon, is_served=True) == name


@pytest.mark.parametrize(
    ("daemon", "why"),
    [
        (a_daemon(), "does not know the runtime runsc-network. "),
        (a_daemon(runsc=[]), "its runsc has a network stack of its own, which nothing outside can serve"),
        (a_daemon(runsc_network=["--network=none"]), "runsc-network without --network=host among its runtimeArgs"),
    ],
)
def test_what_is_missing_is_named_with_the_remedy(daemon: Daemon, why: str) -> None:
    """Who asks for gVisor and a network is told what to register; who asks for neither level gets docker's own."""
    with pytest.raises(BackendUnavailable) as refused:
        choose_runtime(daemon, None, Level.GVISOR, is_served=True)
    assert why in str(refused.value)
    assert 'as a second runtime ("runsc install --runtime=runsc-network -- --network=host"' in str(refused.value)
    assert choose_runtime(daemon, None, None, is_served=True) == ("", Level.JAIL)


@pytest.mark.parametrize(
    ("daemon", "policy", "level", "why"),
    [
        (a_daemon(runsc=[]), Policy(network="open"), Level.JAIL, "its runsc has a network stack of its own"),
        (a_daemon(runsc=[]), Policy(network="bridge"), Level.JAIL, "docker's bridge"),
        (a_daemon(runsc=[]), Policy(network="open", level=Level.JAIL), Level.JAIL, ""),
        (a_daemon(runsc=[]), Policy(network="open", runtime="runc"), Level.JAIL, ""),
        (a_daemon(runsc=[]), Policy(), Level.GVISOR, ""),
        (a_daemon(), Policy(network="open"), Level.JAIL, ""),
    ],
)
def test_less_than_the_preferred_runtime_is_said(daemon: Daemon, policy: Policy, level: Level, why: str) -> None:
    """Where a daemon has gVisor and nobody asked for less, a container of docker's own has a reason (C3)."""
    said = why_not_preferred(daemon, policy, level)
    assert (why in said, bool(said)) == (True, bool(why))


def test_a_default_of_gvisors_is_not_taken_for_dockers_own() -> None:
    """Where the daemon takes gVisor by itself, a network that is served at level jail is runc's, by name."""
    daemon = a_daemon(default="runsc", runsc=[])
    assert choose_runtime(daemon, None, Level.JAIL, is_served=True) == ("runc", Level.JAIL)
    assert choose_runtime(daemon, None, Level.JAIL) == ("", Level.JAIL)
