"""Servers that an agent has started in its sandbox, found by themselves, and forwarded to this host's loopback."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from contextlib import suppress

from cloche.core.errors import InvalidRequest
from cloche.core.policy import Policy
from cloche.core.processes import ListeningPort
from cloche.execution.ports import AsyncForward
from cloche.execution.sandbox import AsyncSandbox

NAME_SERVER_PORT, FIRST_UNPRIVILEGED = 53, 1024
LOOPBACK = ("127.0.0.1", "0.0.0.0", "::1", "::")  # noqa: S104 - addresses at which a forwarded port reaches a server
MOST_FORWARDS, LOOK_S = 32, 1.0


def dev_servers(ports: Iterable[ListeningPort], policy: Policy) -> list[int]:
    """Return the ports of an agent's own servers: not those at which Cloche serves the sandbox's network."""
    served = {NAME_SERVER_PORT, *policy.network_rules().served_ports}
    return sorted({port.port for port in ports if port.port not in served and port.address in LOOPBACK})


async def forward_all(sandbox: AsyncSandbox, tell: Callable[[str], None], *, look_s: float = LOOK_S) -> None:
    """Forward each server while it listens, at the same number if that is free here, until this is cancelled."""
    forwards: dict[int, AsyncForward] = {}
    try:
        while True:
            found = dev_servers(await sandbox.ports(), sandbox.policy)[:MOST_FORWARDS]
            for port in [port for port in forwards if port not in found]:
                await forwards.pop(port).close()
                tell(f"{port} has ended")
            for port in found:
                if port not in forwards:
                    forwards[port] = await _forward(sandbox, port)
                    tell(f"{port} is at http://127.0.0.1:{forwards[port].host_port}")
            await asyncio.sleep(look_s)
    finally:
        for forward in forwards.values():
            await forward.close()


async def _forward(sandbox: AsyncSandbox, port: int) -> AsyncForward:
    with suppress(InvalidRequest):  # taken here
        if port >= FIRST_UNPRIVILEGED:
            return await sandbox.forward(port, port)
    return await sandbox.forward(port)
