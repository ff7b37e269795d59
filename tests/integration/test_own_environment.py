"""The virtual environment of a live sandbox, and the toolchains that its commands find."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from cloche.backends import toolchain
from cloche.sync import Sandbox
from tests.harness.packages import make_wheel

NAMES = ("plain", "user", "module", "inner", "uv")
INSTALLS = {
    "plain": "pip install {}",
    "user": "pip install --user {}",
    "module": "python3 -m pip install {}",
    "inner": "python3 -m venv v && v/bin/pip install {}",
    "uv": "uv pip install {}",
}


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    """Have one with wheels in it."""
    with Sandbox(memory="1g", cpus=2, timeout=120) as opened:
        for name in (f"{how}_package" for how in NAMES):
            files, scripts = {f"{name}.py": f"def main(): print('{name} runs')\n"}, {f"{name}-command": f"{name}:main"}
            opened.write_file(f"wheels/{name}-1.0-py3-none-any.whl", make_wheel(name, files=files, scripts=scripts))
        yield opened


@pytest.mark.user_soak
@pytest.mark.parametrize("how", NAMES)
def test_installers_work_into_a_place_of_the_sandboxs_own(sandbox: Sandbox, how: str) -> None:
    """Although Cloche's environment is shown read-only: commands, `python3`, runs and what they start find it."""
    if how == "uv" and sandbox.exec(["uv", "--version"]).exit_code:
        pytest.skip("missing: uv (make venv)")
    installed = sandbox.exec(shell=INSTALLS[how].format(f"wheels/{how}_package-1.0-py3-none-any.whl"))
    assert installed.ok, installed.stderr
    folder = "v/bin/" if how == "inner" else ""
    done = sandbox.exec(shell=f"{folder}{how}_package-command && {folder}python3 -c 'import pytest' 2>&1; echo $?")
    assert done.stdout.startswith(f"{how}_package runs\n")
    if how == "inner":
        return
    assert done.stdout.endswith("\n0\n"), done.stdout  # what is in Cloche's own environment is there as well
    code = f"import {how}_package, subprocess, sys\n[subprocess.call([sys.executable, '-c', 'import {how}_package'])]"
    assert sandbox.run(code).value == [0]


def test_without_a_network_an_installer_gives_up_at_once(sandbox: Sandbox) -> None:
    """None tries again, which takes up to a minute, and pip says how packages come in."""
    failed = sandbox.exec(["pip", "install", "nothing-here"])
    assert "Retrying" not in failed.stderr
    assert "no network; name packages when the sandbox is opened" in failed.stderr
    variables = sandbox.exec(["env"]).stdout.splitlines()
    assert {"UV_HTTP_RETRIES=0", "npm_config_fetch_retries=0", "CARGO_NET_RETRY=0"} <= set(variables)
    with Sandbox(network="allowlist", network_allow=["index.example.org"]) as other:
        assert "PIP_RETRIES" not in other.exec(["env"]).stdout


@pytest.mark.both_users
def test_commands_find_the_toolchains_of_all_languages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the table of languages finds outside of the system's folders is shown and on PATH, with its folder."""
    programs = tmp_path / "rust" / "bin"
    programs.mkdir(parents=True)
    for name, text in (("rustc", f"echo {tmp_path}/rust"), ("cargo", "echo this is cargo")):
        (programs / name).write_text(f"#!/bin/sh\n{text}\n")
        (programs / name).chmod(0o755)
    monkeypatch.setattr(toolchain, "SYSTEM_FOLDERS", ())
    monkeypatch.setenv(toolchain.FOLDERS_VARIABLE, f"{programs}:/usr/bin")
    with Sandbox() as sandbox:
        assert sandbox.exec(["cargo"]).stdout == "this is cargo\n"
        assert f"{programs}/rustc" in sandbox.exec(["which", "-a", "rustc"]).stdout.splitlines()
