"""Attempts of a guest that has a view of a folder of the host, and on whoever compares and commits what it has done.

Each program is first run outside, in a copy of the folder, where it succeeds; inside, the host's folder stays as it
was, and what is hidden or lies outside is read by nothing. What a commit is tried with is shown to do harm first, too:
to somebody who carries changes out by their paths.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

import cloche
from cloche.agent.approval import Risk
from cloche.agent.catalog import FOLDER_TOOLS
from cloche.agent.host_folder import ShownDiffs
from cloche.cli._review import ask, show_diff
from cloche.core.changes import Change, Diff
from cloche.core.errors import ClocheError, InvalidRequest, WorkspaceConflict
from cloche.workspace.host_files import HostTree
from cloche.workspace.renames import sync_file_system
from cloche.workspace.snapshot import SnapshotReader
from tests.harness.changes import read_stream
from tests.harness.escape.attempts import IS_ROOT

pytestmark = [pytest.mark.both_users, pytest.mark.timeout(180)]

HIDDEN, OUTSIDE = "canary-that-is-hidden", "canary-that-lies-outside"
MOST_S = 30.0
PRELUDE = """
import ctypes, os, stat, sys
FOLDER, CHANGES, OUTSIDE, IS_CONTROL = GIVEN
LIBC = ctypes.CDLL(None, use_errno=True)
def tried(act):
    try:
        return act()
    except (OSError, ValueError) as error:
        print(type(error).__name__, error)
def show(*paths):
    for path in paths:
        tried(lambda: print(open(path, errors="replace").read(4096)))
def write(path, text="harm"):
    tried(lambda: open(path, "w").write(text))
def call(name, *arguments):
    if getattr(LIBC, name)(*arguments) == -1:
        print(name, os.strerror(ctypes.get_errno()))
def roots():
    others = () if IS_CONTROL else filter(str.isdigit, os.listdir("/proc"))
    return [f"/proc/{pid}/root" for pid in ("self", *others)]
"""


@dataclass(frozen=True, kw_only=True)
class Program:
    """Hold a program, and how it is shown to work outside: as it is, or as root of throwaway namespaces."""

    name: str
    code: str
    in_namespaces: bool = False
    root_only: bool = False


def harm(name: str, code: str, **more: bool) -> Program:
    """Return an attempt whose success is seen in the host's folder, or in what it prints."""
    return Program(name=name, code=dedent(code), **more)


AWAY = 'LIBC.umount2(FOLDER.encode(), 2) == 0 and print("no longer covered")\n'
PROGRAMS = (
    harm("write by the root of every process", 'for root in roots(): write(f"{root}{FOLDER}/a.py")'),
    harm(
        "write by the descriptors of every process",
        """
        os.open(FOLDER, os.O_RDONLY)
        for root in roots():
            here = root.replace("root", "fd")
            for fd in tried(lambda: os.listdir(here)) or (): write(f"{here}/{fd}/a.py"); write(f"{here}/{fd}/new")
        """,
    ),
    harm(
        "write by the working directory of every process",
        'for root in roots(): write(root.replace("root", "cwd") + "/a.py")',
    ),
    harm("write to the layer of changes", 'os.mkdir(f"{CHANGES}/made"); write(f"{CHANGES}/a.py")'),
    harm("write by a mapping", """
        import mmap
        with open(f"{FOLDER}/a.py", "r+b") as file, mmap.mmap(file.fileno(), 0) as memory: memory[:4] = b"harm"
        """),
    harm("change what a file is", """
        path = f"{FOLDER}/a.py"
        tried(lambda: os.chmod(path, 0o4777)); tried(lambda: os.setxattr(path, "user.harm", b"harm"))
        tried(lambda: os.utime(path, (1, 1))); tried(lambda: os.truncate(path, 0))
        """),
    harm("remove all", "import shutil\nfor name in os.listdir(FOLDER): tried(lambda: shutil.rmtree(f'{FOLDER}/{name}'))"
         "\nfor name in os.listdir(FOLDER): tried(lambda: os.unlink(f'{FOLDER}/{name}'))"),
    harm(
        "write by a hard link",
        'tried(lambda: os.link(f"{FOLDER}/a.py", f"{FOLDER}/linked")); write(f"{FOLDER}/linked")',
    ),
    harm("take the view away", AWAY + 'show(f"{FOLDER}/with/.env")', in_namespaces=True),
    harm("move the view away", """
        os.makedirs("/tmp/else", exist_ok=True)
        call("mount", FOLDER.encode(), b"/tmp/else", None, 0x2000, None)
        show(f"{FOLDER}/with/.env")
        """, in_namespaces=True),
    harm("mount another overlay of it", """
        os.makedirs("/tmp/seen", exist_ok=True)
        words = [word for line in open("/proc/self/mountinfo") for word in line.replace(",", " ").split()]
        lowers = [word.partition("=")[2].rpartition(":")[2] for word in words if word.startswith("lowerdir=")]
        for lower in [*lowers, FOLDER + ".lower", "/.overlay0/lower"]:
            call("mount", b"overlay", b"/tmp/seen", b"overlay", 0, f"lowerdir={lower}:/tmp".encode())
            show("/tmp/seen/with/.env", f"{lower}/with/.env")
        """, in_namespaces=True),
    harm("a file by its handle", """
        class Handle(ctypes.Structure):
            _fields_ = [("size", ctypes.c_uint), ("kind", ctypes.c_int), ("data", ctypes.c_ubyte * 128)]
        handle, mount = Handle(size=128), ctypes.c_int()
        call("name_to_handle_at", -100, f"{FOLDER}/a.py".encode(), ctypes.byref(handle), ctypes.byref(mount), 0)
        fd = LIBC.open_by_handle_at(os.open(FOLDER, os.O_RDONLY), ctypes.byref(handle), os.O_RDWR)
        print(os.strerror(ctypes.get_errno())) if fd < 0 else os.write(fd, b"harm")
        """, root_only=True),
    harm("read what is hidden by name", 'show(f"{FOLDER}/with/.env", f"{FOLDER}/with/./../with//.env")'),
    harm("read what is hidden by any root", 'for root in roots(): show(f"{root}{FOLDER}/with/.env")'),
    harm("read what is hidden in the layer of changes", 'show(f"{CHANGES}/with/.env"); '
         'tried(lambda: print(os.readlink(f"{CHANGES}/with/.env")))'),
    harm("read what is hidden after its folder was moved", """
        tried(lambda: os.rename(f"{FOLDER}/with", f"{FOLDER}/moved"))
        show(f"{FOLDER}/moved/.env", f"{FOLDER}/with/.env")
        """),
    harm("read what is hidden by a hard link", """
        tried(lambda: os.link(f"{FOLDER}/with/.env", f"{FOLDER}/linked")); show(f"{FOLDER}/linked")
        tried(lambda: os.rename(f"{FOLDER}/with/.env", f"{FOLDER}/other")); show(f"{FOLDER}/other")
        """),
    harm("read what is hidden by making and removing it", """
        path = f"{FOLDER}/with/.env"
        show(path)
        write(path, "mine"); os.unlink(path); show(path)
        tried(lambda: os.mkdir(path)); tried(lambda: os.rmdir(path)); show(path)
        """),
    harm("read what is hidden by attributes of the overlay", """
        show(f"{FOLDER}/with/.env")
        for name in ("opaque", "redirect", "metacopy", "origin", "impure", "whiteouts", "overlay.opaque"):
            for value in (b"n", b"x", b"/with/.env", b"y"):
                for path in ("a.py", "with", "."):
                    tried(lambda: os.setxattr(f"{FOLDER}/{path}", f"user.overlay.{name}", value))
                    tried(lambda: os.removexattr(f"{FOLDER}/{path}", f"user.overlay.{name}"))
                show(f"{FOLDER}/with/.env", f"{FOLDER}/a.py")
        """),
    harm("reach what lies outside by links", """
        for number, target in enumerate((OUTSIDE, "../" * 30 + OUTSIDE, "/proc/self/root" + OUTSIDE, "/proc/1/cwd")):
            link = f"{FOLDER}/link{number}"
            os.symlink(target, link); show(link); write(link)
        show(f"{FOLDER}/out/secret"); write(f"{FOLDER}/out/secret")
        """),
    harm("make what has power over the host", """
        import socket
        path = f"{FOLDER}/a.py"
        tried(lambda: os.chmod(path, 0o6755)); tried(lambda: os.mkfifo(f"{FOLDER}/fifo"))
        tried(lambda: os.mknod(f"{FOLDER}/null", stat.S_IFCHR | 0o666, os.makedev(1, 3)))
        tried(lambda: socket.socket(socket.AF_UNIX).bind(f"{FOLDER}/socket"))
        """),
)  # fmt: skip


@pytest.fixture
def host(tmp_path: Path) -> Path:
    """Make a folder with something hidden in it, and something outside that a link in it leads to."""
    (outside := tmp_path / "outside").mkdir()
    (outside / "secret").write_text(f"{OUTSIDE}\n")
    return make_folder(tmp_path / "host", outside)


def make_folder(path: Path, outside: Path) -> Path:
    """Make what a guest is shown."""
    files = {"a.py": "print('a')\n", "with/.env": f"KEY={HIDDEN}\n", "with/shown": "shown\n", "folder/b.py": "b = 1\n"}
    for name, text in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(text)
    (path / "out").symlink_to(outside)
    return path


def tree_of(path: Path) -> dict[str, Any]:
    """Return all that can be told of a folder, with the contents of its files."""
    found: dict[str, Any] = {}
    for one in sorted([path, *path.rglob("*")]):
        facts = one.lstat()
        data = one.read_bytes() if stat.S_ISREG(facts.st_mode) else b""
        extra = os.listxattr(one, follow_symlinks=False)
        time_ns = facts.st_mtime_ns if stat.S_ISREG(facts.st_mode) else 0
        found[str(one.relative_to(path))] = (facts.st_mode, facts.st_ino, facts.st_size, time_ns, data, extra)
    return found


def prelude(folder: Path, changes: str, outside: Path, *, is_control: bool) -> str:
    """Return what each program begins with. A control looks at itself alone: other processes are not its own."""
    return PRELUDE.replace("GIVEN", repr([str(folder), changes, str(outside), is_control]))


CONTROL_OF_MOUNTS = """
mkdir "$1.lower" && cp -a "$1/." "$1.lower" && mount -t tmpfs none "$1" && mount -t tmpfs none "$1.changes"
exec "$3" -c "$2"
"""


def runs_outside(attempt: Program, tmp_path: Path) -> str:
    """Run a program where nothing holds it, and return what it did, empty for nothing."""
    (outside := tmp_path / "control-outside").mkdir()
    (outside / "secret").write_text(f"{OUTSIDE}\n")
    folder = make_folder(tmp_path / "control", outside)
    changes = tmp_path / "control.changes" if attempt.in_namespaces else folder
    changes.mkdir(exist_ok=True)
    code = prelude(folder, str(changes), outside / "secret", is_control=True) + attempt.code
    before = tree_of(folder), tree_of(outside)
    command = [sys.executable, "-c", code]
    if attempt.in_namespaces:
        command = ["unshare", "-Urm", "sh", "-ec", CONTROL_OF_MOUNTS, "sh", str(folder), code, sys.executable]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder, timeout=60)
    if HIDDEN in done.stdout or OUTSIDE in done.stdout:
        return "read"
    return "wrote" if (tree_of(folder), tree_of(outside)) != before else ""


@pytest.mark.parametrize("attempt", PROGRAMS, ids=lambda one: one.name)
def test_a_guest_neither_writes_to_the_host_nor_reads_what_is_not_shown(
    attempt: Program, host: Path, tmp_path: Path
) -> None:
    """It works outside; inside nothing on the host is another, and no canary comes out, by the diff neither."""
    if IS_ROOT or not attempt.root_only:
        assert runs_outside(attempt, tmp_path), "the attempt does nothing where nothing holds it"
    outside = host.parent / "outside"
    before = tree_of(host), tree_of(outside)
    with cloche.Sandbox(workspace=host, timeout=60) as sandbox:
        result = sandbox.run(prelude(host, "/.cloche-changes", outside / "secret", is_control=False) + attempt.code)
        diff = sandbox.diff()
    assert (tree_of(host), tree_of(outside)) == before
    told = f"{result.stdout}{result.stderr}{json.dumps(diff.as_dict())}"
    assert HIDDEN not in told
    assert OUTSIDE not in told
    assert result.status in ("ok", "error"), told
    assert not {one.path for one in diff.changes} & {"with/.env", "fifo", "null", "socket"}


# What a commit is tried with: rows as a process of the guest may send them, and what the guest has really made.


def sent(*rows: dict[str, Any], contents: Sequence[bytes] = ()) -> bytes:
    """Return a stream with these rows, and a content for each file."""
    left = list(contents)
    frames = b""
    for row in rows:
        data = json.dumps({"mode": 0o644, **row}).encode()
        frames += len(data).to_bytes(4, "big") + data
        if row["kind"] == "file":
            content = left.pop(0) if left else b"harm"
            frames += (1 << 31 | len(content)).to_bytes(4, "big") + content + (1 << 31).to_bytes(4, "big")
    return frames


LEAVING = (
    "../outside/secret",
    "folder/../../outside/secret",
    "/outside/secret",
    "a//b",
    "./a",
    "a/.",
    "a/..",
    "",
    "a\0b",
)


@pytest.mark.parametrize("path", LEAVING)
def test_a_path_that_leaves_the_folder_is_no_path(path: str, tmp_path: Path) -> None:
    """Who joins names writes outside with some of them; the reader takes none."""
    with pytest.raises(ValueError, match="changes hold"):
        read_stream(sent({"path": path, "kind": "file"}), {"count": 1}, tmp_path)


BELOW_WHAT_IS_NONE = (
    ({"path": "l", "kind": "link", "target": "/etc"}, {"path": "l/passwd", "kind": "file"}),
    ({"path": "f", "kind": "file"}, {"path": "f/x", "kind": "file"}),
    ({"path": "gone", "kind": "removed"}, {"path": "gone/x", "kind": "file"}),
    ({"path": "twice", "kind": "file"}, {"path": "twice", "kind": "link", "target": "/etc"}),
)


@pytest.mark.parametrize("rows", BELOW_WHAT_IS_NONE, ids=str)
def test_nothing_lies_below_what_is_no_folder(rows: Sequence[dict[str, Any]], tmp_path: Path) -> None:
    """A link first, and then a file below it, is how archives have always left their folder."""
    with pytest.raises(ValueError, match="changes hold"):
        read_stream(sent(*rows), {"count": len(rows)}, tmp_path)


def test_a_folder_that_became_a_link_to_outside_takes_nothing_there(host: Path) -> None:
    """Who writes by paths goes through the link; a commit makes the link alone, and only after a yes."""
    outside = host.parent / "outside"
    before = tree_of(outside)
    with cloche.Sandbox(workspace=host) as sandbox:
        sandbox.run(f"import os, shutil\nshutil.rmtree('folder'); os.symlink({str(outside)!r}, 'folder')")
        diff = sandbox.diff()
        with pytest.raises(InvalidRequest, match="leads out"):
            sandbox.commit(diff)
        sandbox.commit(diff, dangerous=["folder"])
    assert (host / "folder").is_symlink()
    assert tree_of(outside) == before


def test_a_commit_goes_through_no_link_of_the_hosts(host: Path) -> None:
    """A file is changed inside in a folder that becomes a link on the host meanwhile: outside nothing is written."""
    outside = host.parent / "outside"
    (outside / "b.py").write_text("b = 1\n")
    before = tree_of(outside)
    with cloche.Sandbox(workspace=host) as sandbox:
        sandbox.run("open('folder/b.py', 'w').write('harm'); open('folder/c.py', 'w').write('harm')")
        shutil.rmtree(host / "folder")
        (host / "folder").symlink_to(outside)
        with pytest.raises(ClocheError):
            sandbox.commit()
    assert tree_of(outside) == before


def test_links_that_change_places_while_it_is_committed_lead_nowhere(host: Path) -> None:
    """Another user of the host swaps a folder and a link to outside all the time: what is outside stays as it is."""
    outside = host.parent / "outside"
    (outside / "b.py").write_text("b = 1\n")
    before = tree_of(outside)
    (host / "other").symlink_to(outside)
    is_over = threading.Event()

    def swap() -> None:
        while not is_over.is_set():
            for one, other in (("folder", "kept"), ("other", "folder"), ("folder", "other"), ("kept", "folder")):
                try:
                    os.rename(host / one, host / other)
                except OSError:
                    continue

    with cloche.Sandbox(workspace=host) as sandbox:
        sandbox.run("for n in range(50): open(f'folder/{n}.py', 'w').write('harm')")
        swapping = threading.Thread(target=swap)
        swapping.start()
        try:
            until = time.monotonic() + 4
            while time.monotonic() < until:
                try:
                    sandbox.commit()
                except ClocheError:
                    continue
                break
        finally:
            is_over.set()
            swapping.join()
    assert tree_of(outside) == before


def test_what_has_power_over_the_host_is_not_carried(host: Path) -> None:
    """Set-id bits go, attributes are not there, pipes and sockets are left out, and others' writing needs a yes."""
    program = """
    import os, socket
    for name, mode in (("suid", 0o4755), ("sgid", 0o2755), ("open", 0o666)):
        open(name, "w").write("x"); os.chmod(name, mode); os.setxattr(name, "user.harm", b"x")
    os.mkdir("sticky"); os.chmod("sticky", 0o3777); os.mkfifo("fifo"); socket.socket(socket.AF_UNIX).bind("socket")
    """
    with cloche.Sandbox(workspace=host) as sandbox:
        assert sandbox.run(dedent(program)).ok
        diff = sandbox.diff()
        assert {one.path for one in diff.dangerous} == {"suid", "sgid", "open", "sticky"}
        assert {"fifo", "socket", "suid", "sgid"} <= {one.path for one in diff.left_out}
        sandbox.commit(diff, dangerous=True)
    for name in ("suid", "sgid", "open", "sticky"):
        assert not (host / name).lstat().st_mode & 0o7000
        assert os.listxattr(host / name) == []
        assert (host / name).lstat().st_uid == os.geteuid()
    assert not (host / "fifo").exists()


GIT = {
    "a hook": ".git/hooks/post-checkout",
    "the configuration": ".git/config",
    "other letters": ".GIT/config",
    "blanks and dots behind it": ".git. /config",
    "a repository further down": "folder/.git/config",
}


@pytest.mark.parametrize("path", GIT.values(), ids=GIT.keys())
def test_nothing_is_written_below_a_git_folder(path: str, host: Path) -> None:
    """Not even with a yes to all: these files come by git alone."""
    subprocess.run(["git", "init", "-q", str(host)], check=True)
    config = (host / ".git/config").read_bytes()
    with cloche.Sandbox(workspace=host) as sandbox:
        sandbox.run(f"import os\nos.makedirs(os.path.dirname({path!r}), exist_ok=True); open({path!r}, 'w').write('x')")
        sandbox.commit(dangerous=True)
    assert (host / ".git/config").read_bytes() == config
    assert path == ".git/config" or not (host / path).exists()


def test_a_file_that_names_a_git_folder_is_not_written(host: Path) -> None:
    """`.git` as a file, or as a link, leads git to a configuration of the guest's."""
    with cloche.Sandbox(workspace=host) as sandbox:
        sandbox.run("import os\nopen('folder/.git', 'w').write('gitdir: ../evil'); os.symlink('evil', 'with/.git')")
        sandbox.commit(dangerous=True)
    assert not os.path.lexists(host / "folder/.git")
    assert not os.path.lexists(host / "with/.git")


REPOSITORY = """
import os
for name in ("evil/objects", "evil/refs"): os.makedirs(name)
open("evil/HEAD", "w").write("ref: refs/heads/main\\n")
open("evil/config", "w").write('''[core]
\\trepositoryformatversion = 0
\\tbare = false
\\tworktree = .
\\tfsmonitor = "touch ../ran; false"
''')
"""


def test_what_git_takes_for_a_repository_needs_a_yes(host: Path) -> None:
    """A folder with HEAD, objects and refs is one without any `.git`: `git status` in it runs what it names."""
    with cloche.Sandbox(workspace=host) as sandbox:
        assert sandbox.run(REPOSITORY).ok
        diff = sandbox.diff()
        assert {"evil/HEAD", "evil/config"} <= {one.path for one in diff.dangerous}
        with pytest.raises(InvalidRequest, match="their own confirmation"):
            sandbox.commit(diff)
        sandbox.commit(diff, dangerous=True)
    subprocess.run(["git", "status"], cwd=host / "evil", check=False, capture_output=True)
    assert (host / "ran").exists(), "git does not run this any more, so it is no danger"


def test_a_repository_of_the_guests_runs_nothing_here(host: Path) -> None:
    """Our own git is not led by what the guest has committed to the top of the folder."""
    with cloche.Sandbox(workspace=host) as sandbox:
        sandbox.run(REPOSITORY.replace("evil/", "").replace("../ran", "ran"))
        sandbox.commit(dangerous=True)
        sandbox.run("open('a.py', 'w').write('other')")
        with pytest.raises(ClocheError):
            sandbox.commit(branch="new")
    assert not (host / "ran").exists()


@dataclass(frozen=True, kw_only=True)
class Detour:
    """Hold what the host has, what a guest writes, and the command that runs, or gives away, something by it then."""

    name: str
    files: Mapping[str, str]
    links: Mapping[str, str]
    program: str
    command: Sequence[str]
    dangerous: Sequence[str]
    shows: str = "ran"


DETOURS = (
    Detour(
        name="git-include", files={".git/config": "[core]\n\tbare = false\n[include]\n\tpath = ../dev/git.inc\n"},
        links={}, command=("git", "status"), dangerous=["dev/git.inc"],
        program="import os\nos.mkdir('dev')\n"
        "open('dev/git.inc', 'w').write('[core]\\n\\tfsmonitor = \"touch $RAN; false\"\\n')",
    ),
    Detour(
        name="git-filter", command=("git", "add", "x.dat"), links={}, dangerous=["tools/clean.txt"],
        files={
            ".git/config": "[filter \"x\"]\n\tclean = sh ./tools/clean.txt\n", ".gitattributes": "*.dat filter=x\n",
            "x.dat": "x", "tools/clean.txt": "cat\n",
        },
        program="open('tools/clean.txt', 'w').write('touch $RAN; cat')",
    ),
    Detour(
        name="make", files={"scripts/common.mk.txt": "all:\n"}, links={"Makefile": "scripts/common.mk.txt"},
        program="open('scripts/common.mk.txt', 'w').write('all:\\n\\ttouch $RAN\\n')", command=("make",),
        dangerous=["scripts/common.mk.txt"],
    ),
    Detour(
        name="folder-above", files={"c/x": "", "../home/.config/x": ""}, links={"../home/.config/git": "../../host/c"},
        program="open('c/config', 'w').write('[core]\\n\\tfsmonitor = \"touch $RAN; false\"\\n')",
        command=("sh", "-c", "git init -q x && cd x && git status"), dangerous=["c/config"],
    ),
    Detour(
        name="shell-of-the-home", files={"rc/bash": "true\n"}, links={"../home/.bashrc": "../host/rc/bash"},
        program="open('rc/bash', 'w').write('touch $RAN\\n')", command=("bash", "-i", "-c", "true"),
        dangerous=["rc/bash"],
    ),
    Detour(
        name="repository-without-its-head", files={}, links={}, dangerous=["config", "objects", "refs"],
        program=REPOSITORY.replace("evil/", "").replace("touch ../ran", "touch $RAN") + "os.unlink('HEAD')",
        command=("sh", "-c", "echo ref: refs/heads/main > HEAD; git status"),
    ),
    Detour(
        name="link-to-hidden", files={}, links={}, command=("cat", "public/readme.txt"), shows=HIDDEN,
        program="os.mkdir('public'); os.symlink('../with/.env', 'public/readme.txt')", dangerous=["public/readme.txt"],
    ),
    Detour(
        name="readable-for-all", files={"diary": "private\n"}, links={}, command=("stat", "-c", "%a", "diary"),
        program="os.chmod('diary', 0o644)", shows="644", dangerous=["diary"],
    ),
)  # fmt: skip


@pytest.mark.parametrize("detour", DETOURS, ids=lambda detour: detour.name)
def test_what_the_host_reaches_by_another_name_needs_a_yes(
    host: Path, tmp_path: Path, detour: Detour, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Links and settings of the host make a harmless name run something; it is asked for, and runs after a yes."""
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    if any(one.startswith(".git/") for one in detour.files):
        subprocess.run(["git", "init", "-q", host], check=True)
    for path, text in detour.files.items():
        (host / path).parent.mkdir(exist_ok=True, parents=True)
        with open(host / path, "a") as file:
            file.write(text)
    for path, target in detour.links.items():
        (host / path).symlink_to(target)
    if "diary" in detour.files:
        (host / "diary").chmod(0o600)
    ran = tmp_path / "ran"
    with cloche.Sandbox(workspace=host) as sandbox:
        result = sandbox.run("import os\n" + detour.program.replace("$RAN", str(ran)))
        assert result.ok, result.stderr
        diff = sandbox.diff()
        assert {one.path for one in diff.dangerous} >= set(detour.dangerous)
        with pytest.raises(InvalidRequest, match="their own confirmation"):
            sandbox.commit(diff, dangerous=[one.path for one in diff.dangerous if one.path != detour.dangerous[-1]])
        sandbox.commit(diff, dangerous=True)
    done = subprocess.run(detour.command, cwd=host, check=False, capture_output=True, text=True)
    assert detour.shows in done.stdout or (ran.exists() and detour.shows == "ran"), "so it is no danger"


@pytest.mark.user_soak
@pytest.mark.soak
@pytest.mark.skipif(shutil.which("npm") is None, reason="missing: npm (make setup-system)")
def test_a_build_file_of_npm_needs_a_yes(host: Path, tmp_path: Path) -> None:
    """`npm install` runs what `binding.gyp` names, beside any `package.json`."""
    (host / "package.json").write_text('{"name": "x", "version": "1.0.0"}')
    sources = json.dumps([f"<!(touch {tmp_path}/ran)"])
    text = f'{{"targets": [{{"target_name": "x", "type": "none", "sources": {sources}}}]}}'
    with cloche.Sandbox(workspace=host) as sandbox:
        sandbox.run(f"open('binding.gyp', 'w').write({text!r})")
        with pytest.raises(InvalidRequest, match="their own confirmation"):
            sandbox.commit()
        sandbox.commit(dangerous=["binding.gyp"])
    subprocess.run(
        ["npm", "install", "--offline"], cwd=host, check=False, capture_output=True,
        env={**os.environ, "npm_config_nodedir": "/usr", "npm_config_cache": str(tmp_path / "cache")},
    )  # fmt: skip
    assert (tmp_path / "ran").exists(), "npm does not run this any more, so it is no danger"


BYTECODE = """
import os, py_compile
facts = os.stat("folder/b.py")
source = open("folder/b.py").read()
open("evil.py", "w").write("print('harm')")
os.makedirs("folder/__pycache__", exist_ok=True)
made = py_compile.compile("evil.py", invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
data = open(made, "rb").read()
for tag in TAGS: open(f"folder/__pycache__/b.{tag}.pyc", "wb").write(data)
open("folder/legacy.pyc", "wb").write(data)
"""


@pytest.mark.user_soak
def test_bytecode_takes_the_place_of_no_source(host: Path, tmp_path: Path) -> None:
    """Python runs what lies in `__pycache__`, and a reviewer reads the source: so it is not carried."""
    program = BYTECODE.replace("TAGS", repr([sys.implementation.cache_tag]))
    control = make_folder(tmp_path / "control", host.parent / "outside")
    runs = [sys.executable, "-c", "import folder.b, folder.legacy"]
    subprocess.run([sys.executable, "-c", program], cwd=control, check=True)
    assert subprocess.run(runs, cwd=control, check=True, capture_output=True, text=True).stdout == "harm\nharm\n"
    with cloche.Sandbox(workspace=host) as sandbox:
        assert sandbox.run(program).ok
        diff = sandbox.diff()
        sandbox.commit(diff, dangerous=True)
    assert {"folder/__pycache__", "folder/legacy.pyc"} <= {one.path for one in diff.left_out}
    assert sorted(os.listdir(host / "folder")) == ["b.py"]


# Who looks at it.


def hostile_diff(host: Path) -> Diff:
    """Return what a guest has made to be misread."""
    program = r"""
    import os
    names = [b"a\nM harmless.py", b"\x1b[2J\x1b]0;t\x07", "\u202egpj.exe".encode(), b"[/nothing]", b"[red]x"]
    names += [b"\xff\xfe", b"\r+"]
    os.mkdir("[")
    for name in names: open(name, "wb").write(b"x\n")
    for name in names[:5]: os.mkfifo(name + b".pipe")
    open("text", "w").write("ok" + " " * 500 + "; harm()\n"
        + "shown\x0c a line of its own\x85 and\u2028 more\r\x1b[8m\n")
    """
    with cloche.Sandbox(workspace=host) as sandbox:
        result = sandbox.run(dedent(program))
        assert result.ok, result.stderr
        return sandbox.diff()


@pytest.mark.user_soak
def test_what_is_printed_cannot_be_misread(host: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Names are on one line, nothing steers the terminal or rich, a line that is cut says so, and none is made up."""
    diff = hostile_diff(host)
    assert "\x1b" in diff.patch, "the patch itself has it, for git"
    show_diff(diff, to_stderr=False)
    shown = capsys.readouterr().out
    assert not {char for char in shown if not char.isprintable()} - {"\n", "\t"}
    lines = shown.split("\n")
    assert "M harmless.py" not in lines
    assert any(line.startswith("left out: [/nothing].pipe") for line in lines)
    assert any(line.startswith("left out: [red]x.pipe") for line in lines)
    assert any("more characters" in line for line in lines)
    assert any("shown\\x0c a line of its own" in line for line in lines)


def change(path: str, *dangers: str) -> Change:
    """Return a file that is new."""
    return Change(path=path, what="added", kind="file", mode=0o644, dangers=dangers)


@pytest.mark.user_soak
def test_an_approver_sees_each_dangerous_change_among_very_many_others() -> None:
    """What a yes is bound to stands first; more than can be shown are not asked about, nor kept."""
    tool, shown = FOLDER_TOOLS["commit_changes"], ShownDiffs("/host")
    harmless = tuple(change(f"a{number:05}") for number in range(19_000))
    shown.note(Diff(id="one", changes=(*harmless, change("z", "it runs"))))
    asked = shown.request(tool, {"id": "one"})
    assert (asked.risk, asked.rules["changes"][0]) == (Risk.CRITICAL, "added file z (DANGEROUS: it runs)")
    shown.note(Diff(id="two", changes=tuple(change(f"z{number}", "it runs") for number in range(501))))
    with pytest.raises(InvalidRequest, match="more than 500"):
        shown.request(tool, {"id": "two"})
    assert "id:" not in shown.note(Diff(id="three", changes=(*harmless, *harmless)))
    with pytest.raises(InvalidRequest, match="was shown"):
        shown.request(tool, {"id": "three"})


def test_a_no_holds_below_a_folder_that_was_said_yes_to(host: Path) -> None:
    """A path stands for all below it: who says yes to a new folder and no to a file in it does not get that file."""
    with cloche.Sandbox(workspace=host) as sandbox:
        sandbox.run("import os\nos.mkdir('new')\nfor name in ('good', 'bad'): open(f'new/{name}.py', 'w').write('x')")
        diff = sandbox.diff()
        answer = ask(diff, "host", lambda question: "f" if "[f]ile" in question else "ny"["bad" not in question])
        assert answer is not None
        sandbox.commit(diff, dangerous=answer.dangerous, theirs=answer.declined)
    assert sorted(os.listdir(host / "new")) == ["good.py"]


def test_what_was_seen_is_what_is_written(host: Path) -> None:
    """A guest that changes one byte, one mode or one link after the diff gets nothing written."""
    for change in ("open('x', 'w').write('B')", "import os; os.chmod('x', 0o755)", "import os; os.symlink('x', 'l')"):
        with cloche.Sandbox(workspace=host) as sandbox:
            sandbox.run("open('x', 'w').write('A')")
            diff = sandbox.diff()
            sandbox.run(change)
            before = tree_of(host)
            with pytest.raises(InvalidRequest, match="has changed since"):
                sandbox.commit(diff)
            assert tree_of(host) == before


def test_what_is_hidden_is_neither_removed_nor_written_over(host: Path) -> None:
    """A guest puts a file, a folder and a link in its place, and removes or replaces the folder above."""
    for program in (
        "open('with/.env', 'w').write('mine')",
        "import os; os.mkdir('with/.env'); open('with/.env/x', 'w').write('mine')",
        "import os; os.symlink('shown', 'with/.env')",
        "import shutil; shutil.rmtree('with')",
        "import os, shutil; shutil.rmtree('with'); os.symlink('folder', 'with')",
        "import shutil; shutil.rmtree('with'); open('with', 'w').write('mine')",
        "import os, shutil; shutil.rmtree('with'); os.mkdir('with'); open('with/.env', 'w').write('mine')",
    ):
        with cloche.Sandbox(workspace=host) as sandbox:
            assert sandbox.run(program).ok
            sandbox.commit(dangerous=True)
        assert (host / "with/.env").read_text() == f"KEY={HIDDEN}\n", program
        (host / "with/shown").write_text("shown\n")


@pytest.mark.parametrize("sets_times", [False, True], ids=["", "with the old times"])
def test_a_change_of_the_hosts_is_a_conflict_whatever_its_times_say(host: Path, sets_times: bool) -> None:
    """The time of a content can be set; the time of change cannot."""
    facts = (host / "a.py").stat()
    with cloche.Sandbox(workspace=host) as sandbox:
        sandbox.run("open('a.py', 'w').write('inside')")
        (host / "a.py").write_text("OUTSIDE-OK"[: facts.st_size])
        if sets_times:
            os.utime(host / "a.py", ns=(facts.st_atime_ns, facts.st_mtime_ns))
        with pytest.raises(WorkspaceConflict):
            sandbox.commit()
    assert (host / "a.py").read_text().startswith("OUTSIDE")


# What is bounded, and what stands still.


@pytest.mark.parametrize(
    ("program", "left_out"),
    [
        ("import os\nfd = os.open('sparse', os.O_CREAT | os.O_WRONLY); os.ftruncate(fd, 60 << 20)", {"sparse"}),
        ("import os\nfor _ in range(150): os.mkdir('d'); os.chdir('d')", {"d/" * 99 + "d"}),
        ("import os\nfor n in range(300): os.truncate(os.open(f's{n}', os.O_CREAT | os.O_WRONLY), 1 << 20)", None),
    ],
    ids=["a sparse file", "folders within folders", "many files with holes"],
)
def test_more_than_is_taken_out_is_left_out_and_told(host: Path, program: str, left_out: set[str] | None) -> None:
    """In a bounded time, with what could not be looked at named."""
    with cloche.Sandbox(workspace=host, workspace_disk="32MiB", timeout=60) as sandbox:
        assert sandbox.run(program).ok
        began = time.monotonic()
        diff = sandbox.diff()
        assert time.monotonic() - began < MOST_S
    found = {one.path for one in diff.left_out}
    assert found == left_out if left_out is not None else found


def test_a_file_that_grows_while_it_is_read_is_whole_or_left_out(host: Path) -> None:
    """Everything stands still, but a write that had begun: each diff has the file with whole lines, or says why not."""
    program = """
    while True:
        with open('log', 'ab') as file: file.write(b'x' * 999 + b'\\n')
    """
    with cloche.Sandbox(workspace=host, workspace_disk="256MiB", timeout=120) as sandbox:
        process = sandbox.start(["python3", "-c", dedent(program)])
        for _ in range(4):
            diff = sandbox.diff()
            told = {one.path for one in (*diff.changes, *diff.left_out)}
            assert told <= {"log"}  # a write that had begun ends after the signal that stops all
            assert all(one.size % 1000 == 0 for one in diff.changes)
            time.sleep(0.05)
        process.kill()


HOLDERS = {
    "forks all the time": "import os\nwhile True:\n    if not os.fork(): os._exit(0)\n    os.waitpid(-1, os.WNOHANG)",
    "kills and stops whatever comes": """
        import os, signal
        while True:
            for pid in filter(str.isdigit, os.listdir("/proc")):
                if int(pid) not in (1, os.getpid()):
                    for number in (signal.SIGSTOP, signal.SIGKILL):
                        try: os.kill(int(pid), number)
                        except OSError: pass
        """,
    "stops whatever comes, and wakes itself": """
        import ctypes, os, signal, struct
        signal.signal(signal.SIGCONT, lambda *_: None)
        libc, timer = ctypes.CDLL(None, use_errno=True), ctypes.c_void_p()
        event = struct.pack("QiI48x", 0, signal.SIGCONT, 0)
        libc.timer_create(1, event, ctypes.byref(timer))
        libc.timer_settime(timer, 0, struct.pack("qqqq", 0, 1000000, 0, 1000000), None)
        while True:
            for pid in filter(str.isdigit, os.listdir("/proc")):
                if int(pid) not in (1, os.getpid()):
                    try: os.kill(int(pid), signal.SIGSTOP)
                    except OSError: pass
        """,
}  # fmt: skip


@pytest.mark.user_soak
@pytest.mark.parametrize("program", HOLDERS.values(), ids=HOLDERS.keys())
def test_a_guest_that_is_after_the_walker_costs_no_more_than_that_diff(
    host: Path, program: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends by its clock, which does not stand still with the guest's, and the sandbox goes on."""
    monkeypatch.setattr("cloche.backends.live_files.FILE_S", 5.0)

    async def scene() -> None:
        async with cloche.AsyncSandbox(workspace=host, timeout=120) as sandbox:
            process = await sandbox.start(["python3", "-c", dedent(program)])
            await asyncio.sleep(0.3)
            for _ in range(3):
                async with asyncio.timeout(20):
                    try:
                        await sandbox.diff()
                    except ClocheError:
                        continue
            async with asyncio.timeout(20):
                await process.kill()
                await process.wait()
                assert (await sandbox.run("print('alive')")).stdout == "alive\n"

    asyncio.run(scene())


STANDING = """
import os
for pid in filter(str.isdigit, os.listdir("/proc")):
    state = open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0]
    if state in "tT": print(pid, "stands still")
"""


def many(count: int) -> str:
    """Return a program that makes so many files."""
    return f"for n in range({count}): open(f'f{{n}}', 'w').write('x' * 50)"


@pytest.mark.user_soak
def test_diffs_at_once_pauses_and_cancelled_callers_leave_nobody_standing(host: Path) -> None:
    """Each diff ends, also where the sandbox is paused meanwhile, and what runs inside goes on after all of them."""

    async def scene() -> None:
        async with cloche.AsyncSandbox(workspace=host, timeout=120) as sandbox, asyncio.timeout(100):
            assert (await sandbox.run(many(5000))).ok
            ticking = await sandbox.start(["sh", "-c", "while sleep 0.01; do echo tick; done"])
            one, other = await asyncio.gather(sandbox.diff(), sandbox.diff())
            assert one.id == other.id
            looking = asyncio.create_task(sandbox.diff())
            await asyncio.sleep(0.05)
            await sandbox.pause()
            await looking
            for _ in range(2):  # a diff of what stands still leaves it so
                with pytest.raises(ClocheError, match="paused"):
                    await sandbox.exec(["true"])
                await sandbox.diff()
            await sandbox.resume()
            for after_s in (0.0, 0.01, 0.05, 0.1, 0.2, 0.3):
                looking = asyncio.create_task(sandbox.diff())
                await asyncio.sleep(after_s)
                looking.cancel()
                await asyncio.wait([looking])
            async with asyncio.timeout(20):  # the last one may be about to end
                while (await sandbox.run(STANDING)).stdout:
                    pass
            await ticking.kill()

    asyncio.run(scene())


def test_a_commit_that_nobody_waits_for_writes_to_no_other_folder(
    host: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its descriptors stay open until it has ended, and so it is done or not when its caller goes on."""
    (other := tmp_path / "other").mkdir()

    is_staged = threading.Event()

    def sync_slowly(fd: int) -> None:
        is_staged.set()
        time.sleep(2)
        sync_file_system(fd)

    monkeypatch.setattr("cloche.workspace.commit.sync_file_system", sync_slowly)

    async def scene() -> None:
        async with cloche.AsyncSandbox(workspace=host, timeout=120) as sandbox:
            assert (await sandbox.run(many(30))).ok
            committing = asyncio.create_task(sandbox.commit())
            await asyncio.to_thread(is_staged.wait)
            committing.cancel()
            await asyncio.wait([committing])
            assert committing.cancelled()
        held = [os.open(other, os.O_RDONLY | os.O_DIRECTORY) for _ in range(20)]  # which have the numbers that are free
        await asyncio.sleep(2.5)
        for fd in held:
            os.close(fd)

    asyncio.run(scene())
    assert os.listdir(other) == []
    assert not [name for name in os.listdir(host) if name.startswith(".cloche-")]
    assert len([name for name in os.listdir(host) if name.startswith("f")]) in (1, 31)


def test_a_diff_that_nobody_waits_for_ends(host: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However much there is to compare: it looks now and then whether anybody waits."""
    looked = []
    has_begun = threading.Event()
    look = HostTree.look

    def look_slowly(self: HostTree, path: bytes) -> os.stat_result | None:
        looked.append(path)
        has_begun.set()
        time.sleep(0.05)
        return look(self, path)

    monkeypatch.setattr(HostTree, "look", look_slowly)

    async def scene() -> None:
        async with cloche.AsyncSandbox(workspace=host, timeout=120) as sandbox:
            assert (await sandbox.run(many(2000))).ok
            looking = asyncio.create_task(sandbox.diff())
            await asyncio.to_thread(has_begun.wait)
            looking.cancel()
            await asyncio.wait([looking], timeout=20)
            assert looking.cancelled()

    asyncio.run(scene())
    assert len(looked) < 500


def test_two_who_commit_at_once_write_one_of_both(host: Path) -> None:
    """Two sandboxes have changed the same file: one is written, the other is a conflict or waits for it."""

    async def scene() -> tuple[str, ...]:
        async with (
            cloche.AsyncSandbox(workspace=host) as one,
            cloche.AsyncSandbox(workspace=host) as other,
        ):
            await one.run("open('a.py', 'w').write('one' * 9)")
            await other.run("open('a.py', 'w').write('other' * 9)")
            done = await asyncio.gather(one.commit(), other.commit(), return_exceptions=True)
            return tuple(type(each).__name__ for each in done)

    assert sorted(asyncio.run(scene())) == ["Committed", "WorkspaceConflict"]
    assert (host / "a.py").read_text() in ("one" * 9, "other" * 9)


@pytest.fixture
def descriptors() -> Iterator[None]:
    """Check that none of this process's descriptors is left."""
    with cloche.Sandbox() as sandbox:  # what is kept for the next one
        sandbox.run("1")
    before = len(os.listdir("/proc/self/fd"))
    yield
    until = time.monotonic() + 5
    while len(os.listdir("/proc/self/fd")) > before + 2 and time.monotonic() < until:
        time.sleep(0.05)
    assert len(os.listdir("/proc/self/fd")) <= before + 2


@pytest.mark.usefixtures("descriptors")
def test_a_folder_that_nobody_waits_for_any_more_is_closed(host: Path) -> None:
    """Who is cancelled while the folder is looked through leaves no descriptor."""

    async def scene() -> None:
        async def opened() -> None:
            async with cloche.AsyncSandbox(workspace=host):
                await asyncio.sleep(10)

        for number in range(20):
            opening = asyncio.create_task(opened())
            await asyncio.sleep(0.002 * number)
            opening.cancel()
            await asyncio.wait([opening])

    asyncio.run(scene())


@pytest.mark.user_soak
def test_a_stream_of_rows_takes_bounded_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names of more than their share end the reading, however short each is."""
    monkeypatch.setattr("cloche.workspace.snapshot.MOST_ROWS_BYTES", 1 << 20)
    reader = SnapshotReader(tmp_path)
    above = "/".join(f"{n:030}" for n in range(100))
    frames = b"".join(sent({"path": f"{above}/{number}", "kind": "directory"}) for number in range(1000))
    reader.feed(frames)
    with pytest.raises(ValueError, match="names of the changes"):
        reader.finish({"count": 1000})
    reader.close()
