"""Packages that are built from source: where the operator says so, in a jail that reaches nothing, or not at all.

As in `test_packages.py`, the steps that download run without a jail here; those that build run in one.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import cloche
from cloche.cli.app import root
from cloche.core.errors import InvalidRequest, PolicyDenied, StartFailed
from cloche.core.limits import MIB
from cloche.packages import build
from cloche.packages.store import Store
from tests.harness.packages import PackageIndex, make_source, own_index

pytestmark = pytest.mark.usefixtures("settings_of_nobody", "downloads_outside")


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PackageIndex]:
    """Serve an index, which this user's environment names, give an empty store, and let names in `src*` be built."""
    config = tmp_path / "owner.yaml"
    config.write_text("sandbox: {packages_build: ['src*']}")
    monkeypatch.setenv("CLOCHE_CONFIG", str(config))
    with own_index(tmp_path, monkeypatch) as served:
        yield served


@pytest.mark.both_users
def test_a_source_is_built_with_what_it_needs(index: PackageIndex) -> None:
    """A wheel that will do comes before it; what it needs is known by its build alone, which says so as it runs."""
    index.add("tool", files={"tool.py": "WORD = 'made'\n"})
    index.add("tool_more", files={"tool_more.py": "WORD = 'more'\n"})
    backend = """
import tool
def get_requires_for_build_wheel(settings=None):
    print("what a backend prints is no frame")
    return ["tool-more"]
plain = build_wheel
def build_wheel(*given):
    import tool_more, subprocess, sys
    words = subprocess.run([sys.executable, "-c", "import tool; print(tool.WORD)"], capture_output=True, text=True)
    said = json.load(open("content.json"))
    said["files"]["src_one.py"] = f"WORDS = {[words.stdout, tool_more.WORD]!r}"
    json.dump(said, open("content.json", "w"))
    return plain(*given)
"""
    index.add_source("src_one", backend=backend, build_requires=("tool>=1",), requires=("src-below<2",))
    index.add_source("src_below", "1.0")
    index.add_source("src_below", "2.0")
    index.add("src_wheel", "1.0")
    index.add_source("src_wheel", "2.0")
    result = cloche.run(
        "import src_one, src_below, src_wheel; [src_one.WORDS, src_below.VERSION, src_wheel.VERSION]",
        packages=["src-one", "src-wheel"],
    )
    assert result.value == [["made\n", "more"], "1.0", "1.0"], result.stderr
    assert result.meta["packages"] == ["src-below==1.0", "src-one==1.0", "src-wheel==1.0"]
    assert result.meta["packages_built"] == ["src-below==1.0", "src-one==1.0"]
    before = len(index.asked)
    assert cloche.run("import src_one", packages=["src-one", "src-wheel"]).ok
    assert len(index.asked) == before
    store = Store()
    assert os.listdir(f"{store.folder}/making") == []
    (layer,) = [layer for layer in store.layers() if any(pin.is_source for pin in layer.pins)]
    assert {pin.name: [one.text for one in pin.build] for pin in layer.pins if pin.is_source} == {
        "src-below": [], "src-one": ["tool==1.0", "tool-more==1.0"],
    }  # fmt: skip


def test_what_is_built_comes_into_a_sandbox_that_lives(index: PackageIndex) -> None:
    """What is there keeps its version; a cell's own word needs more than the list of what may be built."""
    index.add_source("src_one", build_requires=())
    index.add_source("src_two", requires=("src-one",))
    with cloche.Sandbox() as sandbox, sandbox.session() as session:
        assert sandbox.install("src-one") == ("src-one==1.0",)
        index.add_source("src_one", "2.0")
        assert session.install("src-two") == ("src-one==1.0", "src-two==1.0")
        assert session.run("import src_one, src_two; src_one.VERSION").value == "1.0"
        assert "packages_allow" in session.run("%pip install src-three").stderr


def test_nothing_is_built_but_what_the_operator_lists(
    index: PackageIndex, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Nor where a file of the working directory says so, or a lock file has one; no source is downloaded."""
    index.add_source("other")
    index.add_source("src_one", requires=("other",))
    with pytest.raises(InvalidRequest, match=r"other.*packages_build"):
        cloche.run("1", packages=["src-one"])
    assert index.downloads() == ["src_one-1.0.tar.gz"]
    index.add_source("src_two")
    lock = tmp_path / "cloche.lock"
    assert _exit_code(["packages", "lock", "src-two", "--output", str(lock)]) == 0
    monkeypatch.delenv("CLOCHE_CONFIG")
    before = index.downloads()
    with pytest.raises(InvalidRequest, match=r"src-two.*packages_build"):
        cloche.run("1", packages=["src-two"])
    with pytest.raises(PolicyDenied, match="src-two as a source"):
        cloche.run("1", packages=["src-two"], locked=lock)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cloche.yaml").write_text("sandbox: {packages_build: ['*']}")
    with pytest.raises((InvalidRequest, PolicyDenied), match="packages_build"):
        cloche.run("1", packages=["src-two"])
    assert index.downloads() == before


def _exit_code(words: list[str]) -> int:
    with pytest.raises(SystemExit) as ended:
        root(words)
    return int(ended.value.code or 0)


def test_a_lock_file_has_sources_with_what_they_are_built_with(
    index: PackageIndex, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its hash, and no newer one of either counts; a layer that was built with something else is another one."""
    backend = """
import tool
plain = build_wheel
def build_wheel(*given):
    said = json.load(open("content.json"))
    said["files"]["src_one.py"] = f"VERSION = {said['version'] + ' by ' + tool.VERSION!r}"
    json.dump(said, open("content.json", "w"))
    return plain(*given)
"""
    index.add("tool", "1.0")
    file = index.add_source("src_one", backend=backend, build_requires=("tool",))
    lock = tmp_path / "cloche.lock"
    assert _exit_code(["packages", "lock", "src-one", "--output", str(lock)]) == 0
    index.add("tool", "2.0")
    assert cloche.run("import src_one; src_one.VERSION", packages=["src-one>0"]).value == "1.0 by 1.0"
    assert _exit_code(["packages", "install", "--upgrade", "src-one"]) == 0
    assert cloche.run("import src_one; src_one.VERSION", packages=["src-one"]).value == "1.0 by 2.0"
    capsys.readouterr()
    assert _exit_code(["packages", "list"]) == 0
    assert capsys.readouterr().out.count("src-one 1.0 (built)") == 2
    index.add_source("src_one", "2.0", backend=backend, build_requires=("tool",))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "another"))
    result = cloche.run("import src_one; src_one.VERSION", packages=["src-one"], locked=lock)
    assert (result.value, result.meta["packages_built"]) == ("1.0 by 1.0", ["src-one==1.0"]), result.stderr
    index.sent[file] = make_source("src_one", built={"files": {"src_one.py": "EVIL = 1"}})
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "third"))
    with pytest.raises(StartFailed, match="hash"):
        cloche.run("1", packages=["src-one"], locked=lock)
    assert Store().layers() == []


ATTEMPTS = """
def attempt(what):
    try:
        return bool(what())
    except Exception:  # however it is refused; the same attempts succeed where nothing holds them
        return False

def connect():
    import socket
    socket.create_connection(("127.0.0.1", {port}), timeout=5).close()
    return True

def holds(path):
    with open(path) as file:
        return "hunter2" in file.read()

def found():
    return dict(
        network=attempt(connect),
        environment="hunter2" in str(__import__("os").environ),
        file=attempt(lambda: holds({secret!r})),
        parent=attempt(lambda: holds("/proc/%d/environ" % __import__("os").getppid())),
        layer=attempt(lambda: open(__import__("tool").__file__, "a")),
    )
"""


def test_a_build_reaches_neither_network_nor_credentials_nor_files(
    index: PackageIndex, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What works for a program outside, works for no build; and none runs where there is a network."""
    secret, marker = tmp_path / "secret", tmp_path / "ran"
    secret.write_text("hunter2")
    attempts = ATTEMPTS.format(port=index.url.rpartition(":")[2].partition("/")[0], secret=str(secret))
    monkeypatch.setenv("UV_DEFAULT_INDEX", index.url.replace("http://", "http://me:hunter2@"))
    outside: dict[str, Any] = {}
    exec(attempts, outside)
    works = {name for name, worked in outside["found"]().items() if worked}
    assert works >= {"network", "environment", "file"}
    index.add("tool")
    backend = f"""
{attempts}
for path in ({str(marker)!r}, {str(secret)!r}):
    try:
        with open(path, "a") as file:
            file.write("x")
    except OSError:
        pass
plain = build_wheel
def build_wheel(*given):
    said = json.load(open("content.json"))
    said["files"]["src_one.py"] = f"FOUND = {{found()!r}}"
    json.dump(said, open("content.json", "w"))
    return plain(*given)
"""
    file = index.add_source("src_one", backend=backend, build_requires=("tool",))
    result = cloche.run("import src_one; src_one.FOUND", packages=["src-one"])
    assert result.value == dict.fromkeys(outside["found"](), False), result.stderr
    assert not marker.exists()
    assert secret.read_text() == "hunter2"
    assert index.downloads().count(file) == 1  # ours: uv looked into none


RENAMES = """
plain = build_wheel
def build_wheel(folder, *more):
    made = plain(folder)
    wanted = made.replace({0!r}, {1!r})
    __import__("os").rename(f"{{folder}}/{{made}}", f"{{folder}}/{{wanted}}")
    return wanted
"""
WRITES = """
def build_wheel(folder, *more):
    with open(f"{{folder}}/src_one-1.0-py3-none-any.whl", "wb") as file:
        file.{0}
    return "src_one-1.0-py3-none-any.whl"
"""
SHOUTS = """
def build_wheel(*more):
    print("x" * 100_000)
    raise RuntimeError("the last words")
"""
FLOODS = """
import os
def build_wheel(*more):
    while True:
        os.write(1, bytes(1 << 16))
"""
FORGES = """
import os
def build_wheel(*more):
    for fd in range(3, 99):
        try:
            while True:
                os.write(fd, bytes(1 << 16))
        except OSError:
            pass
"""
ASKS = "def get_requires_for_build_wheel(*more):\n    return [{0}]\n"
EVER_MORE = ASKS.format("f'tool>0.{__import__(\"random\").randrange(10**9)}'")
# What the source's backend does besides, what its wheel says, and what the error says.
HOSTILE: dict[str, tuple[str, dict[str, object], str]] = {
    "another name": ("", {"name": "src_evil"}, "another package"),
    "another version": ("", {"version": "9.0"}, "another package or version"),
    "another name inside": (RENAMES.format("src_evil", "src_one"), {"name": "src_evil"}, "by its metadata"),
    "another interpreter": (RENAMES.format("py3-none-any", "cp27-cp27m-win32"), {}, "another interpreter"),
    "a path": ("def build_wheel(*more): return '/etc/passwd'", {}, "which is not a name for a wheel"),
    "no wheel": (WRITES.format("write(b'x')"), {}, "cannot be read"),
    "a wheel that is too large": (WRITES.format("truncate(9 << 20)"), {}, "bytes"),
    "an error": (SHOUTS, {}, "the last words"),
    "for ever": ("def build_wheel(*more): __import__('time').sleep(600)", {}, "longer than 3 s"),
    "a flood": (FLOODS, {}, "output_limit"),
    "a frame of its own": (FORGES, {}, "not a wheel"),
    "what needs an address": ("", {"requires": ["evil @ https://evil.example/x.whl"]}, "names a place"),
    "a build that needs an address": (ASKS.format("'x @ https://evil.example/x'"), {}, "names a place"),
    "a build that needs ever more": (EVER_MORE, {}, "build requirements do not end"),
    "a build that needs what is not there": (ASKS.format("'nowhere'"), {}, "nowhere was not found"),
}


def test_a_build_that_is_cancelled_leaves_nothing(index: PackageIndex) -> None:
    """The caller is told at once, and the next one builds it."""
    index.add_source("src_one", backend="def build_wheel(*more): __import__('time').sleep(600)")
    making = Path(f"{Store().folder}/making")

    def is_building() -> bool:
        return bool(list(making.glob("*/*/built-0")))

    async def cancel() -> None:
        run = asyncio.create_task(cloche.arun("1", packages=["src-one"]))
        while not run.done() and not is_building():  # noqa: ASYNC110 - a build tells no one
            await asyncio.sleep(0.05)
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run

    asyncio.run(asyncio.wait_for(cancel(), 60))
    assert list(making.iterdir()) == []
    index.add_source("src_one")
    assert cloche.run("import src_one", packages=["src-one"]).ok


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_build_ends_and_leaves_nothing(
    index: PackageIndex, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """The error says which package and why; no layer has anything of it."""
    backend, built, why = HOSTILE[what]
    limits = replace(build.BUILD_LIMITS, timeout_s=3.0, flood_bytes=9 * MIB)
    monkeypatch.setattr(build, "BUILD_LIMITS", limits)
    monkeypatch.setattr(build, "MOST_BUILT_BYTES", 8 * MIB)
    index.add("tool")
    index.add_source("src_one", backend=backend, built=built)
    with pytest.raises(StartFailed, match=why) as raised:
        cloche.run("1", packages=["src-one"])
    assert "src-one==1.0 cannot be built from source" in str(raised.value)
    assert len(str(raised.value)) < 3000
    store = Store()
    assert os.listdir(f"{store.folder}/making") == []
    assert not [layer for layer in store.layers() if any(pin.is_source for pin in layer.pins)]
