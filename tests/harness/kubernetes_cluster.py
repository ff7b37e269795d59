"""A Kubernetes cluster on one machine, of the real programs: nodes have addresses, disks and cables of their own.

Theory of operation: a process, the *switch*, holds a network namespace with a bridge. etcd, the API server, the
controllers and the scheduler run there. A node is a shell in new namespaces (network, process ids, mounts, control
groups), with containerd and a kubelet, joined to the bridge by a veth pair. To kill a node is to kill its pid 1; to
cut its cable is to set the bridge's end of the pair down. Everything ends with the thread that started it, so a test
that is killed leaves nothing that runs. The kubelet would change sysctls of the whole machine: over those that it reads
on a node, files are mounted that have its values already.

`scripts/kubernetes.sh` makes the programs and the image. The service address of the API server is one of the switch's,
so pods reach it without kube-proxy. There is no DNS, and the network plugin (bridge, host-local) enforces no
NetworkPolicy.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from .namespace_calls import ROOT, NamespaceCalls
from .ray_cluster import remove_group
from .tls import Authority

VERSION = "1.20.2"
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
PROGRAMS = Path(os.environ.get("CLOCHE_KUBERNETES", CACHE / "cloche-kubernetes")) / VERSION
IMAGES = ROOT / "build" / "kubernetes"
IMAGE, PAUSE = "cloche-test:node", "cloche-test:pause"
HOST, SERVICE, PORT = "10.78.0.1", "10.96.0.1", 443
SERVER = f"https://{HOST}:{PORT}"
STARTED_S, NODE_S = 90.0, 180.0
# A node that is not heard of is NotReady after 12 s, and its pods are given up 5 s later.
GRACE_S, TOLERATED_S = 12, 5
SYSCTLS = {
    "vm/overcommit_memory": 1, "vm/panic_on_oom": 0, "kernel/panic": 10, "kernel/panic_on_oops": 1,
    "kernel/keys/root_maxkeys": 1_000_000, "kernel/keys/root_maxbytes": 25_000_000,
}  # fmt: skip
UNSHARE = ("unshare", "--propagation=slave")
BOUND = ("setpriv", "--pdeathsig", "KILL")
SWITCH = f"""
mount -t tmpfs tmpfs "$1"
echo 1 >/proc/sys/net/ipv4/ip_forward
ip -batch - <<END
link set lo up
address add {SERVICE}/32 dev lo
link add bridge type bridge
address add {HOST}/24 dev bridge
link set bridge up
END
echo ready
read -r _
"""
# In the node's control groups before they are its roots.
NODE_BEFORE = """
for group in $GROUPS; do echo 0 >"$group/cgroup.procs"; done
exec unshare --propagation=slave --net --mount --pid --cgroup --kill-child sh -ec "$1"
"""
NODE = f"""
mount -t proc proc /proc
hierarchies=$(grep ' cgroup ' /proc/mounts)
while read -r _ place _ options _; do
    umount "$place"
    mount -t cgroup -o "$options" cgroup "$place"
done <<END
$hierarchies
END
mount -t tmpfs tmpfs /run
mount --bind "$DISK/lib" /var/lib
mount --bind "$DISK/log" /var/log
mount --make-shared /var/lib
for file in "$SETTINGS/sysctls"/*; do
    mount --bind "$file" "/proc/sys/$(basename "$file" | tr . /)"
done
echo unshared
read -r _
echo 1 >/proc/sys/net/ipv4/ip_forward
ip -batch - <<END
link set lo up
link set eth0 up
address add $ADDRESS/24 dev eth0
route add default via {HOST}
END
containerd --config "$SETTINGS/containerd.toml" >>/var/log/containerd.log 2>&1 &
until ctr version >/dev/null 2>&1; do sleep 0.2; done
for image in "$IMAGES"/*.tar; do ctr --namespace k8s.io images import "$image" >>/var/log/images.log; done
"$PROGRAMS/kubelet" --config "$SETTINGS/kubelet.json" --kubeconfig "$SETTINGS/kubeconfig" --hostname-override "$NAME" \\
    --node-ip "$ADDRESS" --container-runtime=remote --pod-infra-container-image={PAUSE} \\
    --container-runtime-endpoint=unix:///run/containerd/containerd.sock >>/var/log/kubelet.log 2>&1 &
echo started
wait
"""
CONTAINERD = f"""
version = 2
disabled_plugins = ["io.containerd.internal.v1.opt"]
[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = "{PAUSE}"
restrict_oom_score_adj = true
[plugins."io.containerd.grpc.v1.cri".cni]
bin_dir = "/usr/lib/cni"
conf_dir = "%s"
"""


class KubernetesCluster(NamespaceCalls):
    """Hold a cluster: `start`, `kill`, `cut`, `mend` nodes by number, and run programs beside the API server."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix=f"cloche-kubernetes-{os.getpid()}-", dir="/var/tmp"))
        for name in ("etcd", "home", "log"):
            (self.folder / name).mkdir()
        self._authority = Authority(self.folder)
        self.nodes: dict[int, _Node] = {}
        self.networks: set[int] = set()  # the namespaces of all that were there, by inode
        self.programs: dict[str, subprocess.Popen[bytes]] = {}
        self.admin_kubeconfig = self._kubeconfig("admin", group="system:masters")
        self._switch = subprocess.Popen(
            [*BOUND, *UNSHARE, "--net", "--mount", "sh", "-ec", SWITCH, "switch", str(self.folder / "etcd")],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        self._words = self._control_plane()

    def __enter__(self) -> KubernetesCluster:
        try:
            assert self._switch.stdout is not None
            assert self._switch.stdout.readline() == b"ready\n"
            self.networks.add(_network_of(self._switch.pid))
            for name in self._words:
                self.start_program(name)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start_program(self, name: str) -> None:
        """Start a program of the control plane, and wait until it answers, if it is the API server."""
        with (self.folder / "log" / name).open("ab") as log:
            words = [*BOUND, str(PROGRAMS / name), *self._words[name]]
            self.programs[name] = subprocess.Popen(self.command(words), stdout=log, stderr=log)
        if name == "kube-apiserver":
            until(lambda: self._is_ready(name), STARTED_S, lambda: self._tail(name))

    def kill_program(self, name: str) -> None:
        """Send SIGKILL to a program of the control plane."""
        process = self.programs.pop(name)
        process.kill()
        process.wait()

    def stop_apiserver(self) -> None:
        """End the API server, at once; `start_program` starts it again."""
        self.kill_program("kube-apiserver")

    def start_apiserver(self) -> None:
        """Start the API server again, and wait until it answers."""
        self.start_program("kube-apiserver")

    def start(self, *numbers: int) -> None:
        """Start nodes, and wait until they are ready."""
        for number in numbers:
            self.nodes[number] = _Node(self, number)
            self.networks.add(_network_of(self.nodes[number].pid))
        for number in numbers:
            self.nodes[number].wait()
            until(lambda: self.is_node_ready(number), NODE_S, self.nodes[number].tail)  # noqa: B023 - called here alone

    def kill(self, number: int) -> None:
        """Send SIGKILL to everything on a node, at once."""
        self.nodes.pop(number).kill()

    def cut(self, number: int) -> None:
        """Take the cable out of a node: not a packet comes or goes."""
        self._ip(f"link set node{number} down")

    def mend(self, number: int) -> None:
        """Put the cable back."""
        self._ip(f"link set node{number} up")

    def drain(self, number: int) -> None:
        """Evict all pods of a node, which takes none until `uncordon`."""
        words = ("--ignore-daemonsets", "--delete-emptydir-data", "--timeout=120s")
        self.kubectl("drain", f"node-{number}", *words)

    def uncordon(self, number: int) -> None:
        """Let a node take pods again."""
        self.kubectl("uncordon", f"node-{number}")

    def kill_container(self, pod: str, namespace: str) -> None:
        """Send SIGKILL to the first process of a pod's container, which the kubelet starts again."""
        path = "--output=jsonpath={.spec.nodeName} {.status.containerStatuses[0].containerID}"
        node, container = self.kubectl("get", "pod", pod, f"--namespace={namespace}", path).split()
        words = ["ctr", "--namespace=k8s.io", "tasks", "kill", "--signal=SIGKILL", container.rpartition("/")[2]]
        done = self.run(words, int(node[-1]))
        assert done.returncode == 0, done.stderr

    def processes_left(self) -> list[str]:
        """Return the processes in the namespaces of this cluster, which has ended."""
        return [pid for pid in os.listdir("/proc") if pid.isdigit() and _network_of(int(pid)) in self.networks]

    def is_node_ready(self, number: int) -> bool:
        """Say whether the node is ready, as the API server has it."""
        path = '{.status.conditions[?(@.type=="Ready")].status}'
        return self.kubectl("get", "node", f"node-{number}", "--output", f"jsonpath={path}", check=False) == "True"

    def kubectl(self, *words: str, stdin: str = "", check: bool = True) -> str:
        """Run kubectl as the administrator, and return what it printed. Raises AssertionError with its complaint."""
        done = self.run([str(PROGRAMS / "kubectl"), *words], input=stdin)
        assert done.returncode == 0 or not check, f"kubectl {words}: {done.stderr}"
        return done.stdout

    def apply(self, *manifests: Mapping[str, Any]) -> str:
        """Apply manifests as the administrator."""
        listed = {"apiVersion": "v1", "kind": "List", "items": manifests}
        return self.kubectl("apply", "--filename=-", stdin=json.dumps(listed))

    def kubeconfig_for(self, account: str, namespace: str = "default") -> Path:
        """Return a file with which a client is a service account, whose token it has."""
        words = ("--namespace", namespace, "get")

        def token() -> str:
            secret = self.kubectl(*words, "serviceaccount", account, "--output=jsonpath={.secrets[0].name}")
            path = "--output=go-template={{.data.token | base64decode}}"
            return self.kubectl(*words, "secret", secret, path) if secret else ""

        until(lambda: bool(token()), STARTED_S)
        return self._write_kubeconfig(f"{namespace}.{account}", {"token": token()}, namespace)

    def command(self, words: Sequence[str], number: int = 0) -> list[str]:
        """Return the command that runs a program beside the API server, or on a node."""
        if number == 0:
            return ["nsenter", f"--target={self._switch.pid}", "--net", "--mount", "--", *words]
        return ["nsenter", f"--target={self.nodes[number].pid}", "--net", "--mount", "--pid", "--cgroup", "--", *words]

    def environment(self) -> dict[str, str]:
        """Return the environment of programs: the administrator's, and nothing of this user's own folders."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("XDG_", "CLOCHE_", "KUBE"))}
        home = str(self.folder / "home")
        own = {"HOME": home, "TMPDIR": home, "CLOCHE_KUBERNETES": str(PROGRAMS.parent)}
        return kept | own | {"KUBECONFIG": str(self.admin_kubeconfig), "PYTHONPATH": str(ROOT)}

    def close(self) -> None:
        """End everything, and remove what it had."""
        for number in list(self.nodes):
            self.kill(number)
        for name in list(self.programs):
            self.kill_program(name)
        self._switch.kill()
        self._switch.communicate()
        shutil.rmtree(self.folder)

    def _is_ready(self, name: str) -> bool:
        assert self.programs[name].poll() is None, self._tail(name)
        return self.kubectl("get", "--raw", "/readyz", check=False) == "ok"

    def _tail(self, name: str) -> str:
        return f"{name}: {(self.folder / 'log' / name).read_text()[-4000:]}"

    def _ip(self, *lines: str) -> None:
        done = self.run(["ip", "-batch", "-"], input="\n".join(lines))
        assert done.returncode == 0, done.stderr

    def _kubeconfig(self, name: str, *, group: str = "", file: str = "") -> Path:
        """Return a file with which a client has a certificate of this name."""
        certificate = str(self._authority.file_of(name, group=group))
        user = {"client-certificate": certificate, "client-key": certificate}
        return self._write_kubeconfig(file or name, user)

    def _write_kubeconfig(self, name: str, user: Mapping[str, str], namespace: str = "default") -> Path:
        path = self.folder / f"{name}.kubeconfig"
        cluster = {"server": SERVER, "certificate-authority": str(self._authority.file)}
        context = {"cluster": "cluster", "user": name, "namespace": namespace}
        lists = {
            "clusters": [{"name": "cluster", "cluster": cluster}],
            "users": [{"name": name, "user": user}],
            "contexts": [{"name": name, "context": context}],
        }
        path.write_text(json.dumps({"apiVersion": "v1", "kind": "Config", "current-context": name, **lists}))
        path.chmod(0o600)
        return path

    def _control_plane(self) -> dict[str, list[str]]:
        """Return the programs in the order of their start, with their words."""
        authority, store = str(self._authority.file), "http://127.0.0.1:2379"
        names = [HOST, SERVICE, "127.0.0.1", "kubernetes.default.svc"]
        server = str(self._authority.file_of("kube-apiserver", hosts=names))
        kubelets = str(self._authority.file_of("kubelets-client", group="system:masters"))
        accounts = str(self._authority.file_of("service-accounts"))
        controllers, scheduler = (
            f"--kubeconfig={self._kubeconfig(f'system:kube-{name}', file=name)}"
            for name in ("controller-manager", "scheduler")
        )
        own = [f"--cert-dir={self.folder}", "--leader-elect=false"]
        return {
            "etcd": [
                f"--data-dir={self.folder}/etcd", f"--listen-client-urls={store}", f"--advertise-client-urls={store}",
            ],
            "kube-apiserver": [
                f"--etcd-servers={store}", f"--secure-port={PORT}", f"--advertise-address={HOST}",
                f"--tls-cert-file={server}", f"--tls-private-key-file={server}", f"--client-ca-file={authority}",
                "--authorization-mode=Node,RBAC", "--enable-admission-plugins=NodeRestriction", "--allow-privileged",
                "--service-account-issuer=https://kubernetes.default.svc", f"--service-account-key-file={accounts}",
                f"--service-account-signing-key-file={accounts}", f"--service-cluster-ip-range={SERVICE}/24",
                f"--kubelet-client-certificate={kubelets}", f"--kubelet-client-key={kubelets}",
                "--kubelet-preferred-address-types=InternalIP", f"--cert-dir={self.folder}",
                f"--default-not-ready-toleration-seconds={TOLERATED_S}",
                f"--default-unreachable-toleration-seconds={TOLERATED_S}",
            ],
            "kube-controller-manager": [
                controllers, *own, f"--service-account-private-key-file={accounts}", f"--root-ca-file={authority}",
                "--use-service-account-credentials", f"--node-monitor-grace-period={GRACE_S}s",
                "--node-monitor-period=2s",
            ],
            "kube-scheduler": [scheduler, *own],
        }  # fmt: skip


class _Node:
    """Hold a node: its namespaces, its disk, its cable and its control groups."""

    def __init__(self, cluster: KubernetesCluster, number: int):
        self.name, self._disk = f"node-{number}", cluster.folder / f"disk{number}"
        self._settings = cluster.folder / f"settings{number}"
        self._groups = list(_make_groups(f"cloche-kubernetes-{os.getpid()}-{number}"))
        address = f"{HOST.rpartition('.')[0]}.{10 + number}"
        self._write_settings(cluster, number)
        for name in ("lib", "log"):
            (self._disk / name).mkdir(parents=True, exist_ok=True)
        variables = {
            "GROUPS": " ".join(map(str, self._groups)), "DISK": str(self._disk), "SETTINGS": str(self._settings),
            "ADDRESS": address, "IMAGES": str(IMAGES), "PROGRAMS": str(PROGRAMS), "NAME": self.name,
        }  # fmt: skip
        with (self._disk / "log" / "node.log").open("ab") as log:
            self._outer = subprocess.Popen(
                cluster.command([*BOUND, "sh", "-ec", NODE_BEFORE, "node", NODE]),
                env=cluster.environment() | variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
            )  # fmt: skip
        self._expect("unshared")
        self.pid = int(Path(f"/proc/{self._outer.pid}/task/{self._outer.pid}/children").read_text())
        cable, pods = f"node{number}", f"10.79.{number}.0/24"
        with contextlib.suppress(AssertionError):
            cluster._ip(f"link delete {cable}")
        cluster._ip(
            f"link add {cable} type veth peer name eth0 netns {self.pid}", f"link set {cable} master bridge",
            f"link set {cable} up", f"route replace {pods} via {address}",
        )  # fmt: skip
        assert self._outer.stdin is not None
        self._outer.stdin.write(b"\n")
        self._outer.stdin.flush()

    def wait(self) -> None:
        """Wait until the kubelet has been started."""
        self._expect("started")

    def kill(self) -> None:
        """Kill pid 1, with which all processes of the node die, and remove the groups."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self._outer.communicate()
        for group in self._groups:
            for folder, _, _ in os.walk(group, topdown=False):
                remove_group(Path(folder))

    def tail(self) -> str:
        """Return the ends of the node's logs."""
        logs = sorted((self._disk / "log").glob("*.log"))
        return "\n".join(f"{log.name}: {log.read_text(errors='replace')[-3000:]}" for log in logs)

    def _expect(self, word: str) -> None:
        assert self._outer.stdout is not None
        assert self._outer.stdout.readline().decode().strip() == word, f"{self.name}: {self.tail()}"

    def _write_settings(self, cluster: KubernetesCluster, number: int) -> None:
        (self._settings / "sysctls").mkdir(parents=True, exist_ok=True)
        for name, value in SYSCTLS.items():
            (self._settings / "sysctls" / name.replace("/", ".")).write_text(f"{value}\n")
        (self._settings / "cni").mkdir(exist_ok=True)
        (self._settings / "cni" / "10-pods.conflist").write_text(json.dumps(_network(f"10.79.{number}.0/24")))
        (self._settings / "containerd.toml").write_text(CONTAINERD % (self._settings / "cni"))
        (self._settings / "resolv.conf").touch()
        (self._settings / "kubelet.json").write_text(json.dumps(self._kubelet(str(cluster._authority.file))))
        kubeconfig = cluster._kubeconfig(f"system:node:{self.name}", group="system:nodes", file=self.name)
        kubeconfig.rename(self._settings / "kubeconfig")

    def _kubelet(self, authority: str) -> dict[str, Any]:
        return {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "authentication": {
                "anonymous": {"enabled": False}, "webhook": {"enabled": True}, "x509": {"clientCAFile": authority},
            },
            "authorization": {"mode": "Webhook"},
            "cgroupDriver": "cgroupfs",
            "cgroupsPerQOS": False,
            "cpuCFSQuota": False,  # a hundred pods share two processors; each needs more than its part to start
            "enforceNodeAllocatable": [],
            "failSwapOn": False,
            "protectKernelDefaults": True,  # it must find SYSCTLS, and never writes them
            "makeIPTablesUtilChains": False,
            "resolvConf": str(self._settings / "resolv.conf"),
            "oomScoreAdj": 0,
            "evictionHard": {"memory.available": "50Mi"},
            "imageGCHighThresholdPercent": 100,
            "imageGCLowThresholdPercent": 99,
            "nodeStatusUpdateFrequency": "3s",
            "nodeLeaseDurationSeconds": GRACE_S,
            "volumePluginDir": "/var/lib/kubelet/volume-plugins",
            "readOnlyPort": 0,
            "healthzPort": 0,
        }  # fmt: skip


def _network_of(pid: int) -> int:
    """Return the inode of a process's network namespace, 0 for a process that is gone."""
    with contextlib.suppress(OSError):
        return os.stat(f"/proc/{pid}/ns/net").st_ino
    return 0


def missing() -> list[str]:
    """Return what a cluster needs and is not here."""
    needed = [*(PROGRAMS / name for name in ("etcd", "kubectl", "kubelet")), IMAGES / "pause.tar"]
    lacks = [f"{path} (scripts/kubernetes.sh)" for path in needed if not path.exists()]
    return lacks + ([] if any(_hierarchies()) else ["control groups of version 1, which Kubernetes 1.20 needs"])


def _hierarchies() -> Iterator[Path]:
    for line in Path("/proc/mounts").read_text().splitlines():
        _, place, kind, *_ = line.split()
        if kind == "cgroup":
            yield Path(place)


def _make_groups(name: str) -> Iterator[Path]:
    for hierarchy in _hierarchies():
        group = hierarchy / name
        group.mkdir(exist_ok=True)
        for file in ("cpuset.cpus", "cpuset.mems"):
            if (group / file).exists():
                (group / file).write_text((hierarchy / file).read_text())
        yield group


def _network(pods: str) -> dict[str, Any]:
    """Return the configuration of a node's bridge; all packets for elsewhere go by the node to the switch."""
    addresses = {"type": "host-local", "ranges": [[{"subnet": pods}]], "routes": [{"dst": "0.0.0.0/0"}]}
    bridge = {"type": "bridge", "bridge": "pods", "isGateway": True, "hairpinMode": True, "ipam": addresses}
    return {"cniVersion": "0.4.0", "name": "pods", "plugins": [bridge]}


def until(is_so: Callable[[], bool], patience_s: float, explain: Callable[[], str] = str) -> None:
    """Wait until something is so. Raises AssertionError with an explanation."""
    ends = time.monotonic() + patience_s
    while not is_so():
        assert time.monotonic() < ends, f"not within {patience_s} s: {explain()}"
        time.sleep(0.2)
