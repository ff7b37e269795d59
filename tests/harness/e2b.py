"""`cloche serve --e2b` for tests of E2B's own SDKs: a process on free ports of loopback, with a home of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import httpx
import pytest

from tests.harness import service

ROOT = Path(__file__).parents[2]
KEY = r"shown once: (e2b_[0-9a-f]+)"
_ADDRESS = re.compile(r"export E2B_API_URL=(\S+)")
MODULES = (*service.MODULES, "cloche.server.e2b.listening")


@dataclass
class E2BService:
    """Hold the service (`service.Service`), the address that E2B's protocol has, and the first key."""

    service: service.Service
    url: str
    key: str

    @property
    def variables(self) -> dict[str, str]:
        """Return the variables that E2B's SDKs read."""
        addresses = dict.fromkeys(("E2B_API_URL", "E2B_SANDBOX_URL", "E2B_VOLUME_API_URL"), self.url)
        return {**addresses, "E2B_API_KEY": self.key}

    def environment(self, home: Path) -> dict[str, str]:
        """Return the whole environment of a program that uses an SDK."""
        return {**service.environment(home), **self.variables, "NO_COLOR": "1"}

    def http(self, **headers: str) -> httpx.Client:
        """Return a client without a key for requests that no SDK sends."""
        return httpx.Client(base_url=self.url, headers=headers, timeout=60, trust_env=False)

    def new_key(self, *scopes: str) -> str:
        """Make a key of the service's with these scopes."""
        return self.service.new_key(*scopes)


def start(home: Path, *words: str, key: str = "", **variables: str) -> E2BService:
    """Start a service as `service.start` does, with E2B's protocol."""
    log = home / "service.log"
    begin = log.stat().st_size if log.exists() else 0
    with_key = service.start(
        home,
        "--e2b",
        *(() if "--e2b-port" in words else ("--e2b-port", "0")),
        *words,
        key=key,
        first_key=KEY,
        modules=MODULES,
        python=_python(),
        **variables,
    )
    url = service.wait_for_line(with_key.process, log, begin, _ADDRESS)
    return E2BService(service=with_key, url=url, key=with_key.key)


def _python() -> str:
    """Return the interpreter of the service, empty for this one: packages of older SDKs lack the service's own."""
    return "" if find_spec("fastapi") else str(ROOT / ".venv/bin/python")


@contextmanager
def serving(home: Path, *words: str, **variables: str) -> Iterator[E2BService]:
    """Serve for the body; then the service must end as it should, and its sandboxes after it."""
    e2b = start(home, *words, **variables)
    with service.ending(e2b.service, home):
        yield e2b


@contextmanager
def variables(e2b: E2BService) -> Iterator[None]:
    """Let the SDKs in this process use a service for the body."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("E2B_")]:
            patch.delenv(name)
        for name, value in e2b.variables.items():
            patch.setenv(name, value)
        yield


def javascript(package: str) -> Path:
    """Return the folder `node_modules` of E2B's packages: `e2b` of the newest, `e2b-older` (scripts/agents.sh)."""
    done = subprocess.run(["scripts/agents.sh", package], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"missing: E2B's packages for JavaScript: {done.stderr.strip()[-300:]}")
    return Path(done.stdout.strip()).parent


def run_node(program: Path, modules: Path, env: Mapping[str, str], cwd: Path, *words: str) -> str:
    """Run a JavaScript program that imports packages of a folder, and return what it prints."""
    (cwd / "node_modules").unlink(missing_ok=True)
    (cwd / "node_modules").symlink_to(modules)
    copy = cwd / program.name
    copy.write_bytes(program.read_bytes())
    done = subprocess.run(
        ["node", str(copy), *words], cwd=cwd, env=dict(env), capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def run_python(text: str, env: Mapping[str, str], cwd: Path) -> str:
    """Run a Python program with this interpreter's packages, and return what it prints."""
    done = subprocess.run(
        [sys.executable, "-c", text], cwd=cwd, env=dict(env), capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
