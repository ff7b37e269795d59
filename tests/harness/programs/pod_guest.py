"""What a guest in a pod tries on the cluster's network: each attempt outside first, then in a leased sandbox.

It runs in a network namespace of its own, the cluster, which has all the addresses; the pod is another one, behind a
pair of devices. It prints JSON: which of them answer a process beside the node, a guest with `network="open"`, and one
whose caller allows each of them.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import cloche
from cloche.core.fleet_settings import FleetSettings
from cloche.fleets.kubernetes.manifests import manifests
from tests.harness.node import Node

LOOPBACK = "127.0.0.1"
TARGETS = {
    "API server": ("10.96.0.1", 6443),
    "API server of a cloud": ("5.6.7.8", 6443),  # the coordinator tells its address
    "kubelet": ("10.9.9.9", 10250),
    "name service": ("10.96.0.10", 53),
    "another pod": ("10.244.1.7", 8471),
    "metadata": ("169.254.169.254", 80),
    "loopback of the pod": (LOOPBACK, 8472),
    "a public address": ("9.8.7.6", 6443),
}
NO_RULE = ("metadata", "loopback of the pod")  # a caller's rule for these is an error
# connect() succeeds at the egress process also for what is refused: bytes alone tell.
ASKS = """
import socket
def answer(kind, target):
    try:
        with socket.socket(socket.AF_INET, kind) as asking:
            asking.settimeout(5)
            asking.connect(tuple(target))
            asking.sendall(f"GET / HTTP/1.0\\r\\nHost: {target[0]}\\r\\n\\r\\n".encode())
            return asking.recv(100).count(b"secret")  # the egress process answers, too: with a refusal
    except OSError:
        return 0
print([answer(socket.SOCK_STREAM, target) for target in TARGETS], answer(socket.SOCK_DGRAM, TARGETS[3]))
"""


def serve(host: str, port: int) -> None:
    """Answer whatever comes, over TCP and UDP."""
    stream = socket.create_server((host, port))
    datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    datagrams.bind((host, port))

    def answer_streams() -> None:
        while True:
            peer, _ = stream.accept()
            peer.sendall(b"secret")
            peer.close()

    def answer_datagrams() -> None:
        while True:
            datagrams.sendto(b"secret", datagrams.recvfrom(100)[1])

    for work in (answer_streams, answer_datagrams):
        threading.Thread(target=work, daemon=True).start()


def denied_words() -> list[str]:
    """Return the denied networks of a pod of the fleet, as its container has them."""
    (deployment,) = [row for row in manifests(FleetSettings(image="x", network=True)) if row["kind"] == "Deployment"]
    words = deployment["spec"]["template"]["spec"]["containers"][0]["args"]
    return list(words[words.index("--network-deny") :])


def ip(*lines: str) -> None:
    """Change the network of this namespace."""
    subprocess.run(["ip", "-batch", "-"], input="\n".join(lines), text=True, check=True)


def cluster(before: list[str]) -> None:
    """Be the cluster, and start the pod in a namespace of its own."""
    hosts = sorted({host for host, _ in TARGETS.values()} - {LOOPBACK})
    ip("link set lo up", *(f"address add {host}/32 dev lo" for host in hosts))
    for host, port in TARGETS.values():
        if host != LOOPBACK:
            serve(host, port)
    command = ["unshare", "--net", "sh", "-c", 'read _; exec "$@"', "sh", sys.executable, "-m", __spec__.name, "pod"]
    pod = subprocess.Popen([*command, *before], stdin=subprocess.PIPE)
    assert pod.stdin is not None
    own = os.readlink("/proc/self/ns/net")
    while os.readlink(f"/proc/{pod.pid}/ns/net") == own:
        time.sleep(0.01)
    ip(
        f"link add veth0 type veth peer name eth0 netns {pod.pid}",
        "address add 10.244.1.1/24 dev veth0", "link set veth0 up",
    )  # fmt: skip
    pod.stdin.write(b"\n")
    pod.stdin.close()
    sys.exit(pod.wait())


def pod(before: list[str]) -> None:
    """Be the pod: run a node with a pod's words, try everything, and print what came back."""
    ip("link set lo up", "link set eth0 up", "address add 10.244.1.5/24 dev eth0", "route add default via 10.244.1.1")
    serve(*TARGETS["loopback of the pod"])
    code = f"TARGETS = {[*TARGETS.values()]!r}\n{ASKS}"
    told = {"outside": subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout}
    rules_of = {name: f"{host}:{port}" for name, (host, port) in TARGETS.items()}
    rules_of["name service"] = TARGETS["name service"][0]  # no rule may have port 53
    allowed = [rule for name, rule in rules_of.items() if name not in NO_RULE]
    with tempfile.TemporaryDirectory(dir="/var/tmp") as home:
        node = Node(Path(home), "--require", "confined", *denied_words(), before=before)
        node.ask("node.keep", denied=["10.244.1.7", "10.9.9.9", "5.6.7.8"], ttl=600)
        backend = node.backend("guest")
        backend.usual_level = None
        for name, network in {
            "open": {"network": "open", "network_ports": [6443, 8471, 10250]},
            "allowed": {"network": "allowlist", "network_allow": allowed},
        }.items():
            result = cloche.run(code, backend=backend, timeout=60, **network)
            assert result.ok, result
            told |= {name: result.stdout, "level": str(result.enforcement.level)}
        node.end(signal.SIGKILL)
    print(json.dumps(told))


if __name__ == "__main__":
    {"cluster": cluster, "pod": pod}[sys.argv[1]](sys.argv[2:])
