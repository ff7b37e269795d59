"""Who is asked about hosts that no rule names: nobody says yes to more than the operator lets anyone have."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any, cast

from cloche.core.ceilings import NetworkCeiling
from cloche.core.errors import PolicyDenied
from cloche.core.network import NetworkRules
from cloche.core.policy import Policy
from cloche.execution.network import AsyncNetwork

Decide = Callable[[str, int], Awaitable[bool]]


def test_nobody_is_asked_about_what_is_above_the_ceiling() -> None:
    """Nor about what no rule could allow; who says yes to everything opens what the ceiling names, and no more."""
    ceiling = NetworkCeiling(mode="allowlist", hosts=("*.good.example",))
    given: list[Decide] = []
    asked: list[tuple[str, int]] = []
    live: Any = SimpleNamespace(network_rules=NetworkRules(mode="allowlist"), decide_network=given.append)

    def check(rules: NetworkRules) -> None:
        if above := ceiling.excess(rules):
            raise PolicyDenied(above)

    async def say_yes(host: str, port: int) -> bool:
        asked.append((host, port))
        return True

    policy = Policy(network="allowlist", on_network="ask")
    AsyncNetwork(cast("Any", live), policy, check).ask(say_yes)

    async def answers() -> list[bool]:
        hosts = ("a.good.example", "evil.example", "good.example", "169.254.169.254", "10.0.0.5", "localhost")
        return [await given[0](host, 443) for host in hosts] + [await given[0]("a.good.example", 22)]

    assert asyncio.run(answers()) == [True, False, False, False, False, False, False]
    assert asked == [("a.good.example", 443)]
