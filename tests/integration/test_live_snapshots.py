"""Snapshots of live sandboxes: all files go into an archive, and a new sandbox begins with exactly these."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest

import cloche
from cloche.core.errors import SandboxFileError, SandboxFileTooLarge

MAKE = """
set -e
useradd -m bob
cd /home/bob
echo hi > file; chown bob:bob file; chmod 4751 file
python3 -c "import os; os.setxattr('file', 'user.kind', b'x' * 300)"
ln file twin; ln -s file link; chown -h bob:bob link; mkfifo pipe
mkdir -p /opt/deep/er; chmod 700 /opt/deep
truncate -s 20M /opt/deep/holes
touch "/tmp/$(printf 'x%.0s' $(seq 200))"
rm /etc/adduser.conf
rm -rf /etc/pam.d; echo file > /etc/pam.d
rm /etc/login.defs; mkdir /etc/login.defs; touch /etc/login.defs/inside
rm /etc/nsswitch.conf; ln -s there /etc/nsswitch.conf
"""
TELL = """
cd /home/bob
stat -c '%n %U:%G %a %h %F' file link .; stat -c '%i' file twin | uniq | wc -l
python3 -c "import os; print(len(os.getxattr('file', 'user.kind')))"
stat -c '%n %U:%G %a %s' /opt/deep /opt/deep/holes; stat -c %s /opt/deep/holes; du -k /opt/deep/holes | cut -f1
ls -R /opt/deep /tmp /etc/pam.d /etc/login.defs; readlink /etc/nsswitch.conf; test ! -e /etc/adduser.conf; id -u bob
"""


def test_a_sandbox_begins_with_the_files_of_another(tmp_path: Path) -> None:
    """Owners, bits, links of both kinds, attributes, holes, users and what was removed are as they were."""
    with cloche.Sandbox(users=True, timeout=60) as sandbox:
        assert sandbox.exec(shell=MAKE, user="root").ok
        before = sandbox.exec(shell=TELL, user="root")
        saved = sandbox.snapshot(tmp_path / "saved")
        assert before.ok
        assert saved.left_out == 1  # the pipe
    with cloche.Sandbox(users=True, timeout=60, snapshot=tmp_path / "saved") as copy:
        assert copy.exec(shell=TELL, user="root").stdout == before.stdout
        assert copy.exec(["cat", "/home/bob/file"], user="bob").stdout == "hi\n"


def test_processes_stand_still_while_files_are_read(tmp_path: Path) -> None:
    """Two files that a process writes one after the other differ by one write at the most; then it goes on."""
    writes = "i=0; while :; do i=$((i+1)); echo $i > /var/a; echo $i > /var/z; done"
    with cloche.Sandbox(timeout=60) as sandbox:
        sandbox.exec(shell="for i in $(seq 400); do head -c 20000 /dev/urandom > /var/m$i; done")
        sandbox.start(shell=f"{writes} &")
        while not sandbox.exists("/var/z"):
            pass
        sandbox.snapshot(tmp_path / "saved")
        first = sandbox.read_file("/var/z")
        while sandbox.read_file("/var/z") == first:
            pass
    with tarfile.open(tmp_path / "saved") as archive:
        values = [int(archive.extractfile(f"var/{name}").read() or b"-1") for name in "az"]  # type: ignore[union-attr]
    assert -1 in values or values[0] - values[1] in (0, 1)


def test_a_paused_sandbox_has_a_snapshot_and_stays_paused(tmp_path: Path) -> None:
    """Nothing of it goes on meanwhile, or afterwards."""
    with cloche.Sandbox(timeout=60) as sandbox:
        sandbox.exec(shell="echo kept > /var/kept; (while :; do date +%s%N > /var/now; done) &")
        sandbox.pause()
        sandbox.snapshot(tmp_path / "first")
        sandbox.snapshot(tmp_path / "second")
        with pytest.raises(cloche.ClocheError, match="paused"):
            sandbox.exec(["true"])
        sandbox.resume()
        assert sandbox.exec(["cat", "/var/kept"]).stdout == "kept\n"
    assert _member(tmp_path / "first", "var/now") == _member(tmp_path / "second", "var/now")


def _member(path: Path, name: str) -> bytes:
    with tarfile.open(path) as archive:
        return archive.extractfile(name).read()  # type: ignore[union-attr]


def _archive(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> bytes:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as archive:
        member = tarfile.TarInfo(name)
        member.type, member.linkname = kind, link
        archive.addfile(member)
    return data.getvalue()


@pytest.mark.parametrize(
    "content",
    [_archive("../../etc/passwd"), _archive("/etc/passwd"), _archive("dev/x", tarfile.CHRTYPE), b"no archive " * 99],
    ids=["above", "absolute", "device", "text"],
)
def test_an_archive_that_leads_out_is_refused(tmp_path: Path, content: bytes) -> None:
    """Nothing of it is unpacked, and the sandbox does not open."""
    (tmp_path / "bad").write_bytes(content)
    with pytest.raises(SandboxFileError), cloche.Sandbox(timeout=60, snapshot=tmp_path / "bad"):
        pass


def test_a_snapshot_is_bounded_and_leaves_nothing(tmp_path: Path) -> None:
    """More bytes than asked for are refused, and no part of the archive stays."""
    with cloche.Sandbox(timeout=60) as sandbox:
        sandbox.exec(shell="head -c 20000000 /dev/zero > /var/big")
        with pytest.raises(SandboxFileTooLarge):
            sandbox.snapshot(tmp_path / "saved", max_bytes=1 << 20)
        assert sandbox.exec(["true"]).ok
    assert list(tmp_path.iterdir()) == []
