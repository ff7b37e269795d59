"""The network of a sandbox that lives: what it may reach, also changed while it runs, and what it has carried."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from cloche.core.errors import InvalidRequest, PolicyDenied
from cloche.core.policy import Policy
from cloche.core.protocols import OpenLiveSandbox, SupportsNetwork

from .live import LiveOperations

if TYPE_CHECKING:
    from cloche.core.ceilings import NetworkCeiling
    from cloche.core.network import NetworkRules

CheckRules = Callable[["NetworkRules"], None]


class AsyncNetwork:
    """Change and watch the network of one sandbox that lives; `AsyncSandbox.network` returns it.

    await sandbox.network.allow("files.example.org")
    for row in await sandbox.network.traffic():
        print(row["host"], row["port"], row["is_allowed"], row["why"])
    """

    def __init__(self, live: SupportsNetwork, policy: Policy, check: CheckRules) -> None:
        self._live, self._policy, self._check = live, policy, check

    @property
    def rules(self) -> NetworkRules:
        """Return what decides now."""
        return self._live.network_rules

    async def allow(self, *rules: str) -> None:
        """Allow further hosts, as `network_allow` has them, on ports that are served here already.

        In mode `allowlist` that is what may be reached; a denying rule still wins. Raises InvalidRequest for a wrong
        rule and for a port that is not served, PolicyDenied for more than the operator's ceiling.
        """
        await self._add(allow=rules)

    async def deny(self, *rules: str) -> None:
        """Deny hosts, as `network_deny` has them; their connections are closed. Raises InvalidRequest."""
        await self._add(deny=rules)

    async def _add(self, *, allow: Sequence[str] = (), deny: Sequence[str] = ()) -> None:
        now = self.rules
        new = now.with_further(allow=allow, deny=deny)
        missing = sorted(set(new.served_ports) - set(now.served_ports))
        if missing:
            raise InvalidRequest(
                f"network_allow: port {_listed(missing)} is not served in this sandbox, whose ports were chosen when "
                f"it was opened ({_listed(now.served_ports)}); open one with a rule that names it"
            )
        self._check(new)
        await self._live.change_network(allow=allow, deny=deny)

    def ask(self, decide: Callable[[str, int], Awaitable[bool]]) -> None:
        """Have `decide` say whether a host and port may be reached that no rule names; each is asked about once.

        It takes a sandbox with `on_network="ask"`. The guest's connection waits meanwhile, five minutes at most. A
        denying rule is not asked about, nor is what no rule could allow or the operator's ceiling does not let through,
        nor an address that is not public, which a yes does not open. A name is looked up after the yes, and may have
        such an address. What was tried before somebody could be asked is asked about when it is tried again.
        Raises InvalidRequest for a sandbox that does not ask.
        """
        if self._policy.on_network != "ask":
            raise InvalidRequest('network.ask: this sandbox refuses what no rule names; open it with on_network="ask"')

        async def decide_within_ceiling(host: str, port: int) -> bool:
            return may_be_asked(self._check, host, port) and await decide(host, port)

        self._live.decide_network(decide_within_ceiling)

    async def traffic(self) -> Sequence[Mapping[str, Any]]:
        """Return what was carried and refused since the sandbox was opened, as `meta["network"]` has it.

        Raises OutcomeUnknown where the process that carries it is gone; nothing is reached any more then.
        """
        return await self._live.network_traffic()


def may_be_asked(check: CheckRules, host: str, port: int) -> bool:
    """Tell whether a yes about a host would be within a ceiling, which `check` holds rules against."""
    from cloche.core.network import NetworkRules  # only where somebody is asked

    try:
        check(NetworkRules.parse(mode="allowlist", allow=(f"{host}:{port}",)))
    except (InvalidRequest, PolicyDenied):
        return False
    return True


def _listed(ports: Sequence[int]) -> str:
    return ", ".join(map(str, ports))


class NetworkOperations(LiveOperations):
    """Reach a sandbox's network."""

    @property
    def network(self) -> AsyncNetwork:
        """Return the network of a sandbox that lives. Raises InvalidRequest where it has none that can be changed."""
        live: OpenLiveSandbox = self._require_live("changing the network")
        if not isinstance(live, SupportsNetwork) or self.policy.network not in ("allowlist", "open"):
            raise InvalidRequest(
                f"network: this sandbox was opened with network {self.policy.network!r}, which nothing serves; open it "
                'with network="allowlist" (its list may be empty) or "open", on backend "local"'
            )
        # The sandbox keeps that, and must not keep the object that its caller has.
        return AsyncNetwork(live, self.policy, partial(check_ceiling, self._prepared.settings.ceilings.get("network")))


def check_ceiling(ceiling: NetworkCeiling | None, rules: NetworkRules) -> None:
    """Raise PolicyDenied for what is more than the operator lets anybody have."""
    above = ceiling.excess(rules) if ceiling is not None else ""
    if above:
        raise PolicyDenied(
            f"network: {above} is above the operator's ceiling (ceilings.network: {ceiling}); ask for less, or have "
            "the operator raise it"
        )
