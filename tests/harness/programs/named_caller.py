"""A caller with a sandbox that has a name, to be killed at any moment.

Arguments: the name, how long to keep it, and a host that it may reach, if any.
"""

from __future__ import annotations

import sys

import cloche
from cloche.backends.local.backend import LocalBackend


def main(name: str, keep: str, host: str = "") -> None:
    """Say how far we are, then run commands on and on."""
    LocalBackend().capabilities()  # the probe is not what is to be killed
    print("ready", flush=True)
    hosts = [host] if host else None
    with cloche.Sandbox(name=name, keep=keep or None, network_allow=hosts) as sandbox:
        print("open", flush=True)
        process = sandbox.start(["sleep", "1000"], keep=True)
        print(f"started {process.id}", flush=True)
        while True:
            sandbox.exec(shell="echo x; sleep 0.01 &")


if __name__ == "__main__":
    main(*sys.argv[1:])
