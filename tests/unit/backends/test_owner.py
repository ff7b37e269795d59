"""Whose something is, and when it is sure that nobody has it any more."""

from __future__ import annotations

import subprocess
import sys

import pytest

from cloche.backends import garbage_collection
from cloche.backends.garbage_collection import HOSTS_OWN, is_dead, owner
from cloche.backends.remote.labels import is_left


def test_who_lives_is_not_dead_and_who_ended_is() -> None:
    """A process is known by its number and its start, and so is one that has ended since."""
    assert not is_dead(owner())
    code = "from cloche.backends.garbage_collection import owner; print(owner())"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    assert ended.split(":")[:3] == owner().split(":")[:3]
    assert is_dead(ended)


def test_what_cannot_be_seen_is_not_said_to_be_dead() -> None:
    """Of another host, or in another process namespace; nor is what nobody of ours wrote."""
    host, boot, _, pid, _ = owner().split(":")
    assert not is_dead(f"another:{boot}:{garbage_collection.namespace()}:1:0")
    assert not is_dead(f"{host}:{boot}:1:{pid}:0")
    assert not is_dead("somebody")


@pytest.mark.parametrize(
    ("his", "mine", "dead"), [(HOSTS_OWN, HOSTS_OWN, True), (HOSTS_OWN, "1", False), ("1", HOSTS_OWN, False)]
)
def test_another_boot_is_proof_for_a_host_alone(
    monkeypatch: pytest.MonkeyPatch, his: str, mine: str, dead: bool
) -> None:
    """Containers of one image have one machine-id, so theirs may be another host, and not another time."""
    host, _, _, pid, started = owner().split(":")
    monkeypatch.setattr(garbage_collection, "namespace", lambda: mine)
    assert is_dead(f"{host}:another:{his}:{pid}:{started}") == dead


def test_at_a_provider_another_boot_is_another_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hosts of one image have one machine-id and may share an account: none ends what another one uses."""
    host, boot, _, pid, _ = owner().split(":")
    monkeypatch.setattr(garbage_collection, "namespace", lambda: HOSTS_OWN)
    assert is_left(f"{host}:{boot}:{HOSTS_OWN}:{pid}:0")
    assert not is_left(f"{host}:another:{HOSTS_OWN}:{pid}:0")


def test_who_may_not_be_looked_at_is_not_said_to_be_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where /proc hides what others run, their processes live nevertheless."""

    def refuse(pid: int, number: int) -> None:
        raise PermissionError(pid, number)

    monkeypatch.setattr(garbage_collection, "started_at", lambda _: "")
    monkeypatch.setattr("os.kill", refuse)
    host, boot, mine, _, _ = owner().split(":")
    assert not is_dead(f"{host}:{boot}:{mine}:1:77")
