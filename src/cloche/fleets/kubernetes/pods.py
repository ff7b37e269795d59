"""Descriptions of pods, the patch that claims one, and pods that are made claimed. Pure: the caller has the JSON.

A pod of the fleet is *ready* for any coordinator, or *claimed* by one coordinator, whose holder object owns it
from then on. It is claimed once: a claimed pod is deleted, and never given to another.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

from cloche.core.escape import escape_line
from cloche.core.record import dataclass

FLEET, TEMPLATE, STATE, HOLDER, LEAVING = (
    "cloche/fleet", "cloche/template", "cloche/state", "cloche/holder", "cloche/leaving"
)  # fmt: skip
READY, CLAIMED, POOLED = "ready", "claimed", "pooled"
DO_NOT_DISRUPT = {"karpenter.sh/do-not-disrupt": "true", "cluster-autoscaler.kubernetes.io/safe-to-evict": "false"}
GROUP = "extensions.agents.x-k8s.io/v1beta1"  # of agent-sandbox
IN_POOL = "agents.x-k8s.io/warm-pool-sandbox"  # label of a pod that agent-sandbox has not bound to a claim yet
CONTAINER, COPYING = "node", "copy"
PORT = 8471
NODE_MEMORY = 128 << 20  # of a pod, for the node's server itself
MOST_REASON = 300
_STUCK = (
    "ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "CreateContainerConfigError",
    "CreateContainerError", "RunContainerError", "CrashLoopBackOff",
)  # fmt: skip
REMEDIES = {  # by words of the reason
    "exceeded quota": 'Raise it ("kubectl describe quota" shows it), or release leases.',
    "cannot be pulled": "Push the image, name it right (fleet.image), or give the machines the registry's credentials.",
    "no machine of the cluster fits": "Add a machine, or ask for less: fleet.pod_cpus, pod_memory, runtime_class.",
    "OOMKilled": "Give it more memory: fleet.pod_memory.",
    "container does not start": '"kubectl logs" and "kubectl describe pod" have its words.',
    "container has ended": '"kubectl logs --previous" has its words.',
    "has 0 replicas": '"kubectl scale" raises them.',
}
_PULL = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull")
_UNITS = {
    "": 1.0,
    "m": 1e-3,
    "k": 1e3,
    "M": 1e6,
    "G": 1e9,
    "T": 1e12,
    "Ki": 2**10,
    "Mi": 2**20,
    "Gi": 2**30,
    "Ti": 2**40,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Pod:
    """Describe a pod of the fleet.

    `is_pooled` is true for one in a pool of agent-sandbox. `container` is the id of its container's present start, and
    `ended` says how a start ended. `stuck` says why the pod does not start, `over` why nothing runs in it any longer;
    both are empty for a pod that is well. `cpus` and `memory_bytes` are for leases.
    """

    name: str
    uid: str
    resource_version: str
    template: str = ""
    state: str = READY
    holder: str = ""
    is_pooled: bool = False
    address: str = ""
    machine: str = ""
    machine_address: str = ""
    container: str = ""
    ended: str = ""
    is_running: bool = False
    is_ready: bool = False
    is_leaving: bool = False
    started_at: float = 0.0
    cpus: float = 0.0
    memory_bytes: int = 0
    stuck: str = ""
    over: str = ""

    @property
    def is_claimed(self) -> bool:
        """Tell whether a coordinator has claimed it."""
        return self.state == CLAIMED or (self.state == POOLED and not self.is_pooled)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """The facts that the server in a pod prints when it begins to serve."""

    address: str
    certificate: str
    boot: str
    version: str


def pod_of(row: Mapping[str, Any]) -> Pod:
    """Return the description of a pod's JSON."""
    meta, spec, status = row.get("metadata", {}), row.get("spec", {}), row.get("status", {})
    labels = meta.get("labels") or {}
    container = _named(status.get("containerStatuses"))
    copying: Mapping[str, Any] = next(iter(status.get("initContainerStatuses") or ()), {})
    limits, (cpus, memory_bytes) = _limits(spec), amounts_of(row)
    return Pod(
        name=meta.get("name", ""),
        uid=meta.get("uid", ""),
        resource_version=meta.get("resourceVersion", ""),
        template=labels.get(TEMPLATE, ""),
        state=labels.get(STATE, ""),
        holder=labels.get(HOLDER, ""),
        is_pooled=IN_POOL in labels,
        address=status.get("podIP") or "",
        machine=spec.get("nodeName") or "",
        machine_address=status.get("hostIP") or "",
        container=container.get("containerID") or "",
        ended=_ended(container, limits) or (f"{COPYING}: {last_end(copying)}" if _exit_code(copying) else ""),
        is_running="running" in (container.get("state") or {}),
        is_ready=_condition(status, "Ready").get("status") == "True",
        is_leaving=bool(meta.get("deletionTimestamp")) or LEAVING in labels,
        started_at=_seconds(status.get("startTime")),
        cpus=cpus,
        memory_bytes=memory_bytes,
        stuck=_stuck(status, container, limits) or _stuck(status, copying, limits),
        over=_over(meta, status),
    )


def amounts_of(row: Mapping[str, Any]) -> tuple[float, int]:
    """Return the processors and the bytes that leases may use of a pod, or of a template's pods."""
    limits = _limits(row.get("spec") or {})
    return quantity(limits.get("cpu", "0")), max(int(quantity(limits.get("memory", "0"))) - NODE_MEMORY, 0)


def _limits(spec: Mapping[str, Any]) -> Mapping[str, Any]:
    return (_named(spec.get("containers")).get("resources") or {}).get("limits") or {}


def remedy_of(reason: str) -> str:
    """Return what to do about the reason why pods take no lease; empty where that is not known."""
    return next((remedy for words, remedy in REMEDIES.items() if words in reason), "")


def _named(rows: Any) -> Mapping[str, Any]:  # noqa: ANN401 - JSON
    """Return the row of the node's container among those of a pod."""
    return next((row for row in rows or () if row.get("name") == CONTAINER), {})


def _condition(status: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    return next((row for row in status.get("conditions") or () if row.get("type") == kind), {})


def _stuck(status: Mapping[str, Any], container: Mapping[str, Any], limits: Mapping[str, Any]) -> str:
    scheduled = _condition(status, "PodScheduled")
    if scheduled.get("reason") == "Unschedulable":
        return _text(f"no machine of the cluster fits: {scheduled.get('message', '')}")
    waiting = (container.get("state") or {}).get("waiting") or {}
    reason, message = waiting.get("reason", ""), waiting.get("message", "")
    if reason not in _STUCK:
        return ""
    if reason in _PULL:
        return _text(f"its image cannot be pulled ({reason}): {message or container.get('image', '')}")
    return _text(f"its container does not start ({reason}): {_ended(container, limits) or message}")


def _over(meta: Mapping[str, Any], status: Mapping[str, Any]) -> str:
    target = _condition(status, "DisruptionTarget")
    told = status if status.get("reason") else target
    why = " ".join(filter(None, (told.get("reason"), told.get("message") or status.get("message"))))
    if status.get("phase") in ("Failed", "Succeeded"):
        return _text(f"the pod has ended: {why or status['phase']}")
    if meta.get("deletionTimestamp"):
        return _text(f"the pod is being deleted{f': {why}' if why else ', as by a drain of its machine'}")
    return ""


def last_end(container: Mapping[str, Any]) -> str:
    """Return how the last start of a container ended, such as `OOMKilled, exit code 137`; empty if it has not."""
    for state in ("state", "lastState"):
        ended = (container.get(state) or {}).get("terminated")
        if ended:
            words = (ended.get("reason"), f"exit code {ended.get('exitCode')}", _last_line(ended.get("message")))
            return _text(", ".join(str(word) for word in words if word))
    return ""


def _last_line(message: Any) -> str:  # noqa: ANN401 - JSON
    """Return the last line of an end's message, which may be the end of the log; the server's facts are no words."""
    lines = [line for line in str(message or "").splitlines() if line.strip() and not line.startswith("{")]
    return lines[-1] if lines else ""


def _exit_code(container: Mapping[str, Any]) -> int:
    return int(((container.get("state") or {}).get("terminated") or {}).get("exitCode") or 0)


def _ended(container: Mapping[str, Any], limits: Mapping[str, Any]) -> str:
    ended = last_end(container)
    return f"{ended}; its limit is {limits['memory']} of memory" if "OOM" in ended and "memory" in limits else ended


def _text(text: str) -> str:
    return escape_line(text[: 4 * MOST_REASON])[:MOST_REASON]


def _seconds(stamp: Any) -> float:  # noqa: ANN401 - JSON
    try:
        return datetime.fromisoformat(str(stamp)).timestamp()
    except ValueError:
        return 0.0


def stamp(at: float) -> str:
    """Return a time as Kubernetes writes it, with microseconds."""
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def quantity(text: object) -> float:
    """Return the number of an amount such as `500m`, `1Gi` or `2`; 0 for other text."""
    match = re.fullmatch(r"([0-9.]+(?:[eE][+-]?[0-9]+)?)([A-Za-z]{0,2})", str(text))
    return float(match[1]) * _UNITS.get(match[2], 0.0) if match else 0.0


def facts_of(log: str) -> NodeFacts | None:
    """Return the facts that a node's server printed, from its pod's log; None if they are missing."""
    for fields in _printed(log):
        names = ("address", "certificate", "boot", "version")
        if all(isinstance(fields.get(name), str) for name in names):
            return NodeFacts(**{name: fields[name] for name in names})
    return None


def _printed(log: str) -> Iterator[dict[str, Any]]:
    for line in log.splitlines():
        if line.startswith("{"):
            try:
                fields = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(fields, dict):
                yield fields


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """Name the holder object of a coordinator; with it all that it claimed is deleted."""

    holder: str
    name: str
    uid: str

    def reference(self) -> dict[str, Any]:
        """Return it as an entry of `ownerReferences`: `kubectl drain` refuses to evict pods without a controller."""
        kind = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "controller": True}
        return {**kind, "name": self.name, "uid": self.uid}


def _claimed(owner: Owner, *, is_kept: bool) -> dict[str, Any]:
    """Return what marks a pod as claimed; autoscalers do not disrupt one that is kept."""
    labels = {STATE: CLAIMED, HOLDER: owner.holder}
    kept = {"annotations": DO_NOT_DISRUPT} if is_kept else {}
    return {"labels": labels, "ownerReferences": [owner.reference()], **kept}


def claim_patch(pod: Pod, owner: Owner, *, now: float, longest_s: float, is_kept: bool = False) -> dict[str, Any]:
    """Return the merge patch that claims a pod. It has no effect on one that has changed since it was read.

    The ReplicaSet is no owner any longer, and makes another pod. The kubelet ends the pod at its deadline, which counts
    from the pod's start.
    """
    age_s = max(now - pod.started_at, 0.0) if pod.started_at else 0.0
    return {
        "metadata": {
            "uid": pod.uid,
            "resourceVersion": pod.resource_version,
            **_claimed(owner, is_kept=is_kept),
        },
        "spec": {"activeDeadlineSeconds": int(age_s + longest_s) + 1},
    }


def born_claimed(
    spec: Mapping[str, Any], owner: Owner, *, name: str, longest_s: float, is_kept: bool = False
) -> dict[str, Any]:
    """Return a pod that is claimed from its creation, with its owner and its deadline."""
    claimed = _claimed(owner, is_kept=is_kept)
    labels = {FLEET: "cloche", **claimed["labels"]}
    return {
        "apiVersion": "v1", "kind": "Pod", "metadata": {**claimed, "name": name, "labels": labels},
        "spec": {**spec, "activeDeadlineSeconds": int(longest_s) + 1},
    }  # fmt: skip
