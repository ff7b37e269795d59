"""Loading a skill: what it says, everything that is wrong at once, and that nothing of it ever runs."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from cloche.config.keys import Settings
from cloche.core.errors import InvalidRequest
from cloche.core.limits import MIB
from cloche.skills import loader
from cloche.skills.loader import Examined, examine_skill, find_skills, load_skill, locate_skill, search_path
from cloche.skills.skill import InvalidSkill
from tests.harness.texts import CARD, write_skill

EXAMPLE = Path(__file__).parents[3] / "examples" / "skills" / "word-count"
MANIFEST = """
runtime: python
entry: go
scripts: {go: scripts/go.py, tidy: {path: scripts/tidy, runtime: bash, description: Tidy up.}}
limits: {timeout: 5s, memory_limit: 64m, CpuLimitPercent: 25}
network: {hosts: [a.example, "*.b.example"]}
packages: [numpy]
tools: [run_code, read_file]
require: [jail, memory]
"""


def faults_of(folder: Path) -> list[str]:
    """Return what is wrong with a skill, as it is told."""
    return [str(fault) for fault in examine_skill(str(folder)).faults]


def test_everything_that_a_skill_says_is_read(tmp_path: Path) -> None:
    """The published format's keys, and the manifest's with the spellings of configuration."""
    card = (
        "---\nname: demo\ndescription: |\n  Two\n  lines.\nlicense: MIT\ncompatibility: none\n"
        'metadata: {version: 1.0, author: "x"}\nallowed-tools: Bash(git:*) Read\n---\n# Use\n---\nmore\n'
    )
    folder = write_skill(tmp_path, card=card, manifest=MANIFEST, go__py="print(1)", tidy="echo", other__rb="")
    skill = load_skill(folder, Settings())
    assert (skill.name, skill.card.description, skill.card.license) == ("demo", "Two\nlines.", "MIT")
    assert skill.card.metadata == {"version": "1.0", "author": "x"}
    assert skill.card.allowed_tools == ("Bash(git:*)", "Read")
    assert skill.card.instructions == "# Use\n---\nmore"
    assert [(one.name, one.path, one.runtime) for one in skill.scripts] == [
        ("go", "scripts/go.py", "python"),
        ("tidy", "scripts/tidy", "bash"),
    ]
    asked = skill.manifest.asked
    assert dict(asked.limits) == {"timeout": 5.0, "memory": 64 * MIB, "cpus": 0.25}
    assert (asked.network, asked.hosts) == ("allowlist", ("a.example", "*.b.example"))
    assert (asked.packages, asked.tools) == (("numpy",), ("run_code", "read_file"))
    assert (str(asked.require_level), asked.require_controls) == ("jail", ("memory",))
    assert skill.script().name == "go"
    assert skill.script("scripts/tidy").name == "tidy"
    with pytest.raises(InvalidRequest, match="has no script 'x'; it has: go, tidy"):
        skill.script("x")


def test_a_published_skill_needs_no_manifest(tmp_path: Path) -> None:
    """Scripts are what lies below `scripts` and has a language; the only one is the entry."""
    folder = write_skill(tmp_path, run__sh="echo", notes__txt="no language")
    skill = load_skill(folder, Settings())
    assert (skill.script().path, skill.script().runtime) == ("scripts/run.sh", "bash")
    assert [file.mode for file in skill.files] == [0o444] * 3


def test_the_example_is_sound() -> None:
    """The skill that the documents show has no faults."""
    assert faults_of(EXAMPLE) == []


def test_all_faults_come_at_once_with_file_and_key(tmp_path: Path) -> None:
    """Both files and the folder are read whole, whatever is wrong in one of them."""
    manifest = """
entry: nowhere
scripts:
  {a: ../../etc/passwd, b: /etc/passwd, c: scripts/none.py, "d e": x, e: 1, g: scripts/latin.py,
   f: {path: scripts/x.py, runtime: cobol, mode: 7}}
limits: {memroy: 1g, timeout: -1, memory: 1k, inodes: 5}
network: {hosts: ["no host"], ports: [80]}
packages: [-rf]
tools: [run_code, rm]
preset: huge
require: [fort-knox]
backend: docker
"""
    card = "---\nname: Wrong--Name\nallowed-tools: {a: b}\nmetadata: [1]\nlicense: 7\n---\n"
    folder = write_skill(tmp_path, card=card, manifest=manifest, x__py="", latin__py=b"# \xe9")
    os.symlink("/etc/passwd", folder / "secrets")
    faults = examine_skill(str(folder)).faults
    assert {(fault.file, fault.key) for fault in faults} == {
        ("secrets", ""),
        ("scripts/latin.py", ""),
        *(("SKILL.md", key) for key in ("name", "description", "license", "metadata", "allowed-tools")),
        *(
            ("cloche-skill.yaml", key)
            for key in (
                "entry", "scripts.a.path", "scripts.b.path", "scripts.c.path", "scripts.d e", "scripts.e",
                "scripts.f.runtime", "scripts.f.mode", "limits.memroy", "limits.timeout", "limits.memory",
                "limits.inodes", "network.hosts", "network.ports", "packages", "tools", "preset", "require", "backend",
            )
        ),
    }  # fmt: skip
    told = "\n".join(map(str, faults))
    assert "did you mean 'memory'?" in told
    assert "no host" in told
    assert "'../../etc/passwd' leads out of the skill's folder" in told
    with pytest.raises(InvalidSkill, match=f"{len(faults)} faults"):
        load_skill(folder, Settings())


BOMB = "a: &a [x, x, x, x, x, x, x, x]\n" + "".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 8)}]\n" for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (BOMB, "anchors (&) and aliases (*) are not allowed"),
        ("base: &b {memory: 1g}\nlimits:\n  <<: *b\n", "anchors (&) and aliases (*) are not allowed"),
        ("runtime: &anchor python\n", "anchors (&) and aliases (*) are not allowed"),
        ("limits: " + "[" * 5000 + "]" * 5000, "nested deeper than 8 levels"),
        ("limits: " + "{a: " * 12 + "1" + "}" * 12, "nested deeper than 8 levels"),
        ("runtime: !!python/object/apply:os.system ['touch pwned']\n", "could not determine a constructor"),
        ("runtime: !!python/name:os.system\n", "could not determine a constructor"),
        ("runtime: python\nruntime: bash\n", "given twice"),
        ("runtime: [python\n", "line"),
        ("a: 1\n---\nb: 2\n", "document"),
        ("- a\n- b\n", "keys with values"),
        ("1: 2\n", "keys are to be text"),
        ("x" * 70_000, "more than 65536 bytes"),
        ("limits: {pids: " + "9" * 6000 + "}", "the number is too long"),
        ("runtime: python\na: 2024-99-99\n", "line 2: the value cannot be read"),
        ("limits:\n  ? 0x" + "f" * 5000 + "\n  : 1\n", "line 2: the number is too long"),
        ("preset: 0x" + "f" * 5000, "the number is too long"),
    ],
)
def test_hostile_yaml_is_refused_quickly(tmp_path: Path, text: str, told: str) -> None:
    """It is plain data, no larger than it looks; and the fault says where it is."""
    folder = write_skill(tmp_path, manifest=text, go__py="")
    (fault,) = faults_of(folder)
    assert fault.startswith("cloche-skill.yaml")
    assert told in fault
    assert not Path("pwned").exists()
    in_card = write_skill(tmp_path, "other", card=f"---\n{text}\n---\nname: other\n")
    assert any(fault.startswith("SKILL.md") for fault in faults_of(in_card))


@pytest.mark.parametrize(
    ("card", "told"),
    [
        (b"", "no front matter"),
        (b"# Title\n---\nname: demo\n---\n", "no front matter"),
        (b"---\nname: demo\n", "no front matter"),
        (b"---\nname: \xff\n---\n", "not UTF-8 (byte 10)"),
        (b"---\nname: demo\ndescription: x\n---\n" + b"x" * 300_000, "more than 262144 bytes"),
        (b"---\n" + b"a: 1\n" * 20_000 + b"---\n", "front matter of more than"),
        (b"---\nname: demo\ndescription: [1]\n---\n", "description: must be text, not a list"),
        (b"---\nname: demo\ndescription: '  '\n---\n", "description: is empty"),
        (b"---\nname: demo\ndescription: " + b"x" * 1025 + b"\n---\n", "has 1025 characters; at most 1024"),
        (b"---\nname: demo2\ndescription: x\n---\n", "not the name of its folder, 'demo'"),
        (b"---\nname: " + b"a" * 65 + b"\ndescription: x\n---\n", "has 65 characters; at most 64"),
        (b"---\nname: demo\ndescription: x\nmetadata: {a: {b: c}}\n---\n", "metadata.a: must be a text"),
        (b"---\nname: demo\ndescription: x\nmetadata: {a: 0x" + b"f" * 5000 + b"}\n---\n", "line 4: the number is too"),
    ],
)
def test_a_card_that_is_wrong_says_where(tmp_path: Path, card: bytes, told: str) -> None:
    """Each fault is told with what is allowed."""
    folder = write_skill(tmp_path)
    (folder / "SKILL.md").write_bytes(card)
    assert told in "\n".join(faults_of(folder))


def test_an_unknown_key_of_the_card_is_a_remark(tmp_path: Path) -> None:
    """Others write keys of their own there; they mean nothing here."""
    folder = write_skill(tmp_path, card=CARD.format(name="demo").replace("---\n\n", "user-invocable: true\n---\n\n"))
    skill = load_skill(folder, Settings())
    assert skill.notes == ("SKILL.md: 'user-invocable' is not a key of the format, and is ignored",)


def _bind(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(path))


def _link(folder: Path, target: str) -> None:
    os.symlink(target, folder / "thing")


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda folder: _link(folder, "/etc/passwd"), "leads out of the skill's folder"),
        (lambda folder: _link(folder, "../outside.txt"), "leads out of the skill's folder"),
        (lambda folder: _link(folder, "scripts/../../outside.txt"), "leads out of the skill's folder"),
        (lambda folder: _link(folder, "scripts"), "not a plain file of the skill's folder"),
        (lambda folder: _link(folder, "thing"), "not a plain file of the skill's folder"),
        (lambda folder: _link(folder, "nothing"), "not a plain file of the skill's folder"),
        (lambda folder: os.symlink("..", folder / "up"), "leads out of the skill's folder"),
        (lambda folder: os.link(folder.parent / "outside.txt", folder / "thing"), "hard link"),
        (lambda folder: os.mkfifo(folder / "thing"), "is a pipe"),
        (lambda folder: _bind(folder / "thing"), "is a socket"),
        (lambda folder: (folder / "thing").write_bytes(bytes(8 * MIB + 1)), "at most 8MiB"),
        (lambda folder: (folder / "a\nb").touch(), "control character"),
        (lambda folder: (folder / "a\x1b[31m").touch(), "control character"),
        (lambda folder: (folder / "a\\b").touch(), "backslash"),
        (lambda folder: open(os.fsencode(folder) + b"/\xff\xfe", "w").close(), "not UTF-8"),
        (lambda folder: (folder / "/".join(["d"] * 20)).mkdir(parents=True), "deeper than 16 folders"),
    ],
)  # fmt: skip
def test_what_may_not_travel_is_a_fault(tmp_path: Path, make: object, told: str) -> None:
    """Links out, what is no file, and names and sizes that no skill needs; nothing outside is read."""
    (tmp_path / "outside.txt").write_text("secret")
    folder = write_skill(tmp_path, go__py="")
    assert faults_of(folder) == []
    make(folder)  # type: ignore[operator]
    examined = examine_skill(str(folder))
    (fault,) = examined.faults
    assert told in str(fault)
    assert str(fault).isprintable()
    assert all(b"secret" not in file.data for file in examined.skill.files) if examined.skill else True


def test_a_folder_that_changes_meanwhile_leads_nowhere(tmp_path: Path) -> None:
    """While a folder and a link out take turns under one name, nothing from outside is ever read, or named."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "go.py").write_text("secret")
    folder = write_skill(tmp_path, go__py="print(1)")
    name, aside, link = folder / "scripts", tmp_path / "aside", tmp_path / "link"
    link.symlink_to(outside)
    is_over = threading.Event()

    def swap() -> None:
        while not is_over.is_set():
            os.rename(name, aside)
            os.rename(link, name)
            os.rename(name, link)
            os.rename(aside, name)

    swapping = threading.Thread(target=swap)
    naive = set()
    swapping.start()
    try:
        deadline, rounds = time.monotonic() + 30, 0
        while rounds < 100 or (len(naive) < 2 and time.monotonic() < deadline):
            rounds += 1
            with suppress(OSError):
                naive.add((name / "go.py").read_text())
            examined = examine_skill(str(folder))
            assert examined.skill is not None
            assert all(b"secret" not in file.data for file in examined.skill.files)
    finally:
        is_over.set()
        swapping.join()
    assert "secret" in naive, "a plain read is not led out either"


def test_a_device_is_refused(tmp_path: Path) -> None:
    """A folder of devices is read without touching one of them."""
    found = loader.Gathered()
    with loader.open_folder("/dev") as fd:
        loader._take(fd, fd, "zero", "zero", os.stat("/dev/zero").st_mode, found)
    assert [str(fault) for fault in found.faults] == ["zero: is a device; a skill has regular files and folders only"]


def test_too_many_files_and_bytes_end_the_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bounds hold for all files together, and the reading stops there."""
    folder = write_skill(tmp_path, **{f"f{number}__txt": "x" * 100 for number in range(20)})
    monkeypatch.setattr(loader, "MOST_BYTES", 1000)
    assert "all files of a skill have at most 1000B together" in faults_of(folder)[-1]
    monkeypatch.setattr(loader, "MOST_FILES", 10)
    assert any("more than 10 files" in fault for fault in faults_of(folder))


def test_a_link_brings_nothing_that_stays_behind(tmp_path: Path) -> None:
    """What version control keeps, a token in its configuration say, does not travel under another name either."""
    folder = write_skill(tmp_path, go__py="")
    (folder / ".git").mkdir()
    (folder / ".git" / "config").write_text("url = https://user:secret@host/")
    os.symlink(".git/config", folder / "notes.txt")
    examined = examine_skill(str(folder))
    assert [str(fault) for fault in examined.faults] == [
        "notes.txt: is a link to '.git/config', which is not a part of the skill"
    ]
    assert examined.skill is not None
    assert all(b"secret" not in file.data for file in examined.skill.files)


def test_links_within_the_folder_are_copies(tmp_path: Path) -> None:
    """A link to a file of the skill's own travels as that file."""
    folder = write_skill(tmp_path, go__py="print(1)")
    os.symlink("go.py", folder / "scripts" / "same.py")
    os.symlink("scripts/../scripts/go.py", folder / "again.py")
    skill = load_skill(folder, Settings())
    assert {file.path: file.data for file in skill.files if file.path != "SKILL.md"} == dict.fromkeys(
        ("again.py", "scripts/go.py", "scripts/same.py"), b"print(1)"
    )


def test_what_is_no_part_of_a_skill_stays_behind(tmp_path: Path) -> None:
    """Version control and caches are left out, and named."""
    folder = write_skill(tmp_path, go__py="")
    for name in (".git", "scripts/__pycache__"):
        (folder / name).mkdir()
        (folder / name / "x").touch()
    skill = load_skill(folder, Settings())
    assert skill.left_out == (".git", "scripts/__pycache__")
    assert [file.path for file in skill.files] == ["SKILL.md", "scripts/go.py"]


WATCHED = """
import os, sys
import cloche.skills.loader as skills
from cloche.config.settings import Settings
skills.load_skill(sys.argv[1] + "/harmless/", Settings())  # everything that loading needs is imported now
forbidden = ("exec", "compile", "import", "subprocess", "os.system", "os.exec", "os.fork", "os.posix_spawn", "ctypes",
             "socket", "pty", "marshal", "pickle", "os.putenv", "os.chdir", "os.mkdir", "os.remove", "os.rename")
seen = []
def watch(event, arguments):
    if event.startswith(forbidden) or (event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)):
        seen.append((event, str(arguments)[:100]))
sys.addaudithook(watch)
examined = skills.examine_skill(sys.argv[1] + "/trap")
assert examined.skill is not None and len(examined.faults) == 1, examined
assert list(skills.find_skills([sys.argv[1]]))
found = tuple(seen)
exec("1")
assert not found, found
assert seen, "the watch is blind"
"""


def test_loading_runs_nothing(tmp_path: Path) -> None:
    """A skill full of traps is read without an import, a compilation, a process or a write: the interpreter says so."""
    trap = f"import pathlib; pathlib.Path({str(tmp_path / 'sprung')!r}).touch()"
    manifest = "entry: scripts/go.py\nruntime: !!python/object/apply:os.system ['touch sprung']\n"
    card = CARD.format(name="trap").replace("What it is for.", '"`touch sprung` $(touch sprung) {{7*7}}"')
    folder = write_skill(tmp_path, "trap", card=card, manifest=manifest, go__py=trap)
    write_skill(tmp_path, "harmless", manifest="limits: {pids: 5}\nnetwork: off\n", go__py="", stop__sh="")
    for name in ("__init__", "setup", "sitecustomize", "conftest", "yaml", "SKILL", "typing"):
        (folder / f"{name}.py").write_text(trap)
    done = subprocess.run(
        [sys.executable, "-c", WATCHED, str(tmp_path)], cwd=folder.parent, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert not list(tmp_path.rglob("sprung"))


def test_a_name_is_looked_for_where_the_operator_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The platform's folder, then those of the configuration; the working directory only where it is named."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    work = tmp_path / "work"
    standing = tmp_path / "data" / "cloche" / "skills"
    for parent in (standing, work, work / "skills"):
        write_skill(parent, "demo")
    write_skill(work / "skills", "other")
    monkeypatch.chdir(work)
    plain, trusting = search_path(Settings()), search_path(Settings(skill_path=("./skills",)))
    assert plain == (str(standing),)
    assert trusting == (str(standing), str(work / "skills"))
    assert locate_skill("demo", trusting) == str(standing / "demo")
    assert locate_skill("./demo", plain) == str(work / "demo")
    with pytest.raises(InvalidRequest, match="no skill 'other' in "):
        locate_skill("other", plain)
    (work / "mine").mkdir()
    with pytest.raises(InvalidRequest, match=r'for the folder here write "\./mine"'):
        locate_skill("mine", plain)
    found = [(one.name, one.folder, one.is_hidden) for one in find_skills(trusting)]
    assert found == [
        ("demo", str(standing / "demo"), False),
        ("demo", str(work / "skills" / "demo"), True),
        ("other", str(work / "skills" / "other"), False),
    ]


def test_listing_survives_what_it_finds(tmp_path: Path) -> None:
    """A faulty skill is listed as one; what is none is passed over; a folder that is not there holds none."""
    write_skill(tmp_path, "good")
    write_skill(tmp_path, "bad", card="nothing")
    (tmp_path / "none").mkdir()
    piped = tmp_path / "piped"
    piped.mkdir()
    os.mkfifo(piped / "SKILL.md")
    os.symlink("/nowhere", tmp_path / "dangling")
    os.symlink("loop", tmp_path / "loop")
    found = {one.name: [str(fault) for fault in one.faults] for one in find_skills([str(tmp_path), "/nowhere"])}
    assert list(found) == ["bad", "good", "piped"]
    assert found["good"] == []
    assert "no front matter" in found["bad"][0]
    assert "is a pipe" in found["piped"][0]


@pytest.mark.parametrize("name", ["", "a\0b"])
def test_a_name_that_is_none(name: str) -> None:
    """What no file can be called is refused."""
    with pytest.raises(InvalidRequest, match="neither the name nor the path"):
        locate_skill(name, ())


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    """The path is named, with the reason; a folder without SKILL.md is no skill."""
    with pytest.raises(InvalidRequest, match="No such file"):
        examine_skill(str(tmp_path / "no"))
    assert [str(fault) for fault in examine_skill(str(tmp_path)).faults] == [
        "SKILL.md: is missing; a skill is a folder with this file"
    ]
    with pytest.raises(InvalidSkill, match=r"1 fault: SKILL\.md"):
        Examined(folder="x", skill=None, faults=examine_skill(str(tmp_path)).faults).usable()
