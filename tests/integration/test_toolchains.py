"""Folders of programs of this host that a sandbox is shown by name, and what is said of programs that are not there."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

import cloche
from cloche.core.errors import BackendUnavailable, InvalidRequest
from cloche.records.results import result_as_wire

LOOK = "tool; cat credentials.toml inner/.env; ls -A inner/.ssh; touch new; ls -d ../beside"


def make_program(path: Path, text: str) -> Path:
    """Write a program, with its folders."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    """Make a folder of programs, with credentials by its own name and below it, beside one that is nobody's."""
    folder = tmp_path / ".cargo"
    make_program(folder / "bin" / "tool", "#!/bin/sh\nnl\n")
    make_program(folder / "bin" / "nl", "#!/bin/sh\necho it runs\n")  # before the system's program of that name
    (folder / "inner" / ".ssh").mkdir(parents=True)
    for path in ("credentials.toml", "inner/.env", "inner/.ssh/id_rsa", "../beside"):
        (folder / path).write_text("secret")
    return folder


@pytest.mark.user_soak
def test_a_folder_of_programs_is_shown_read_only_and_without_credentials(prefix: Path) -> None:
    """To throwaway runs, cold and warm, to commands, and to what runs and sessions start."""
    options = {"toolchains": [str(prefix)]}
    results = [cloche.run(f"cd {prefix}\n{LOOK}", language="bash", toolchains=[str(prefix)]) for _ in range(3)]
    with cloche.Sandbox(toolchains=[str(prefix)]) as sandbox:
        results.append(sandbox.exec(shell=LOOK, cwd=str(prefix)))
        results.append(sandbox.session("bash").run(f"cd {prefix}\n{LOOK}"))
    with cloche.Sandbox(live=False, toolchains=options["toolchains"]) as sandbox:
        results.append(sandbox.session("bash").run(f"cd {prefix}\n{LOOK}"))
    for result in results:
        assert result.stdout == "it runs\n", result.stderr
        assert "Read-only file system" in result.stderr


SPEAK = """
import socket, sys
caller = socket.socket(socket.AF_UNIX)
caller.connect(sys.argv[1])
print(caller.recv(64))
"""


@pytest.mark.user_soak
def test_no_socket_in_a_folder_of_programs_leads_to_the_host(prefix: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read-only mount prevents no connection: outside there is one, inside the socket and the pipe are covered."""
    os.mkfifo(prefix / "pipe", 0o666)
    monkeypatch.chdir(prefix)  # whose own path may be too long for a socket
    with socket.socket(socket.AF_UNIX) as service:
        service.bind("service")
        service.listen()
        os.chmod("service", 0o777)
        with socket.socket(socket.AF_UNIX) as caller:
            caller.connect("service")
        code = f"import os\nos.chdir({str(prefix)!r})\nprint(open('pipe').read())\n{SPEAK}"
        result = cloche.run(code, argv=["service"], toolchains=[str(prefix)], timeout=20)
    assert result.stdout == "\n", result.stderr
    assert "ConnectionRefusedError" in result.stderr


@pytest.mark.parametrize("folder", ["~", "/", "/home", "/tmp", "relative", "/nowhere"])
def test_no_home_is_shown_and_nothing_above_one(folder: str) -> None:
    """A folder that may not be shown is an error that begins with the key, before anything runs."""
    with pytest.raises(InvalidRequest, match=r"^toolchains: "):
        cloche.run("print(1)", toolchains=[folder])


def test_where_nothing_can_be_hidden_no_folder_is_shown(prefix: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Below level jail it is an error, unless the variable alone asks, which languages are searched by as well."""
    with pytest.raises(BackendUnavailable, match="at level jail"):
        cloche.run("print(1)", toolchains=[str(prefix)], level="confined")
    monkeypatch.setenv("CLOCHE_TOOLCHAINS", str(prefix / "bin"))
    assert cloche.run("print(1)", level="confined").ok
    assert cloche.run(argv=["tool"]).stdout == "it runs\n"


def test_a_file_of_the_working_directory_shows_nothing(
    prefix: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What of the host is shown is the owner's choice alone."""
    (tmp_path / "cloche.yaml").write_text(f"sandbox:\n  toolchains: [{prefix}]\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidRequest, match="toolchains"):
        cloche.run("print(1)")


@pytest.mark.user_soak
def test_a_program_of_this_host_says_which_folders_to_show(prefix: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It, and the interpreter that a script names; where that alone is missing, the command itself names it, too."""
    python = prefix.parent / "python"
    make_program(python / "bin" / "python3", "#!/bin/sh\n")
    script = make_program(prefix / "bin" / "own-script", f"#!{python}/bin/python3\n")
    monkeypatch.setenv("PATH", f"{script.parent}:/usr/bin:/bin")
    with cloche.Sandbox() as sandbox:
        absent = sandbox.exec(["own-script"])
    assert str(prefix) not in str(result_as_wire(absent))  # whose readers may be elsewhere
    assert absent.meta["host_advice"].endswith(
        f'--toolchain {prefix} --toolchain {python} (toolchains=["{prefix}", "{python}"])'
    )
    with cloche.Sandbox(toolchains=[str(prefix)]) as sandbox:
        for result in (sandbox.exec(["own-script"]), cloche.run(argv=["own-script"], toolchains=[str(prefix)])):
            assert f"its interpreter '{python}/bin/python3', which its first line names, is not there" in result.stderr
            assert f"with --toolchain {python} (" in result.meta["host_advice"]
        assert "host_advice" not in sandbox.exec(["nowhere-at-all"]).meta
