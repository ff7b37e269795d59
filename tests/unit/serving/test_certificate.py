"""A certificate that a server keeps: made once, in a folder that is private."""

from __future__ import annotations

import os
import ssl
from pathlib import Path

import pytest

from cloche.core.errors import InvalidRequest
from cloche.serving.certificate import keep_certificate


def test_a_certificate_is_made_once_and_kept_private(tmp_path: Path) -> None:
    """The next start has the same one, so that its clients' pin holds; its key is for this user alone."""
    folder = str(tmp_path / "tls")
    path, sha256 = keep_certificate(folder, "10.0.0.7")
    ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(path)
    assert os.stat(path).st_mode & 0o777 == 0o600
    assert keep_certificate(folder, "10.0.0.7") == (path, sha256)
    Path(folder).chmod(0o755)
    with pytest.raises(InvalidRequest, match="mode 0700"):
        keep_certificate(folder, "10.0.0.7")
