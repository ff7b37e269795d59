"""Be the host and the internet until the test that started this is gone.

Told JSON: names, the ports that the internet leaves free, and the descriptors by which a test asks the host and the
internet. Each line that comes is `{"do": NAME, ...}`, and one line of JSON goes back.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from typing import Any

from cloche.jail.syscalls import CLONE_NEWNET, prctl, unshare
from tests.harness.model_servers import SCRIPT

from . import build
from .listeners import Listeners
from .names import Names
from .packets import Packets
from .services import answer_by_name, start_postgres, tcp_services, udp_services

PR_SET_PDEATHSIG = 1
GROUP = ("224.0.0.251", 5353)
ABSTRACT = "host-of-tests"
Commands = Mapping[str, Callable[..., Any]]


def main() -> None:
    """Make the namespaces, then serve on both sides."""
    sys.unraisablehook = lambda _: None  # a server name that is no text, which Python says on standard error
    told = json.loads(sys.argv[1])
    build.enter_namespaces()
    build.build_files(told["names"])
    hears, says = socket.socketpair()
    if (child := os.fork()) == 0:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        hears.close()
        unshare(CLONE_NEWNET)
        says.sendall(b"made")
        says.recv(1)  # the interface is here, or who would bring it is gone
        _be_internet(told)
    says.close()
    hears.recv(4)
    build.set_up(
        f"link add {build.HOST_DEVICE} type veth peer name {build.INTERNET_DEVICE} netns {child}\n{build.HOST_ROUTES}"
    )
    build.set_up6(build.HOST_ROUTES6)
    hears.sendall(b"x")
    _be_host(told)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def _be_internet(told: Mapping[str, Any]) -> None:
    build.set_up(build.INTERNET_ROUTES)
    build.set_up6(build.INTERNET_ROUTES6)
    names = Names()
    names.set(told["names"])
    packets = Packets(build.INTERNET_DEVICE)
    tcp = {port: answer for port, answer in tcp_services(names).items() if port not in told["left_free"]}
    listeners = Listeners(tcp, udp_services(names))
    listeners.join(*GROUP, build.GATEWAY)
    listeners.start()

    def forget() -> None:
        for one in (listeners.record, names, packets.record):
            one.forget()

    def seen() -> dict[str, Any]:
        listeners.settle()
        records = {"arrivals": listeners.record, "questions": names.record, "packets": packets.record}
        return {name: record.as_json() for name, record in records.items()}

    commands: Commands = {
        "seen": seen, "forget": forget, "name": names.set, "start_postgres": start_postgres, "script": SCRIPT.set,
        "asked": SCRIPT.asked,
    }  # fmt: skip
    _obey(told["internet"], commands)
    os._exit(0)


def _be_host(told: Mapping[str, Any]) -> None:
    listeners = Listeners(tcp_services(None), udp_services(None))
    listeners.listen_by_name(ABSTRACT, answer_by_name)
    listeners.start()

    def seen() -> dict[str, Any]:
        listeners.settle()
        return {"arrivals": listeners.record.as_json()}

    _obey(told["host"], {"seen": seen, "forget": listeners.record.forget})


def _obey(fd: int, commands: Commands) -> None:
    """Carry out what is asked for until who asks is gone; the first line says that all is ready, and who we are."""
    with socket.socket(fileno=fd) as control, control.makefile("rw") as lines:
        print(json.dumps({"pid": os.getpid()}), file=lines, flush=True)
        for line in lines:
            asked = json.loads(line)
            answer = commands[asked.pop("do")](**asked)
            print(json.dumps(answer), file=lines, flush=True)


main()
