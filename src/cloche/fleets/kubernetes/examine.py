"""Look at the fleet of a namespace for `cloche doctor`, which starts nothing: server, rights, clock, pods, network.

Whether the NetworkPolicy is enforced is tried with connections from here to a pod, for which no right is needed: at the
port of its server, where the policy lets callers in, and beside it, where it lets no connection in and nothing listens.
Without policies the pod's kernel refuses the second one; a network that enforces them drops it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from cloche.core.errors import BackendUnavailable
from cloche.core.fleet import NodeInfo
from cloche.core.fleet_settings import FleetSettings
from cloche.core.record import replace

from ..findings import FleetFindings
from ..tending import reach
from .api import KubernetesApi
from .fleet import UP, KubernetesOperator, mode_of
from .manifests import CALLER, FORWARD, OUTSIDE, rules
from .pods import PORT, remedy_of

MOST_SKEW_S = 10.0
BESIDE = PORT + 1
BY_HAND = "kubectl run probe --namespace default --rm --stdin --restart Never --image busybox -- nc -w 3 {} {}"
REVIEWS = "/apis/authorization.k8s.io/v1/selfsubjectrulesreviews"


def examine(settings: FleetSettings) -> FleetFindings:
    """Look at the cluster of these settings and its fleet; takes a second or two."""
    return asyncio.run(_examined(settings))


async def _examined(settings: FleetSettings) -> FleetFindings:
    operator = KubernetesOperator(settings)
    findings = FleetFindings(engine=operator.engine)
    try:
        findings = replace(findings, version=str((await operator.api.get("/version")).get("gitVersion", "")))
        problem, remedy = await _missing(operator.api, settings)
        if problem:
            return replace(findings, address=operator.api.host, problem=problem, remedy=remedy)
        problem, remedy = _clock(operator.api.offset_s)
        status = await operator.status()
        if not problem and not any(node.state == "ready" for node in status.nodes):
            problem, remedy = _no_pod(status.nodes)
        policy = await _policy([node.address for node in status.nodes if node.state == "ready"])
        return replace(
            findings, address=operator.api.host, status=status, problem=problem, remedy=remedy, network_policy=policy
        )
    except BackendUnavailable as error:
        return replace(findings, address=operator.api.host, problem=error.reason, remedy=error.remedy)
    finally:
        await operator.close()


async def _missing(api: KubernetesApi, settings: FleetSettings) -> tuple[str, str]:
    """Return which rights this account has not, with the remedy."""
    namespace, is_outside = settings.namespace, settings.reach == "forward"
    answer = await api.create(REVIEWS, {"spec": {"namespace": namespace}})
    needed = [*rules(await mode_of(api, namespace)), *([FORWARD] if is_outside else ())]
    missing = list(missing_rights((answer.get("status") or {}).get("resourceRules") or (), needed))
    if not missing:
        return "", ""
    return (
        f"this account may not {', '.join(missing)} in namespace {namespace}.",
        f'Bind the role {OUTSIDE if is_outside else CALLER} to it: "cloche fleet up --engine kubernetes" prints it.',
    )


def missing_rights(allows: Iterable[Mapping[str, Any]], needed: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the verbs and resources of needed rules that no rule allows."""
    allowed = list(allows)
    for row in needed:
        for resource in row["resources"]:
            for verb in row["verbs"]:
                if not any(_allows(rule, row["apiGroups"][0], resource, verb) for rule in allowed):
                    yield f"{verb} {resource}"


def _allows(rule: Mapping[str, Any], group: str, resource: str, verb: str) -> bool:
    wanted = {"apiGroups": group, "resources": resource, "verbs": verb}
    return all({"*", value} & set(rule.get(name) or ()) for name, value in wanted.items())


def _no_pod(nodes: Iterable[NodeInfo]) -> tuple[str, str]:
    """Return why no pod is ready, with the remedy."""
    reason = next((node.reason for node in nodes if node.reason), "")
    return f"no pod is ready{reason and f': {reason}'}.", remedy_of(reason) or UP


async def _policy(addresses: Sequence[str]) -> str:
    """Try whether the network enforces the fleet's NetworkPolicy, and return a sentence."""
    if not addresses:
        return "not tried, as no pod is ready."
    host = f"[{addresses[0]}]" if ":" in addresses[0] else addresses[0]
    served, beside = await asyncio.gather(reach(f"https://{host}:{PORT}"), reach(f"https://{host}:{BESIDE}"))
    by_hand = BY_HAND.format(addresses[0], PORT)
    if served != "open":
        return (
            f"not tried, as {host}:{PORT} cannot be reached from here. Run this in a pod with the label cloche/role: "
            f'caller, or by hand "{by_hand}", which has to fail.'
        )
    tried = f"{host} accepts connections at {PORT}, and at {BESIDE}, where the policy lets no connection in,"
    if beside == "silent":
        return f"enforced: {tried} packets are dropped."
    return (
        f"NOT enforced: {tried} its kernel answers. Use a network that enforces policies. One that rejects instead of "
        f'dropping looks the same: then "{by_hand}" fails.'
    )


def _clock(offset_s: float) -> tuple[str, str]:
    if abs(offset_s) <= MOST_SKEW_S:
        return "", ""
    where = "behind" if offset_s > 0 else "ahead of"
    problem = f"this machine's clock is {abs(offset_s):.0f} s {where} the API server's: leases have ends."
    return problem, "Set the clocks of all machines, for example by NTP."
