"""A kubelet for the small API server: it runs the containers of pods as processes of this machine.

An image is a folder of programs. The mounts of a container are folders below one of the pod, and its paths in commands
and variables become those. Each pod has a loopback address of its own.
"""

from __future__ import annotations

import base64
import re
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

from cloche.fleets.kubernetes.pods import stamp
from tests.harness.kubernetes_api import Cluster

Json = dict[str, Any]
LOOK_S, END_S = 0.02, 120.0
ANY = "0.0.0.0"  # each pod has an address of its own in place of it
MOST_MESSAGE = 2048  # of a termination message that is the end of the log


class Kubelet:
    """Run the pods that a cluster is told to create.

    `images` has the folder of programs of each image, `unscheduled` why pods of an image get no machine; empty for a
    scheduler that says nothing.
    """

    def __init__(self, cluster: Cluster, folder: Path, images: Mapping[str, Path]):
        self._cluster, self._folder, self.images = cluster, folder, dict(images)
        self.unscheduled: dict[str, str] = {}
        self._numbers = count(2)
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._environs: dict[str, dict[str, str]] = {}
        self._ended: set[str] = set()
        self._threads: list[threading.Thread] = []
        cluster.created, cluster.end_pod = self._created, self.kill

    def _created(self, path: str, row: Json) -> None:
        if not path.endswith("/pods"):
            return
        message = self.unscheduled.get(row["spec"]["containers"][0]["image"])
        if message:
            condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
            self._tell(row["metadata"]["name"], conditions=[condition])
        elif message is None:
            thread = threading.Thread(target=self._run, args=(row, f"127.1.0.{next(self._numbers)}"))
            self._threads.append(thread)
            thread.start()

    def kill(self, name: str, number: int = signal.SIGTERM) -> None:
        """End the processes of a pod."""
        self._ended.add(name)
        if (process := self._processes.get(name)) is not None:
            with suppress(ProcessLookupError):
                process.send_signal(number)

    def close(self) -> None:
        """End all pods."""
        for name in list(self._processes):
            self.kill(name, signal.SIGKILL)
        for thread in self._threads:
            thread.join(END_S)

    def _run(self, row: Json, address: str) -> None:
        name, spec = row["metadata"]["name"], row["spec"]
        for volume in spec.get("volumes", ()):
            if "secret" in volume:
                self._write_secret(self._folder / name / volume["name"], volume["secret"]["secretName"])
        base = {"startTime": stamp(time.time()), "podIP": address, "hostIP": "10.9.9.9"}
        self._tell(name, **base, phase="Pending", spec={"nodeName": "machine-1"})
        for container in spec.get("initContainers", ()):
            ended = self._to_its_end(name, container, address)
            if "waiting" in ended or ended["terminated"]["exitCode"]:
                self._tell(name, **base, phase="Failed", initContainerStatuses=[_status(name, container, ended)])
                return
        (container,) = spec["containers"]
        self._serve(name, container, address, base)

    def _serve(self, name: str, container: Json, address: str, base: Json) -> None:
        started = self._start(name, container, address)
        if not isinstance(started, subprocess.Popen):
            phase = "Pending" if "waiting" in started else "Failed"
            self._tell(name, **base, phase=phase, containerStatuses=[_status(name, container, started)])
            return
        self._tell(name, **base, phase="Running", containerStatuses=[_status(name, container, {"running": {}})])
        port, is_ready = container["ports"][0]["containerPort"], False
        while started.poll() is None:
            if not is_ready and _is_open(address, port):
                is_ready = True
                ready = {"conditions": [{"type": "Ready", "status": "True"}]}
                running = _status(name, container, {"running": {}})
                self._tell(name, **base, **ready, phase="Running", containerStatuses=[running])
            time.sleep(LOOK_S)
        ended = _status(name, container, self._terminated(name, started))
        self._tell(name, **base, phase="Failed", containerStatuses=[ended])

    def _to_its_end(self, name: str, container: Json, address: str) -> Json:
        started = self._start(name, container, address)
        if not isinstance(started, subprocess.Popen):
            return started
        started.wait(END_S)
        return self._terminated(name, started)

    def _start(self, name: str, container: Json, address: str) -> subprocess.Popen[bytes] | Json:
        """Start a container, or return the state that says why it has none."""
        programs = self.images.get(container["image"])
        if programs is None:
            message = f'failed to pull and unpack image "{container["image"]}": not found'
            return {"waiting": {"reason": "ErrImagePull", "message": message}}
        words = [*container["command"], *container.get("args", ())]
        words = [word for word in words if word != "--all-addresses"]  # this machine's are those of all pods
        program = shutil.which(words[0], path=str(programs))
        if program is None:
            message = f'exec: "{words[0]}": executable file not found in $PATH: unknown'
            return {"terminated": {"reason": "StartError", "exitCode": 128, "message": message}}
        variables = dict(self._variables(container, address))
        words = [address if word == ANY else re.sub(r"\$\((\w+)\)", lambda m: variables[m[1]], word) for word in words]
        shown = [self._shown(name, container, word) for word in words]
        environ = {key: self._shown(name, container, text) for key, text in variables.items()}
        environ |= {"PATH": f"{programs}:/usr/bin:/bin"}
        self._environs[name] = environ
        with self._log(name).open("ab") as log:
            process = subprocess.Popen([program, *shown[1:]], stdout=log, stderr=log, env=environ, cwd=self._folder)
        self._processes[name] = process
        if name in self._ended:
            process.kill()
        return process

    def _object(self, kind: str, name: str) -> Json:
        return self._cluster.objects[f"/api/v1/namespaces/{self._cluster.settings.namespace}/{kind}"][name]

    def _write_secret(self, folder: Path, name: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for key, text in self._object("secrets", name)["data"].items():
            (folder / key).write_bytes(base64.b64decode(text))

    def exec(self, name: str, words: Sequence[str]) -> str:
        """Run a program beside that of a pod, and return what it prints."""
        environ = self._environs[name]
        program = shutil.which(words[0], path=environ["PATH"]) or words[0]
        words = [program, *words[1:]]
        return subprocess.run(
            words, check=True, env=environ, cwd=self._folder, stdout=subprocess.PIPE, text=True
        ).stdout

    def _variables(self, container: Json, address: str) -> Iterator[tuple[str, str]]:
        fields = {"status.podIP": address, "metadata.namespace": self._cluster.settings.namespace}
        for row in container.get("env", ()):
            source = row.get("valueFrom", {})
            if "fieldRef" in source:
                yield row["name"], fields[source["fieldRef"]["fieldPath"]]
            elif "secretKeyRef" in source:
                key = source["secretKeyRef"]
                yield row["name"], base64.b64decode(self._object("secrets", key["name"])["data"][key["key"]]).decode()
            elif "configMapKeyRef" in source:
                key = source["configMapKeyRef"]
                yield row["name"], self._object("configmaps", key["name"])["data"][key["key"]]
            else:
                yield row["name"], row["value"]

    def _shown(self, name: str, container: Json, text: str) -> str:
        """Return a text with the paths of mounts as those of this machine."""
        for mount in container.get("volumeMounts", ()):
            folder = self._folder / name / mount["name"]
            folder.mkdir(parents=True, exist_ok=True)
            text = re.sub(rf"^{re.escape(mount['mountPath'])}(?=/|$)", str(folder), text)
        return text

    def _log(self, name: str) -> Path:
        return self._folder / f"{name}.log"

    def _terminated(self, name: str, process: subprocess.Popen[bytes]) -> Json:
        words = {"reason": "Error", "exitCode": process.returncode}
        message = self._log(name).read_text()[-MOST_MESSAGE:]
        return {"terminated": {**words, "message": message} if process.returncode else {"exitCode": 0}}

    def _tell(self, name: str, *, spec: Json | None = None, **status: Any) -> None:
        self._cluster.logs[name] = self._log(name).read_text
        with suppress(KeyError):  # the pod is deleted
            self._cluster.change_pod(name, spec=spec, **status)


def _status(name: str, container: Json, state: Json) -> Json:
    return {"name": container["name"], "containerID": f"c://{name}", "restartCount": 0, "state": state}


def _is_open(address: str, port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex((address, port)) == 0


def image_with(folder: Path, name: str, programs: Mapping[str, Sequence[str] | str]) -> Path:
    """Make the folder of an image: each program is a link, or a script of these lines."""
    made = folder / name.replace(":", "-")  # a colon divides a PATH
    made.mkdir()
    for program, target in programs.items():
        file = made / program
        if isinstance(target, str):
            file.symlink_to(target)
        else:
            file.write_text("\n".join(target) + "\n")
            file.chmod(0o755)
    return made
