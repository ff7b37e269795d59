"""The AST screen: what it lists, what each mode does, and that it is no wall."""

from __future__ import annotations

import warnings

import pytest

from cloche.core.errors import PolicyDenied
from cloche.core.screen import CALLS, MODULES, Finding, apply_screen, screen_code


def _whats(code: str) -> list[str]:
    return [finding.what for finding in screen_code(code)]


@pytest.mark.parametrize("module", ["os", "subprocess", "shutil", "pathlib", "socket"])
@pytest.mark.parametrize(
    "form",
    [
        "import {}",
        "import json, {} as x",
        "from {} import *",
        "def f():\n    import {}",
        "__import__('{}')",
        "import importlib\nimportlib.import_module('{}')",
        "from importlib import import_module as i\ni(name='{}')",
    ],
)
def test_every_form_of_import_is_found(module: str, form: str) -> None:
    """The five modules of R3 are found however they are imported by name."""
    assert f"import of {module}" in _whats(form.format(module))


@pytest.mark.parametrize("code", ["import os.path", "from os.path import join", "from os import path"])
def test_submodules_count_as_their_module(code: str) -> None:
    """Whatever lies below a listed module is listed."""
    assert len(_whats(code)) == 1


@pytest.mark.parametrize(
    ("code", "what"),
    [
        ("eval('1')", "eval()"),
        ("exec('1')", "exec()"),
        ("compile('1', '', 'eval')", "compile()"),
        ("import builtins\nbuiltins.eval('1')", "eval()"),
        ("import os\nos.system('ls')", "os.system()"),
        ("import os as o\no.system('ls')", "os.system()"),
        ("from os import system as s\ns('ls')", "os.system()"),
        ("import os\nos.execvp('ls', ['ls'])", "os.execvp()"),
        ("import os\nos.forkpty()", "os.forkpty()"),
        ("import subprocess\nsubprocess.run(['ls'])", "subprocess.run()"),
        ("from subprocess import Popen\nPopen('ls')", "subprocess.Popen()"),
        ("import shutil\nshutil.rmtree('/')", "shutil.rmtree()"),
        ("import ctypes\nctypes.CDLL(None)", "ctypes.CDLL()"),
        ("import pickle\npickle.loads(b'')", "pickle.loads()"),
    ],
)
def test_dangerous_calls_are_found(code: str, what: str) -> None:
    """A listed call is found under whatever name it was imported."""
    assert what in _whats(code)


@pytest.mark.parametrize(
    "code",
    [
        "import json, math, re", "import ossify", "from . import os", "open('out.txt', 'w').write('x')",
        "x.eval(1)", "re.compile('a')", "cursor.exec('x')", "import_os = 1", "# import os", "'import os'", "",
    ],
)  # fmt: skip
def test_harmless_code_has_no_findings(code: str) -> None:
    """Names that only look alike, methods of one's own objects, and files of the workspace are not listed."""
    assert screen_code(code) == ()


def test_a_finding_tells_line_column_and_reason() -> None:
    """Lines and columns count from 1."""
    assert screen_code("x = 1\nif x:\n    import os") == (
        Finding(line=3, column=5, what="import of os", why=MODULES["os"]),
    )


def test_findings_come_in_order_of_appearance() -> None:
    """A reader meets them from top to bottom."""
    assert [finding.line for finding in screen_code("def f():\n    eval('1')\nimport os\nexec('')")] == [
        2,
        3,
        4,
    ]


@pytest.mark.parametrize("code", ["def (", "\0", "(" * 60_000, "import os\n  x", "-" * 60_000 + "1"])
def test_code_that_does_not_parse_has_no_findings(code: str) -> None:
    """It will fail by itself, with the interpreter's own words."""
    assert screen_code(code) == ()


def test_the_codes_own_warnings_are_not_ours() -> None:
    """An invalid escape neither warns nor, where warnings are errors, hides what is listed."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert _whats("import os\nx = '\\d'") == ["import of os"]


def test_off_does_nothing_and_warn_returns_findings() -> None:
    """Only `block` refuses."""
    assert apply_screen("off", "python", "import os") == ()
    assert [finding.what for finding in apply_screen("warn", "py", "import os")] == ["import of os"]


def test_block_refuses_and_names_the_lines() -> None:
    """The error tells the model where, what and why."""
    with pytest.raises(PolicyDenied, match=r"line 1: import of os .*; line 3: eval\(\) runs text as code"):
        apply_screen("block", "python", "import os\n\neval('1')")


def test_block_keeps_a_long_list_short() -> None:
    """The error stays readable however often the code offends."""
    with pytest.raises(PolicyDenied, match="and 80 more") as caught:
        apply_screen("block", "python", "eval('1')\n" * 100)
    assert len(str(caught.value)) < 2000


def test_block_lets_clean_code_and_other_languages_pass() -> None:
    """The screen reads Python alone."""
    assert apply_screen("block", "python", "print(1)") == ()
    assert apply_screen("block", "bash", "rm -rf /") == ()


@pytest.mark.parametrize(
    "code",
    [
        "getattr(__builtins__, 'ev' + 'al')('1')",
        "__import__('o' + 's')",
        "e = eval\ne('1')",
        "().__class__.__base__.__subclasses__()",
    ],
)
def test_the_screen_is_advice_not_a_wall(code: str) -> None:
    """Code that means to hide passes: whoever needs a wall takes the jail."""
    assert screen_code(code) == ()


def test_every_row_has_a_reason() -> None:
    """A finding without a reason would help nobody."""
    assert all(why for table in (MODULES, CALLS) for why in table.values())


def test_a_program_too_long_to_look_at_is_a_finding() -> None:
    """Nobody waits for a parser of megabytes, and none passes the screen for its length."""
    code = "x = 1\n" * 200_000
    (finding,) = apply_screen("warn", "python", code)
    assert "a program of 1200000 characters is longer than" in str(finding)
    with pytest.raises(PolicyDenied, match="longer than"):
        apply_screen("block", "python", code)
