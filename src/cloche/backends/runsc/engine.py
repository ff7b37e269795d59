"""Which runsc there is, and the words that it is called with."""

from __future__ import annotations

import functools
import logging
import os
import shutil
import subprocess
from dataclasses import dataclass

log = logging.getLogger("cloche.runsc")
RUNSC = "runsc"
PATH_VARIABLE, NONE = "CLOCHE_RUNSC", "none"
# What catches the guest's system calls, the fastest first; kvm needs a device, and is not asked for.
PLATFORMS = ("systrap", "ptrace")
ASK_S = 10.0
INSTALL = (
    'Install gVisor\'s runsc: "sudo apt-get install runsc", or as https://gvisor.dev/docs/user_guide/install says; '
    "docker is not needed."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """Name one runsc and how it is run."""

    path: str
    version: str
    platform: str
    is_rootless: bool

    def words(self) -> list[str]:
        """Return the words before the command."""
        return [
            self.path,
            f"--platform={self.platform}",
            "--network=none",
            "--ignore-cgroups",
            "--oci-seccomp",
            *(["--rootless"] if self.is_rootless else []),
        ]


def find_runsc() -> str:
    """Return the path of runsc: what CLOCHE_RUNSC names, else the one on PATH; empty when there is none."""
    named = os.environ.get(PATH_VARIABLE, "")
    found = None if named == NONE else shutil.which(named or RUNSC)
    return os.path.realpath(found) if found else ""


def why_no_runsc() -> str:
    """Return why there is no path of runsc."""
    named = os.environ.get(PATH_VARIABLE, "")
    if not named:
        return "there is no program runsc on PATH"
    return f"{PATH_VARIABLE} is {named!r}, " + (
        "so there is no program runsc" if named == NONE else "no program to run"
    )


@functools.cache
def version_of(path: str, age: int) -> str:  # noqa: ARG001 - part of the cache's key
    """Return what a runsc says of its version, empty when it says nothing."""
    try:
        answer = subprocess.run(
            [path, "--version"], capture_output=True, stdin=subprocess.DEVNULL, timeout=ASK_S, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        log.debug("%s does not say its version: %s", path, error)
        return ""
    first = answer.stdout.decode("utf-8", "replace").splitlines()[:1]
    return first[0].removeprefix("runsc version ").strip() if first else ""
