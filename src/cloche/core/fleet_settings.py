"""What an operator sets for a fleet; an account at an engine holds it, so it is apart from the seam in `fleet.py`."""

from __future__ import annotations

from typing import Literal

from .record import dataclass

FleetMode = Literal["warm", "pod", "agent-sandbox"]
TTL_S = 60.0  # of a lease
WAIT_S = 300.0  # in the queue


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSettings:
    """What an operator sets for a fleet.

    `address` is the engine's, empty for the one that its environment names. `share` is the part of each node's
    processors and memory that leases may use; `reserve_cpu` takes it from the engine's own tasks. A lease lasts `ttl_s`
    unless it is renewed. Without a lease or a caller for `idle_s` the fleet ends. `quota` is the number of leases that
    one key may hold and wait for; None is without a limit. A request waits for `wait_s` in the queue. `scaling_s` is
    the time in which the engine's autoscaler brings a machine, 0 without an autoscaler. Each node's server listens on
    `port`, or on a free one if it is 0. A coordinator keeps the settings with which it was started.
    The lease of a live sandbox has room for so many `sandboxes` of its size: for itself, for each session with
    checkpoints, and for each fork.

    On Kubernetes the address is a context of the kubeconfig. The fleet is in a `namespace`, its pods are of a
    `template`. Its `mode` says where they come from: a Deployment ("warm"), besides pods for images that callers name
    ("pod"), or the objects of agent-sandbox. A pod has one lease (`isolation` "pod"), or many until it is `pod_age_s`
    old ("jail"); none lasts for longer than `lease_age_s`. `fleet up` makes `pods` pods of `image`, each with
    `pod_cpus` and `pod_memory_bytes` for leases, and of `runtime_class`; with `network` they may reach public
    addresses. Their servers hold the values of a Kubernetes Secret, `secret`, for callers who name them. Callers
    `reach` a pod at its address, or by the API server's port-forward. With `do_not_disrupt` autoscalers leave claimed
    pods alone; with `cordons` claims avoid cordoned machines, which callers may see then.
    """

    address: str = ""
    share: float = 0.5
    reserve_cpu: bool = False
    ttl_s: float = TTL_S
    idle_s: float = 600.0
    quota: int | None = None
    wait_s: float = WAIT_S
    port: int = 0
    scaling_s: float = 0.0
    sandboxes: int = 1
    namespace: str = "cloche"
    template: str = "default"
    mode: FleetMode = "warm"
    isolation: Literal["pod", "jail"] = "pod"
    pod_age_s: float = 3_600.0
    lease_age_s: float = 86_400.0
    image: str = ""
    pods: int = 3
    pod_cpus: float = 1.0
    pod_memory_bytes: int = 1 << 30
    runtime_class: str = ""
    secret: str = ""
    network: bool = False
    do_not_disrupt: bool = False
    cordons: bool = False
    reach: Literal["auto", "address", "forward"] = "auto"
