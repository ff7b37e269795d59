"""What callers may give as files, arguments, standard input and environment."""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from cloche.core.errors import InvalidRequest
from cloche.execution import inputs
from cloche.execution.inputs import Files, Inputs, gather_files, has_host_files, read_argv, read_env, read_stdin

LIMIT = 1 << 20


def gather(files: Files | None, *, max_bytes: int = LIMIT, max_files: int = 100) -> Inputs:
    """Gather with the tests' bounds."""
    return gather_files(files, max_bytes=max_bytes, max_files=max_files)


def contents(files: Files) -> dict[str, bytes]:
    """Return path and content of what was gathered."""
    return {file.path: file.data for file in gather(files).files}


def test_text_in_a_mapping_is_content() -> None:
    """A string is what the file holds, never a path."""
    assert contents({"a.txt": "/etc/passwd"}) == {"a.txt": b"/etc/passwd"}


@pytest.mark.parametrize("data", [b"\0\xff", bytearray(b"\0\xff"), memoryview(b"\0\xff")])
def test_bytes_in_a_mapping_are_content(data: bytes) -> None:
    """Bytes arrive as they are."""
    assert contents({"a.bin": data}) == {"a.bin": b"\0\xff"}


def test_a_path_object_in_a_mapping_names_a_host_file(tmp_path: Path) -> None:
    """A path object is copied under the name it is given."""
    (tmp_path / "in.csv").write_text("a,b\n")
    assert contents({"data/x.csv": tmp_path / "in.csv"}) == {"data/x.csv": b"a,b\n"}


def test_a_list_holds_host_paths(tmp_path: Path) -> None:
    """Listed files keep their last name, whether text or path object."""
    (tmp_path / "a").write_text("1")
    (tmp_path / "b").write_text("2")
    assert contents([str(tmp_path / "a"), tmp_path / "b"]) == {"a": b"1", "b": b"2"}


def test_a_directory_is_copied_with_what_is_below(tmp_path: Path) -> None:
    """A directory's files keep their place below its name."""
    (tmp_path / "d" / "sub").mkdir(parents=True)
    (tmp_path / "d" / "sub" / "x").write_text("x")
    (tmp_path / "d" / "y").write_text("y")
    assert contents([tmp_path / "d"]) == {"d/sub/x": b"x", "d/y": b"y"}
    assert contents({".": tmp_path / "d"}) == {"sub/x": b"x", "y": b"y"}


def test_a_link_that_leads_out_of_a_directory_is_left_out(tmp_path: Path) -> None:
    """A directory nobody vetted must not pull in the caller's other files; what is left out is listed."""
    secret = tmp_path / "secret"
    secret.write_text("s")
    folder = tmp_path / "d"
    folder.mkdir()
    (folder / "kept").write_text("k")
    (folder / "inner").symlink_to("kept")
    for name, target in {"out": secret, "up": tmp_path, "gone": folder / "nothing"}.items():
        (folder / name).symlink_to(target)
    os.mkfifo(folder / "pipe")
    found = gather([folder])
    assert {file.path: file.data for file in found.files} == {"d/kept": b"k", "d/inner": b"k"}
    assert sorted(map(os.path.basename, found.left_out)) == ["gone", "out", "pipe", "up"]


def test_a_program_stays_executable(tmp_path: Path) -> None:
    """The owner's execute bit is kept, everything else of the mode is not."""
    (tmp_path / "p").write_text("#!/bin/sh\n")
    (tmp_path / "p").chmod(0o4711)
    assert gather([tmp_path / "p"]).files[0].mode == 0o755


@pytest.mark.parametrize(
    "files",
    [
        "a.txt",
        b"a.txt",
        Path("a.txt"),
        {"a": 1},
        {1: b""},
        [b"a"],
        [1],
        {"../a": b""},
        {"/etc/passwd": b""},
        {"a\0b": b""},
        ["/nonexistent/file"],
        ["/dev/null"],
    ],
)
def test_what_cannot_be_a_file_is_refused(files: Files) -> None:
    """Wrong kinds, paths out of the workspace and missing or special host files are the caller's error."""
    with pytest.raises(InvalidRequest, match=r"file"):
        gather(files)


def test_more_than_the_workspace_holds_is_refused_before_it_is_read(tmp_path: Path) -> None:
    """A huge sparse file is an error that costs no memory."""
    with (tmp_path / "huge").open("wb") as huge:
        huge.truncate(1 << 40)
    with pytest.raises(InvalidRequest, match="huge"):
        gather([tmp_path / "huge"])


def test_too_many_files_are_refused(tmp_path: Path) -> None:
    """The number of files is bounded like their size."""
    with pytest.raises(InvalidRequest, match="too many"):
        gather({str(number): b"" for number in range(4)}, max_files=3)


def test_only_host_paths_need_the_disk(tmp_path: Path) -> None:
    """Content given directly is not read from anywhere."""
    assert not has_host_files({"a": "text"})
    assert has_host_files({"a": tmp_path})
    assert has_host_files(["a"])


def test_stdin_is_bytes_or_text() -> None:
    """Text is sent as UTF-8; anything else is refused by kind."""
    assert (read_stdin("ä"), read_stdin(b"\xff"), read_stdin(None)) == ("ä".encode(), b"\xff", b"")
    with pytest.raises(InvalidRequest, match="int"):
        read_stdin(3)


def test_argv_is_a_list_of_text() -> None:
    """One string is refused, as it would be taken apart letter by letter."""
    assert read_argv(["a", Path("b")]) == ("a", "b")
    with pytest.raises(InvalidRequest, match="list of words"):
        read_argv("ls -l")
    with pytest.raises(InvalidRequest, match="int"):
        read_argv([1])


def test_env_maps_text_to_text() -> None:
    """A number as a value is refused by the variable's name."""
    assert read_env(None) == {}
    with pytest.raises(InvalidRequest, match="COUNT"):
        read_env({"COUNT": 1})  # type: ignore[dict-item]


def test_a_file_that_becomes_a_link_is_not_followed_out(tmp_path: Path) -> None:
    """Whoever owns the folder may change it between a look and the reading."""
    (tmp_path / "secret").write_bytes(b"canary")
    folder = tmp_path / "given"
    folder.mkdir()
    (folder / "file").write_bytes(b"plain")
    is_over = threading.Event()

    def swap() -> None:
        while not is_over.is_set():
            (tmp_path / "next").symlink_to(tmp_path / "secret")
            (tmp_path / "next").rename(folder / "file")
            (tmp_path / "next").write_bytes(b"plain")
            (tmp_path / "next").rename(folder / "file")

    swapping = threading.Thread(target=swap)
    swapping.start()
    try:
        for _ in range(500):
            with suppress(InvalidRequest):  # it changed just then, which is said
                assert set(contents({"d": folder}).values()) <= {b"plain"}
    finally:
        is_over.set()
        swapping.join()


def test_a_tree_without_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders count, too, where there is nothing in them."""
    monkeypatch.setattr(inputs, "MOST_WALKED", 3)
    (tmp_path / "a" / "b").mkdir(parents=True)
    assert contents({"d": tmp_path}) == {}
    (tmp_path / "a" / "b" / "c").mkdir()
    with pytest.raises(InvalidRequest, match="more than 3 files and folders"):
        gather({"d": tmp_path})


def test_large_host_files_are_copied_to_disk_for_a_stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the bound their data is a view of a copy, which stays as it was when the file is shortened; an empty one
    is empty, and bytes that the caller gives are not copied.
    """
    monkeypatch.setattr(inputs, "MOST_IN_MEMORY", 4)
    given = b"given"
    for name, data in {"small": b"1234", "large": b"5" * 5000, "empty": b"", "last": b"67"}.items():
        (tmp_path / name).write_bytes(data)
    files = {name: tmp_path / name for name in ("small", "large", "empty", "last")}
    found = {
        file.path: file.data for file in gather_files({**files, "given": given}, max_bytes=1 << 20, maps=True).files
    }
    (tmp_path / "large").write_bytes(b"")
    assert found == {"small": b"1234", "large": b"5" * 5000, "empty": b"", "last": b"67", "given": given}
    assert [name for name, data in found.items() if isinstance(data, memoryview)] == ["large", "last"]
    assert found["given"] is given
