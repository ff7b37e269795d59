"""`cloche skill`, as a shell sees it, and skills through the library: the same on every backend."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import cloche
from cloche.config.keys import Settings
from cloche.core.errors import InvalidRequest, PolicyDenied
from cloche.core.result import Result, Status
from cloche.skills.loader import examine_skill, load_skill
from cloche.skills.run import arun_skill, run_skill, terms_for
from cloche.skills.skill import Skill
from tests.harness.containers import ROOT, Daemon
from tests.harness.texts import CARD, write_skill

pytestmark = pytest.mark.usefixtures("settings_of_nobody", "cloche_on_path")
EXAMPLE = ROOT / "examples" / "skills" / "word-count"
NOTES = {"notes.txt": "the cat and the dog\nthe cat\n"}
# What a script can see of where it is; the same on every backend.
LOOK = """
import json, os, sys, neighbour
def refused(path):
    try:
        open(path, "a").close()
    except PermissionError:
        return True
print(json.dumps({
    "file": __file__, "cwd": os.getcwd(), "argv": sys.argv[1:], "path": sys.path[0], "neighbour": neighbour.NAME,
    "table": open("references/table.txt").read(), "read_only": [refused(__file__), refused("references/table.txt")],
    "stdin": sys.stdin.read(), "mode": os.stat("tool").st_mode & 0o777,
}))
open("made.txt", "w").write("made")
"""
SEEN = {
    "file": "/workspace/scripts/look.py", "cwd": "/workspace", "argv": ["a", "--b"], "path": "/workspace/scripts",
    "neighbour": "beside", "table": "rows", "read_only": [True, True], "stdin": "in", "mode": 0o555,
}  # fmt: skip


@pytest.fixture
def looking(tmp_path: Path) -> Skill:
    """Return a skill whose script says what it sees."""
    folder = write_skill(
        tmp_path, "looking", manifest="entry: scripts/look.py\nlimits: {memory: 128m, pids: 40, timeout: 60s}\n",
        look__py=LOOK, neighbour__py="NAME = 'beside'", say__sh='echo "$0 $1 $(cat references/table.txt)"',
    )  # fmt: skip
    (folder / "references").mkdir()
    (folder / "references" / "table.txt").write_text("rows")
    (folder / "tool").write_text("#!/bin/sh\n")
    (folder / "tool").chmod(0o750)
    return load_skill(folder, Settings())


def check_it_looks(skill: Skill, tmp_path: Path, **options: Any) -> Result:
    """Run the skill on a backend and compare all that it sees."""
    result = run_skill(skill, argv=("a", "--b"), stdin="in", out=tmp_path / "out", **options)
    assert result.ok, (result.stderr, result.meta)
    assert json.loads(result.stdout) == SEEN
    assert [file.name for file in (tmp_path / "out").rglob("*")] == ["made.txt"]
    assert (result.meta["limits"]["memory_bytes"], result.meta["limits"]["pids"]) == (128 << 20, 40)
    return result


def command(*words: str, stdin: bytes = b"", **env: str) -> subprocess.CompletedProcess[str]:
    """Run `cloche skill`."""
    told, env = stdin.decode(), {**os.environ, **env}
    command = ["cloche", "skill", *words]
    return subprocess.run(command, input=told, capture_output=True, text=True, check=False, timeout=60, env=env)


def test_a_skill_sees_its_folder_in_the_jail(looking: Skill, tmp_path: Path) -> None:
    """Its files lie under their own paths, read-only; the script starts where it lies, with its neighbours."""
    result = check_it_looks(looking, tmp_path)
    assert (result.meta["backend"], result.meta["skill"]) == ("local", {"name": "looking", "script": "look.py"})
    said = run_skill(looking, "say.sh", argv=("x",))
    assert said.stdout == "/workspace/scripts/say.sh x rows\n"


@pytest.mark.root
def test_the_same_skill_in_a_container(looking: Skill, tmp_path: Path, docker: Daemon) -> None:
    """With runc, in an image with Python: nothing in the skill is different, nor in what it sees."""
    image = docker.image("cloche-test:python")
    assert check_it_looks(looking, tmp_path, backend="docker", image=image).meta["backend"] == "docker"
    said = run_skill(looking, "say.sh", argv=("x",), backend="docker", image=image)
    assert said.stdout == "/workspace/scripts/say.sh x rows\n"


@pytest.mark.usefixtures("gvisor_alone")
def test_the_same_skill_on_gvisor(looking: Skill, tmp_path: Path) -> None:
    """The same again on another kernel."""
    assert check_it_looks(looking, tmp_path, backend="gvisor").meta["level"] == "gvisor"


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_the_same_skill_in_a_virtual_machine(
    looking: Skill, tmp_path: Path, microvm_image: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And in a machine of its own."""
    monkeypatch.setenv("CLOCHE_MICROVM_IMAGE", str(microvm_image))
    monkeypatch.setenv("XDG_CACHE_HOME", str(microvm_image.parents[2]))
    assert check_it_looks(looking, tmp_path, backend="microvm", timeout=300).meta["level"] == "vm"


def test_terms_hold_in_the_run(tmp_path: Path) -> None:
    """What was agreed is what the code meets: the skill's time-out, lowered to the operator's ceiling."""
    (tmp_path / "mine.yaml").write_text("sandbox: {timeout: 90s, ceilings: {timeout: 1s}}")
    folder = write_skill(tmp_path, manifest="limits: {timeout: 60s}", go__py="while True: pass")
    skill = load_skill(folder, Settings())
    assert terms_for(skill, config="mine.yaml").limits["timeout"] == 1.0
    result = run_skill(skill, config="mine.yaml")
    assert (result.status, result.meta["limits"]["timeout_s"]) == (Status.TIMEOUT, 1.0)


def test_the_environment_and_the_working_directory_have_their_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file of the working directory only tightens, the environment decides; both beat the skill."""
    folder = write_skill(tmp_path, manifest="limits: {memory: 1g, timeout: 60s, pids: 10}", go__py="")
    skill = load_skill(folder, Settings())
    (tmp_path / "cloche.yaml").write_text("sandbox: {memory: 100m, pids: 20}")
    monkeypatch.setenv("SANDBOX_TIMEOUT_SEC", "7")
    limits = terms_for(skill).limits
    assert (limits["memory"], limits["pids"], limits["timeout"]) == (100 << 20, 10, 7.0)
    # The same file, named by the operator, is the operator's: its plain values are defaults.
    assert terms_for(skill, config="cloche.yaml").limits["memory"] == 1 << 30


def test_only_a_trusted_skill_has_the_host_to_itself(looking: Skill, tmp_path: Path) -> None:
    """Tier 4 runs code on the host, and a skill only when the operator says that it is their own."""
    result = run_skill(looking, "say.sh", argv=("x",), tier=4, trusted=True)
    assert (result.stdout.endswith("/scripts/say.sh x rows\n"), result.meta["level"]) == (True, "process")


def test_nothing_starts_that_is_refused(looking: Skill, tmp_path: Path) -> None:
    """Every reason is in one error, before a backend is even looked for."""
    folder = write_skill(tmp_path, manifest="packages: [x@git+y]\nnetwork: [a.example]\ntools: [os.execute]", go__py="")
    skill = load_skill(folder, Settings())
    with pytest.raises(PolicyDenied, match=r"network: .*a\.example.*packages: .*x@git.*tools: tier 3 has no os"):
        asyncio.run(arun_skill(skill, backend="docker"))
    with pytest.raises(InvalidRequest, match="a skill gets the hosts that it names"):
        run_skill(looking, network="open")
    with pytest.raises(InvalidRequest, match=r"'tool' is one of the skill's own"):
        run_skill(looking, files={"tool": b""})
    with pytest.raises(PolicyDenied, match="tier 1"):
        run_skill(looking, tier=1)
    with pytest.raises(PolicyDenied, match="on the host without a sandbox"):
        run_skill(looking, tier=4)
    with pytest.raises(InvalidRequest, match=r"its files have .* the workspace 100B; raise disk"):
        run_skill(looking, disk=100)


@pytest.mark.parametrize(("network", "is_refused"), [("", False), ("network: off\n", True)])
def test_a_trusted_skill_falls_back_unless_it_demands_isolation(
    tmp_path: Path, network: str, is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The operator's own skills may run as a child process where nothing else is; one that demands no network not."""
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none")
    skill = load_skill(write_skill(tmp_path, manifest=f"{network}limits: {{}}", go__py="print(1)"), Settings())
    result = run_skill(skill, backend="docker", fallback="process", trusted=True)
    assert (result.stdout, result.meta["fallback"]["used"]) == ("1\n", "local")
    demanded = terms_for(skill).is_network_demanded
    assert demanded is is_refused
    with pytest.raises(cloche.BackendUnavailable):
        run_skill(skill, backend="docker", fallback="process")


def test_run_passes_streams_arguments_and_exit_code() -> None:
    """Words after -- are the script's; input, output and exit code pass through."""
    done = command("run", str(EXAMPLE), "--", "missing.txt")
    assert done.returncode == 1
    assert "FileNotFoundError" in done.stderr


def test_arguments_that_look_like_options_are_the_scripts(tmp_path: Path) -> None:
    """A script that is named comes before --; what follows is never taken for it, or for an option."""
    folder = write_skill(tmp_path, "demo", a__sh='cat; echo "$#:$*"; exit 3', b__sh="echo b")
    done = command("run", str(folder), "a.sh", "--", "--json", "-h", "--", "x", stdin=b"in:")
    assert (done.stdout, done.stderr, done.returncode) == ("in:4:--json -h -- x\n", "", 3)
    done = command("run", str(folder), "--", "a.sh")
    assert (done.returncode, "say which script to run: it has: a.sh, b.sh" in done.stderr) == (2, True)


def test_the_runtime_is_named_as_for_any_run(tmp_path: Path) -> None:
    """`--runtime` of `skill run` is docker's own runtime or a backend, and of `skill check` says what holds."""
    folder = str(write_skill(tmp_path, "demo", a__sh="echo ran"))
    done = command("run", folder, "--runtime", "local")
    assert (done.stdout, done.stderr) == ("ran\n", "")
    told = json.loads(command("check", folder, "--json", "--runtime", "runsc").stdout)
    assert next(term for term in told["policy"] if term["key"] == "backend")["result"] == "gvisor"


def test_check_tells_programs_everything(tmp_path: Path) -> None:
    """As JSON: what is asked, what holds and why, faults with file and key; the exit code says whether it can run."""
    done = command("check", str(EXAMPLE), "--json", "--memory", "99m")
    told = json.loads(done.stdout)
    assert (done.returncode, told["ok"], told["faults"], told["entry"]) == (0, True, [], "count")
    by_key = {term["key"]: term for term in told["policy"]}
    assert (by_key["memory"]["result"], by_key["memory"]["origin"]) == ("99MiB", "argument")
    folder = write_skill(tmp_path, manifest="limits: {memory: lots}\npackages: [x@git+y]\n", go__py="")
    os.symlink("/etc/shadow", folder / "out")
    told = json.loads((done := command("check", str(folder), "--json")).stdout)
    assert done.returncode == 1
    assert [(fault["file"], fault["key"]) for fault in told["faults"]] == [
        ("out", ""), ("cloche-skill.yaml", "limits.memory"), ("cloche-skill.yaml", "packages"),
    ]  # fmt: skip


def test_list_shows_what_names_can_be_run(tmp_path: Path) -> None:
    """A name is found in the platform's folder; a faulty one is listed as such; the working directory is no place."""
    data = {"XDG_DATA_HOME": str(tmp_path / "data")}
    standing = tmp_path / "data" / "cloche" / "skills"
    write_skill(standing, "good", go__py="print('ran')")
    write_skill(standing, "bad", card="---\nname: other\n---\n")
    write_skill(tmp_path, "mine", go__py="print('no')")
    listed = json.loads(command("list", "--json", **data).stdout)
    assert [(row["skill"], len(row["faults"])) for row in listed] == [("bad", 2), ("good", 0)]
    assert command("run", "good", **data).stdout == "ran\n"
    done = command("run", "mine", **data)
    assert done.returncode == 2
    assert 'write "./mine"' in done.stderr
    done = command("run", "bad", **data)
    assert (done.returncode, "2 faults" in done.stderr) == (2, True)
    done = command("list", str(tmp_path / "mistyped"), **data)
    assert (done.returncode, "there is no such folder" in done.stderr) == (2, True)


EVIL = "\x1b]0;owned\x07\x1b[2Jx\u202egpj.exe\x9b31m"


def test_nothing_that_a_skill_says_drives_a_terminal(tmp_path: Path) -> None:
    """At a terminal, names and texts with escape sequences are made visible, in each verb and in errors."""
    quoted = json.dumps(EVIL)
    card = CARD.format(name="evil").replace(
        "What it is for.", quoted + f"\nlicense: {quoted}\nmetadata: {{{quoted}: {quoted}}}"
    )
    manifest = f"{{scripts: {{a: {{path: scripts/go.py, description: {quoted}}}}}, {quoted}: 1, tools: [{quoted}]}}"
    folder = write_skill(tmp_path, "evil", card=card, manifest=manifest, go__py="")
    read = examine_skill(str(folder)).skill
    assert read is not None
    assert EVIL in read.card.description, "the escapes do not even get through"
    for words in (["check", "./evil"], ["list", "."], ["run", "./evil"], ["run", f"./{EVIL}"]):
        ours, theirs = pty.openpty()
        with subprocess.Popen(
            [sys.executable, "-m", "cloche", "skill", *words], stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs
        ):
            os.close(theirs)
            seen = b""
            while True:
                try:
                    seen += os.read(ours, 65536)
                except OSError:
                    break
        os.close(ours)
        text = seen.decode()
        assert "owned" in text, words
        assert not any(one in text for one in ("\x07", "\x1b]", "\x1b[2J", "\u202e", "\x9b")), (words, text)
