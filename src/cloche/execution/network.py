"""The network of a live sandbox: its rules, which can be changed while it runs, and its traffic."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from cloche.core.enforcement import NetworkMode
from cloche.core.errors import InvalidRequest, PolicyDenied
from cloche.core.policy import Policy
from cloche.core.protocols import OpenLiveSandbox, SupportsNetwork

from .live import LiveOperations

if TYPE_CHECKING:
    from cloche.core.ceilings import NetworkCeiling
    from cloche.core.network import NetworkRules

CheckRules = Callable[["NetworkRules"], None]


class AsyncNetwork:
    """Change and watch the network of one live sandbox; `AsyncSandbox.network` returns it.

    await sandbox.network.allow("files.example.org")
    for row in await sandbox.network.traffic():
        print(row["host"], row["port"], row["is_allowed"], row["why"])
    """

    def __init__(self, live: SupportsNetwork, policy: Policy, check: CheckRules) -> None:
        self._live, self._policy, self._check = live, policy, check

    @property
    def rules(self) -> NetworkRules:
        """Return the current rules."""
        return self._live.network_rules

    async def allow(self, *rules: str) -> None:
        """Allow further hosts, in the form of `network_allow`, on ports that this sandbox already serves.

        In mode `allowlist` only allowed hosts can be reached; a denying rule takes precedence. Raises InvalidRequest
        for an invalid rule and for a port that is not served, PolicyDenied beyond the operator's ceiling.
        """
        await self._add(allow=rules)

    async def deny(self, *rules: str) -> None:
        """Deny hosts, in the form of `network_deny`, and close their connections. Raises InvalidRequest."""
        await self._add(deny=rules)

    async def replace(
        self, *, mode: NetworkMode = "allowlist", allow: Sequence[str] = (), deny: Sequence[str] = (),
        headers: Mapping[str, Mapping[str, str]] | None = None,
    ) -> None:  # fmt: skip
        """Replace all rules, also the mode, and close the connections that the new ones do not allow.

        Modes are `allowlist` and `open`; an empty allowlist reaches no host. `headers`, by host, are put into each HTTP
        request to it, in place of the program's own of these names: `{"api.example.org": {"Authorization": "..."}}`.
        They allow nothing, and need a sandbox that was opened with `secrets`, which may be empty. Raises as `allow`.
        """
        if mode not in ("allowlist", "open"):
            raise InvalidRequest(f"mode: {mode!r} cannot be set; use 'allowlist', whose list may be empty, or 'open'")
        now = self.rules
        new = now.replaced(mode=mode, allow=allow, deny=deny, headers=headers)
        self._check_ports(now, {port for rule in new.allow for port in rule.ports})
        self._check(new)
        await self._live.replace_network(mode=mode, allow=allow, deny=deny, headers=headers)

    async def _add(self, *, allow: Sequence[str] = (), deny: Sequence[str] = ()) -> None:
        now = self.rules
        new = now.with_further(allow=allow, deny=deny)
        self._check_ports(now, set(new.served_ports))
        self._check(new)
        await self._live.change_network(allow=allow, deny=deny)

    def _check_ports(self, now: NetworkRules, ports: set[int]) -> None:
        missing = sorted(ports - set(now.served_ports))
        if missing:
            raise InvalidRequest(
                f"network_allow: port {_listed(missing)} is not served in this sandbox, whose ports were chosen when "
                f"it was opened ({_listed(now.served_ports)}); open one with a rule that names it"
            )

    def ask(self, decide: Callable[[str, int], Awaitable[bool | None]]) -> None:
        """Let `decide` approve each host and port that no rule names; it is called once for each.

        The sandbox needs `on_network="ask"`. The guest's connection waits meanwhile, at most five minutes. `decide` is
        not called for denied hosts, for those that no rule could allow or that exceed the operator's ceiling, nor for
        addresses that are not public, which approval does not open. A name is resolved after approval, and may have
        such an address. A connection tried before `decide` was set is decided when it is tried again. None refuses
        a connection, too, and `decide` is called again for the next one. Raises InvalidRequest for a sandbox without
        `on_network="ask"`.
        """
        if self._policy.on_network != "ask":
            raise InvalidRequest(
                'network.ask: this sandbox refuses hosts without a rule; open it with on_network="ask" '
                "(onNetwork over REST)"
            )

        async def decide_within_ceiling(host: str, port: int) -> bool | None:
            return may_be_asked(self._check, host, port) and await decide(host, port)

        self._live.decide_network(decide_within_ceiling)

    async def traffic(self) -> Sequence[Mapping[str, Any]]:
        """Return the connections carried and refused since the sandbox was opened, as in `meta["network"]`.

        Raises OutcomeUnknown if the proxy process has died; the sandbox then reaches no host.
        """
        return await self._live.network_traffic()


def may_be_asked(check: CheckRules, host: str, port: int) -> bool:
    """Tell whether a host is within a ceiling, which `check` enforces."""
    from cloche.core.network import NetworkRules  # imported only for approvals

    try:
        check(NetworkRules.parse(mode="allowlist", allow=(f"{host}:{port}",)))
    except (InvalidRequest, PolicyDenied):
        return False
    return True


def _listed(ports: Sequence[int]) -> str:
    return ", ".join(map(str, ports))


class NetworkOperations(LiveOperations):
    """Access to a sandbox's network."""

    @property
    def network(self) -> AsyncNetwork:
        """Return the network of a live sandbox. Raises InvalidRequest if it has no network that can be changed."""
        live: OpenLiveSandbox = self._require_live("changing the network")
        if not isinstance(live, SupportsNetwork) or self.policy.network not in ("allowlist", "open"):
            raise InvalidRequest(
                f"network: this sandbox was opened with network {self.policy.network!r}, whose rules cannot change; "
                'open it with network="allowlist" (its list may be empty) or "open", on backend "local"'
            )
        # The sandbox keeps this function, which must not keep the caller's object alive.
        return AsyncNetwork(live, self.policy, partial(check_ceiling, self._prepared.settings.ceilings.get("network")))


def check_ceiling(ceiling: NetworkCeiling | None, rules: NetworkRules) -> None:
    """Raise PolicyDenied for rules that exceed the operator's ceiling."""
    above = ceiling.excess(rules) if ceiling is not None else ""
    if above:
        raise PolicyDenied(
            f"network: {above} is above the operator's ceiling (ceilings.network: {ceiling}); ask for less, or have "
            "the operator raise it"
        )
