"""Sandboxes with several users: root inside, accounts that it makes, and what neither of them can do.

Root on the host gives each sandbox a block of ids, an ordinary user a part of the range in /etc/subuid.
"""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import cloche
from tests.harness.environments import COUNT, FIRST, run_as_user

PROGRAM = r"""
import json, os, sys, cloche
def lines(result):
    return result.stdout.splitlines()
with cloche.Sandbox(live=True, users=True) as sandbox, cloche.Sandbox(live=True, users=True) as other:
    found = {}
    ask = "id -u; id -G; pwd; echo $HOME $USER; grep -E 'Cap(Prm|Eff|Bnd)' /proc/self/status | cut -f2; "
    ask += "cat /proc/self/uid_map"
    found["own"] = lines(sandbox.exec(shell=ask))
    found["root"] = lines(sandbox.exec(shell=ask, user="root"))
    found["other"] = lines(other.exec(shell="cat /proc/self/uid_map"))
    make = "useradd -m joe && su joe -c 'id -un; touch ~/f; cat /etc/shadow' 2>&1; runuser -u joe -- id -un"
    made = sandbox.exec(shell=make, user="root")
    found["made"] = [made.exit_code, *lines(made), made.stderr]
    found["joe"] = lines(sandbox.exec(shell="id -un; cd; pwd; echo $HOME; stat -c %U f", user="joe"))
    found["by uid"] = lines(sandbox.exec(["id", "-un"], user="1000"))
    found["found on PATH"] = sandbox.exec(["useradd", "--help"], user="root").exit_code
    found["shared"] = [sandbox.exec(shell="echo 1 > /etc/x; chown joe /opt; echo $?", user="root").stdout,
                       sandbox.exec(shell="cat /etc/x; touch /opt/y && stat -c %U /opt/y", user="joe").stdout,
                       sandbox.exec(shell="touch /etc/y || touch /opt/z || touch /root/z").exit_code]
    found["python"] = sandbox.run("import os; os.getuid()").value
    found["identity"] = str(sandbox.exec(["true"]).enforcement.controls["identity"].state)
    attempts = {
        "mount": "mount -t tmpfs x /opt", "mount bind": "mount --bind /opt /usr", "device": "mknod /opt/d b 8 0",
        "chroot": "chroot /opt /bin/true", "namespace": "unshare -n true", "user namespace": "unshare -r true",
        "enter": "nsenter -t 1 -n true", "host name": "hostname evil", "write /usr": "touch /usr/x",
        "write /proc/sys": "echo 1 > /proc/sys/kernel/hostname", "init's memory": "cat /proc/1/environ",
        "init's files": "ls /proc/1/root/", "init's descriptors": "readlink /proc/1/fd/0",
        "init's limits": "prlimit --pid 1 --nofile=1", "init's priority": "renice 19 1",
        "remount": "mount -o remount,rw /",
        "module": "modprobe dummy", "clock": "date -s 2000-01-01", "reboot": "reboot -f", "trace": "strace true",
        "raw socket": "python3 -c 'import socket; socket.socket(2, 3, 1)'", "swap": "swapon /opt",
        "keys": "python3 -c 'import ctypes; assert ctypes.CDLL(None).syscall(250, 0, -3, 0, 0, 0) > 0'",
        "signal to init": "kill -9 1; false",
    }
    found["attempts"] = [name for name, line in attempts.items()
                         if sandbox.exec(shell=f"{line} 2>/dev/null", user="root").exit_code == 0]
    found["alive"] = sandbox.exec(["echo", "alive"]).stdout
    for wrong in ("nobody-here", "../root", "0:0"):
        try:
            sandbox.exec(["id"], user=wrong)
        except cloche.InvalidRequest as error:
            found.setdefault("wrong", []).append(str(error))
    sandbox.exec(shell="mv /etc/passwd /etc/old; mkfifo /etc/passwd", user="root")
    try:
        sandbox.exec(["id"], user="root", timeout=5)
    except cloche.InvalidRequest as error:
        found["fifo"] = str(error)
    found["after"] = sandbox.exec(["echo", "alive"]).stdout
print(json.dumps(found))
"""


def check(found: dict[str, Any], *, first: range, count: int) -> list[int]:
    """Check what is the same whoever opens the sandbox; return the first id of each of the two."""
    starts = [int(found[name][-1].split()[1]) for name in ("own", "other")]
    nothing, nine = "0" * 16, "00000000000005fb"
    assert found["own"][:-1] == ["1000", "1000", "/workspace", "/home/sandbox", nothing, nothing, nine]
    assert found["root"][:-1] == ["0", "0", "/workspace", "/root root", nine, nine, nine]
    assert found["own"][-1].split() == ["0", str(starts[0]), str(count)]
    assert all(start in first and start + count - 1 in first for start in starts)
    assert abs(starts[0] - starts[1]) >= count, "two sandboxes share ids"
    assert found["made"] == [0, "joe", "cat: /etc/shadow: Permission denied", "joe", ""]
    assert found["joe"] == ["joe", "/home/joe", "/home/joe", "joe"]
    assert found["by uid"] == ["sandbox"]
    assert found["found on PATH"] == 0
    assert found["shared"] == ["0\n", "1\njoe\n", 1]
    assert found["python"] == 1000
    assert found["identity"] == "enforced"
    assert found["attempts"] == []
    assert found["alive"] == found["after"] == "alive\n"
    assert len(found["wrong"]) == 3
    assert "nobody-here" in found["wrong"][0]
    assert "not a regular file" in found["fifo"]
    return starts


@pytest.mark.root
def test_root_gives_each_sandbox_a_block_of_ids() -> None:
    """Ids above those of sandboxes with one user, and below half of all there are."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    check(json.loads(done.stdout), first=range(2_000_100_000, 1 << 31), count=65_537)


@pytest.mark.root  # who else could give a user a range?
def test_an_ordinary_user_gives_each_sandbox_a_part_of_the_range() -> None:
    """Of its upper half: the lower one is for sandboxes with one user."""
    check(run_as_user(PROGRAM), first=range(FIRST + COUNT // 2, FIRST + COUNT), count=1_024)


def test_a_ceiling_gives_every_sandbox_one_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It opens as without `users`, and who asks for another user is told of the ceiling and its file."""
    own = tmp_path / "own.yaml"
    own.write_text("ceilings: {users: false}")
    monkeypatch.setenv("CLOCHE_CONFIG", str(own))
    with cloche.Sandbox(live=True, users=True) as sandbox:
        assert sandbox.exec(["id", "-un"]).stdout == "sandbox\n"
        with pytest.raises(cloche.InvalidRequest, match=re.escape(f"lift ceilings.users (ceiling in {own} (asked by")):
            sandbox.exec(["id"], user="root")


def test_a_user_is_refused_in_a_sandbox_with_one() -> None:
    """And the error says what to do."""
    with cloche.Sandbox(live=True) as sandbox, pytest.raises(cloche.InvalidRequest, match="open it with users=True"):
        sandbox.exec(["id"], user="root")


def test_the_account_has_the_given_name_and_its_home() -> None:
    """Commands of each user start in its home, with the variables of its account and the sandbox's own environment."""
    ask = "id -un; id -gn; pwd; echo $HOME $USER $LOGNAME $SHELL; getent passwd $USER | cut -d: -f6-; echo $SHARED; "
    ask += "which python3"
    with cloche.Sandbox(account="dev", env={"SHARED": "yes"}) as sandbox:
        own = sandbox.exec(shell=ask).stdout.splitlines()
        assert own == [
            "dev", "dev", "/home/dev", "/home/dev dev dev /bin/bash", "/home/dev:/bin/bash", "yes",
            "/.venv/bin/python3",
        ]  # fmt: skip
        assert sandbox.exec(shell=ask, user="dev", cwd="~").stdout.splitlines() == own
        sandbox.write_file("/home/dev/below/file", "")
        assert sandbox.exec(["ls"], cwd="~/below").stdout == "file\n"
        assert sandbox.run("import os; [os.getcwd(), os.environ['USER']]").value == ["/workspace", "dev"]


@pytest.mark.root
def test_other_users_have_the_sandboxs_environment() -> None:
    """But for the folders of its account on PATH; and their home is where their commands start, if it has a name."""
    with cloche.Sandbox(account="dev", users=True, env={"SHARED": "yes"}) as sandbox:
        ask = "pwd; echo $HOME $USER $SHARED; which python3 useradd; echo $PATH"
        *lines, path = sandbox.exec(shell=ask, user="root").stdout.splitlines()
        assert lines == ["/root", "/root root yes", "/.venv/bin/python3", "/usr/sbin/useradd"]
        assert "/home/dev" not in path
        assert sandbox.exec(["pwd"], user="root", cwd="~/..", env={"HOME": "/opt"}).stdout == "/\n"


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [({"account": name}, cloche.InvalidRequest, "not a name") for name in ("root", "0", "a b", "../x", "A", "x" * 33)]
    + [
        ({"account": "dev", "preset": "locked-down"}, cloche.InvalidRequest, "conflicts"),
        ({"account": "dev", "level": "confined"}, cloche.BackendUnavailable, "level jail"),
    ],
)
def test_an_account_that_cannot_be_is_refused(options: dict[str, Any], error: type[Exception], match: str) -> None:
    """Its name is one of /etc/passwd, and not one that is there."""
    with pytest.raises(error, match=match), cloche.Sandbox(**options):
        pass
