"""Packages from a local index: what is installed is what was pinned, nothing half made is used, and hostile wheels end.

Egress never reaches loopback, where this index is, so the steps that download run without a jail here
(`downloads_outside`); those that unpack, and the programs, run in one.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import stat
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from click.testing import CliRunner

import cloche
from cloche.cli.app import root
from cloche.core.errors import BackendUnavailable, InvalidRequest, PolicyDenied, StartFailed
from cloche.core.policy import Policy
from cloche.execution.registry import backend_named
from cloche.packages import defaults, steps
from cloche.packages.frames import FILES_END, FRAME
from cloche.packages.store import Store
from cloche.packages.target import own_target
from cloche.packages.unpack import unpack
from tests.harness.packages import PackageIndex, make_wheel, own_index, serving_packages, sha256_of

pytestmark = pytest.mark.usefixtures("settings_of_nobody", "downloads_outside")
OUTSIDE = """
from cloche.core.enforcement import Level
from cloche.packages import defaults, steps
real = steps.step_policy
steps.step_policy = lambda policy, step: real(
    policy.with_changes(level=Level.PROCESS) if step.network_allow else policy, step
)
"""


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PackageIndex]:
    """Serve an index, which this user's environment names, and give an empty store."""
    with own_index(tmp_path, monkeypatch) as served:
        yield served


@pytest.mark.both_users
def test_packages_are_there_with_what_they_need_and_can_only_be_read(index: PackageIndex) -> None:
    """A package, one that it needs, its command and its data; programs that a program starts find them, too."""
    index.add("below", files={"below/__init__.py": "WORD = 'within'\n", "below/word.txt": "text"})
    source = "import below\ndef main():\n    print(below.WORD)\n"
    files = {"above.py": source, "above-1.0.data/data/share/above.txt": "shared"}
    index.add("above", requires=("below>=1",), scripts={"say-above": "above:main"}, files=files)
    code = """
import above, importlib.metadata, importlib.resources, subprocess, sys
try:
    open(above.__file__, "a")
    why = "it can be written to"
except OSError as error:
    why = error.strerror
said = subprocess.run(["say-above"], capture_output=True, text=True).stdout
other = subprocess.run([sys.executable, "-c", "import below; print(below.WORD)"], capture_output=True, text=True).stdout
[said, other, importlib.metadata.version("above"), importlib.resources.files("below").joinpath("word.txt").read_text(),
 why, above.__cached__.endswith(".pyc"), __import__("os").path.exists(above.__cached__)]
"""
    result = cloche.run(code, packages=["above"])
    assert result.value[:4] == ["within\n", "within\n", "1.0", "text"], result.stderr
    assert result.value[4] in {"Read-only file system", "Permission denied"}
    assert result.value[5:] == [True, True]
    assert result.meta["packages"] == ["above==1.0", "below==1.0"]


SHADOWS = """
import argparse, encodings, os, sys, click, idle_one
own = os.path.dirname(os.__file__)
site = [at for at, path in enumerate(sys.path) if path.endswith("/site")][0]
print(argparse.__file__.startswith(own), encodings.__file__.startswith(own), click.WORD, idle_one.NAME,
      sys.path.index(own) < site, os.environ.get("PYTHONPATH", "").count(":"), "sitecustomize ran" in os.listdir("."))
"""


@pytest.mark.both_users
@pytest.mark.parametrize("how", ["run", "turns", "lives"])
def test_no_package_stands_for_a_module_of_the_interpreter(index: PackageIndex, how: str) -> None:
    """In a program, and in what it starts, packages come after the standard library and before the caller's own.

    Their `sitecustomize` and `usercustomize` are run in none, nor is anything before the library can be found.
    """
    marker = "open('sitecustomize ran', 'w').close()\n"
    index.add("idle_one", files={
        "argparse.py": "1/0\n", "encodings/__init__.py": "1/0\n", "click.py": "WORD = 'asked for'\n",
        "idle_one.py": "NAME = 'one'\n", "sitecustomize.py": marker, "usercustomize.py": marker,
    })  # fmt: skip
    expected = "True True asked for one True 0 False\n"
    files = {"shadows.py": SHADOWS}
    if how == "run":
        starts = f"{SHADOWS}\nimport subprocess; subprocess.run([sys.executable, 'shadows.py'], check=True)"
        assert cloche.run(starts, packages=["idle_one"], files=files).stdout == 2 * expected
        assert cloche.run("python3 shadows.py", language="bash", packages=["idle_one"], files=files).stdout == expected
        return
    with (
        cloche.Sandbox(packages=["idle_one"], live=how == "lives", files=files) as sandbox,
        sandbox.session() as session,
    ):
        assert sandbox.run(argv=["python3", "shadows.py"]).stdout == expected
        assert session.run("!python3 shadows.py").stdout == expected
        assert session.run(SHADOWS).stdout == expected
        if how == "lives":
            assert sandbox.exec(["python3", "shadows.py"]).stdout == expected


def test_what_was_installed_once_needs_no_network_again(index: PackageIndex) -> None:
    """Nor does the same set of another list of requirements download anything."""
    index.add("one")
    index.add("two")
    assert cloche.run("import one, two", packages=["one", "two"]).ok
    before = len(index.asked)
    assert cloche.run("import one, two", packages=["two", "one"]).ok
    assert len(index.asked) == before
    assert cloche.run("import one, two", packages=["two>=1", "one"]).ok
    assert index.downloads().count("one-1.0-py3-none-any.whl") == 1


def test_credentials_are_with_the_downloads_alone(index: PackageIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    """The index gets them; the program, its result and the store have nothing of them."""
    index.password = "hunter2"
    index.add("one")
    monkeypatch.setenv("UV_DEFAULT_INDEX", index.url.replace("http://", "http://me:hunter2@"))
    result = cloche.run(
        "import os, glob, one; [dict(os.environ), open('/proc/self/cmdline').read(), one.NAME]", packages=["one"]
    )
    assert result.ok, result.stderr
    assert "hunter2" not in json.dumps([result.value, result.meta], default=str)
    folder = Path(os.environ["XDG_DATA_HOME"])
    assert not [path for path in folder.rglob("*") if path.is_file() and b"hunter2" in path.read_bytes()]
    assert any(path.startswith("/files/") and sent for path, sent in index.asked)


def test_a_wheel_with_another_hash_than_the_listed_one_is_not_kept(index: PackageIndex) -> None:
    """What the index sends is compared before anything opens it; nothing is left in the store."""
    file = index.add("one")
    index.sent[file] = make_wheel("one", files={"one.py": "EVIL = 1"})
    with pytest.raises((StartFailed, InvalidRequest), match=r"hash|Hash"):
        cloche.run("import one", packages=["one"])
    store = Store()
    assert store.layers() == []
    assert os.listdir(f"{store.folder}/making") == []


def test_what_cannot_be_resolved_is_told_in_the_words_of_uv(index: PackageIndex) -> None:
    """Before any code ran."""
    index.add("one", requires=("two>2",))
    index.add("two")
    with pytest.raises(InvalidRequest, match=r"two>2.*unsatisfiable"):
        cloche.run("open('made', 'w')", packages=["one"])
    with pytest.raises(InvalidRequest, match="nowhere was not found"):
        cloche.run("1", packages=["nowhere"])


def test_the_operator_denies_and_allows(index: PackageIndex, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Denied is denied also below another one; where there is a list, what is not in it is refused."""
    index.add("one", requires=("bad-one",))
    index.add("bad_one", files={"bad_one.py": ""})
    config = tmp_path / "owner.yaml"
    config.write_text("sandbox: {packages_deny: [bad-*], packages_allow: [one]}")
    monkeypatch.setenv("CLOCHE_CONFIG", str(config))
    with pytest.raises(PolicyDenied, match="bad-one may not be installed"):
        cloche.run("1", packages=["bad_one"])
    with pytest.raises(PolicyDenied, match="bad-one may not be installed"):
        cloche.run("1", packages=["one"])
    with pytest.raises(PolicyDenied, match="two is not among those"):
        cloche.run("1", packages=["two"])
    assert not index.downloads()


def test_auto_installs_what_is_sure_and_refuses_what_is_not(index: PackageIndex) -> None:
    """A header counts; an import that nobody knows does not become a package of that name."""
    index.add("emoji", files={"emoji.py": "FACE = 1"})
    index.add("invented", files={"invented.py": ""})
    assert cloche.run("import emoji; emoji.FACE", packages="auto").value == 1
    with pytest.raises(PolicyDenied, match='"invented"'):
        cloche.run("import invented", packages="auto")
    code = '# /// script\n# dependencies = ["invented"]\n# ///\nimport invented\n'
    assert cloche.run(code, packages="auto").ok
    assert cloche.run("import helper", files={"helper.py": ""}, packages="auto").ok


def test_a_private_index_is_not_shadowed_by_the_public_one(
    index: PackageIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever puts a newer package of that name on the client's default; one that is only there still comes."""
    index.add("one")
    monkeypatch.delenv("UV_DEFAULT_INDEX")
    with serving_packages() as public:
        public.add("one", "9.0", files={"one.py": "VERSION = 'stolen'"})
        public.add("two")
        monkeypatch.setattr(defaults, "default_index", lambda: public.url)
        monkeypatch.setitem(defaults._listed, public.url, ("files.example:443",))
        monkeypatch.setenv("PIP_INDEX_URL", index.url)
        monkeypatch.setenv("PIP_EXTRA_INDEX_URL", public.url)
        result = cloche.run("import one, two; one.VERSION", packages=["one", "two"])
    assert (result.value, result.meta["packages"]) == ("1.0", ["one==1.0", "two==1.0"]), result.stderr


def test_a_lock_file_is_written_and_required(index: PackageIndex, tmp_path: Path) -> None:
    """With it a newer release does not count; without it, or for other requirements, nothing runs."""
    index.add("one", "1.0")
    lock = tmp_path / "cloche.lock"
    assert _exit_code(["packages", "lock", "one", "--output", str(lock)]) == 0
    index.add("one", "2.0")
    assert cloche.run("import one; one.VERSION", packages=["one"], locked=lock).value == "1.0"
    with pytest.raises(InvalidRequest, match="other requirements"):
        cloche.run("1", packages=["two"], locked=str(lock))
    with pytest.raises(InvalidRequest, match="No such file"):
        cloche.run("1", packages=["one"], locked=str(tmp_path / "none.lock"))
    with pytest.raises(InvalidRequest, match="no effect without packages"):
        cloche.run("1", locked=lock)


def test_a_lock_file_brings_nothing_that_was_not_asked_for(
    index: PackageIndex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever wrote it: what nothing needs, a version that is not wanted, another file, or one that is too young."""
    index.add("one", requires=("below<2",))
    for version in ("1.0", "2.0"):
        index.add("below", version)
    index.add("evil")
    lock = tmp_path / "cloche.lock"
    assert _exit_code(["packages", "lock", "one", "--output", str(lock)]) == 0
    text = lock.read_text()
    assert index.url.partition("//")[2].partition("/")[0] not in text
    rows = text.split("[[packages]]")
    below = next(row for row in rows if 'name = "below"' in row)
    evil = below.replace("below", "evil").replace(sha256_of(index.wheels["below-1.0-py3-none-any.whl"]), "e" * 64)
    newer = below.replace("1.0", "2.0")
    for changed, why in (
        (f"{text}\n[[packages]]{evil}", r"pins evil==1\.0, which no requested package needs"),
        (text.replace(below, newer), r"cannot be resolved: .*below==2\.0"),
        (text.replace(f"[[packages]]{below}", ""), r"does not pin below==1\.0, but a requested package needs that"),
        (text.replace(below, below.replace('sha256 = "', 'sha256 = "0')[:-1]), "no file of"),
    ):
        lock.write_text(changed)
        with pytest.raises((InvalidRequest, StartFailed), match=why):
            cloche.run("1", packages=["one"], locked=lock)
    assert [layer.pins for layer in Store().layers() if any(pin.name == "evil" for pin in layer.pins)] == []
    lock.write_text(text)
    config = tmp_path / "owner.yaml"
    config.write_text("sandbox: {packages_min_age: 7d}")
    monkeypatch.setenv("CLOCHE_CONFIG", str(config))
    with pytest.raises(InvalidRequest, match="cannot be resolved"):  # as without the file: no release is that old
        cloche.run("1", packages=["one"], locked=lock)


def test_a_lock_file_holds_for_a_mirror(index: PackageIndex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It names files and hashes: another index that lists the same ones does as well."""
    index.add("one")
    lock = tmp_path / "cloche.lock"
    assert _exit_code(["packages", "lock", "one", "--output", str(lock)]) == 0
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "elsewhere"))
    with serving_packages() as mirror:
        mirror.wheels.update(index.wheels)
        mirror.add("one", "2.0")
        index.wheels.clear()
        monkeypatch.setenv("UV_DEFAULT_INDEX", mirror.url)
        assert cloche.run("import one; one.VERSION", packages=["one"], locked=lock).value == "1.0"
        assert mirror.downloads() == ["one-1.0-py3-none-any.whl"]


def _exit_code(words: list[str]) -> int:
    with pytest.raises(SystemExit) as ended:
        root(words)
    return int(ended.value.code or 0)


@pytest.mark.parametrize("live", [False, True])
def test_sandboxes_and_sessions_have_packages(index: PackageIndex, live: bool) -> None:
    """Runs, commands, and the cells of a session."""
    index.add("one", scripts={"say-one": "one:main"}, files={"one.py": "def main():\n    print('said')\n"})
    with cloche.Sandbox(packages=["one"], live=live) as sandbox:
        assert sandbox.run("import one; one.__name__").value == "one"
        assert sandbox.run(argv=["say-one"]).stdout == "said\n"
        assert sandbox.run("say-one", language="bash").stdout == "said\n"
        with sandbox.session() as session:
            assert session.run("import one; one.__name__").value == "one"


def test_packages_come_into_a_sandbox_that_lives(index: PackageIndex) -> None:
    """Programs and sessions find them, also one that has begun; what is there keeps its version."""
    index.add("one", files={"shared/one.py": "", "one.py": "VERSION = '1.0'\n"})
    index.add(
        "two", requires=("one",), files={"shared/two.py": "", "two.py": "import one\n"}, scripts={"two": "two:print"}
    )
    index.add("three", requires=("one>1",))
    with cloche.Sandbox() as sandbox, sandbox.session() as session:
        assert sandbox.run("import one").status == "error"
        assert session.run("import sys; ':' in __import__('os').environ.get('PYTHONPATH', '')").value is False
        assert sandbox.install("one") == ("one==1.0",)
        assert session.run("import one; one.VERSION").value == "1.0"
        index.add("one", "2.0")
        assert session.install("two") == ("one==1.0", "two==1.0")
        assert session.run("import two, shared.two, shared.one; one.VERSION").value == "1.0"
        assert sandbox.run("import two, shared.one; two.one.VERSION").value == "1.0"
        assert sandbox.exec(["sh", "-c", "command -v two"]).stdout.endswith("/bin/two\n")
        with pytest.raises(InvalidRequest, match=r"one==1\.0"):
            sandbox.install("three")
        with pytest.raises(InvalidRequest, match="a path"):
            sandbox.install("./x")
    assert os.listdir(f"{Store().folder}/growing") == []


def test_a_cell_installs_what_is_listed_or_approved(
    index: PackageIndex, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It is a model's own word: without a list, and without anybody to ask, it is told why not."""
    for name in ("one", "two", "three"):
        index.add(name)
    with cloche.Sandbox() as sandbox, sandbox.session() as session:
        result = session.run("%pip install one")
        assert "one is not among those" in result.stderr
    config = tmp_path / "owner.yaml"
    config.write_text("sandbox: {packages_allow: [one]}")
    monkeypatch.setenv("CLOCHE_CONFIG", str(config))
    asked = []

    async def approve(names: Sequence[str]) -> bool:
        asked.append(tuple(names))
        return "two" in names

    async def use() -> None:
        sandbox = cloche.AsyncSandbox()
        sandbox.ask_about_packages(approve)
        async with sandbox:
            session = await sandbox.session()
            result = await session.run("%pip install -q one\nimport one\none.NAME")
            assert (result.value, "installed: one==1.0" in result.stdout) == ("one", True)
            assert (await session.run("!pip install two\nimport two; two.NAME")).value == "two"
            assert "three is not among those" in (await session.run("%pip install three")).stderr
            assert "an option" in (await session.run("%pip install --index-url http://x two")).stderr

    asyncio.run(use())
    assert asked == [("two",), ("three",)]


def test_a_sandbox_whose_runs_take_turns_says_that_it_installs_nothing(index: PackageIndex) -> None:
    """The remedy is in the message."""
    with (
        cloche.Sandbox(live=False) as sandbox,
        pytest.raises(InvalidRequest, match="install needs a live sandbox"),
    ):
        sandbox.install("one")


def test_a_sandbox_with_a_name_keeps_what_was_installed(index: PackageIndex) -> None:
    """Its keeper holds it; another caller finds it, and installs more, also the command line."""
    index.add("one")
    index.add("two")
    index.add("three")
    with cloche.Sandbox(name="packages-test", keep="1m", packages=["one"]) as sandbox:
        assert sandbox.run("import one").ok
    try:
        assert Store().prune(most_layers=0) == []
        with cloche.Sandbox.attach("packages-test") as sandbox:
            assert sandbox.run("import one").ok
            assert sandbox.install("two") == ("two==1.0",)
            assert sandbox.run("import one, two").ok
        assert CliRunner().invoke(root, ["sandbox", "install", "packages-test", "three"]).output == "three==1.0\n"
    finally:
        with cloche.Sandbox.attach("packages-test") as sandbox:
            sandbox.kill()


def test_ten_at_once_install_once(index: PackageIndex) -> None:
    """In one process and in several."""
    index.add("one")

    async def all_at_once() -> list[bool]:
        return [
            one.ok for one in await asyncio.gather(*(cloche.arun("import one", packages=["one"]) for _ in range(6)))
        ]

    others = [_other("print(cloche.run('import one', packages=['one']).ok)") for _ in range(4)]
    assert asyncio.run(all_at_once()) == [True] * 6
    for other in others:
        said, _ = other.communicate(timeout=120)
        assert said == b"True\n"
    assert index.downloads() == ["one-1.0-py3-none-any.whl"]


def _other(program: str) -> subprocess.Popen[bytes]:
    whole = f"{OUTSIDE}\nimport cloche\n{program}"
    return subprocess.Popen([sys.executable, "-c", whole], stdout=subprocess.PIPE)


def test_what_was_killed_in_the_middle_is_never_used(index: PackageIndex) -> None:
    """A process that is killed at whatever moment leaves no layer that is half made, and nothing that stays."""
    index.add("one", files={f"one/m{number}.py": "x = 1\n" * 200 for number in range(40)} | {"one/__init__.py": ""})
    store = Store()
    for moment in ("fetch", "unpack", "publish"):
        program = f"""
import os, signal
from cloche.packages import install, store
def die(*_, **__): os.kill(os.getpid(), signal.SIGKILL)
if {moment!r} == "publish":
    os.rename = die
else:
    install.{moment if moment != "publish" else "fetch"} = die
cloche.run("1", packages=["one"])
"""
        killed = _other(program)
        killed.communicate(timeout=120)
        assert killed.returncode == -signal.SIGKILL
        assert store.layers() == []
        assert len(os.listdir(f"{store.folder}/making")) == 1
    assert cloche.run("import one.m7", packages=["one"]).ok
    assert os.listdir(f"{store.folder}/making") == []
    assert len(store.layers()) == 1


def test_what_is_in_use_stays_and_the_rest_goes_by_age_and_size(index: PackageIndex) -> None:
    """A process keeps what it uses; after it the one that was not used for the longest time goes first."""
    for name in ("one", "two", "six"):
        index.add(name, files={f"{name}.py": "", "data.bin": bytes(1000)})
        said, _ = _other(f"print(cloche.run('import {name}', packages=['{name}']).ok)").communicate()
        assert said == b"True\n"
    layers = {layer.pins[0].name: layer for layer in Store().layers()}
    for age, name in enumerate(("six", "two", "one")):
        os.utime(layers[name].folder, (1e9 - age, 1e9 - age))
    assert cloche.run("import one", packages=["one"]).ok
    assert [layer.pins[0].name for layer in Store().prune(most_layers=0)] == ["six", "two"]
    assert cloche.run("import one", packages=["one"]).ok
    assert cloche.run("import two", packages=["two"]).ok


def test_the_store_has_a_bound(index: PackageIndex, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What nobody uses makes room for what is new."""
    config = tmp_path / "owner.yaml"
    config.write_text("sandbox: {packages_keep_count: 1}")
    monkeypatch.setenv("CLOCHE_CONFIG", str(config))
    for name in ("one", "two"):
        index.add(name)
        assert _other(f"cloche.run('import {name}', packages=['{name}'])").communicate()
    assert [layer.pins[0].name for layer in Store().layers()] == ["two"]


def test_a_layer_that_was_removed_is_made_again_elsewhere(index: PackageIndex) -> None:
    """No jail that was built with the old one is taken for one with the new one."""
    index.add("one")
    before = cloche.run("import one; one.__file__", packages=["one"]).value
    store = Store()
    (layer,) = store.layers()
    os.chmod(layer.folder, 0o700)
    os.rename(layer.folder, f"{layer.folder}.gone")
    after = cloche.run("import one; one.__file__", packages=["one"]).value
    assert before
    assert after
    assert before != after


def test_backends_that_show_no_packages_say_so(index: PackageIndex) -> None:
    """Before anything is downloaded."""
    from cloche.testing.fake import FakeBackend

    with pytest.raises(BackendUnavailable, match="cannot use them"):
        cloche.run("1", packages=["one"], backend=FakeBackend())
    assert index.asked == []


def _entry(name: str, kind: int = stat.S_IFREG) -> zipfile.ZipInfo:
    entry = zipfile.ZipInfo(name)
    entry.external_attr = (kind | 0o777) << 16
    return entry


HOSTILE = {
    "up": ({_entry("../../outside.py"): b"x"}, "leads out"),
    "up in the middle": ({_entry("one/../../outside.py"): b"x"}, "leads out"),
    "absolute": ({_entry("/tmp/outside.py"): b"x"}, "leads out"),
    "up in a folder of data": ({_entry("one-1.0.data/data/../../../outside"): b"x"}, "leads out"),
    "backslashes": ({_entry("..\\outside.py"): b"x"}, "leads out"),
    "a link": ({_entry("one/link", stat.S_IFLNK): b"/etc/passwd"}, "not a regular file"),
    "a device": ({_entry("one/null", stat.S_IFCHR): b""}, "not a regular file"),
    "a script that is a path": ({_entry("one-1.0.data/scripts/a/b"): b"#!python\n"}, "of a kind"),
    "a name that is too long": ({_entry("a" * 300): b""}, "too long"),
    "folders without end": ({_entry("a/" * 100 + "b"): b""}, "parts"),
    "a folder that is a file": ({_entry("a"): b"", _entry("a/b"): b""}, "cannot write"),
}  # fmt: skip


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_wheel_is_refused(tmp_path: Path, what: str) -> None:
    """Nothing of it is written outside of the folder that is being made."""
    odd, why = HOSTILE[what]
    with pytest.raises(StartFailed, match=why):
        _unpack(tmp_path, make_wheel("one", odd=odd))
    assert not [path for path in tmp_path.rglob("*") if path.name in {"outside", "outside.py", "link", "null"}]


def test_a_bomb_and_a_crowd_end_at_the_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that is a thousand times its size, and more files than there may be."""
    monkeypatch.setattr("cloche.packages.unpack.MOST_BYTES", 1 << 20)
    with pytest.raises(StartFailed, match="too large"):
        _unpack(tmp_path / "bomb", make_wheel("one", files={"one.bin": bytes(64 << 20)}))
    monkeypatch.setattr("cloche.packages.unpack.MOST_FILES", 20)
    with pytest.raises(StartFailed, match="too many"):
        _unpack(tmp_path / "crowd", make_wheel("one", files={f"m{number}.py": "" for number in range(50)}))
    broken = make_wheel("one")
    with pytest.raises(StartFailed, match="cannot be unpacked"):
        _unpack(tmp_path / "broken", broken[: len(broken) // 2])


@pytest.mark.parametrize("sent", ["path", "kind", "size", "half"])
def test_what_a_sandbox_sends_is_not_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sent: str) -> None:
    """Whatever got hold of the program that unpacks writes nothing elsewhere, and no more than it may."""
    frames = {
        "path": FRAME.pack(1, 12, 1) + b"../../../out" + b"x", "kind": FRAME.pack(9, 1, 1) + b"ax",
        "size": FRAME.pack(1, 1, 1 << 60) + b"a", "half": FRAME.pack(1, 1, 10) + b"a" + b"x",
    }  # fmt: skip
    end = FRAME.pack(FILES_END, 0, 0) if sent != "half" else b""
    monkeypatch.setattr(steps, "_source", lambda _: f"import os; os.write(1, {frames[sent] + end!r})")
    with pytest.raises(StartFailed):
        _unpack(tmp_path, make_wheel("one"))
    assert not list(tmp_path.rglob("out"))
    assert not list(tmp_path.rglob("site/a"))


def test_a_compiler_that_crashes_costs_the_bytecode_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files of the wheels are complete by then; what was half written is removed."""
    cut = FRAME.pack(1, 5, 100) + b"x.pyc" + b"half"
    whole = FRAME.pack(1, 4, 1) + b"x.py" + b"1" + FRAME.pack(FILES_END, 0, 0)
    program = f"import os; os.write(1, {whole + cut!r}); os.kill(os.getpid(), 11)"
    monkeypatch.setattr(steps, "_source", lambda _: program)
    made = _unpack(tmp_path, make_wheel("one"))
    assert [path.name for path in made.rglob("*") if path.is_file()] == ["x.py"]


def _unpack(folder: Path, wheel: bytes) -> Path:
    """Unpack a wheel as an installation does, in a jail."""
    wheels, made = folder / "wheels", folder / "made"
    wheels.mkdir(parents=True)
    made.mkdir()
    file = wheels / "one-1.0-py3-none-any.whl"
    file.write_bytes(wheel)
    paths = [str(file)], str(wheels), str(made), str(folder / "final")
    asyncio.run(unpack(backend_named("local"), Policy(), *paths, own_target()))
    return made
