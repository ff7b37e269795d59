"""What is asked for: lines, files, headers and imports; what is no requirement is refused with the reason."""

from __future__ import annotations

import time

import pytest

from cloche.core.ceilings import normalize_package
from cloche.core.errors import InvalidRequest, PolicyDenied
from cloche.packages.known_imports import DISTRIBUTIONS
from cloche.packages.requirements import (
    Header,
    check_python,
    parse_requirement,
    parse_requirements,
    read_header,
    read_imports,
    read_requirements_file,
    resolve_auto,
)


@pytest.mark.parametrize(
    ("line", "name", "text"),
    [
        ("rich", "rich", "rich"),
        (" Rich ", "rich", "rich"),
        ("Zope.Interface>=5", "zope-interface", "zope-interface>=5"),
        ("httpx[HTTP2,socks]<1,>=0.27", "httpx", "httpx[http2,socks]<1,>=0.27"),
        ("six==1.17.0", "six", "six==1.17.0"),
        ("tomli>=2; python_version < '3.11'", "tomli", 'tomli>=2; python_version < "3.11"'),
        ("a~=1.4.2", "a", "a~=1.4.2"),
    ],
)
def test_a_requirement_has_one_spelling(line: str, name: str, text: str) -> None:
    """Whoever asks for the same in other words asks for the same."""
    found = parse_requirement(line)
    assert (found.name, found.text) == (name, text)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("", "is empty"),
        ("-r other.txt", "an option"),
        ("-e .", "an option"),
        ("--index-url https://evil.example/simple", "an option"),
        ("--extra-index-url=https://evil.example", "an option"),
        ("-ihttps://evil.example", "an option"),
        ("--find-links /tmp", "an option"),
        ("six --hash=sha256:00", "not a requirement"),
        ("six --global-option=x", "not a requirement"),
        ("https://evil.example/six-1.0-py3-none-any.whl", "a place"),
        ("git+https://evil.example/six", "a place"),
        ("git+ssh://git@evil.example/six", "a place"),
        ("six @ https://evil.example/six.whl", "a place"),
        ("six@https://evil.example/six.whl", "a place"),
        ("six @ file:///etc", "a place"),
        ("six[x] @ git+https://evil.example/six", "a place"),
        ("file:six.whl", "a place"),
        (".", "a path"),
        ("./six", "a path"),
        ("../six", "a path"),
        ("/etc/passwd", "a path"),
        ("folder/six", "a path"),
        ("a\\six", "a path"),
        ("six-1.0-py3-none-any.whl", "a path"),
        ("six-1.0.tar.gz", "a path"),
        ("six.zip", "a path"),
        ("${HOME}", "characters"),
        ("$SIX", "characters"),
        ("six\nevil", "characters"),
        ("six\x00", "characters"),
        ("six; evil", "not a requirement"),
        ("six==", "not a requirement"),
        ("six rich", "not a requirement"),
        ("{six}", "not a requirement"),
        ("a" * 600, "600 characters"),
    ],
)
def test_what_is_no_requirement_is_refused(line: str, why: str) -> None:
    """Places, paths and options are the operator's alone, and every message says what a requirement is."""
    with pytest.raises(InvalidRequest, match=why) as refused:
        parse_requirement(line)
    assert "a requirement is a name" in str(refused.value) or why == "not a requirement"


def test_requirements_are_sorted_and_counted() -> None:
    """Each once; too many are a mistake."""
    assert [str(one) for one in parse_requirements(["b", "a", "B"])] == ["a", "b"]
    with pytest.raises(InvalidRequest, match="at most"):
        parse_requirements(f"p{number}" for number in range(500))


@pytest.mark.parametrize("code", ["# /// a\n" * 500_000, "# /// script\n" + "#\n" * 500_000, "a\n" * 500_000])
def test_a_long_program_is_looked_at_for_a_moment(code: str) -> None:
    """Whoever wrote it keeps nobody waiting: each line is looked at once, and what is too long to parse is refused."""
    began = time.process_time()
    assert read_header(code) is None
    with pytest.raises(InvalidRequest, match="characters"):
        resolve_auto(code, provides=lambda _: False)
    assert time.process_time() - began < 5


def test_a_file_of_requirements_is_read_by_lines() -> None:
    """Comments and blank lines are none; what is refused is named with its line."""
    text = "# these\nrich>=13  # with a reason\n\nhttpx ; python_version > '3'\n"
    assert read_requirements_file(text, file="r.txt") == ("rich>=13", "httpx ; python_version > '3'")
    for wrong, why in (("-r more.txt", "option"), ("x --hash=sha256:1", "hashes"), ("x \\", "continued")):
        with pytest.raises(InvalidRequest, match=rf"r\.txt, line 2: .*{why}"):
            read_requirements_file(f"rich\n{wrong}\n", file="r.txt")
    with pytest.raises(InvalidRequest, match="larger"):
        read_requirements_file("a\n" * 200_000, file="r.txt")


HEADER = """#!/usr/bin/env python
# /// script
# requires-python = ">=3.8"
# dependencies = [
#     "rich",
#     "httpx<1",
# ]
# [tool.uv]
# index-url = "https://evil.example/simple"
# [[tool.uv.index]]
# url = "https://evil.example/simple"
# ///
import rich
"""


def test_of_a_header_only_two_keys_count() -> None:
    """Where packages come from is not a script's to say."""
    assert read_header(HEADER) == Header(dependencies=("rich", "httpx<1"), requires_python=">=3.8")
    assert read_header("print(1)") is None
    assert read_header("# /// other\n# x = 1\n# ///\n") is None


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("# /// script\n# dependencies = 'rich'\n# ///\n", "not a list"),
        ("# /// script\n# dependencies = [1]\n# ///\n", "not a list"),
        ("# /// script\n# requires-python = 3\n# ///\n", "not text"),
        ("# /// script\n# dependencies = [\n# ///\n", "not TOML"),
        ("# /// script\n# x = 1\n# ///\n\n# /// script\n# x = 1\n# ///\n", "two headers"),
    ],
)
def test_a_broken_header_is_an_error(text: str, why: str) -> None:
    """It is not taken for none."""
    with pytest.raises(InvalidRequest, match=why):
        read_header(text)


def test_a_header_may_ask_for_another_python() -> None:
    """Which is an error, as there is one."""
    check_python(Header(requires_python=">=3.11"), "3.12.1")
    check_python(Header(), "3.12.1")
    with pytest.raises(InvalidRequest, match=r"needs Python >=3\.13, but this is 3\.12"):
        check_python(Header(requires_python=">=3.13"), "3.12.1")
    with pytest.raises(InvalidRequest, match="not a range"):
        check_python(Header(requires_python="new"), "3.12.1")


def test_imports_are_told_apart() -> None:
    """Those for type checkers do not count; those whose failure is caught can be done without."""
    code = """
import os, yaml as y
import google.cloud.storage
from . import mine
from .mine import x
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    import only_types
else:
    import at_run_time
try:
    import fast
except ImportError:
    import slow
try:
    import needed
except ValueError:
    pass
def late():
    import inside
"""
    found = read_imports(code)
    assert {"os", "yaml", "google.cloud.storage", "typing", "at_run_time", "needed", "inside"} <= found.needed
    assert {"fast", "slow"} == found.optional
    assert not {"mine", "x", "only_types"} & (found.needed | found.optional)
    assert read_imports("not python at all (") == read_imports("")


def _auto(code: str, provided: tuple[str, ...] = (), **more: object) -> list[str]:
    found = resolve_auto(code, provides=lambda name: name in provided, **more)  # type: ignore[arg-type]
    return [str(one) for one in found]


@pytest.mark.parametrize(
    ("code", "packages"),
    [
        ("import yaml", ["pyyaml"]),
        ("import cv2", ["opencv-python-headless"]),
        ("from PIL import Image", ["pillow"]),
        ("import sklearn.tree, bs4", ["beautifulsoup4", "scikit-learn"]),
        ("from google.cloud import storage", ["google-cloud-storage"]),
        ("import google.cloud.storage.blob", ["google-cloud-storage"]),
        ("import dateutil.parser, os, json", ["python-dateutil"]),
        ("import requests", ["requests"]),
        ("import os, sys", []),
        ("import inside", []),
        ("try:\n    import nobody_knows\nexcept ImportError:\n    pass", []),
    ],
)
def test_an_import_is_sure_by_the_table(code: str, packages: list[str]) -> None:
    """What the interpreter has is not installed, and what can be done without is not guessed."""
    assert _auto(code, provided=("inside",)) == packages


@pytest.mark.parametrize("code", ["import reqeusts", "import my_company_utils", "import google", "import a.b.c"])
def test_an_import_of_the_same_name_is_not_sure(code: str) -> None:
    """It is refused by name: names that are nearly right, or invented, are the attack."""
    with pytest.raises(PolicyDenied, match=r"not clear .*packages_allow"):
        _auto(code)


def test_the_operator_makes_an_import_sure() -> None:
    """A name of the list, whichever way it is spelled; a pattern is none."""
    assert _auto("import my_utils", allowed=["my-utils"]) == ["my-utils"]
    with pytest.raises(PolicyDenied):
        _auto("import my_utils", allowed=["my-*", "*"])


def test_a_header_says_what_an_import_is() -> None:
    """What nobody knows is one of its packages; what the table knows is not installed a second time."""
    code = '# /// script\n# dependencies = ["opencv-contrib-python", "odd"]\n# ///\nimport cv2, odd_one, yaml\n'
    assert _auto(code) == ["odd", "opencv-contrib-python", "pyyaml"]


def test_the_files_of_a_run_are_its_own_modules() -> None:
    """They are no packages."""
    assert _auto("import helper", given=["helper"]) == []


def test_the_table_is_sound() -> None:
    """Names are normalized, and each row is a requirement."""
    for module, packages in DISTRIBUTIONS.items():
        assert packages, module
        for one in packages:
            assert parse_requirement(one).text == one
    assert normalize_package("A__b..C") == "a-b-c"


STRANGE = {
    "parts": ("# /// script\n# " + ".".join(["a"] * 3_000) + " = 1\n# ///\n", "too many parts"),
    "digits": ("# /// script\n# a = " + "1" * 5_000 + "\n# ///\n", "not TOML"),
    "version": ('# /// script\n# requires-python = "==' + "1" * 5_000 + '"\n# ///\n', "is not a range"),
    "modules": ("import " + ", ".join(f"a{n}" for n in range(1_001)), "imports 1001 modules"),
}


@pytest.mark.parametrize(("code", "why"), STRANGE.values(), ids=STRANGE)
def test_a_program_that_would_keep_us_is_refused(code: str, why: str) -> None:
    """What takes the square of a program's length, or fails in its own words, is an error that says what to do."""

    def look() -> None:
        resolve_auto(code, provides=lambda _: False)
        check_python(read_header(code) or Header(), "3.11.4")

    with pytest.raises(InvalidRequest, match=why) as caught:
        look()
    assert len(str(caught.value)) < 400


def test_many_names_of_one_import_are_looked_at_once() -> None:
    """Time grows with the names of a program, not with their square; a message names the first of many modules."""
    code = "import " + ", ".join(f"a{n % 900}.b{n}" for n in range(18_000))
    begun = time.process_time()
    with pytest.raises(PolicyDenied, match="and 850 more") as caught:
        resolve_auto(code, provides=lambda _: False)
    assert time.process_time() - begun < 3
    assert len(str(caught.value)) < 1_000
