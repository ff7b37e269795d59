"""A sandbox's network, for every backend that has one: its rules, its egress process, and the origin of its sockets."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from cloche.core.enforcement import NetworkMode
from cloche.core.errors import ClocheError, StartFailed
from cloche.core.policy import Policy
from cloche.egress.client import KeptNetwork, SandboxNetwork, join_network, open_network, operator_proxies
from cloche.egress.ledger import Sum
from cloche.egress.windows import SharedNetwork
from cloche.jail.network import NAME_SERVER, open_sockets
from cloche.jail.steps import StepFailed
from cloche.jail.syscalls import CLONE_NEWNET, call

from .certificates import files_and_variables, variables_here
from .host import with_limit

if TYPE_CHECKING:
    from cloche.core.network import NetworkRules

log = logging.getLogger("cloche.egress")
SERVED: tuple[NetworkMode, ...] = ("allowlist", "open")
NAME_SERVER_ADDRESS = ".".join(map(str, NAME_SERVER))
NO_RETRIES: Mapping[str, str] = {
    "PIP_RETRIES": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1", "UV_HTTP_RETRIES": "0", "npm_config_fetch_retries": "0",
    "npm_config_update_notifier": "false", "CARGO_NET_RETRY": "0",
}  # fmt: skip
ASK_BY_TCP: Mapping[str, str] = {"RES_OPTIONS": "use-vc"}  # glibc's resolver
MOST_RULES = 64  # cached, by policy
Key = tuple[NetworkMode, tuple[str, ...], tuple[str, ...], tuple[int, ...], tuple[int, ...], bool]


_rules: dict[Key, NetworkRules] = {}


def network_key(policy: Policy) -> Key:
    """Return the key that two policies with the same network share, but for the secrets of each sandbox in it."""
    is_opened = policy.secrets is not None
    ports, host_ports = policy.network_ports, policy.host_ports
    return policy.network, policy.network_allow, policy.network_deny, ports, host_ports, is_opened


def network_rules(policy: Policy) -> NetworkRules | None:
    """Return the rules of a policy's network; None if no egress process serves it."""
    if policy.network not in SERVED:
        return None
    key = network_key(policy)
    rules = _rules.get(key)
    if rules is None:
        if len(_rules) >= MOST_RULES:
            _rules.clear()
        rules = _rules[key] = policy.network_rules()
    return rules


def served_ports(policy: Policy) -> tuple[int, ...]:
    """Return the ports at which a sandbox's network is served, besides that of name lookups; none without a network."""
    rules = network_rules(policy)
    return rules.served_ports if rules is not None else ()


def authority_variables(policy: Policy) -> Mapping[str, str]:
    """Return the variables by which a guest's programs find the operator's certificate authorities; none without a
    network.
    """
    return files_and_variables()[1] if policy.network in SERVED else {}


def variables_without_namespace(policy: Policy) -> Mapping[str, str]:
    """Return the variables for a guest in the host's network namespace and file system: authorities, and names over
    TCP.
    """
    return {**ASK_BY_TCP, **variables_here()} if policy.network in SERVED else {}


def network_variables(policy: Policy) -> Mapping[str, str]:
    """Return the variables that tell programs of a live sandbox about its network: authorities, or not to retry.

    Without a network, installers would retry for up to a minute.
    """
    return NO_RETRIES if policy.network == "off" else authority_variables(policy)


def new_network(rules: NetworkRules, *, asks: bool = False) -> SandboxNetwork:
    """Return a network with these rules; with `asks`, it asks about hosts that no rule names. Raises StartFailed."""
    try:
        return open_network(rules, proxies=operator_proxies(), asks=asks)
    except OSError as error:
        raise _no_process(error) from error


def open_shared_network(policy: Policy) -> SharedNetwork | None:
    """Return a network that several runs or sessions use at once; None without a network."""
    rules = network_rules(policy)
    asks = policy.on_network == "ask"
    return SharedNetwork(new_network(rules, asks=asks), rules) if rules is not None else None


def open_kept_network(policy: Policy) -> KeptNetwork | None:
    """Return a network for a sandbox that a keeper holds; None without a network. Raises StartFailed."""
    rules = network_rules(policy)
    if rules is None:
        return None
    try:
        return KeptNetwork(rules, proxies=operator_proxies(), asks=policy.on_network == "ask")
    except OSError as error:
        raise _no_process(error) from error


async def join_shared_network(policy: Policy, join: Callable[[], socket.socket]) -> SharedNetwork:
    """Return the network of a sandbox that a keeper holds; `join` blocks and returns a link to it.

    If its egress process is gone, the returned network counts as lost.
    """
    joining = asyncio.get_running_loop().create_task(asyncio.to_thread(lambda: join_network(join())))
    try:
        network, rules, so_far = await asyncio.shield(joining)
    except (ClocheError, OSError) as error:
        log.warning("the network of a sandbox cannot be reached: %s", error)
        return SharedNetwork(*_lost_network(policy))
    except asyncio.CancelledError:
        joining.add_done_callback(_close_joined)
        raise
    return SharedNetwork(network, policy.network_rules().parse(**rules), so_far)


def _close_joined(joining: asyncio.Task[tuple[SandboxNetwork, dict[str, Any], Sum]]) -> None:
    if not joining.cancelled() and joining.exception() is None:
        joining.result()[0].close()


def _lost_network(policy: Policy) -> tuple[SandboxNetwork, NetworkRules]:
    (ours, server_end), (jail_end, another) = (
        socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(2)
    )
    for end in (server_end, another):
        end.close()
    ours.setblocking(False)
    return SandboxNetwork(jail_end, ours), policy.network_rules()


def _no_process(error: OSError) -> StartFailed:
    message = with_limit(f"cannot start the egress process: {error}", error.errno)
    return StartFailed(message, step="network", errno=error.errno)


def serve_namespace(pid: int, mark: str, rules: NetworkRules, network: SandboxNetwork) -> None:
    """Make a network's sockets from outside, in the network namespace of a container's process.

    The process's control group must contain `mark` in its name, because a daemon on another machine numbers its
    processes differently. Blocks. Raises StartFailed.
    """
    failed: list[BaseException] = []

    def work() -> None:  # setns(2) moves only the calling thread, which ends in the namespace
        try:
            _enter(pid, mark)
            open_sockets({"ports": list(rules.served_ports)}, network.jail_end)
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=work, name="cloche-network")
    thread.start()
    thread.join()
    if failed:
        error = failed[0]
        if isinstance(error, OSError | StepFailed):
            raise StartFailed(f"cannot serve the container's network: {error}", step="network", errno=error.errno or 0)
        raise error


def _enter(pid: int, mark: str) -> None:
    """Enter a process's network namespace after checking that the process is the expected one. Raises OSError."""
    namespace = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        with open(f"/proc/{pid}/cgroup", encoding="utf-8", errors="replace") as file:
            is_it = mark in file.read()
        if not is_it or os.path.samestat(os.fstat(namespace), os.stat("/proc/self/ns/net")):
            raise OSError(0, f"process {pid} does not belong to the container; is its daemon on another machine?")
        call("setns", namespace, CLONE_NEWNET)
    finally:
        os.close(namespace)
