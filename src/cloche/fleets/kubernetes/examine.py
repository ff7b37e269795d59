"""Look at the fleet of a namespace without starting anything, for `cloche doctor`: server, rights, clock, pods."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from cloche.core.errors import BackendUnavailable
from cloche.core.fleet_settings import FleetSettings
from cloche.core.record import replace

from ..findings import FleetFindings
from .api import KubernetesApi
from .fleet import KubernetesOperator, mode_of
from .manifests import rules

MOST_SKEW_S = 10.0
REVIEWS = "/apis/authorization.k8s.io/v1/selfsubjectrulesreviews"


def examine(settings: FleetSettings) -> FleetFindings:
    """Look at the cluster of these settings and its fleet; takes a second or two."""
    return asyncio.run(_examined(settings))


async def _examined(settings: FleetSettings) -> FleetFindings:
    operator = KubernetesOperator(settings)
    findings = FleetFindings(engine=operator.engine)
    try:
        findings = replace(findings, version=str((await operator.api.get("/version")).get("gitVersion", "")))
        problem, remedy = await _missing(operator.api, settings.namespace)
        if problem:
            return replace(findings, address=operator.api.host, problem=problem, remedy=remedy)
        problem, remedy = _clock(operator.api.offset_s)
        status = await operator.status()
        if not problem and not any(node.state == "ready" for node in status.nodes):
            problem, remedy = "no pod is ready.", 'Look at the reasons below; "cloche fleet up --apply" starts a fleet.'
        return replace(findings, address=operator.api.host, status=status, problem=problem, remedy=remedy)
    except BackendUnavailable as error:
        return replace(findings, address=operator.api.host, problem=error.reason, remedy=error.remedy)
    finally:
        await operator.close()


async def _missing(api: KubernetesApi, namespace: str) -> tuple[str, str]:
    """Return which rights this account has not, with the remedy."""
    answer = await api.create(REVIEWS, {"spec": {"namespace": namespace}})
    mode = await mode_of(api, namespace)
    missing = list(missing_rights((answer.get("status") or {}).get("resourceRules") or (), mode))
    if not missing:
        return "", ""
    return (
        f"this account may not {', '.join(missing)} in namespace {namespace}.",
        'Bind the role cloche-caller to it: "cloche fleet up --engine kubernetes" prints it.',
    )


def missing_rights(allows: Iterable[Mapping[str, Any]], mode: str = "warm") -> Iterator[str]:
    """Yield the verbs and resources of the role in this mode that no rule allows."""
    allowed = list(allows)
    for row in rules(mode):
        for resource in row["resources"]:
            for verb in row["verbs"]:
                if not any(_allows(rule, row["apiGroups"][0], resource, verb) for rule in allowed):
                    yield f"{verb} {resource}"


def _allows(rule: Mapping[str, Any], group: str, resource: str, verb: str) -> bool:
    wanted = {"apiGroups": group, "resources": resource, "verbs": verb}
    return all({"*", value} & set(rule.get(name) or ()) for name, value in wanted.items())


def _clock(offset_s: float) -> tuple[str, str]:
    if abs(offset_s) <= MOST_SKEW_S:
        return "", ""
    where = "behind" if offset_s > 0 else "ahead of"
    problem = f"this machine's clock is {abs(offset_s):.0f} s {where} the API server's: leases have ends."
    return problem, "Set the clocks of all machines, for example by NTP."
