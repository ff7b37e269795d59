"""The certificate authorities that a guest with a network trusts: the host's, and those of the operator's environment.

The variables are those of OpenSSL, pip, requests, curl, git and Node. The files are copied into the guest's /etc, since
their own paths may not be visible to the guest.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Mapping

from .layout import Row

log = logging.getLogger("cloche.backends")
VARIABLES = (
    "SSL_CERT_FILE", "PIP_CERT", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "GIT_SSL_CAINFO", "NODE_EXTRA_CA_CERTS",
)  # fmt: skip
FOLDER = "etc/cloche"
MOST_BYTES = 4 << 20
MARK = "-----BEGIN CERTIFICATE-----"


@functools.cache
def files_and_variables() -> tuple[tuple[Row, ...], Mapping[str, str]]:
    """Return the files to write into a guest's tree, and the variables that name them there; read once.

    A file without certificates is left out and logged: it may be a private key.
    """
    paths: dict[str, str] = {}
    rows: list[Row] = []
    variables: dict[str, str] = {}
    for name in VARIABLES:
        path = os.environ.get(name, "")
        if path and path not in paths:
            text = read_certificates(path)
            paths[path] = f"{FOLDER}/authorities-{len(rows)}.pem" if text else ""
            rows += [("text", paths[path], text)] if text else []
        if paths.get(path):
            variables[name] = f"/{paths[path]}"
    return tuple(rows), variables


@functools.cache
def variables_here() -> Mapping[str, str]:
    """Return the variables unchanged, for guests that see these files at their own paths; read once."""
    paths = {name: os.path.realpath(os.environ[name]) for name in VARIABLES if os.environ.get(name)}
    return {name: path for name, path in paths.items() if read_certificates(path)}


def read_certificates(path: str) -> str:
    """Return the text of a file of certificates; empty, and logged, for another file."""
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            text = file.read(MOST_BYTES + 1)
    except OSError as error:
        log.warning("guests do not get the authorities of %s: %s", path, error)
        return ""
    if MARK not in text or "PRIVATE KEY-----" in text or len(text) > MOST_BYTES:
        log.warning("guests do not get %s: it is not a file of certificates, holds a key, or is too large", path)
        return ""
    return text
