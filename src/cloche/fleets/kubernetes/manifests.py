"""The objects of Kubernetes that a fleet needs. Pure: settings and the server's version go in.

`deploy/kubernetes/` is made from this (`scripts/manifests.py`), and `cloche fleet up --engine kubernetes` applies it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from cloche.core.errors import InvalidRequest
from cloche.core.fleet_settings import FleetMode, FleetSettings
from cloche.core.record import dataclass, replace

from .pods import CONTAINER, COPYING, FLEET, GROUP, NODE_MEMORY, POOLED, PORT, READY, STATE, TEMPLATE

Manifest = dict[str, Any]
NAME = "cloche"
OBJECT = "cloche-fleet"
CALLER, OUTSIDE, NODE = "cloche-caller", "cloche-outside", "cloche-node"
ROLE = "cloche/role"  # label of pods that run code, and of namespaces with such pods: "caller"
USER_ID = 10_001
SECCOMP = "cloche-seccomp.json"  # what "cloche doctor --container-profile" writes, below the kubelet's folder seccomp
HOME, TEMPORARY = "/var/lib/cloche", "/tmp"
HELD, SECRETS = "secrets", "/etc/cloche-secrets"  # volume and folder of the secrets that nodes hold for callers
PROGRAMS = "/opt/cloche"  # of a pod with another image: the folder with Cloche and its requirements
# No guest reaches these, whatever rules a caller gives: pods, services, machines, and the metadata of clouds.
PRIVATE = ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10", "169.254.0.0/16", "fc00::/7", "fe80::/10")
USER_NAMESPACES_SINCE = 33  # 1.33 has hostUsers and procMount without a switch
POLICY_V1_SINCE = 21
MOST_PODS_MORE = 4  # claimed pods for each ready one, before the quota refuses further ones


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """Say which Kubernetes 1.`minor` a server is."""

    minor: int = USER_NAMESPACES_SINCE

    @property
    def has_user_namespaces(self) -> bool:
        """Tell whether pods may have user namespaces."""
        return self.minor >= USER_NAMESPACES_SINCE


def manifests(
    settings: FleetSettings, served: Served | None = None, *, data: Mapping[str, str] | None = None
) -> list[Manifest]:
    """Return the objects, in the order of their application. `data` belongs to the fleet's own object, with its key."""
    served = served or Served()
    _check_secret(settings)
    return [
        _namespace(settings),
        *_accounts(settings),
        fleet_object(settings, data or {}, served),
        _network_policy(settings),
        _quota(settings),
        _limit_range(settings),
        _disruption_budget(settings, served),
        *(_sandbox_pool(settings, served) if settings.mode == "agent-sandbox" else [_deployment(settings, served)]),
    ]


def _check_secret(settings: FleetSettings) -> None:
    if settings.secret and settings.isolation != "jail":
        raise InvalidRequest(
            f"fleet.secret: with fleet.isolation {settings.isolation!r} a guest shares the files of its pod, and would "
            "read the Secret; use fleet.isolation: jail, or leave fleet.secret out"
        )
    if settings.secret and not settings.network:
        raise InvalidRequest("fleet.secret: without fleet.network pods reach no host that could use one; set it, too")


def left_out(settings: FleetSettings, served: Served) -> list[str]:
    """Return sentences about missing features of a server."""
    missing = []
    if settings.isolation == "jail" and not served.has_user_namespaces:
        missing.append(
            f"Kubernetes 1.{served.minor} has no user namespaces for pods: hostUsers and procMount are left out, and "
            "pods that do not reach level jail refuse every run."
        )
    if served.minor < POLICY_V1_SINCE:
        missing.append(f"Kubernetes 1.{served.minor} has no policy/v1: the budget is of policy/v1beta1.")
    return missing


def fleet_object(settings: FleetSettings, data: Mapping[str, str], served: Served) -> Manifest:
    """Return the fleet's own object: with it, coordinators' objects and their pods are deleted."""
    terms = {
        "mode": settings.mode, "image": settings.image, "isolation": settings.isolation,
        "podAge": f"{settings.pod_age_s:g}", "leaseAge": f"{settings.lease_age_s:g}",
        "doNotDisrupt": str(settings.do_not_disrupt).lower(), "cordons": str(settings.cordons).lower(),
    }  # fmt: skip
    if settings.mode != "warm":
        terms["pod"] = json.dumps((foreign_pod if settings.mode == "pod" else _pod)(settings, served))
    return _made("v1", "ConfigMap", OBJECT, settings, data={**terms, **data})


def secret_object(settings: FleetSettings, private_key: str) -> Manifest:
    """Return the coordinators' private key, in base64. It is made once, and never printed."""
    return _made("v1", "Secret", OBJECT, settings, data={"privateKey": private_key})


def _made(version: str, kind: str, name: str, settings: FleetSettings, **more: Any) -> Manifest:  # noqa: ANN401 - JSON
    metadata = {"name": name, "namespace": settings.namespace, "labels": {FLEET: NAME}}
    return {"apiVersion": version, "kind": kind, "metadata": metadata, **more}


def _namespace(settings: FleetSettings) -> Manifest:
    level = "privileged" if settings.isolation == "jail" else "restricted"
    labels = {FLEET: NAME, ROLE: "caller", "pod-security.kubernetes.io/enforce": level}
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": settings.namespace, "labels": labels}}


# The least verbs of a coordinator: pods, their logs, its own object, the fleet's two objects, and what its mode needs.
POD_VERBS: Mapping[FleetMode, list[str]] = {
    "warm": ["get", "list", "watch", "patch", "delete"],
    "pod": ["get", "list", "watch", "patch", "delete", "create"],
    "agent-sandbox": ["get", "list", "watch"],
}
POOLS: list[Manifest] = [{"apiGroups": ["apps"], "resources": ["deployments"], "verbs": ["get"]}]  # why there is no pod
SANDBOX_CLAIMS: list[Manifest] = [
    {
        "apiGroups": [GROUP.partition("/")[0]], "resources": ["sandboxclaims"],
        "verbs": ["create", "get", "watch", "delete"],
    }
]  # fmt: skip
POOL_RULES: Mapping[FleetMode, list[Manifest]] = {"warm": POOLS, "pod": POOLS, "agent-sandbox": SANDBOX_CLAIMS}


def rules(mode: FleetMode) -> list[Manifest]:
    """Return the rules of the role for a mode of the fleet."""
    return [
        {"apiGroups": [""], "resources": ["pods"], "verbs": POD_VERBS[mode]},
        {"apiGroups": [""], "resources": ["pods/log"], "verbs": ["get"]},
        {"apiGroups": [""], "resources": ["configmaps", "secrets"], "resourceNames": [OBJECT], "verbs": ["get"]},
        *POOL_RULES[mode],
        {
            "apiGroups": ["coordination.k8s.io"],
            "resources": ["leases"],
            "verbs": ["create", "list", "patch", "delete"],
        },
    ]


# A web socket is a GET; since 1.35 the right to create is asked for, too.
FORWARD: Manifest = {"apiGroups": [""], "resources": ["pods/portforward"], "verbs": ["get", "create"]}


def _accounts(settings: FleetSettings) -> list[Manifest]:
    allowed = rules(settings.mode)
    return [
        _made("v1", "ServiceAccount", NODE, settings, automountServiceAccountToken=False),
        *_account(CALLER, allowed, settings),
        *(_account(OUTSIDE, [*allowed, FORWARD], settings) if settings.reach == "forward" else ()),
        *(_sight_of_machines(settings) if settings.cordons else ()),
    ]


def _account(name: str, allowed: list[Manifest], settings: FleetSettings) -> list[Manifest]:
    """Return a service account, and its role."""
    subject = {"kind": "ServiceAccount", "name": name, "namespace": settings.namespace}
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name}
    return [
        _made("v1", "ServiceAccount", name, settings),
        _made("rbac.authorization.k8s.io/v1", "Role", name, settings, rules=allowed),
        _made("rbac.authorization.k8s.io/v1", "RoleBinding", name, settings, subjects=[subject], roleRef=role),
    ]


def _sight_of_machines(settings: FleetSettings) -> list[Manifest]:
    """Return the right to list machines, which are no part of a namespace, for the callers' accounts."""
    accounts = (CALLER, OUTSIDE) if settings.reach == "forward" else (CALLER,)
    metadata = {"name": f"{settings.namespace}-machines", "labels": {FLEET: NAME}}
    row = {"apiVersion": "rbac.authorization.k8s.io/v1", "metadata": metadata}
    return [
        {**row, "kind": "ClusterRole", "rules": [{"apiGroups": [""], "resources": ["nodes"], "verbs": ["list"]}]},
        {
            **row, "kind": "ClusterRoleBinding",
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": metadata["name"]},
            "subjects": [
                {"kind": "ServiceAccount", "name": account, "namespace": settings.namespace} for account in accounts
            ],
        },
    ]  # fmt: skip


def _network_policy(settings: FleetSettings) -> Manifest:
    """Let callers in, at the node's port, and nothing private out. A claim does not change the labels it selects by."""
    here = {"podSelector": {"matchLabels": {ROLE: "caller"}}}
    elsewhere = {"namespaceSelector": {"matchLabels": {ROLE: "caller"}}, **here}
    spec = {
        "podSelector": {"matchLabels": {FLEET: NAME}},
        "policyTypes": ["Ingress", "Egress"],
        "ingress": [{"from": [elsewhere], "ports": [{"protocol": "TCP", "port": PORT}]}],
        "egress": _egress() if settings.network else [],
    }
    return _made("networking.k8s.io/v1", "NetworkPolicy", NODE, settings, spec=spec)


def _egress() -> list[Manifest]:
    """Return the ways out of a fleet with a network: public addresses, and the cluster's name service."""
    blocks = [
        {"cidr": cidr, "except": [network for network in PRIVATE if (":" in network) == (":" in cidr)]}
        for cidr in ("0.0.0.0/0", "::/0")
    ]
    names = {
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "kube-system"}},
        "podSelector": {"matchLabels": {"k8s-app": "kube-dns"}},
    }
    ports = [{"protocol": protocol, "port": 53} for protocol in ("UDP", "TCP")]
    return [{"to": [{"ipBlock": block} for block in blocks]}, {"to": [names], "ports": ports}]


def _quota(settings: FleetSettings) -> Manifest:
    pods = settings.pods * (1 + MOST_PODS_MORE)
    hard = {
        "pods": str(pods),
        "limits.cpu": f"{settings.pod_cpus * pods:g}",
        "limits.memory": f"{(settings.pod_memory_bytes + NODE_MEMORY) * pods >> 20}Mi",
    }
    return _made("v1", "ResourceQuota", NODE, settings, spec={"hard": hard})


def _limit_range(settings: FleetSettings) -> Manifest:
    amounts = _amounts(settings)
    limit = {"type": "Container", "default": amounts, "defaultRequest": amounts}
    return _made("v1", "LimitRange", NODE, settings, spec={"limits": [limit]})


def _amounts(settings: FleetSettings) -> Manifest:
    return {"cpu": f"{settings.pod_cpus:g}", "memory": f"{(settings.pod_memory_bytes + NODE_MEMORY) >> 20}Mi"}


def _disruption_budget(settings: FleetSettings, served: Served) -> Manifest:
    """Keep half of the ready pods in a drain. Claimed pods do not count, and block no drain."""
    version = "policy/v1" if served.minor >= POLICY_V1_SINCE else "policy/v1beta1"
    spec = {"maxUnavailable": "50%", "selector": {"matchLabels": {FLEET: NAME, STATE: READY}}}
    return _made(version, "PodDisruptionBudget", NODE, settings, spec=spec)


def _deployment(settings: FleetSettings, served: Served) -> Manifest:
    ready = {FLEET: NAME, TEMPLATE: settings.template, STATE: READY}
    spec = {
        "replicas": settings.pods,
        "revisionHistoryLimit": 2,
        "selector": {"matchLabels": ready},
        "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": "25%", "maxSurge": "25%"}},
        "template": {"metadata": {"labels": ready}, "spec": _pod(settings, served)},
    }
    return _made("apps/v1", "Deployment", f"{NAME}-{settings.template}", settings, spec=spec)


def _sandbox_pool(settings: FleetSettings, served: Served) -> list[Manifest]:
    """Return the objects of agent-sandbox in place of the Deployment. The fleet has a NetworkPolicy of its own."""
    name, labels = f"{NAME}-{settings.template}", {FLEET: NAME, TEMPLATE: settings.template, STATE: POOLED}
    template = {
        "podTemplate": {"metadata": {"labels": labels}, "spec": _pod(settings, served)},
        "networkPolicyManagement": "Unmanaged",
    }
    pool = {"replicas": settings.pods, "sandboxTemplateRef": {"name": name}}
    return [
        _made(GROUP, "SandboxTemplate", name, settings, spec=template),
        _made(GROUP, "SandboxWarmPool", name, settings, spec=pool),
    ]


def _pod(settings: FleetSettings, served: Served) -> Manifest:
    has_jail = settings.isolation == "jail" and served.has_user_namespaces
    secret = {"name": HELD, "secret": {"secretName": settings.secret, "defaultMode": 0o440}}
    seccomp = {"type": "Localhost", "localhostProfile": SECCOMP} if has_jail else {"type": "RuntimeDefault"}
    return {
        **({"hostUsers": False} if has_jail else {}),
        **({"runtimeClassName": settings.runtime_class} if settings.runtime_class else {}),
        "serviceAccountName": NODE,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": 10,
        "securityContext": {
            "runAsNonRoot": True, "runAsUser": USER_ID, "runAsGroup": USER_ID, "fsGroup": USER_ID,
            "seccompProfile": seccomp,
        },
        "containers": [_container(settings, has_jail=has_jail)],
        "volumes": [
            {"name": "home", "emptyDir": {}}, {"name": "temporary", "emptyDir": {}},
            *([secret] if settings.secret else []),
        ],
    }  # fmt: skip


def _container(settings: FleetSettings, *, has_jail: bool) -> Manifest:
    denied = [word for network in PRIVATE for word in ("--network-deny", network)]
    return {
        "name": CONTAINER,
        "image": settings.image,
        "command": ["cloche", "node"],
        "args": [
            "--listen", f"$(POD_IP):{PORT}", "--all-addresses", "--public-key", "$(PUBLIC_KEY)", "--waits",
            "--backend", "local",
            "--require", "jail" if settings.isolation == "jail" else "confined", *denied,
            *(("--secrets-from", SECRETS) if settings.secret else ()),
        ],
        "env": [
            {"name": "HOME", "value": HOME},
            {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
            {"name": "PUBLIC_KEY", "valueFrom": {"configMapKeyRef": {"name": OBJECT, "key": "publicKey"}}},
        ],
        "ports": [{"name": "wire", "containerPort": PORT, "protocol": "TCP"}],
        "readinessProbe": {"tcpSocket": {"port": PORT}, "periodSeconds": 2, "failureThreshold": 3},
        "resources": {"requests": _amounts(settings), "limits": _amounts(settings)},
        "securityContext": {
            **({"procMount": "Unmasked"} if has_jail else {}),
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [
            {"name": "home", "mountPath": HOME}, {"name": "temporary", "mountPath": TEMPORARY},
            *([{"name": HELD, "mountPath": SECRETS, "readOnly": True}] if settings.secret else []),
        ],
    }  # fmt: skip


def foreign_pod(settings: FleetSettings, served: Served) -> Manifest:
    """Return the description of a pod for an image that a caller names, which is put in the place of the fleet's.

    A container of the fleet's image first copies Cloche and its requirements; then the other image's Python runs it.
    It could read the fleet's secrets, and is the caller's choice: so it has none.
    """
    spec = _pod(replace(settings, secret=""), served)
    (container,) = spec["containers"]
    mount = {"name": "programs", "mountPath": PROGRAMS}
    copying = {
        "name": COPYING,
        "image": settings.image,
        "command": ["cloche", "node", "--copy-to", PROGRAMS],
        "resources": container["resources"],
        "securityContext": {key: value for key, value in container["securityContext"].items() if key != "procMount"},
        "volumeMounts": [mount],
    }
    foreign = {
        **container,
        "command": ["python3", "-I", f"{PROGRAMS}/cloche/node/start.py"],
        "args": ["node", *container["args"]],
        "workingDir": HOME,
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [*container["volumeMounts"], {**mount, "readOnly": True}],
    }
    volumes = [*spec["volumes"], {"name": "programs", "emptyDir": {}}]
    return {
        **spec, "restartPolicy": "Never", "initContainers": [copying], "containers": [foreign], "volumes": volumes
    }  # fmt: skip
