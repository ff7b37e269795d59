"""Where packages come from without configuration: the default of the client itself, read from its own output.

uv's help names its index, npm its registry. The index keeps its files on other hosts, and its list of a package names
them: for the default index that list is trusted, for any other the operator names the hosts (`packages_hosts`).
"""

from __future__ import annotations

import asyncio
import functools
import json
import re
import subprocess
from collections.abc import Sequence
from urllib.parse import urlsplit

from cloche.core.errors import BackendUnavailable, StartFailed
from cloche.core.limits import MIB
from cloche.core.network import parse_address
from cloche.core.policy import Policy
from cloche.core.protocols import Backend
from cloche.core.record import replace

from .index import Index, find_index
from .npm import Npm
from .registry import Registry, find_registry
from .resolve import credentials_variable, find_uv
from .steps import CA_FILE, Step, ca_files, failed, run_step

ASKING_S = 60.0
MOST_PAGE_BYTES = 64 * MIB
MOST_HOSTS = 4
_INDEX = re.compile(r"--default-index\b[^<]*<DEFAULT_INDEX>[^<]*\bby\s+default:\s*<(https://[^\s<>]+)>")
_REGISTRY = re.compile(r"https://[^\s<>]+")
_NOWHERE = "/nonexistent"
_HOST = re.compile(r"[A-Za-z0-9_-]+(?:\.[A-Za-z0-9_-]+)+")
_listed: dict[str, tuple[str, ...]] = {}  # by index: it is asked once by each process


@functools.cache
def default_index() -> str:
    """Return the address of uv's default index. Raises BackendUnavailable where there is no uv, or it says none."""
    match = _INDEX.search(_output_of((find_uv(), "pip", "compile", "--help")))
    if match is None:
        raise BackendUnavailable(
            "packages: the default index of this uv is unknown.",
            remedy="Name one: UV_DEFAULT_INDEX, or index-url in your pip.conf",
        )
    return match[1].rstrip("/")


@functools.cache
def default_registry(npm: Npm) -> str:
    """Return the address of npm's default registry. Raises BackendUnavailable where it says none."""
    without = (f"--userconfig={_NOWHERE}/user", f"--globalconfig={_NOWHERE}/all", "--logs-max=0")
    match = _REGISTRY.fullmatch(_output_of((*npm.argv, "config", "get", "registry", *without)).strip())
    if match is None:
        raise BackendUnavailable(
            "packages: the default registry of this npm is unknown.",
            remedy="Name one: registry=... in your ~/.npmrc",
        )
    return match[0].rstrip("/")


def _output_of(argv: Sequence[str]) -> str:
    """Run the operator's client without their configuration, and return its output. Raises BackendUnavailable."""
    env = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": _NOWHERE, "NO_COLOR": "1"}
    try:
        return subprocess.run(
            argv,
            cwd="/",
            env=env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=ASKING_S,
            check=True,
            text=True,
        ).stdout
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError) as error:
        raise BackendUnavailable(f"packages: {argv[0]} does not report its default: {error}.") from None


async def with_default_registry(registry: Registry, npm: Npm) -> Registry:
    """Return a registry with what npm says of its default."""
    default = await asyncio.to_thread(default_registry, npm)
    if registry.url:
        return replace(registry, default=default)
    return replace(find_registry(default=default), file_hosts=registry.file_hosts)


async def with_default_index(backend: Backend, policy: Policy, index: Index, name: str) -> Index:
    """Return an index with what uv says of its default, and where that has its files.

    `name` is that of a package, whose list is read. Raises BackendUnavailable, StartFailed.
    """
    try:
        default = await asyncio.to_thread(default_index)
    except BackendUnavailable:
        if index.url:
            return index  # and whoever needs uv will say so
        raise
    if not index.url:
        index = replace(find_index(default=default), file_hosts=index.file_hosts)
    index = index.in_order(default)
    if default not in (index.url, *index.extra):
        return index
    if default not in _listed:
        hosts = await _hosts_listed(backend, policy, index, default, name)
        if not hosts:
            return index
        _listed[default] = hosts
    return replace(index, listed_hosts=_listed[default])


async def _hosts_listed(backend: Backend, policy: Policy, index: Index, default: str, name: str) -> tuple[str, ...]:
    """Ask an index, in a sandbox, which hosts a package's files are on."""
    bundle = index.ca_bundle()
    order = {"page": f"{default}/{name}/", "ca": CA_FILE if bundle else "", "most": MOST_PAGE_BYTES}
    step = Step(
        name="look up", program="download", stdin=json.dumps(order).encode(), env=credentials_variable(index),
        files=ca_files(bundle), network_allow=index.network_allow,
    )  # fmt: skip
    outcome = await run_step(backend, policy, step)
    if not outcome.result.ok:
        raise failed(step, outcome.result, index.credentials.hide)
    try:
        hosts = json.loads(outcome.result.stdout)
        if not isinstance(hosts, list) or len(hosts) > MOST_HOSTS:
            raise ValueError("it is not a list of hosts, or it is too long")
        return tuple(_listed_host(host) for host in hosts)
    except (ValueError, RecursionError) as error:
        host = urlsplit(default).hostname
        raise StartFailed(
            f"packages: the hosts for the files of {host} cannot be used: {error}", step="look up"
        ) from None


def _listed_host(name: object) -> str:
    if not isinstance(name, str) or not _HOST.fullmatch(name) or parse_address(name) is not None:
        raise ValueError(f"{str(name)[:100]!r} is not a name of a host")
    return f"{name.lower()}:443"
