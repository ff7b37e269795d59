"""What to run."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloche.core.errors import InvalidRequest
from cloche.core.request import MAX_ARGV_BYTES, MAX_ONE_ARGUMENT_BYTES, InputFile, Request, workspace_path


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({}, "nothing to run"),
        ({"code": "x", "argv": ("a\0b",)}, "argv: "),
        ({"code": "x", "argv": ("a" * (MAX_ONE_ARGUMENT_BYTES + 1),)}, "one argument exceeds"),
        ({"code": "x", "argv": ("a" * 1023,) * 1030}, f"exceed the limit of {MAX_ARGV_BYTES}"),
        ({"code": "x", "env": {"A=B": "c"}}, "env: 'A=B' is not a variable's name"),
        ({"code": "x", "env": {"": "c"}}, "env: '' is not"),
        ({"code": "x", "env": {"A": "c\0"}}, "env A: "),
        ({"code": "x", "timeout_s": 0}, "timeout: 0"),
        (
            {"code": "x", "files": (InputFile(path="a", data=b""), InputFile(path="./a", data=b""))},
            "'a' is given twice",
        ),
        (
            {"code": "x", "files": (InputFile(path="a/b/c", data=b""), InputFile(path="a", data=b""))},
            "file 'a' cannot also be the folder of file 'a/b/c'",
        ),
    ],
)
def test_wrong_requests_are_named(fields: dict[str, Any], named: str) -> None:
    """A request that cannot be run is refused with the part that is wrong."""
    with pytest.raises(InvalidRequest) as caught:
        Request(**fields)
    assert named in str(caught.value)


def test_bytes_of_file_names_survive() -> None:
    """An argument with undecodable bytes, as Python gives them, is accepted."""
    assert Request(code="x", argv=("caf\udce9",)).argv == ("caf\udce9",)


def test_contents_are_not_printed() -> None:
    """A request's repr shows neither its environment nor its input."""
    assert "secret" not in repr(Request(code="x", env={"TOKEN": "secret"}, stdin=b"secret"))


@pytest.mark.parametrize(
    "path", ["", ".", "..", "../a", "a/../../b", "/etc/passwd", "/workspace", "/workspace/..", "a\0"]
)
def test_paths_that_leave_the_workspace(path: str) -> None:
    """A file's path stays below /workspace."""
    with pytest.raises(InvalidRequest, match="is not a path below /workspace"):
        InputFile(path=path, data=b"")


@pytest.mark.parametrize("path", ["cloche-main.py", "/workspace/a/../cloche-main.go", "./.cloche-main.rb"])
def test_the_name_of_the_program_itself_is_no_files(path: str) -> None:
    """A file that a run would replace, and no listing would show, is refused before it is lost."""
    with pytest.raises(InvalidRequest, match="has the name under which Cloche runs a program"):
        InputFile(path=path, data=b"")
    assert InputFile(path=f"below/{path.rpartition('/')[2]}", data=b"").path.startswith("below/")


@given(st.text(alphabet="a./\\ ", max_size=12))
def test_accepted_paths_are_below(path: str) -> None:
    """An accepted path is relative, normal and never upwards."""
    try:
        inside = workspace_path(path)
    except InvalidRequest:
        return
    assert not inside.startswith("/")
    assert ".." not in inside.split("/")
    assert workspace_path(f"/workspace/{inside}") == inside
