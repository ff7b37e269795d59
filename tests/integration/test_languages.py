"""Every language for real, in the local jail, through the public API and under the default limits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import cloche
from cloche.core.errors import BackendUnavailable, PolicyDenied
from cloche.core.result import Status
from tests.harness.texts import PROGRAMS

NPM_PROGRAMS = Path(__file__).parents[2] / ".toolchains/bin"
EIGHT = tuple(PROGRAMS)
STOPPED_AFTER_S = 20  # time enough for a compiler, beside seven others and other suites
# What differs from a language's first choice on the test machine, and how `meta` says so.
STAND_INS = {"csharp": "Mono stands in for .NET"}

pytestmark = pytest.mark.toolchain


@pytest.fixture(autouse=True)
def _npm_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    _show_npm_programs(monkeypatch)


def _show_npm_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let deno be found where this checkout has it; an installed suite has it on PATH."""
    if NPM_PROGRAMS.is_dir():
        monkeypatch.setenv("CLOCHE_TOOLCHAINS", str(NPM_PROGRAMS))


def _run(
    code: str, language: str, *, argv: tuple[str, ...] = (), stdin: str = "", timeout: float = 30
) -> cloche.Result:
    """Run with all eight languages allowed; everything else is as a new user has it."""
    return cloche.run(code, language=language, languages=EIGHT, argv=argv, stdin=stdin, timeout=timeout, require="jail")


@pytest.mark.parametrize("language", EIGHT)
def test_a_program_talks(language: str) -> None:
    """It prints, gets its arguments unchanged, reads its standard input, and ends well."""
    argv = ("one", "two words", "--help", "$HOME;`id`")
    result = _run(PROGRAMS[language].talk, language, argv=argv, stdin="what else \u2713\n")
    assert result.stdout.splitlines() == ["hello", "|".join(argv), "WHAT ELSE \u2713"], result.stderr
    assert (result.status, result.exit_code, result.timed_out) == (Status.OK, 0, False)


@pytest.mark.parametrize("language", EIGHT)
def test_nothing_but_the_programs_own_files_is_reported(language: str) -> None:
    """Compilers leave no trace in the workspace: a program that writes nothing has no files."""
    assert _run(PROGRAMS[language].leave, language).files == ()


@pytest.mark.parametrize("language", EIGHT)
def test_code_that_does_not_compile_is_an_error_with_the_compilers_words(language: str) -> None:
    """What the compiler or the parser says is on stderr, and the program does not start."""
    programs = PROGRAMS[language]
    result = _run(programs.broken, language)
    assert result.status is Status.ERROR
    assert result.exit_code != 0
    assert programs.broken_words in result.stderr


@pytest.mark.parametrize("language", [language for language in EIGHT if language != "rust"])
def test_code_that_dies_is_an_error_with_its_words(language: str) -> None:
    """A run-time error ends the program with a code of its own and says why."""
    programs = PROGRAMS[language]
    result = _run(programs.fails, language)
    assert result.status is Status.ERROR
    assert result.exit_code != 0
    assert programs.fails_words in result.stderr


def test_a_panic_in_rust_is_an_error_with_code_101() -> None:
    """Rust's own exit code for a panic arrives unchanged."""
    result = _run(PROGRAMS["rust"].fails, "rust")
    assert (result.status, result.exit_code) == (Status.ERROR, 101)
    assert PROGRAMS["rust"].fails_words in result.stderr


USERS_FILE = {
    "python": "main.py", "javascript": "main.js", "typescript": "main.ts", "bash": "main.sh", "ruby": "main.rb",
    "go": "main.go", "rust": "main.rs", "csharp": "Program.cs",
}  # fmt: skip
# How a program uses a file beside it (its path, content, and the code), where its language has a way: it prints 42.
BESIDE = {
    "python": ("helper.py", "word = 42", "import helper; print(helper.word)"),
    "javascript": ("helper.js", "exports.word = 42", "console.log(require('./helper').word)"),
    "typescript": (
        "helper.ts", "export const word: number = 42;", "import { word } from './helper.ts';\nconsole.log(word);"
    ),
    "bash": ("helper.sh", "word=42", '. "$(dirname "$0")/helper.sh"; echo "$word"'),
    "ruby": ("helper.rb", "WORD = 42", "require_relative 'helper'\nputs WORD"),
    "go": (
        "helper/helper.go", "package helper\nconst Word = 42\n",
        'package main\nimport "./helper"\nfunc main() { print(helper.Word) }\n',
    ),
    "rust": ("helper.rs", "pub const WORD: i32 = 42;", "mod helper;\nfn main() { println!(\"{}\", helper::WORD) }"),
    "csharp": (
        "word.txt", "42",
        'class P { static void Main() { System.Console.Write(System.IO.File.ReadAllText("word.txt")); } }',
    ),
}  # fmt: skip


@pytest.mark.parametrize("language", EIGHT)
def test_a_program_runs_beside_the_users_files_and_replaces_none(language: str) -> None:
    """A file with a program's usual name stays as it is, and what lies beside it can be used as before."""
    helper, content, code = BESIDE[language]
    mine = {USERS_FILE[language]: "mine", helper: content}
    with cloche.Sandbox(live=False, languages=EIGHT, timeout=30, require="jail") as sandbox:
        for path, text in mine.items():
            sandbox.write_file(path, text)
        result = sandbox.run(code, language=language)
        assert (result.stdout + result.stderr * (language == "go")).strip() == "42", result.stderr
        assert result.files == ()
        assert sandbox.list_files() == tuple(sorted(mine))
        assert sandbox.read_file(USERS_FILE[language]) == b"mine"


def test_a_program_can_have_pytest_run_it() -> None:
    """Models write tests so: pytest imports the file by its name."""
    code = "import pytest, sys\ndef test_it(): assert 1\nsys.exit(pytest.main(['-qp', 'no:cacheprovider', __file__]))"
    result = cloche.run(code.replace("sys.exit", "if __name__ == '__main__': sys.exit"), timeout=30)
    assert (result.status, "1 passed" in result.stdout) == ("ok", True), result.stdout


@pytest.mark.parametrize("language", EIGHT)
def test_an_exit_code_is_kept(language: str) -> None:
    """Exit code 3 stays 3."""
    result = _run(PROGRAMS[language].leave, language)
    assert (result.status, result.exit_code) == (Status.ERROR, 3)


@pytest.fixture(scope="module")
def stopped() -> Mapping[str, Callable[[], cloche.Result]]:
    """Run a program that goes on in each language, all at once: nearly all of the time it sleeps."""
    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(len(EIGHT)) as pool:
        _show_npm_programs(patch)
        sleepers = {name: programs.sleeps for name, programs in PROGRAMS.items()}
        running = {name: pool.submit(_run, code, name, timeout=STOPPED_AFTER_S) for name, code in sleepers.items()}
    return {name: future.result for name, future in running.items()}


@pytest.mark.parametrize("language", EIGHT)
def test_a_program_that_goes_on_is_stopped(language: str, stopped: Mapping[str, Callable[[], cloche.Result]]) -> None:
    """At the time-out everything is killed; what was said before is kept, compile step or not."""
    result = stopped[language]()
    assert (result.status, result.exit_code, result.timed_out) == (Status.TIMEOUT, -1, True)
    assert result.stdout == "begun\n"
    assert result.stderr.endswith("Execution timed out")
    assert STOPPED_AFTER_S <= result.duration < 50  # the programs sleep for a minute


def test_the_clock_covers_the_compile_step() -> None:
    """A time-out that the compiler alone exceeds is a time-out, not a compile error."""
    result = _run(PROGRAMS["rust"].leave, "rust", timeout=0.05)
    assert (result.status, result.timed_out) == (Status.TIMEOUT, True)


@pytest.mark.parametrize(("language", "words"), STAND_INS.items())
def test_a_stand_in_is_named(language: str, words: str) -> None:
    """Whoever reads the result learns that another engine ran the code."""
    assert words in str(_run(PROGRAMS[language].leave, language).meta)


def test_csharp_is_not_in_the_default_allowlist() -> None:
    """C# runs where it is allowed by name, and is refused otherwise."""
    with pytest.raises(PolicyDenied, match="csharp"):
        cloche.run(PROGRAMS["csharp"].leave, language="csharp")


def test_a_missing_toolchain_says_which_package_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without any engine for TypeScript, the error names the commands that install one."""
    monkeypatch.setenv("CLOCHE_TOOLCHAINS", "")
    monkeypatch.setenv("PATH", "/usr/sbin")
    with pytest.raises(BackendUnavailable, match="npm install --global deno"):
        _run(PROGRAMS["typescript"].leave, "typescript")
