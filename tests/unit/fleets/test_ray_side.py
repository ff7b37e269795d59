"""What the caller's side of a fleet on Ray decides without Ray."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from types import ModuleType

import pytest

from cloche.core.errors import BackendUnavailable
from cloche.core.fleet_settings import FleetSettings
from cloche.fleets.ray import cluster
from cloche.fleets.ray.cluster import check_answers
from cloche.fleets.ray.fleet import _silent, differences

# Another handler is set at the level of the C library in a thread, as Ray does it.
REPLACED = """
import faulthandler, os, signal, sys, threading, time
from cloche.fleets.ray import cluster

def end(number, _):
    raise SystemExit(128 + number)

def replace():
    with cluster._own_handler_of_sigterm():
        faulthandler.register(signal.SIGTERM)

signal.signal(signal.SIGTERM, end)
thread = threading.Thread(target=replace)
thread.start()
thread.join()
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(10)
"""


def answer_once(listener: socket.socket, answer: bytes) -> None:
    """Send an answer to the first client."""
    with listener.accept()[0] as connection:
        connection.recv(100)
        connection.sendall(answer)


def test_a_cluster_that_does_not_answer_is_named_at_once() -> None:
    """A port where another protocol is spoken or nobody listens, a word that is no address, and another kind of one."""
    for answer, is_right in ((b"\0\0\6\4\0\0\0\0\0\0\4\0\0\0\0", True), (b"HTTP/1.1 400 Bad Request\r\n", False)):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            address = f"127.0.0.1:{listener.getsockname()[1]}"
            thread = threading.Thread(target=answer_once, args=(listener, answer))
            thread.start()
            with contextlib.nullcontext() if is_right else pytest.raises(BackendUnavailable, match="not Ray's head"):
                check_answers(address)
            thread.join()
    for wrong, text in ((address, "cannot be reached: .*refused"), ("127.0.0.1:99999", "cannot be reached")):
        with pytest.raises(BackendUnavailable, match=text) as raised:
            check_answers(wrong)
        assert "HOST:PORT of its head" in raised.value.remedy
    for wrong in ("head", "ray://head:10001"):
        with pytest.raises(BackendUnavailable, match=f"{wrong} is no address .*from outside of it"):
            check_answers(wrong)


def test_a_token_is_sent_wherever_there_is_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In a mode that has to be set before Ray's import. Ray's own file serves where no address is named."""
    monkeypatch.setitem(sys.modules, "ray", ModuleType("ray"))
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".ray").mkdir()
    for token, before, address, has_file, after in (
        ("", "", "head:6379", False, ""),
        ("secret", "", "head:6379", False, "token"),
        ("secret", "disabled", "head:6379", False, "disabled"),
        ("", "", "head:6379", True, ""),
        ("", "", "auto", True, "token"),
    ):
        for name, value in (("RAY_AUTH_TOKEN", token), ("RAY_AUTH_MODE", before), ("RAY_ADDRESS", address)):
            monkeypatch.setenv(name, value)
            if not value:
                monkeypatch.delenv(name)
        if has_file:
            (tmp_path / ".ray" / "auth_token").write_text("secret")
        with contextlib.suppress(ModuleNotFoundError):  # this Ray has no address to find
            cluster.find()
        assert os.environ.get("RAY_AUTH_MODE", "") == after


def test_a_coordinator_that_cannot_start_is_told_by_its_own_error() -> None:
    """Ray's first line has the actor's name alone, and its last one the error."""
    text = "The actor died because of an error raised in its creation task, ray::coordinator\n  File x\nTypeError: mode"
    error = _silent(RuntimeError(text))
    assert str(error).startswith("the fleet's coordinator cannot start on this node: TypeError: mode. Cloche beside")


@pytest.mark.parametrize("has_started", [True, False])
def test_a_ray_of_this_process_outlives_the_join(has_started: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel ends Ray's processes with the thread that started them, so that thread goes on."""
    threads: list[threading.Thread] = []

    def join(address: str, *, starts: bool) -> bool:
        threads.append(threading.current_thread())
        return has_started

    monkeypatch.setattr(cluster, "join", join)
    asyncio.run(cluster.joined())
    threads[0].join(0.5 if has_started else 30.0)
    assert threads[0].is_alive() is has_started


def test_a_running_fleet_says_which_settings_it_does_not_have() -> None:
    """Those that its coordinator was started with; a caller's own count at once."""
    wanted = FleetSettings(share=0.8, idle_s=60.0, ttl_s=10.0, wait_s=1.0)
    assert differences(FleetSettings(), wanted) == "share 0.5 and not 0.8, idle 600.0 and not 60.0"
    assert differences(wanted, wanted) == ""


def test_sigterm_keeps_its_handler_while_ray_is_joined() -> None:
    """It is put back from whatever thread joins."""
    done = subprocess.run([sys.executable, "-c", REPLACED], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (143, "", "")
