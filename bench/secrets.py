"""Measure what connections cost that are opened for secrets: `python -m bench.secrets [--rounds N] [--events NAME,…]`.

As `bench.network` does, whose world, server and client these are: a sandbox with a secret of the server's host takes
turns with one where the host is in the allow list (its TLS is spliced), and with the client outside. It needs root.
"""

from __future__ import annotations

import sys

from .network import measured
from .network_host import OPENED_EVENTS
from .targets import OF_SECRETS


def main() -> int:
    """Measure what is asked for on the command line."""
    call = "memory_with_secrets(**ARGUMENT)"
    return measured("python -m bench.secrets", __doc__ or "", OPENED_EVENTS, OF_SECRETS, call)


if __name__ == "__main__":
    sys.exit(main())
