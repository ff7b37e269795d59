"""What unpacks npm's tarballs refuses what leads out, and what is no file."""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from cloche.packages import inside

PROGRAM = Path(inside.__path__[0]) / "unpack_tarballs.py"
HOSTILE = [
    ("package/../../../outside", tarfile.REGTYPE, "leads out"),
    ("package/../other/index.js", tarfile.REGTYPE, "leads out"),
    ("/tmp/outside", tarfile.REGTYPE, "leads out"),
    ("package/..\\outside", tarfile.REGTYPE, "leads out"),
    ("package/link", tarfile.SYMTYPE, "not a regular file"),
    ("package/link", tarfile.LNKTYPE, "not a regular file"),
    ("package/null", tarfile.CHRTYPE, "not a regular file"),
    ("package/pipe", tarfile.FIFOTYPE, "not a regular file"),
]


def unpacked(folder: Path, name: str, kind: bytes) -> subprocess.CompletedProcess[bytes]:
    """Unpack a tarball that holds this."""
    entry = tarfile.TarInfo(name)
    entry.type, entry.linkname = kind, "/etc/passwd"
    with tarfile.open(folder / "one.tgz", "w:gz") as tarball:
        tarball.addfile(entry)
    asked = {"tarballs": [[str(folder / "one.tgz"), "one"]], "most_files": 10, "most_bytes": 1000}
    command = [sys.executable, "-I", str(PROGRAM)]
    return subprocess.run(command, input=json.dumps(asked).encode(), capture_output=True, check=False, timeout=60)


@pytest.mark.parametrize(("name", "kind", "why"), HOSTILE)
def test_what_leads_out_or_is_no_file_ends_it(tmp_path: Path, name: str, kind: bytes, why: str) -> None:
    """The error says so, and nothing has come out."""
    done = unpacked(tmp_path, name, kind)
    assert (done.returncode, done.stdout) == (1, b"")
    assert why in done.stderr.decode()


def test_a_plain_file_comes_out(tmp_path: Path) -> None:
    """So it is what it holds that has ended the others."""
    done = unpacked(tmp_path, "package/index.js", tarfile.REGTYPE)
    assert (done.returncode, b"one/index.js" in done.stdout) == (0, True)
