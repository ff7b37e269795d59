"""Where toolchains are found, what they need shown, and that the commands of every engine work."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from cloche.backends.toolchain import FOLDERS_VARIABLE, SYSTEM_FOLDERS, Toolchain, default_search_path, find_toolchain
from cloche.core.errors import BackendUnavailable
from cloche.core.languages import LANGUAGES, Engine, Language, render, render_env, render_generated
from tests.harness.texts import PROGRAMS

NPM_PROGRAMS = Path(__file__).parents[3] / ".toolchains/bin"
# What Debian 12 and npm do not bring onto the test machine: .NET, and a node and a Go that are new enough.
ELSEWHERE = {("csharp", "dotnet"), ("typescript", "node"), ("go", "go")}
RUN_HERE = [
    (language, engine)
    for language in LANGUAGES.values()
    for engine in language.engines
    if (language.name, engine.name) not in ELSEWHERE
]

Plant = Callable[[str, str], Path]


@pytest.fixture(name="home")
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a fresh folder this user's home."""
    home = tmp_path / "home/somebody"
    home.mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    return home


@pytest.fixture(name="plant")
def _plant(home: Path) -> Plant:
    """Return a function that puts a shell script below the home and makes it executable."""

    def plant(path: str, script: str) -> Path:
        file = home / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"#!/bin/sh\n{script}\n")
        file.chmod(0o755)
        return file

    return plant


def _only(language: Language, engine: Engine) -> Language:
    return replace(language, engines=(engine,))


def test_system_folders_come_first_and_the_home_last(home: Path) -> None:
    """System, then folders chosen for Cloche, then the rest of PATH, what is below the home at the end."""
    path = f"{home}/.cargo/bin:/opt/tools/bin:relative:/usr/bin::{home}/bin"
    environ = {"PATH": path, FOLDERS_VARIABLE: f"{home}/chosen:/srv/chosen"}
    assert default_search_path(environ) == (
        *SYSTEM_FOLDERS,
        f"{home}/chosen",
        "/srv/chosen",
        "/opt/tools/bin",
        f"{home}/.cargo/bin",
        f"{home}/bin",
    )


def test_python_is_the_callers_own_interpreter() -> None:
    """Without a search path, Python is what runs these tests, with the folders of its environment shown."""
    toolchain = find_toolchain(LANGUAGES["python"])
    answer = subprocess.run(
        [toolchain.programs["python3"], "-c", "import sys, pytest; print(sys.prefix)"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert answer.stdout.strip() == sys.prefix
    shown = ("/usr", *toolchain.binds)
    for folder in (sys.prefix, sys.base_prefix, os.path.realpath(sys.executable)):
        assert any(folder == top or folder.startswith(f"{top}/") for top in shown)


def test_a_home_is_never_shown() -> None:
    """Whatever is found on this machine, no bind is the home, a folder above it, or the root."""
    home = os.path.realpath(os.path.expanduser("~"))
    for language in LANGUAGES.values():
        try:
            binds = find_toolchain(language).binds
        except BackendUnavailable:
            continue
        assert not [bind for bind in binds if f"{home}/".startswith(f"{bind.rstrip('/')}/")]


def test_rustups_shim_leads_to_the_real_compiler(home: Path, plant: Plant) -> None:
    """The shim is asked for the toolchain's root; only that root is shown, and the shim's folder is not."""
    root = home / ".rustup/toolchains/stable"
    shim = plant(".cargo/bin/rustup", f'[ "${{0##*/}}" = rustc ] && echo {root}')
    (shim.parent / "rustc").symlink_to("rustup")
    real = plant(".rustup/toolchains/stable/bin/rustc", "echo rustc 1.99.0")
    toolchain = find_toolchain(LANGUAGES["rust"], search_path=[str(shim.parent), "/usr/bin"])
    assert toolchain.programs["rustc"] == str(real)
    assert toolchain.binds == (str(root),)
    assert toolchain.version == "rustc 1.99.0"


def test_a_version_managers_shim_leads_to_the_real_program(home: Path, plant: Plant) -> None:
    """A script that stands before ruby is asked for the ruby it would start."""
    real = plant(".rbenv/versions/3.3.0/bin/ruby", f"echo {home}/.rbenv/versions/3.3.0/bin/ruby")
    shim = plant(".rbenv/shims/ruby", f'exec "{real}" "$@"')
    toolchain = find_toolchain(LANGUAGES["ruby"], search_path=[str(shim.parent)])
    assert toolchain.programs == {"ruby": str(real)}
    assert toolchain.binds == (f"{home}/.rbenv/versions/3.3.0",)


def test_a_shim_that_cannot_say_where_it_leads_is_passed_over(home: Path, plant: Plant) -> None:
    """The next folder's program is taken instead of a shim without an answer."""
    shim = plant(".asdf/shims/ruby", "exit 1")
    real = plant("ruby-3/bin/ruby", f"echo {home}/ruby-3/bin/ruby")
    toolchain = find_toolchain(LANGUAGES["ruby"], search_path=[str(shim.parent), str(real.parent)])
    assert toolchain.programs == {"ruby": str(real)}


def test_a_program_in_a_grab_bag_is_shown_alone_or_not_at_all(home: Path, plant: Plant) -> None:
    """In ~/.local/bin, deno is shown as one file; ruby, which needs ~/.local around it, is not used."""
    deno = plant(".local/bin/deno", "echo deno 2.0.0")
    plant(".local/bin/ruby", f"echo {home}/.local/bin/ruby")
    search = [str(deno.parent)]
    assert find_toolchain(LANGUAGES["typescript"], search_path=search).binds == (str(deno),)
    with pytest.raises(BackendUnavailable, match="ruby is missing"):
        find_toolchain(LANGUAGES["ruby"], search_path=search)


def test_a_package_is_shown_with_its_siblings(home: Path, plant: Plant) -> None:
    """A packaged tsx needs its siblings: the node_modules folder is shown, and nothing above it."""
    real = plant("project/node_modules/tsx/dist/cli.mjs", "")
    plant("project/node_modules/.bin/node", "echo v20.0.0")
    (home / "project/node_modules/.bin/tsx").symlink_to(real)
    search = [str(home / "project/node_modules/.bin")]
    toolchain = find_toolchain(LANGUAGES["typescript"], search_path=search)
    assert toolchain.engine.name == "tsx"
    assert toolchain.programs["tsx"] == str(real)
    assert toolchain.binds == (f"{home}/project/node_modules",)


def test_a_link_into_a_multicall_binary_keeps_its_name(plant: Plant) -> None:
    """Where sh is busybox, the link is what must be started."""
    busybox = plant("tools/bin/busybox", "")
    (busybox.parent / "sh").symlink_to("busybox")
    toolchain = find_toolchain(LANGUAGES["bash"], search_path=[str(busybox.parent)])
    assert toolchain.engine.name == "sh"
    assert toolchain.programs["sh"] == str(busybox.parent / "sh")


def test_an_old_node_does_not_run_types(home: Path, plant: Plant) -> None:
    """The error names the version found, the one needed, and every way to install an engine."""
    node = plant("node-20/bin/node", f'[ "$1" = -p ] && echo {home}/node-20/bin/node || echo v20.19.2')
    with pytest.raises(BackendUnavailable) as caught:
        find_toolchain(LANGUAGES["typescript"], search_path=[str(node.parent)])
    for words in (
        "typescript",
        "npm install --global deno",
        "npm install --global tsx",
        "v20.19.2, older than 22.18",
    ):
        assert words in str(caught.value)


def test_a_new_node_runs_types(home: Path, plant: Plant) -> None:
    """Node 22.18 and later is the third choice for TypeScript."""
    node = plant("node-22/bin/node", f'[ "$1" = -p ] && echo {home}/node-22/bin/node || echo v22.18.0')
    toolchain = find_toolchain(LANGUAGES["typescript"], search_path=[str(node.parent)])
    assert (toolchain.engine.name, toolchain.binds) == ("node", (f"{home}/node-22",))


def test_dotnet_is_shown_by_the_folder_it_is_in(home: Path, plant: Plant) -> None:
    """What dotnet needs lies beside it, whatever that folder is called."""
    dotnet = plant(".dotnet/dotnet", "echo 10.0.100")
    toolchain = find_toolchain(LANGUAGES["csharp"], search_path=[str(dotnet.parent)])
    assert (toolchain.engine.name, set(toolchain.binds) - {"/etc/dotnet"}) == ("dotnet", {f"{home}/.dotnet"})


@pytest.mark.toolchain
def test_mono_is_shown_with_its_settings() -> None:
    """Mono reads from /etc/mono which library is which, so that folder is shown with it."""
    mono = LANGUAGES["csharp"].engines[1]
    assert _toolchain(LANGUAGES["csharp"], mono).binds == ("/etc/mono",)


@pytest.mark.parametrize("language", LANGUAGES.values(), ids=list(LANGUAGES))
def test_a_missing_toolchain_names_the_package(language: Language, tmp_path: Path) -> None:
    """The error says which language, and which command installs each engine."""
    with pytest.raises(BackendUnavailable) as caught:
        find_toolchain(language, search_path=[str(tmp_path)])
    assert language.name in str(caught.value)
    assert all(engine.package in str(caught.value) for engine in language.engines)


def _toolchain(language: Language, engine: Engine) -> Toolchain:
    return find_toolchain(_only(language, engine), search_path=(*default_search_path(), str(NPM_PROGRAMS)))


def _run(
    toolchain: Toolchain,
    language: Language,
    code: str,
    folder: Path,
    *,
    argv: tuple[str, ...] = (),
    stdin: str = "",
) -> subprocess.CompletedProcess[str]:
    """Run the rendered commands one after the other, as a backend does, without a jail."""
    workspace, build = folder / "workspace", folder / "build"
    workspace.mkdir()
    build.mkdir()
    source = workspace / language.file_name
    source.write_text(code)
    for path, text in render_generated(toolchain.engine, str(source), str(build)).items():
        Path(path).write_text(text)
    minimum = {
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "HOME": str(workspace),
        "LANG": "C.UTF-8",
        "TMPDIR": str(build),
    }
    env: Mapping[str, str] = {
        **minimum,
        **render_env(toolchain.engine, str(source), str(build)),
        **toolchain.env,
    }
    for command in render(toolchain.engine, toolchain.programs, str(source), str(build), argv):
        ended = subprocess.run(
            command,
            input=stdin,
            capture_output=True,
            text=True,
            cwd=workspace,
            env=env,
            timeout=120,
            check=False,
        )
        if ended.returncode != 0:
            break
    return ended


@pytest.mark.toolchain
@pytest.mark.parametrize(
    ("language", "engine"), RUN_HERE, ids=[f"{language.name}-{engine.name}" for language, engine in RUN_HERE]
)
class TestCommands:
    """The table's commands, run for real."""

    def test_a_program_talks(self, language: Language, engine: Engine, tmp_path: Path) -> None:
        """It prints, gets its arguments unchanged and reads its standard input."""
        toolchain = _toolchain(language, engine)
        assert toolchain.version
        code = PROGRAMS[language.name].talk
        ended = _run(toolchain, language, code, tmp_path, argv=("one", "two words", "--help"), stdin="what else\n")
        assert ended.stdout.splitlines() == ["hello", "one|two words|--help", "WHAT ELSE"], ended.stderr
        assert ended.returncode == 0

    def test_an_exit_code_is_kept(self, language: Language, engine: Engine, tmp_path: Path) -> None:
        """Exit code 3 stays 3."""
        ended = _run(_toolchain(language, engine), language, PROGRAMS[language.name].leave, tmp_path)
        assert ended.returncode == 3

    def test_code_that_does_not_compile_says_why(self, language: Language, engine: Engine, tmp_path: Path) -> None:
        """The compiler's or the parser's words are on stderr, and the exit code is not 0."""
        programs = PROGRAMS[language.name]
        ended = _run(_toolchain(language, engine), language, programs.broken, tmp_path)
        assert ended.returncode != 0
        assert programs.broken_words in ended.stderr

    def test_code_that_dies_says_why(self, language: Language, engine: Engine, tmp_path: Path) -> None:
        """The run-time error's words are on stderr, and the exit code is not 0."""
        programs = PROGRAMS[language.name]
        ended = _run(_toolchain(language, engine), language, programs.fails, tmp_path)
        assert ended.returncode != 0
        assert programs.fails_words in ended.stderr
