"""Certificates of the tests' own, for a daemon that listens on TLS and for its callers."""

from __future__ import annotations

import subprocess
from pathlib import Path

NAMES = {"server": "subjectAltName=IP:127.0.0.1", "client": "extendedKeyUsage=clientAuth"}


def make_certificates(folder: Path) -> Path:
    """Make an authority, and what a daemon and its callers show; a caller's folder is as docker wants it, `client`."""
    folder.mkdir()
    _openssl(
        "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2",
        "-subj", "/CN=tests", "-keyout", folder / "ca-key.pem", "-out", folder / "ca.pem",
    )  # fmt: skip
    for name, extension in NAMES.items():
        place = folder / name
        place.mkdir()
        (place / "extensions").write_text(extension)
        _openssl(
            "req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-subj", f"/CN={name}",
            "-keyout", place / "key.pem", "-out", place / "request.pem",
        )  # fmt: skip
        _openssl(
            "x509", "-req", "-days", "2", "-in", place / "request.pem", "-CA", folder / "ca.pem", "-CAcreateserial",
            "-CAkey", folder / "ca-key.pem", "-extfile", place / "extensions", "-out", place / "cert.pem",
        )  # fmt: skip
        (place / "ca.pem").write_bytes((folder / "ca.pem").read_bytes())
    return folder


def _openssl(*words: str | Path) -> None:
    subprocess.run(["openssl", *words], check=True, capture_output=True)
