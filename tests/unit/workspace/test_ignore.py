"""Lines of gitignore's syntax say what is hidden; none of them takes long, whatever it holds."""

import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cloche.core.errors import InvalidRequest
from cloche.records.git_ignore import IgnoreRules, is_ignored, parse_rules
from cloche.workspace.ignore import MOST_CHARACTERS, MOST_PATTERNS, IgnorePatterns


def _hides(lines: str, path: str) -> bool:
    """Ask for a path; a slash behind it says that it is a folder."""
    plain = path.rstrip("/")
    patterns = IgnorePatterns(lines.split("\n"), where="test")
    return patterns.hides(plain.rpartition("/")[2], plain, is_folder=path.endswith("/"))


@pytest.mark.parametrize(
    ("lines", "hidden", "shown"),
    [
        ("secret", ["secret", "a/secret", "a/secret/"], ["secrets", "a/secret.txt"]),
        ("/secret", ["secret"], ["a/secret"]),
        ("a/secret", ["a/secret"], ["b/a/secret", "secret"]),
        ("build/", ["build/", "a/build/"], ["build", "a/build"]),
        ("*.txt", ["a.txt", "b/.txt", "x/a.b.txt"], ["a.txt.py", "txt"]),
        ("a?c", ["abc", "x/a.c"], ["ac", "abbc"]),
        ("a*b*c", ["abc", "axbxbxc", "abbc"], ["ab", "abcd", "acb"]),
        ("**/data", ["data", "a/b/data"], ["data2"]),
        ("data/**", ["data/a", "data/a/b"], ["data", "data/"]),
        ("a/**/b", ["a/b", "a/x/b", "a/x/y/b"], ["ab", "a/x", "x/a/b"]),
        ("a/**/b/**/c", ["a/b/c", "a/b/b/c", "a/x/b/y/c"], ["a/c", "a/b/x"]),
        ("[ab].txt", ["a.txt", "x/b.txt"], ["c.txt"]),
        ("[!ab].txt", ["c.txt"], ["a.txt", "/.txt"]),
        ("[a-c]x", ["bx"], ["dx"]),
        (r"\[", ["["], ["a"]),
        ("keys/[[:digit:]]", ["keys/1"], ["keys/a", "keys/:"]),
        (r"[\]a]", ["]", "a"], ["\\"]),
        (r"\#a", ["#a"], [r"\#a"]),
        (r"\!a", ["!a"], ["a"]),
        (r"\*", ["*"], ["a"]),
        ("a.b", ["a.b"], ["axb"]),
        ("# note\n\n  \na", ["a"], ["note", "# note"]),
        ("a  ", ["a"], ["a  "]),
        ("a\\ ", ["a "], ["a"]),
        ("a\r", ["a"], ["a\r"]),
        ("*.txt\n!keep.txt", ["a.txt"], ["keep.txt", "x/keep.txt"]),
        ("*.txt\n!keep.txt\nx/keep.txt", ["x/keep.txt"], ["keep.txt"]),
        ("!a", [], ["a"]),
        ("new\nline*", ["line\nfeed", "new"], ["new\nline"]),
        ("*.\udcff", ["a.\udcff"], ["a.\udcfe"]),
        ("**", ["a", "a/b"], []),
    ],
)
def test_a_pattern_hides_what_gitignore_would(lines: str, hidden: list[str], shown: list[str]) -> None:
    """Each form of the syntax hides what it names, and not what only looks like it."""
    assert [path for path in hidden if not _hides(lines, path)] == []
    assert [path for path in shown if _hides(lines, path)] == []


_ALPHABET = "ab.-[]!^:*?\\/ \t\r\n\xe9\udcff#"
_FOLDERS = ("", "a/", "b/", "a/b/", "a/b/a/", "\xe9/", "[a/", "ab/", "ab/a/")
_FILES = ("a", "b", "ab", "ba", "aab", ".", "a.", "[", "]", "[a]", "a]", "-", "!", "#a", "a ", "\\", "\\a", "1", "\xe9",
          "\udcff", "\t", "a\t", ":", "A", "a\rb", "^", "*", "a-b", "?", "abab")  # fmt: skip
_PIECES = st.sampled_from([
    "*", "**", "**/", "/**/", "/**", "?", "a", "b", "ab", "/", "[ab]", "[!a]", "[^b]", "[[:alpha:]]", "[[:digit:]1]",
    "[[:space:]]", "[[:punct:]a]", "[[:no:]]", "[", "]", "[]a]", "[]-a]", "[\\]a]", "[a-", "[a-b]", "[[a]", "[[:a]",
    "\\", "\\a", "\\/", "!", "#", " ", "\\ ", "\xe9", "[\xe9]", "-", "[!]]", "[a-\\b]", "[[:cntrl:]]", "[/]", "[.-/]",
    "***",
])  # fmt: skip
_LINES = st.one_of(
    st.lists(_PIECES, min_size=1, max_size=6).map("".join), st.text(_ALPHABET.replace("\n", ""), min_size=1, max_size=9)
)
_COPIES = 12  # of the tree, each with patterns of its own, for one question to git


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a repository with the same files in each of its folders."""
    top = tmp_path_factory.mktemp("repository")
    subprocess.run(["git", "init", "-q", top], check=True)
    for number in range(_COPIES):
        folders = [top / f"c{number}" / above for above in _FOLDERS]
        for folder in folders:
            folder.mkdir(parents=True, exist_ok=True)
        for folder in folders:
            for name in _FILES:
                if name != "." and not (path := folder / name).exists():
                    path.touch()
    return top


def _paths_in(top: Path) -> list[tuple[bytes, bool]]:
    """Return what is below a folder, by its relative path, and whether it is a folder."""
    return [
        (os.path.relpath(os.path.join(above, name), os.fsencode(top)), is_folder)
        for above, folders, files in os.walk(os.fsencode(top))
        for names, is_folder in ((folders, True), (files, False))
        for name in names
        if name != b".gitignore"
    ]


def _ignored_by_git(repository: Path) -> set[bytes]:
    paths = [os.path.relpath(os.path.join(above, name), os.fsencode(repository))
             for above, folders, files in os.walk(os.fsencode(repository)) for name in (*folders, *files)
             if b".git" not in above.split(b"/") and name != b".git"]  # fmt: skip
    done = subprocess.run(
        ["git", "-C", repository, "-c", "core.excludesFile=/dev/null", "check-ignore", "--no-index", "-z", "--stdin"],
        input=b"\0".join(paths), capture_output=True, check=False,
    )  # fmt: skip
    assert done.returncode in (0, 1), done.stderr
    return set(done.stdout.split(b"\0")) - {b""}


def _is_met(path: bytes, is_folder: bool, matches: Callable[[bytes, bytes, bool], bool]) -> bool:
    """Tell whether a path, or a folder that it is in, is matched."""
    parts = path.split(b"/")
    return any(
        matches(parts[depth - 1], b"/".join(parts[:depth]), is_folder or depth < len(parts))
        for depth in range(1, len(parts) + 1)
    )


def _agree_with_git(repository: Path, files: list[list[str]]) -> None:
    tree = _paths_in(repository / "c0")
    for number in range(_COPIES):
        data = os.fsencode("\n".join(files[number])) if number < len(files) else b""
        (repository / f"c{number}" / ".gitignore").write_bytes(data)
    ignored = _ignored_by_git(repository)
    for number, lines in enumerate(files):
        base = b"c%d/" % number
        rules, _ = parse_rules(os.fsencode("\n".join(lines)), base)
        wanted = {path[len(base) :] for path in ignored if path.startswith(base)} - {b".gitignore"}

        def in_records(_: bytes, path: bytes, is_folder: bool, base: bytes = base, rules: IgnoreRules = rules) -> bool:
            return is_ignored([rules], base + path, is_folder=is_folder, check=lambda: None)

        assert {path for path, is_folder in tree if _is_met(path, is_folder, in_records)} == wanted, lines
        try:
            patterns = IgnorePatterns(lines, where="here")
        except InvalidRequest:
            continue

        def in_workspace(name: bytes, path: bytes, is_folder: bool, patterns: IgnorePatterns = patterns) -> bool:
            return patterns.hides(os.fsdecode(name), os.fsdecode(path), is_folder=is_folder)

        assert {path for path, is_folder in tree if _is_met(path, is_folder, in_workspace)} == wanted, lines


@given(st.lists(st.lists(_LINES, min_size=1, max_size=3), min_size=_COPIES, max_size=_COPIES))
@example([["keys/[[:digit:]]"], ["[\\]a]"], ["x/a**/b"], ["a**/b"], ["a/b**"], ["**\\/a"], ["a/[a/b]"], ["a?/**/b"]])
@settings(max_examples=6)
def test_patterns_match_what_git_ignores(repository: Path, files: list[list[str]]) -> None:
    """The matcher of `.gitignore` and the one of hidden paths agree with `git check-ignore`, whatever is written."""
    _agree_with_git(repository, files)


@pytest.mark.soak
@given(st.lists(st.lists(_LINES, min_size=1, max_size=3), min_size=_COPIES, max_size=_COPIES))
@settings(max_examples=400)
def test_many_patterns_match_what_git_ignores(repository: Path, files: list[list[str]]) -> None:
    """The same for some thousands."""
    _agree_with_git(repository, files)


@pytest.mark.parametrize(
    "line",
    ["[", "keys/[[:digits:]]", "a[b", "x[/]", "a\\", "!", "/", "a//b", "./keys", "keys/..", "keys\t", "![a", "x/[a/"],
)
def test_a_pattern_that_cannot_be_read_is_an_error(line: str) -> None:
    """What it was to hide is not known, and it cannot be used; the sentence says what is the matter."""
    with pytest.raises(InvalidRequest, match=r"^here: the pattern .* cannot be used: .*; correct or remove it$"):
        IgnorePatterns(["*.pem", line], where="here")


@pytest.mark.parametrize(
    ("pattern", "path"),
    [
        ("a*" * 200 + "b", "a" * 255),
        ("*a" * 200 + "b", "a" * 255),
        ("**/a/" * 80 + "b", "/".join("a" * 2000)),
        ("a/**/" * 80 + "*b", "/".join("a" * 2000)),
        ("?*" * 200 + "b", "a" * 255),
        ("[ab]*" * 80 + "c", "ab" * 127),
        ("*/" * 200 + "b", "/".join("a" * 2000)),
        ("**/*a*a*a*a*a*b/**/c", "/".join(["a" * 200] * 19)),
    ],
)
def test_a_hostile_pattern_takes_no_time(pattern: str, path: str) -> None:
    """Patterns that take exponential time of a naive matcher are answered at once."""
    patterns = IgnorePatterns([pattern, f"!{pattern}"], where="test")
    began = time.process_time()
    assert not patterns.hides(path.rpartition("/")[2], path, is_folder=False)
    assert time.process_time() - began < 0.5


@pytest.mark.parametrize(
    "lines", [["a"] * (MOST_PATTERNS + 1), ["a" * (MOST_CHARACTERS + 1)], ["a\0b"]], ids=["many", "long", "zero"]
)
def test_patterns_have_bounds(lines: list[str]) -> None:
    """Too many or too long patterns are refused, and not left out."""
    with pytest.raises(InvalidRequest, match=r"^here: "):
        IgnorePatterns(lines, where="here")
