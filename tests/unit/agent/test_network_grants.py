"""Grants of hosts for a folder: the file that holds them, and the gate that asks about the others."""

from __future__ import annotations

import asyncio
import io
import os
import threading
from functools import partial
from pathlib import Path

import pytest

from cloche.agent import network_grants
from cloche.agent.approval import ApprovalEvent, ApprovalRequest, Approver, Decided, Decision, Gate, Risk
from cloche.agent.network_grants import GrantFolder, HostGate, add_grant, read_grants, revoke_grants, use_grant
from cloche.agent.terminal import AskTerminal
from cloche.core.errors import InvalidRequest
from cloche.core.policy import Policy

HOST = "api.example.org"


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return where the grants of a user without any are."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state" / "cloche" / network_grants.NAME


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Return a folder."""
    folder = tmp_path / "project"
    folder.mkdir()
    return folder


def has(folder: Path, host: str = HOST, port: int = 443) -> bool:
    """Tell whether a folder has a grant."""
    return use_grant(GrantFolder.at(str(folder)), host, port)


def approved(folder: Path, approver: Approver, host: str = HOST) -> tuple[bool, list[ApprovalEvent]]:
    """Return whether a new sandbox's host is approved, and the events."""
    events: list[ApprovalEvent] = []
    request = partial(ApprovalRequest.of_host, policy=Policy(), runs_on="local")
    gate = HostGate(Gate(approver, on_event=events.append), str(folder), request, events.append)
    return asyncio.run(gate.approve(host, 443)), events


def test_a_grant_is_for_one_folder_host_and_port(file: Path, project: Path, tmp_path: Path) -> None:
    """The file is private, and each use is noted."""
    add_grant(GrantFolder.at(str(project)), HOST, 443)
    assert has(project)
    assert not has(project, port=80)
    assert not has(project, "other.example")
    assert not has(tmp_path)
    assert file.stat().st_mode & 0o777 == 0o600
    (grant,) = read_grants()
    assert grant.since <= grant.last_used
    assert os.listdir(file.parent) == [file.name]


def test_a_folder_that_takes_anothers_place_inherits_nothing(file: Path, project: Path, tmp_path: Path) -> None:
    """Not by a link, not by being moved, and not by the path that another one had; a link to it is the folder."""
    add_grant(GrantFolder.at(str(project)), HOST, 443)
    (tmp_path / "link").symlink_to(project)
    assert has(tmp_path / "link")
    moved = project.rename(tmp_path / "moved")
    assert not has(moved)
    other = tmp_path / "other"
    other.mkdir()
    project.symlink_to(other)
    assert not has(project)
    project.unlink()
    project.mkdir()
    assert not has(project)


@pytest.mark.parametrize(
    ("spoil", "fault"),
    [
        (lambda file: file.chmod(0o644), "its mode is 644"),
        (lambda file: file.chmod(0o660), "its mode is 660"),
        (lambda file: file.parent.chmod(0o777), "its mode is 777"),
        (lambda file: file.write_text("{"), "its text is not valid"),
        (lambda file: file.write_text('{"version": 1, "grants": [{"folder": "/", "host": "a"}]}'), "not valid"),
        (lambda file: file.write_text('{"version": 2, "grants": []}'), "another version"),
        (lambda file: file.write_text("[" * 100_000), "its text is not valid"),
        (lambda file: file.write_bytes(b" " * (network_grants.MOST_BYTES + 1)), "larger than"),
        (lambda file: file.symlink_to(file.rename(f"{file}.own")), "symbolic"),
        (lambda file: (file.unlink(), os.mkfifo(file, 0o600)), "not a regular file"),
        (lambda file: (file.unlink(), file.mkdir(0o700)), "directory"),
    ],
)  # fmt: skip
def test_a_file_that_others_could_write_is_an_error(file: Path, project: Path, spoil: object, fault: str) -> None:
    """It is not ignored, and no host is allowed or asked about by it; nor is it replaced."""
    add_grant(GrantFolder.at(str(project)), HOST, 443)
    assert callable(spoil)
    spoil(file)
    for use in (read_grants, partial(has, project), partial(add_grant, GrantFolder.at(str(project)), "b.example", 80)):
        with pytest.raises(InvalidRequest, match=fault):
            use()
    with pytest.raises(InvalidRequest, match=fault):
        approved(project, _never)


async def _never(_: ApprovalRequest) -> Decision:
    raise AssertionError


@pytest.mark.skipif(os.geteuid() != 0, reason="needs another user's file")
@pytest.mark.parametrize("is_folder", [False, True])
def test_a_file_or_folder_of_another_user_is_an_error(file: Path, project: Path, *, is_folder: bool) -> None:
    """Its owner could allow hosts."""
    add_grant(GrantFolder.at(str(project)), HOST, 443)
    os.chown(file.parent if is_folder else file, 65534, 65534)
    with pytest.raises(InvalidRequest, match="it belongs to user 65534, who could allow hosts"):
        has(project)


def test_there_is_a_most(file: Path, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A grant that is there already is no further one."""
    monkeypatch.setattr(network_grants, "MOST_GRANTS", 2)
    folder = GrantFolder.at(str(project))
    for host in ("a.example", "b.example", "b.example"):
        add_grant(folder, host, 443)
    with pytest.raises(InvalidRequest, match="there are 2 grants, the most; revoke some"):
        add_grant(folder, "c.example", 443)


def test_grants_at_once_are_all_kept(file: Path, project: Path) -> None:
    """Each change reads and replaces the file under a lock."""
    folder = GrantFolder.at(str(project))
    threads = [threading.Thread(target=add_grant, args=(folder, f"a{number}.example", 443)) for number in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(read_grants()) == 20
    assert revoke_grants(lambda grant: grant.host != "a7.example") == 19
    assert [grant.host for grant in read_grants()] == ["a7.example"]


def test_an_approvers_yes_for_the_folder_is_kept(file: Path, project: Path, tmp_path: Path) -> None:
    """The next sandbox there is not asked, which is an event; a plain yes, and another folder, are asked about."""
    asked: list[ApprovalRequest] = []

    async def decide(request: ApprovalRequest) -> Decision:
        asked.append(request)
        is_kept = request.arguments["host"] == HOST
        return Decision(is_approved=True, by="test", is_for_folder=is_kept)

    assert approved(project, decide, "once.example")[0]
    assert approved(project, decide)[0]
    is_approved, (event,) = approved(project, _never)
    assert is_approved
    assert isinstance(event, Decided)
    assert (event.decision.by, event.was_remembered) == ("grant", True)
    assert [request.arguments["folder"] for request in asked] == [str(project.resolve())] * 2
    assert not approved(tmp_path, _no)[0]
    assert not approved(project, _no, "once.example")[0]


def test_a_no_keeps_nothing(file: Path, project: Path) -> None:
    """Also one that says that it is for the folder."""

    async def decide(_: ApprovalRequest) -> Decision:
        return Decision(is_approved=False, by="test", is_for_folder=True)

    assert not approved(project, decide)[0]
    assert not file.exists()


async def _no(_: ApprovalRequest) -> Decision:
    return Decision(is_approved=False, by="test")


@pytest.mark.parametrize(
    ("typed", "names", "decided"),
    [
        ("f\n", ("folder",), (True, True, False)),
        ("y\n", ("folder",), (True, False, False)),
        ("f\n", (), (False, False, False)),
        ("\n", ("folder",), (False, False, False)),
        ("o\n", ("folder", "sandbox"), (True, False, True)),
        ("o\n", ("folder",), (False, False, False)),
    ],
)
def test_the_terminal_has_further_answers_for_hosts(
    typed: str, names: tuple[str, ...], decided: tuple[bool, bool, bool]
) -> None:
    """Always in the folder, or once for a sandbox with a name; left out where there is none."""
    output = io.StringIO()
    request = ApprovalRequest.of_host(HOST, 443, policy=Policy(), runs_on="local", **dict.fromkeys(names, "/a"))
    decision = asyncio.run(AskTerminal(answers=io.StringIO(typed), output=output)(request))
    assert (decision.is_approved, decision.is_for_folder, decision.is_once) == decided
    for name, text in (("folder", "f: yes, always in this folder"), ("sandbox", "o: yes, once")):
        assert (text in output.getvalue()) is (name in names)


def test_no_other_call_is_kept_for_a_folder(file: Path) -> None:
    """Code is no host."""
    request = ApprovalRequest(tool="run_code", risk=Risk.HIGH, arguments={"code": "1", "folder": "/"})
    decision = asyncio.run(AskTerminal(answers=io.StringIO("f\n"), output=io.StringIO())(request))
    assert not decision.is_approved


def test_the_file_is_where_the_users_state_is_and_nowhere_in_a_project(
    file: Path, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A repository's file of grants, and its `.env`, name no grant."""
    monkeypatch.chdir(project)
    add_grant(GrantFolder.at(str(project)), HOST, 443)
    text = file.read_text()
    file.unlink()
    for path in (network_grants.NAME, f".cloche/{network_grants.NAME}", f".local/state/cloche/{network_grants.NAME}"):
        (project / path).parent.mkdir(parents=True, exist_ok=True)
        (project / path).write_text(text)
        (project / path).chmod(0o600)
    (project / ".env").write_text("XDG_STATE_HOME=.local/state\nHOME=.\n")
    monkeypatch.setenv("XDG_STATE_HOME", ".local/state")  # which is no absolute path, so it does not count
    monkeypatch.setenv("HOME", str(file.parent))
    assert not has(project)
