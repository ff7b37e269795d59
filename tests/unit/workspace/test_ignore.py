"""Lines of gitignore's syntax say what is hidden; none of them takes long, whatever it holds."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloche.core.errors import InvalidRequest
from cloche.init.patterns import matches
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
        ("[", ["["], ["a"]),
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
        ("/", [], ["a"]),
    ],
)
def test_a_pattern_hides_what_gitignore_would(lines: str, hidden: list[str], shown: list[str]) -> None:
    """Each form of the syntax hides what it names, and not what only looks like it."""
    assert [path for path in hidden if not _hides(lines, path)] == []
    assert [path for path in shown if _hides(lines, path)] == []


_NAMES = st.text("ab.", min_size=1, max_size=4)
_PARTS = st.one_of(st.text("ab.*?", min_size=1, max_size=5).filter(lambda part: part.strip("*")), st.just("**"))


@given(st.lists(_PARTS, min_size=2, max_size=5).filter(lambda parts: parts[-1] != "**"), st.lists(_NAMES, max_size=5))
def test_a_pattern_with_slashes_matches_as_the_simple_matcher_does(parts: list[str], names: list[str]) -> None:
    """An expression built of atomic groups finds every match that a search of all places finds."""
    pattern, path = "/".join(parts), "/".join(names or ["a"])
    assert _hides(f"/{pattern}", path) == matches(pattern, path)


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
