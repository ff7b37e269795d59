"""The first messages are answered before the protocol package is imported, and as the package would answer them."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from mcp_types.version import HANDSHAKE_PROTOCOL_VERSIONS

from cloche.mcp import table
from cloche.mcp.early import EarlyAnswers
from tests.harness.mcp import END_S
from tests.integration.test_mcp_ends import HELLO, send, wire

PACKAGE = "pydantic_core"  # a compiled part of the protocol package
FOR_THE_PACKAGE = {"jsonrpc": "2.0", "id": "other", "method": "prompts/list"}


def hello(version: str, number: int | str = 1) -> dict[str, Any]:
    """Return a client's first request, at a revision."""
    params = {"protocolVersion": version, "capabilities": {}, "clientInfo": {"name": "t", "version": "1"}}
    return {"jsonrpc": "2.0", "id": number, "method": "initialize", "params": params}


def request(method: str, number: int | str = "n", **more: Any) -> dict[str, Any]:
    """Return a request."""
    return {"jsonrpc": "2.0", "id": number, "method": method, **more}


def line_of(process: subprocess.Popen[bytes]) -> bytes:
    """Return the next line that a server sends."""
    assert process.stdout is not None
    return process.stdout.readline()


def has_package(process: subprocess.Popen[bytes]) -> bool:
    """Return whether a process has loaded the protocol package."""
    return PACKAGE in Path(f"/proc/{process.pid}/maps").read_text()


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--network-allow", "example.org", "--secret", "TOKEN@example.org", "--interpreters", "0", "--approve", "high"),
        pytest.param(("--tier", "4", "--no-sandbox"), marks=pytest.mark.soak),
        pytest.param(("--tier", "2"), marks=pytest.mark.soak),
        pytest.param(("--tool", "read_file", "--cpus", "1"), marks=pytest.mark.soak),
        pytest.param(("--workspace", "FOLDER"), marks=pytest.mark.soak),
    ],
)  # fmt: skip
def test_early_answers_are_the_packages_own(options: tuple[str, ...], tmp_path: Path) -> None:
    """Byte for byte, for each option that changes the tools, and for each revision that begins with a handshake."""
    folder = tmp_path / "folder"
    folder.mkdir()
    given = [str(folder) if option == "FOLDER" else option for option in options]
    with wire(tmp_path, *given, env={"TOKEN": "a-secret-of-the-tests"}) as process:
        send(process, hello("2025-06-18"), HELLO[1], request("ping"), request("tools/list", params={}))
        early = [line_of(process) for _ in range(3)]
        send(process, FOR_THE_PACKAGE)
        assert json.loads(line_of(process))["id"] == "other", "the handshake is answered once"
        assert has_package(process)
        send(process, hello("2025-06-18"), request("ping"), request("tools/list", params={}))
        assert [line_of(process) for _ in range(3)] == early
        for version in (*HANDSHAKE_PROTOCOL_VERSIONS, "2026-07-28", "1999-01-01"):
            send(process, hello(version, version))
            answer = {"jsonrpc": "2.0", "id": version, "result": table.about(version)}
            assert line_of(process).decode() == json.dumps(answer, separators=(",", ":")) + "\n"
        assert json.loads(early[2])["result"]["tools"]
    assert table.HANDSHAKES == HANDSHAKE_PROTOCOL_VERSIONS


@pytest.mark.parametrize("way", ["SIGTERM", pytest.param("SIGINT", marks=pytest.mark.soak), "the client leaves"])
def test_a_client_that_only_greets_needs_no_package(way: str, tmp_path: Path) -> None:
    """Nothing of it is imported, and the exit code says how the server ended."""
    with wire(tmp_path) as process:
        send(process, *HELLO, request("ping", 2))
        assert [json.loads(line_of(process))["id"] for _ in range(2)] == [1, 2]
        assert not has_package(process)
        if way == "the client leaves":
            assert process.stdin is not None
            process.stdin.close()
        else:
            process.send_signal(getattr(signal, way))
        assert process.wait(END_S) == {"SIGTERM": 143, "SIGINT": 130}.get(way, 0)
    assert (tmp_path / "stderr").read_text() == ""


def test_other_forms_are_left_to_the_package() -> None:
    """A message that is not in the usual form or place is not answered by the table."""
    first, version = hello("2025-06-18"), {"protocolVersion": "2025-06-18"}
    others: list[tuple[int, object]] = [
        (0, request("ping")), (0, request("tools/list")), (0, HELLO[1]), (0, request("server/discover")),
        (0, {**first, "params": version}), (0, {**first, "id": None}), (0, {**first, "id": True}), (0, [first]),
        (0, {**first, "jsonrpc": "1.0"}), (0, {**first, "more": 1}), (1, first), (2, HELLO[1]),
        (2, request("tools/list", params={"cursor": "x"})), (2, request("tools/list", params={"_meta": {}})),
        (2, request("tools/call")), (2, {"jsonrpc": "2.0", "method": "ping"}),
        (2, {"jsonrpc": "2.0", "id": 3, "result": {}}),
    ]  # fmt: skip
    for greeted, message in others:
        answers = EarlyAnswers([])
        for known in HELLO[:greeted]:
            assert answers.answer(json.dumps(known)) is not None
        assert answers.answer(json.dumps(message)) is None, message
    assert EarlyAnswers([]).answer("rubbish") is None
