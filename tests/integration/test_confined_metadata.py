"""What programs do to modes, owners, times and attributes of their own files at level confined."""

from __future__ import annotations

import time

import pytest

import cloche

pytestmark = pytest.mark.both_users
PROGRAMS = r"""
set -e
mkdir source && echo text >source/file && chmod 751 source/file && touch -d 2001-02-03T04:05:06Z source/file
ln -s file source/link && ln -s "$PWD/source" whole && mkfifo source/pipe
tar -cf all.tar source && mkdir out && tar -xpf all.tar -C out
cp -a source copy && cp -p whole/file kept && install -m 4711 source/file installed && touch -h source/link
chown -R "$(id -u):$(id -g)" out && chmod -R u+rwX,go-rwx whole/
git init --quiet repository && cd repository && cp ../kept . && git add .
git -c user.name=a -c user.email=b commit -qm all
cd .. && git clone --quiet repository clone
stat -c '%a %Y %n' source/file out/source/file copy/file kept installed clone/kept | cut -d' ' -f1,3
stat -c %Y out/source/file copy/file kept | uniq
"""
TREES = """
import os, shutil, tarfile, tempfile
os.makedirs("tree/below")
for number, name in enumerate(("tree/one", "tree/below/two")):
    open(name, "w").close()
    os.chmod(name, 0o600 + number)
    os.utime(name, ns=(10**9, 10**9 + number))
shutil.copytree("tree", "copied")
with tarfile.open("all.tar", "w") as file:
    file.add("tree")
with tarfile.open("all.tar") as file:
    file.extractall("unpacked")
for root in ("copied", "unpacked/tree"):
    print([(oct(found.st_mode), found.st_mtime) for found in map(os.stat, (f"{root}/one", f"{root}/below/two"))])
with tempfile.TemporaryFile() as file:
    os.fchmod(file.fileno(), 0o640)
    print(oct(os.fstat(file.fileno()).st_mode))
"""
# Questions that are hard, wrong, or nobody's any more when they are answered.
HOSTILE = """
import ctypes, itertools, os, random, signal, sys, threading
libc = ctypes.CDLL(None, use_errno=True)
open("file", "w").close()
folder = os.getcwd()
for number in range(60):
    os.symlink(f"{folder}/{number + 1}", f"{folder}/{number}")
os.symlink(folder + "/../" * 50, "up")
paths = [b"file", b"0", b"up/" * 40 + b"file", b"../" * 1300, b"." * 5000, (folder + "/./../" * 500).encode(), b""]
words = [0, 1, -1, -100, 2**63 - 1, 2**62, 0xFFFFFFFF, *paths]
calls = (90, 91, 92, 93, 94, 132, 188, 190, 197, 199, 235, 260, 261, 268, 280, 452)

def ask(turns):
    choose = random.Random(7).choice
    for _ in turns:
        picked = [choose(words) for _ in range(5)]
        passed = [ctypes.c_long(one) if isinstance(one, int) else one for one in picked]
        libc.syscall(ctypes.c_long(choose(calls)), *passed)

def ask_for_ever():
    for _ in range(4):
        threading.Thread(target=ask, args=(itertools.count(),), daemon=True).start()
    ask(itertools.count())
"""
KILLED = """
for _ in range(8):
    child = os.fork()
    if child == 0:
        ask_for_ever()
    ask(range(100))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
os.chmod("file", 0o640)
print(oct(os.stat("file").st_mode))
"""
FOR_EVER = """
print("they ask", flush=True)
for _ in range(8):
    if os.fork() == 0:
        break
ask_for_ever()
"""


def test_programs_set_modes_and_times() -> None:
    """By tar, cp, install, touch, chown and git, through links that stay below the folder, too."""
    result = cloche.run(PROGRAMS, language="bash", level="confined")
    files = ["700 source/file", "751 out/source/file", "751 copy/file", "751 kept", "4711 installed", "755 clone/kept"]
    assert result.stdout.splitlines() == [*files, "981173106"], result


def test_programs_in_python_copy_trees() -> None:
    """And unpack them, with the mode of a file that has no name any more."""
    tree = "[('0o100600', 1.0), ('0o100601', 1.000000001)]"
    assert cloche.run(TREES, level="confined").stdout.splitlines() == [tree, tree, "0o100640"]


def test_hostile_questions_keep_nobody() -> None:
    """Long, wrong, or asked by who is killed meanwhile: others are answered."""
    result = cloche.run(HOSTILE + KILLED, level="confined", timeout=60)
    assert (result.stdout, result.stderr) == ("0o100640\n", ""), result


def test_who_asks_for_ever_is_ended() -> None:
    """By the time-out, with all that ask beside it."""
    begun = time.monotonic()
    result = cloche.run(HOSTILE + FOR_EVER, level="confined", timeout=2)
    assert (result.stdout, str(result.status)) == ("they ask\n", "timeout"), result
    assert time.monotonic() - begun < 30
