"""The service, `cloche serve` in a process of its own, on a free port of loopback."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from cloche.core.errors import OutcomeUnknown
from cloche.keeper import registry
from cloche.keeper.attach import visit
from tests.harness.commands import Command, imported_once

END_S = 60
_FIRST_KEY = r"shown once: (cloche_\S+)"
_LINK = re.compile(r"once: (http\S+/login\?code=\S+)")


@dataclass
class Service:
    """Hold a service that runs: its address, the first key, the one-time link, and its process."""

    address: str
    key: str
    link: str
    database: Path
    process: Command | subprocess.Popen[bytes]
    log: Path
    environ: Mapping[str, str] = field(default_factory=dict)

    def client(self, key: str | None = None, **more: object) -> httpx.Client:
        """Return a client with a key, the first one unless another is given; an empty one for none."""
        text = self.key if key is None else key
        headers = {"Authorization": f"Bearer {text}"} if text else {}
        return httpx.Client(base_url=self.address, headers=headers, timeout=60, trust_env=False, **more)  # type: ignore[arg-type]

    def new_key(self, *scopes: str) -> str:
        """Make a key with these scopes and return its text."""
        with self.client() as client:
            made = client.post("/api/keys", json={"name": "-".join(scopes), "scopes": list(scopes)})
            made.raise_for_status()
            return str(made.json()["key"])

    def end(self, number: int = signal.SIGTERM) -> int:
        """End it by a signal, and return its exit code."""
        self.process.send_signal(number)
        return self.process.wait(END_S)


def environment(home: Path) -> dict[str, str]:
    """Return variables that keep the machine's own configuration out of a service."""
    kept = {name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ}
    (home / "run").mkdir(mode=0o700, exist_ok=True)
    return {
        **kept, "HOME": str(home), "XDG_CONFIG_HOME": str(home), "XDG_STATE_HOME": str(home / "state"),
        "XDG_CACHE_HOME": str(home / "cache"), "XDG_RUNTIME_DIR": str(home / "run"), "LANG": "C.UTF-8",
    }  # fmt: skip


# What a service imports takes most of its start.
MODULES = (
    "cloche.server.app", "cloche.server.command", "cloche.server.log", "cloche.wire.connection",
    "cloche.serving.http", "cloche.records.provision", "cloche.config.settings", "alembic.config", "uvicorn",
    "uvicorn.loops.auto", "uvicorn.protocols.http.auto", "websockets.server",
)  # fmt: skip


def start(
    home: Path, *words: str, key: str = "", program: Sequence[str] = (), python: str = "",
    first_key: str = _FIRST_KEY, modules: Sequence[str] = MODULES, **variables: str,
) -> Service:  # fmt: skip
    """Start a service with its database below `home`; with a `key` it is one that has been started before.

    It has the modules already; another `program`, a module and its first words, or another Python starts by itself.
    """
    database, log = home / "records" / "records.db", home / "service.log"
    environ = {**environment(home), **variables}
    begin = log.stat().st_size if log.exists() else 0
    all_words = ["serve", "--port", "0", "--database", str(database), *words]
    process: Command | subprocess.Popen[bytes]
    with log.open("ab") as output:
        if program or python:
            command = [python or sys.executable, "-m", *(program or ["cloche"]), *all_words]
            process = subprocess.Popen(
                command, env=environ, stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd=home
            )
        else:
            process = imported_once(*modules).start(all_words, env=environ, cwd=home, output=output.fileno())
    link = wait_for_line(process, log, begin, _LINK)
    found = re.search(first_key, log.read_text()[begin:])
    return Service(
        address=link.partition("/login")[0], key=found[1] if found else key, link=link, database=database,
        process=process, log=log, environ=environ,
    )  # fmt: skip


def wait_for_line(process: Command | subprocess.Popen[bytes], log: Path, begin: int, pattern: re.Pattern[str]) -> str:
    """Return the first group of a pattern once the log has it; a service without it is killed."""
    import time

    ends = time.monotonic() + END_S
    while time.monotonic() < ends:
        if (found := pattern.search(log.read_text()[begin:])) is not None:
            return found[1]
        if process.poll() is not None:
            break
        time.sleep(0.05)
    process.kill()
    process.wait(END_S)
    raise AssertionError(f"the service did not start: {log.read_text()[begin:]}")


@contextmanager
def serving(home: Path, *words: str, program: Sequence[str] = (), **variables: str) -> Iterator[Service]:
    """Serve for the body; then it must end by SIGTERM, as it should, and its sandboxes after it."""
    service = start(home, *words, program=program, **variables)
    with ending(service, home):
        yield service


@contextmanager
def ending(service: Service, home: Path) -> Iterator[Service]:
    """End a service after the body: by SIGTERM, as it should, and its sandboxes after it."""
    try:
        yield service
    except BaseException:
        service.end(signal.SIGKILL)
        raise
    finally:
        if service.process.poll() is None:
            assert service.end() == 128 + signal.SIGTERM, service.log.read_text()
        end_sandboxes(home)


def end_sandboxes(home: Path) -> None:
    """End the sandboxes that a service has left, as they outlive it."""
    place = home / "run" / "cloche"
    for lock in place.glob(f"*{registry.LOCK}"):
        with suppress(OutcomeUnknown):  # it has ended meanwhile
            visit(registry.Found(name=lock.stem, path=str(place)), "end", timeout_s=END_S)
