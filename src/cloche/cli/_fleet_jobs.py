"""`cloche fleet` from outside of a cluster: the same commands, each as a job there, by Cloche as the cluster has it."""

from __future__ import annotations

import contextlib
import getpass
import hashlib
import re
import secrets
import socket
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from cloche import __version__

from .output import say

if TYPE_CHECKING:
    from cloche.core.fleet_settings import FleetSettings

DONE_S = 300.0
KEY_BYTES = 32
_SERVICE = {"address": r"https://[A-Za-z0-9.:\[\]-]+", "certificate": "[0-9a-f]{64}"}


def run_in_cluster(
    settings: FleetSettings, words: Sequence[str], *, pip: Sequence[str], timeout_s: float = DONE_S
) -> dict[str, Any]:
    """Run `cloche fleet WORDS --json` as a job, and return what it printed. Raises BackendUnavailable."""
    import asyncio

    from cloche.fleets.ray.jobs import jobs_at

    jobs = jobs_at(settings.address, pip=pip, version=__version__)
    return asyncio.run(jobs.run(["fleet", *words, "--json"], variables_of(settings), timeout_s=timeout_s))


def new_key() -> tuple[str, list[str]]:
    """Return a new key of a service, and the words with which the cluster admits it: its hash alone."""
    key = f"cloche_{secrets.token_urlsafe(KEY_BYTES)}"
    name = socket.gethostname()
    with contextlib.suppress(OSError, KeyError):  # a user without a name
        name = f"{getpass.getuser()}@{name}"
    return key, ["--key-sha256", hashlib.sha256(key.encode()).hexdigest(), "--key-name", name[:64]]


def service_of(document: Mapping[str, Any]) -> dict[str, str]:
    """Return the address and the certificate of a fleet's service. Raises BackendUnavailable for anything else.

    They become lines of a file with settings, and the network in between may be hostile.
    """
    from cloche.core.errors import BackendUnavailable

    service = document.get("service")
    texts = {name: str(service.get(name)) for name in _SERVICE} if isinstance(service, dict) else {}
    if not texts or not all(re.fullmatch(_SERVICE[name], text) for name, text in texts.items()):
        raise BackendUnavailable(
            "the cluster's answer names no service with an address and a certificate.",
            remedy="Ask again over https://, or over ssh -L: a machine in between may have changed it.",
        )
    return texts


def print_account(service: Mapping[str, str], key: str) -> None:
    """Print the lines of a .env with which Cloche runs code at a service."""
    say("these lines are an account: keep them in a file of yours, and name it with --env-file")
    print(
        f"SANDBOX_TYPE=cloche\nCLOCHE_REMOTE_URL={service['address']}\n"
        f"CLOCHE_REMOTE_CERTIFICATE={service['certificate']}\nCLOCHE_REMOTE_KEY={key}"
    )


def variables_of(settings: FleetSettings) -> dict[str, str]:
    """Return the settings of the fleet that are not the defaults, as variables of another process."""
    from cloche.config.keys import KEYS

    default, variables = type(settings)(), {}
    for key in KEYS:
        section, _, name = key.settings_field.partition(".")
        if section == "fleet" and name != "address" and getattr(settings, name) != getattr(default, name):
            value = getattr(settings, name)
            variables[key.variable] = f"{value:g}s" if name.endswith("_s") else str(value).lower()
    return variables
