"""Attempts by way of a workspace: what a guest leaves in it when a fork or a checkpoint copies it.

The copy is made outside the guest's jail, so it is tried to make it follow, hang, grow, or tear.
"""

from __future__ import annotations

import os
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

import cloche
from cloche.jail.clone_namespaces import FOLDER, copy_tree
from cloche.sync import Session
from tests.harness.escape.controls import Controls

RACE_S, MOST_S = 0.8, 30.0


@pytest.fixture
def session() -> Iterator[Session]:
    """Return a session whose cells have half a minute."""
    with cloche.Sandbox(live=False, timeout=30) as sandbox:
        yield sandbox.session()


def copies(session: Session) -> Iterator[Session]:
    """Yield a fork, and the session itself after it went back to a checkpoint."""
    with session.fork(1)[0] as fork:
        yield fork
    session.checkpoint("c")
    session.run("open('later', 'w').close()")
    session.rollback("c")
    yield session


# What a guest makes of its workspace, and an expression that is true where it is as it was.
HOSTILE = {
    "names that are no text": (
        r"""
        names = [b'\xff\xfe', b'a\nb', b'\xed\xa0\x80', b'x' * 255, b'..x', b'-rf', b'\x1b[2J']
        for name in names: open(name, 'wb').write(name)
        os.mkdir(b'\xff'); open(b'\xff/\xff', 'w').close()
        """,
        r"all(open(name, 'rb').read() == name for name in names) and os.path.isfile(b'\xff/\xff')",
    ),
    "names of devices": (
        """
        names = 'null', 'zero', 'mem', 'sda', 'dev', 'con', 'fd', 'tty'
        for name in names: open(name, 'w').write(name)
        """,
        "all(open(name).read() == name for name in names)",
    ),
    "links that are no text, or lead nowhere": (
        r"""
        links = {b'a': b'\xff\xfe', b'b': b'\xff' * 4000, b'c': b'c', b'd': b'/proc/self/fd/0', b'e': b'../' * 40}
        for name, target in links.items(): os.symlink(target, name)
        """,
        "{name: os.readlink(name) for name in links} == links",
    ),
    "fifos that nobody writes to": (
        "os.mkfifo('fifo'); os.mkfifo('closed'); os.chmod('closed', 0)",
        "[stat.filemode(os.lstat(name).st_mode) for name in ('fifo', 'closed')] == ['prw-r--r--', 'p---------']",
    ),
    "special bits": (
        "open('s', 'w').write('#!/bin/sh'); os.chmod('s', 0o6755); os.mkdir('d'); os.chmod('d', 0o3777)",
        "[os.lstat(n).st_mode & 0o7777 for n in 'sd'] == [0o6755, 0o3777] and os.statvfs('.').f_flag & 6 == 6",
    ),
    "modes that keep everybody out": (
        "open('f', 'w').write('f'); os.chmod('f', 0); os.mkdir('d'); open('d/f', 'w').write('d'); os.chmod('d', 0)",
        "(os.chmod('f', 0o600), os.chmod('d', 0o700)) and open('f').read() + open('d/f').read() == 'fd'",
    ),
    "a sparse file": (
        """
        fd = os.open('s', os.O_CREAT | os.O_RDWR); os.ftruncate(fd, 200 << 20)
        os.pwrite(fd, b'mid', 100 << 20); os.pwrite(fd, b'end', (200 << 20) - 3); os.close(fd)
        def look():
            with open('s', 'rb') as file:
                facts = os.stat('s')
                ends = [(file.seek(place), file.read(3))[1] for place in (100 << 20, facts.st_size - 3)]
                return facts.st_size == 200 << 20 and facts.st_blocks < 64 and ends == [b'mid', b'end']
        """,
        "look()",
    ),
    "a file of two names": (
        "open('a', 'w').write('same'); os.link('a', 'b')",
        "open('a').read() == open('b').read() == 'same'",
    ),
    "folders within folders": (
        """
        for _ in range(150): os.mkdir('d'); os.chdir('d')
        open('f', 'w').write('down'); os.chdir('/workspace')
        """,
        "open('d/' * 150 + 'f').read() == 'down'",
    ),
    "as many files as there may be": (
        """
        made = 0
        try:
            while made < 40_000: os.mknod(str(made)); made += 1
        except OSError: pass
        """,
        "32_000 < made == len(os.listdir())",
    ),
    "no room left": (
        """
        fd, filled = os.open('f', os.O_CREAT | os.O_WRONLY), 0
        try:
            while True: filled += os.write(fd, b'x' * (1 << 20))
        except OSError: os.close(fd)
        """,
        "filled == os.stat('f').st_size >= 256 << 20",
    ),
    "a working folder that is gone": (
        "os.mkdir('gone'); os.chdir('gone'); os.rmdir('/workspace/gone')",
        "os.path.isdir(os.getcwd())",
    ),
    "the other places": (
        r"""
        places = '/tmp', '/dev/shm'
        for place in places: os.mkfifo(place + '/p'); open(place + '/\udcff', 'w').write(place)
        """,
        r"all(open(place + '/\udcff').read() == place for place in places)",
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_a_workspace_holds_is_copied_as_it_is(name: str, session: Session) -> None:
    """Whatever it is, a fork and a checkpoint have it too, and are there within seconds."""
    make, check = HOSTILE[name]
    assert session.run(f"import os, stat\n{dedent(make)}").ok
    for copy in copies(session):
        seen = copy.run(f"bool({check})")
        assert seen.value is True, seen.stderr


# What cannot be copied within the bounds of a copy, and why.
TOO_MUCH = {
    "folders too deep": (
        """
        for _ in range(3000): os.mkdir('d'); os.chdir('d')
        open('f', 'w').write('x'); os.chdir('/workspace')
        """,
        "nested more than 200 deep",
    ),
    "a file of many names": (
        """
        open('f', 'wb').write(b'x' * (1 << 20))
        for number in range(300): os.link('f', f'{number}')
        """,
        "No space left on device",
    ),
}


@pytest.mark.parametrize("name", TOO_MUCH)
def test_what_cannot_be_copied_is_said(name: str, session: Session) -> None:
    """The copy ends at its bounds, with an error; the session and its files are as they were."""
    make, why = TOO_MUCH[name]
    assert session.run(f"import os\n{dedent(make)}\nkept = len(os.listdir())").ok
    for clone in (session.fork, lambda: session.checkpoint("c")):
        with pytest.raises(cloche.InvalidRequest, match=why):
            clone()
        assert session.run("kept == len(os.listdir())").value is True


LOOK = """
for way in ('loot', 'folder/public', 'folder/victim'):
    try:
        print(open(way).read())
    except OSError as error:
        print('none', error)
"""


def test_links_out_are_not_followed(controls: Controls, session: Session) -> None:
    """Links to the host's files and folders stay links, which lead nowhere in a fork."""
    targets, secrets = controls.canaries.targets, controls.canaries.secrets
    assert secrets["a file in /tmp"] in Path(targets["public"]).read_text()
    session.run(f"import os; os.symlink({targets['public']!r}, 'loot'); os.symlink({targets['folder']!r}, 'folder')")
    with session.fork(1)[0] as fork:
        seen = fork.run(LOOK)
        assert seen.stdout.count("none") == 3, seen.stdout
        for path in ("loot", "folder/public"):
            with pytest.raises(cloche.ClocheError):
                fork.read_file(path)
        with pytest.raises(cloche.ClocheError):
            fork.write_file("folder/victim", "harm")
    assert not controls.canaries.harm()


def _race(copy: Callable[[Path, Path], None], folder: Path, sought: str) -> str:
    """Copy again and again while a folder and a file are swapped for links out; return all that arrived.

    It goes on for a while, and where others take all the processors, until what is sought has arrived.
    """
    source, outside = folder / "source", folder / "outside"
    for place in (source / "d", outside):
        place.mkdir(parents=True)
    (source / "d" / "f").write_text("own")
    (source / "f").write_text("own")
    (outside / "f").write_text("canary")
    os.symlink(outside, source / "link")
    os.symlink(outside / "f", source / "link2")
    arrived, began, is_over = "", time.monotonic(), threading.Event()

    def swap() -> None:
        while not is_over.is_set():
            for one, other in (("d", "link"), ("f", "link2")):
                for first, second in ((one, "away"), (other, one), (one, other), ("away", one)):
                    os.rename(source / first, source / second)

    swapper = threading.Thread(target=swap)
    swapper.start()
    try:
        while time.monotonic() - began < (RACE_S if sought in arrived else MOST_S):
            target = folder / "target"
            target.mkdir()
            copy(source, target)
            found = (path for path in target.rglob("*") if path.is_file() and not path.is_symlink())
            arrived += "".join(path.read_text() for path in found)
            shutil.rmtree(target)
    finally:
        is_over.set()
        swapper.join()
    return arrived


def _copy_naively(source: Path, target: Path) -> None:
    for folder, names, files in os.walk(source):
        for name in (*names, *files):
            path = Path(folder, name)
            if path.is_symlink():
                continue
            time.sleep(0)
            try:
                (target / name).write_text(path.read_text() if path.is_file() else (path / "f").read_text())
            except OSError:
                pass


def _copy(source: Path, target: Path) -> None:
    ours, theirs = os.open(source, FOLDER), os.open(target, FOLDER)
    try:
        copy_tree(ours, theirs)
    except OSError:
        pass  # it refuses what has become another thing
    finally:
        os.close(ours)
        os.close(theirs)


def test_a_link_in_a_folders_place_is_not_followed(tmp_path: Path) -> None:
    """Who looks first and opens by name later is led outside; the copy, which has no name to be led by, is not."""
    assert "canary" in _race(_copy_naively, tmp_path / "control", "canary")
    arrived = _race(_copy, tmp_path / "attempt", "own")
    assert "own" in arrived
    assert "canary" not in arrived


@pytest.mark.root
def test_devices_and_sockets_are_left_out(tmp_path: Path) -> None:
    """No guest can make a device; were one there, no copy would have it, nor a socket."""
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    target.mkdir()
    os.mknod(source / "zero", 0o20666, os.makedev(1, 5))
    os.mknod(source / "disk", 0o60666, os.makedev(0, 0))
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(source / "socket"))
        (source / "f").write_text("f")
        _copy(source, target)
    assert os.listdir(target) == ["f"]


def test_a_copy_is_of_one_moment(session: Session) -> None:
    """Runs and file operations of the caller beside it are wholly in a fork or not at all."""
    sandbox, is_over = session.sandbox, threading.Event()
    both = "import time; open('a', 'w').write(str({0})); time.sleep(0.02); open('b', 'w').write(str({0}))"
    failed: list[BaseException] = []

    def repeat(act: Callable[[int], Any]) -> None:
        try:
            number = 0
            while not is_over.is_set():
                act(number := number + 1)
        except BaseException as error:
            failed.append(error)

    acts = (
        lambda number: sandbox.run(both.format(number)),
        lambda number: sandbox.write_file("c", str(number % 10) * (4 << 20)),
    )
    for act in acts:
        act(0)
    threads = [threading.Thread(target=repeat, args=(act,)) for act in acts]
    for thread in threads:
        thread.start()
    try:
        for _ in range(6):
            with session.fork(1)[0] as fork:
                assert fork.run("open('a').read() == open('b').read()").value is True
                assert fork.run("c = open('c').read(); len(c) == 4 << 20 and len(set(c)) == 1").value is True
    finally:
        is_over.set()
        for thread in threads:
            thread.join()
    assert not failed


FILL = "import os\nfor number in range(30_000): os.mknod(str(number))"
GROW = """
import os, time
hoard, began = [], time.monotonic()
while len(hoard) < 400 and time.monotonic() - began < 5:
    hoard.append(bytearray(b'x') * (1 << 20))
    os.write(1, b'.')
    time.sleep(0.001)
"""


def test_limits_hold_while_another_is_cloned() -> None:
    """A fork that runs is kept to its memory while its parent, whose workspace is full of files, is forked again."""
    with cloche.Sandbox(live=False, memory="64m", timeout=30, cpus=2) as sandbox:
        session = sandbox.session()
        (fork,) = session.fork(1)
        assert session.run(FILL).ok
        cloner = threading.Thread(target=session.fork, args=(4,))
        cloner.start()
        time.sleep(0.3)
        held = len(fork.run(GROW).stdout)
        cloner.join()
    assert held < 250
