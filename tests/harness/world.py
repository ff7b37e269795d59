"""The world of a network test: a host where programs run, and an internet with a server at every address.

`tests/harness/internet` is what runs in it, and says how it is built. Nothing of it outlives its process, and no packet
leaves it: it has no other interface. `World.run` runs a program on its host, `World.seen` says what arrived where.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import cloche
from tests.harness.environments import run_as_user
from tests.harness.internet.build import BUNDLE, HOME, OWN, OWN6, OWN_PRIVATE, RESOLVER, SYSTEM_PATH

__all__ = [
    "METADATA",
    "OWN",
    "OWN6",
    "OWN_PRIVATE",
    "PRIVATE",
    "PUBLIC",
    "PUBLIC_TOO",
    "RESOLVER",
    "World",
    "open_world",
]

ROOT = Path(__file__).parents[2]
ENTER = ("-m", "tests.harness.internet.enter")
START_S, RUN_S = 60.0, 240.0
# A command has not the room for any program or argument.
START = """
import json
with open({path!r}) as file:
    told = json.load(file)
ARGUMENT = told["argument"]
exec(compile(told["program"], "<program>", "exec"))
"""
PUBLIC, PUBLIC_TOO, METADATA, PRIVATE = "93.184.216.34", "93.184.216.35", "169.254.169.254", "10.1.2.3"
# What the name server answers, by turns (internet/names.py). All have certificates.
NAMES: dict[str, list[list[str]]] = {
    "good.example": [[PUBLIC]],
    "*.good.example": [[PUBLIC]],
    "other.example": [[PUBLIC]],
    "*.other.example": [[PUBLIC]],
    "wild.example": [[PUBLIC_TOO]],
    "*.wild.example": [[PUBLIC_TOO]],
    "db.example": [[PRIVATE]],
    "both.example": [[PUBLIC, "2606:2800:220:1::1"]],
    **{f"{site}.example": [["93.184.216.40"]] for site in ("index", "files", "registry", "modules", "git", "socket")},
}
# Of a host whose operator has an authority of its own; names that programs read where it is.
BUNDLE_VARIABLES = (
    "SSL_CERT_FILE",
    "REQUESTS_CA_BUNDLE",
    "CURL_CA_BUNDLE",
    "PIP_CERT",
    "NODE_EXTRA_CA_CERTS",
    "GIT_SSL_CAINFO",
)


@dataclass(frozen=True, slots=True)
class Seen:
    """What came to the internet and to the host's own listeners since the world was told to forget.

    `arrivals` are connections and datagrams that a server took, `questions` what a name server was asked, `packets`
    all that passed from the host: first packets of connections, and whatever is not TCP.
    """

    arrivals: Sequence[dict[str, Any]]
    questions: Sequence[dict[str, Any]]
    packets: Sequence[dict[str, Any]]

    @property
    def names(self) -> set[str]:
        """Return the names that were asked for, in lower case."""
        return {row["name"].lower() for question in self.questions for row in question["requests"]}

    @property
    def endpoints(self) -> set[tuple[str, str, int]]:
        """Return protocol, address and port of all that passed from the host."""
        return {(packet["protocol"], packet["address"], packet["port"]) for packet in self.packets}

    def holding(self, token: str) -> list[Mapping[str, Any]]:
        """Return what holds a word anywhere: in bytes below or above TLS, in a server name, in a name asked for."""
        small = token.lower()
        return [row for row in (*self.arrivals, *self.questions, *self.packets) if small in row["text"]]


class Control:
    """Ask one side of the world."""

    def __init__(self, end: socket.socket) -> None:
        self._end, self._lines = end, end.makefile("rw")
        self.pid: int = self.hear()["pid"]

    def hear(self) -> Any:
        """Return an answer."""
        line = self._lines.readline()
        if not line:
            raise RuntimeError("the world has ended")
        return json.loads(line)

    def ask(self, what: str, **told: Any) -> Any:
        """Ask, and return the answer."""
        print(json.dumps({"do": what, **told}), file=self._lines, flush=True)
        return self.hear()

    def close(self) -> None:
        """Let that side end."""
        with suppress(OSError):  # it has ended by itself, and what was to be said to it is lost
            self._lines.close()
        self._end.close()


class World:
    """A host and its internet. `run` runs a program on the host; the rest reads and sets the internet."""

    def __init__(self, host: Control, internet: Control) -> None:
        self._host, self._internet = host, internet

    @property
    def pid(self) -> int:
        """Return the process that all of it ends with, which is in the host's namespaces."""
        return self._host.pid

    def name(self, table: Mapping[str, Sequence[Sequence[str]]]) -> None:
        """Have the name server answer so for these names."""
        self._internet.ask("name", table=table)

    def forget(self) -> None:
        """Begin a new record; names are at their first turns again."""
        self._internet.ask("forget")
        self._host.ask("forget")

    def seen(self) -> Seen:
        """Return what has arrived; whatever was sent before is in it."""
        found = self._internet.ask("seen")
        on_host = self._host.ask("seen")
        seen = Seen([*found["arrivals"], *on_host["arrivals"]], found["questions"], found["packets"])
        for row in (*seen.arrivals, *seen.questions, *seen.packets):
            row["text"] = f"{row['raw']}\n{row['said']}\n{row['server_name']}".lower()
        return seen

    def start_postgres(self) -> str:
        """Start PostgreSQL behind port 5432 of every address; say what is missing where it cannot be."""
        return str(self._internet.ask("start_postgres"))

    def script(self, steps: Sequence[Mapping[str, str]]) -> None:
        """Have the models follow these steps (model_servers.py)."""
        self._internet.ask("script", steps=steps)

    def asked(self) -> list[dict[str, Any]]:
        """Return what the models were asked since then."""
        return list(self._internet.ask("asked"))

    def words(self, *, has_powers: bool = False, on_internet: bool = False) -> list[str]:
        """Return the words before a command that runs on the host, or `on_internet`, on that side.

        `has_powers`: with all capabilities in the world's namespaces, which an ordinary user's programs there lack.
        """
        is_root = os.geteuid() == 0
        pid = (self._internet if on_internet else self._host).pid
        enter = ["nsenter", f"--target={pid}", "--mount", "--net", "--ipc"]
        enter += [] if is_root else ["--user", "--preserve-credentials"]
        if has_powers and not is_root:
            enter = ["env", f"--chdir={ROOT}", f"PYTHONPATH={_both_paths()}", sys.executable, *ENTER, str(pid)]
        return [*enter, "setpriv", "--pdeathsig=KILL"]

    def run(
        self,
        program: str,
        argument: object = None,
        *,
        user: str | None = None,
        has_powers: bool = False,
        env: Mapping[str, str] | None = None,
    ) -> Any:
        """Run a program of Python's on the host, and return the JSON that it prints last.

        It has `json`, and its argument as `ARGUMENT`, and can import Cloche. `user="ordinary"` has it run by an
        ordinary user where this is root (environments.py).
        """
        env = {**host_variables(), **(env or {})}
        with NamedTemporaryFile("w", suffix=".json") as file:
            json.dump({"argument": argument, "program": program}, file)
            file.flush()
            os.chmod(file.name, 0o644)
            head = START.format(path=file.name)
            if user == "ordinary" and os.geteuid() == 0:
                return run_as_user(head, inside=self.words(), env=env)
            words = [*self.words(has_powers=has_powers), "env", f"--chdir={HOME}", sys.executable, "-c", head]
            done = subprocess.run(
                words, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=RUN_S, check=False
            )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])


def host_variables() -> dict[str, str]:
    """Return the environment of programs on the host: what its operator would set, and nothing of the machine's."""
    return {
        "HOME": str(HOME),
        "PATH": SYSTEM_PATH,
        "LANG": "C.UTF-8",
        "PYTHONPATH": str(Path(cloche.__file__).parents[1]),
        "PIP_CONFIG_FILE": os.devnull,
        **dict.fromkeys(BUNDLE_VARIABLES, str(BUNDLE)),
    }


def _both_paths() -> str:
    return os.pathsep.join([str(ROOT), host_variables()["PYTHONPATH"]])


@contextmanager
def open_world(
    names: Mapping[str, Sequence[Sequence[str]]] = NAMES, *, left_free: Sequence[int] = ()
) -> Iterator[World]:
    """Start a world, and end it. At the ports that are `left_free` its internet serves nothing."""
    with ExitStack() as stack:
        ours, theirs = zip(*(socket.socketpair() for _ in range(2)), strict=True)
        told = {
            "names": names, "left_free": list(left_free), "host": theirs[0].fileno(), "internet": theirs[1].fileno()
        }  # fmt: skip
        words = [sys.executable, "-m", "tests.harness.internet", json.dumps(told)]
        env = {**host_variables(), "PYTHONPATH": _both_paths()}
        process = stack.enter_context(
            subprocess.Popen(words, cwd=ROOT, env=env, pass_fds=[end.fileno() for end in theirs])
        )
        stack.callback(process.kill)  # what is below it has ended by itself, or does so then
        for end in theirs:
            end.close()
        for end in ours:
            end.settimeout(START_S)
        controls = [Control(end) for end in ours]
        yield World(*controls)
        for control in controls:
            control.close()
        process.wait(START_S)
