"""The argument list of the container that an agent works in (C15)."""

from __future__ import annotations

import csv
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cloche.agent.container import container_arguments
from cloche.core.errors import ClocheError
from cloche.core.limits import MIB

pytestmark = pytest.mark.usefixtures("no_settings")
USER = (1000, 1001)


@pytest.fixture
def no_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the machine's own configuration out."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "settings"))
    monkeypatch.chdir(tmp_path)


def arguments(folder: Path, *command: str, **asked: Any) -> list[str]:
    """Return the list for an agent of an ordinary user."""
    return container_arguments(folder, "some/image:1", command, **{"user": USER, **asked})


def test_an_agents_container_is_as_hard_as_a_runs(tmp_path: Path) -> None:
    """Every wall by its word, one folder of the host, and the command last."""
    words = arguments(tmp_path, "agent", "--privileged", memory="1g", cpus=2, pids=100)
    assert words[:4] == ["docker", "run", "--rm", "--interactive"]
    assert {
        "--network=none", f"--memory={1024 * MIB}", f"--memory-swap={1024 * MIB}", "--cpus=2", "--pids-limit=100",
        "--cap-drop=ALL", "--security-opt=no-new-privileges", "--read-only", "--ipc=none", "--log-driver=none",
        "--user=1000:1001", "--workdir=/workspace",
    } <= set(words)  # fmt: skip
    assert any(word.startswith("--security-opt=seccomp=/") for word in words)
    assert [word for word in words if "bind" in word] == [f'--mount=type=bind,"src={tmp_path}",dst=/workspace']
    assert words[words.index("some/image:1") :] == ["some/image:1", "agent", "--privileged"]
    loose = ("--privileged", "--cap-add", "--device", "--pid=", "--userns", "--publish", "--volume", "--tty", "--name")
    assert not [word for word in words[: words.index("some/image:1")] if word.startswith(loose)]


def test_what_is_asked_for_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Network, runtime, name, terminal, variables with and without their value, the configured roots."""
    memory = tmp_path / "memory"
    monkeypatch.setenv("CLOCHE_ROOT_MEMORY", str(memory))
    words = arguments(
        tmp_path, env={"A": "b c", "TOKEN": None}, name="mine", has_terminal=True, network="bridge", runtime="runc"
    )
    assert {"--network=bridge", "--runtime=runc", "--name=mine", "--tty", "--env=A=b c", "--env=TOKEN"} <= set(words)
    assert f'--mount=type=bind,"src={memory}",dst=/memory' in words
    assert "--runtime=runsc" in arguments(tmp_path, runtime="gvisor")
    assert "--runtime=runsc" in arguments(tmp_path, runtime="runsc")


def test_nobody_is_who_it_runs_as_or_an_error(tmp_path: Path) -> None:
    """`locked-down` runs it as nobody, whoever has the folder; another user beside that is refused."""
    if os.geteuid() == 0:
        os.chown(tmp_path, *USER)
    assert "--user=65534:65534" in container_arguments(tmp_path, "some/image:1", preset="locked-down")
    with pytest.raises(ClocheError, match=r"1000 conflicts with nobody \(preset locked-down \(argument\)\)"):
        arguments(tmp_path, preset="locked-down")


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"require": "vm"}, "level vm"),
        ({"level": "process"}, "level process"),
        ({"require": "memory"}, "cloche backends"),
        ({"runtime": "runc", "require": "gvisor"}, "exclude each other"),
        ({"network": "allowlist"}, "off or bridge"),
        ({"network": "open"}, "off or bridge"),
        ({"network": "bridge", "runtime": "gvisor"}, "that of docker's own runtime"),
        ({"user": (0, 1000)}, "as root"),
        ({"user": (1000, 0)}, "as root"),
        ({"name": "--privileged"}, "name of a container"),
        ({"env": {"A=B": "c"}}, "variable's name"),
        ({"backend": "firecracker"}, "backend 'firecracker' is requested"),
        ({"runtime": "local"}, "backend 'local' is requested"),
    ],
)
def test_less_or_more_than_a_container_gives_is_refused(tmp_path: Path, asked: dict[str, Any], said: str) -> None:
    """Nothing that was asked for is left out in silence."""
    with pytest.raises(ClocheError, match=said):
        arguments(tmp_path, **asked)


def test_no_name_is_taken_for_an_option_and_no_folder_for_the_host(tmp_path: Path) -> None:
    """An image that begins with a dash, the root folder by any name, and what is no folder."""
    with pytest.raises(ClocheError, match="one string"):
        container_arguments(tmp_path, "image", "sh -c true", user=USER)
    with pytest.raises(ClocheError, match="name of an image"):
        container_arguments(tmp_path, "--privileged", user=USER)
    (tmp_path / "link").symlink_to("/")
    for folder in ("/", "//", "/..", tmp_path / "link"):
        with pytest.raises(ClocheError, match="below /"):
            container_arguments(folder, "image", user=USER)
    for folder in (tmp_path / "missing", "/etc/passwd"):
        with pytest.raises(ClocheError, match="cannot look into"):
            container_arguments(folder, "image", user=USER)


def test_any_name_of_a_folder_stays_one_field(tmp_path: Path) -> None:
    """A comma or a quote in it adds no option to the mount."""
    (odd := tmp_path / 'a",dst=/etc,b c').mkdir(parents=True)
    mount = next(word for word in arguments(odd) if word.startswith("--mount="))
    assert next(csv.reader([mount.removeprefix("--mount=")])) == ["type=bind", f"src={odd}", "dst=/workspace"]


def test_the_command_line_prints_it(tmp_path: Path) -> None:
    """Quoted for a shell, or as JSON; the folder's owner is who it runs as, unless that is root."""
    words = ["container", str(tmp_path), "some/image:1", "--user", "1000:1001", "--env", "TOKEN"]
    words += ["--", "sh", "-c", "a b"]
    command = [sys.executable, "-m", "cloche"]
    shown = subprocess.run([*command, *words], capture_output=True, text=True, check=True).stdout
    wanted = arguments(tmp_path, "sh", "-c", "a b", env={"TOKEN": None})
    assert shlex.split(shown) == wanted
    told = subprocess.run([*command, words[0], "--json", *words[1:]], capture_output=True, text=True, check=True).stdout
    assert json.loads(told) == wanted
    owned = subprocess.run([*command, *words[:3]], capture_output=True, text=True, check=False)
    if os.geteuid() == 0:
        assert (owned.returncode, "chown" in owned.stderr) == (2, True)
    else:
        assert f"--user={os.geteuid()}:" in owned.stdout
