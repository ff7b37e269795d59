"""What `cloche network` says of hosts, before anything is connected to, and of those allowed for folders."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import click
import pytest

from cloche.agent.network_grants import GrantFolder, add_grant
from cloche.cli.app import root
from cloche.cli.network import decide_on
from cloche.core.errors import InvalidRequest

LIMITED = "a.example/GET:/x"


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An operator without a configuration, in an empty folder."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "settings"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def decided(target: str, capsys: pytest.CaptureFixture[str], **options: Any) -> tuple[int, list[dict[str, Any]]]:
    """Return the exit code and the rows."""
    is_resolved = options.pop("resolve", False)
    code = decide_on(target, options, is_resolved=is_resolved, as_json=True)  # type: ignore[arg-type]
    return code, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("target", "options", "code", "rule", "origin", "why"),
    [
        ("a.example", {}, 1, "", "default", "the network of this sandbox is 'off'"),
        (
            "A.example.",
            {"network_allow": "*.example.org,a.example"},
            0,
            "a.example",
            "argument",
            "is allowed by a.example",
        ),
        (
            "a.example:8443",
            {"network_allow": "a.example"},
            1,
            "",
            "argument",
            "the rules for this host are a.example; allow",
        ),
        ("b.example", {"network_allow": "a.example"}, 1, "", "argument", "the rules are a.example; allow"),
        ("a.example", {"network": "open"}, 0, "", "argument", "allowed by network 'open', if its address is public"),
        ("8.8.8.8", {"network": "open"}, 0, "", "argument", "8.8.8.8:443 is allowed by network 'open'"),
        ("0x0a000005", {"network": "open"}, 1, "", "argument", "10.0.0.5:443 is not allowed; it is a private address"),
        ("a.example", {"network": "open", "network_deny": "*.example"}, 1, "*.example", "argument", "network_deny"),
        (
            "a.example:22",
            {"preset": "network-open", "network_ports": "22"},
            0,
            "",
            "preset network-open (argument)",
            "",
        ),
        ("a.example", {"network": "bridge"}, 0, "", "argument", "network 'bridge' has no rules"),
        ("a.example/GET:/x", {"network_allow": LIMITED}, 0, LIMITED, "argument", f"is allowed by {LIMITED}"),
        (
            "a.example/GET:/y",
            {"network_allow": LIMITED},
            1,
            LIMITED,
            "argument",
            "443: GET /y is not allowed; the rules",
        ),
        ("a.example/GET:/y", {"network_allow": "a.example"}, 0, "a.example", "argument", "is allowed by a.example"),
    ],
)
def test_a_host_is_decided_with_rule_and_origin(
    target: str,
    options: dict[str, Any],
    code: int,
    rule: str,
    origin: str,
    why: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Allowed or not, by which rule, of which source, and why; the exit code says it, too."""
    found, rows = decided(target, capsys, **options)
    (row,) = rows
    assert (found, row["allowed"], row["rule"], row["from"]) == (code, code == 0, rule, origin)
    assert why in row["why"]


def test_every_port_has_to_be_allowed(capsys: pytest.CaptureFixture[str]) -> None:
    """One of two that is refused is told by the exit code."""
    code, rows = decided("a.example:80,443", capsys, network_allow="a.example:443")
    assert (code, [(row["port"], row["allowed"]) for row in rows]) == (1, [(80, False), (443, True)])


def test_a_files_rule_has_its_files_name(own_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The origin is the file that the rule stands in."""
    (own_folder / "mine.yaml").write_text("network: [a.example]")
    _, rows = decided("a.example", capsys, config="mine.yaml")
    assert rows[0]["from"] == str(own_folder / "mine.yaml")


def test_addresses_are_decided_one_by_one(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """With --resolve: the host may be reached where one of its addresses may."""
    answers = ["10.0.0.7", "8.8.8.8", "fe80::1%2", "8.8.8.8"]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [(0, 0, 0, "", (answer, 443)) for answer in answers])
    code, rows = decided("a.example", capsys, network="open", resolve=True)
    assert [(row["address"], row["allowed"]) for row in rows] == [
        ("10.0.0.7", False), ("8.8.8.8", True), ("fe80::1%2", False),
    ]  # fmt: skip
    assert code == 0
    assert rows[0]["why"] == (
        "a.example:443 is not allowed; it resolves to 10.0.0.7, a private address; allow it with network_allow "
        '"a.example@10.0.0.0/8"'
    )
    answers[:] = ["127.0.0.1"]
    code, rows = decided("a.example", capsys, network_allow="a.example@0.0.0.0/0", resolve=True)
    why = "a.example:443 is not allowed; it resolves to 127.0.0.1, a loopback address; no rule can allow that"
    assert (code, rows[0]["why"]) == (1, why)


def test_a_refused_name_is_not_resolved(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is any without --resolve; and one that nobody knows is refused."""

    def unknown(*_: Any, **__: Any) -> Any:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    assert decided("a.example", capsys, network="open")[0] == 0
    assert decided("a.example", capsys, network="off", resolve=True)[1][0]["why"].startswith("a.example:443 is not")
    code, rows = decided("a.example", capsys, network="open", resolve=True)
    assert (code, rows[0]["why"]) == (1, "a.example cannot be resolved here: Name or service not known")


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("*.example.org", "stands for several hosts"),
        ("10.0.0.0/8", "stands for several hosts"),
        ("https://a.example/x", "has a scheme"),
        ("a.example:x", "has no port 'x'"),
        ("a b", "is empty or has blanks"),
    ],
)
def test_what_is_no_host_is_wrong_usage(target: str, reason: str) -> None:
    """It is named, with the reason."""
    with pytest.raises(InvalidRequest, match=r"^HOST: ") as caught:
        decide_on(target, {})
    assert reason in str(caught.value)


def test_options_of_the_network_are_repeatable() -> None:
    """Each of several values counts, and the options have the names that one would guess."""
    command = root.get_command(click.Context(root), "run")
    assert command is not None
    words = "--network-allow a.example --network-allow b.example:80,8443 --network-deny 10.0.0.0/8 --network-port 22"
    params = command.make_context("run", [*words.split(), "--network-port", "8443", "x.py"]).params
    assert (params["network_allow"], params["network_deny"], params["network_ports"]) == (
        "a.example,b.example:80,8443", "10.0.0.0/8", "22,8443",
    )  # fmt: skip


def command(*words: str) -> int:
    """Run a command of the group, and return its exit code."""
    return int(root.main(["network", *words], standalone_mode=False))


def test_grants_are_listed_and_revoked(
    own_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those of a folder or of all, of a host or of all; the exit code says whether there was one."""
    monkeypatch.setenv("XDG_STATE_HOME", str(own_folder / "state"))
    (own_folder / "other").mkdir()
    assert command("grants") == 0
    assert "there are no grants" in capsys.readouterr().err
    for host in ("a.example:443", "b.example:80", "b.example:443"):
        add_grant(GrantFolder.at("."), host.partition(":")[0], int(host.partition(":")[2]))
    add_grant(GrantFolder.at("other"), "a.example", 443)
    assert command("grants", "--json") == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["host"] for row in rows] == ["a.example:443", "b.example:80", "b.example:443", "a.example:443"]
    assert [Path(row["folder"]) for row in rows] == [own_folder] * 3 + [own_folder / "other"]
    assert rows[0]["since"] == rows[0]["last_used"]
    assert command("revoke", "b.example:443") == 0
    assert command("revoke", "b.example:443") == 1
    assert command("revoke", "A.Example", "--folder", "other") == 0
    assert command("revoke") == 0
    assert command("revoke", "--all-folders") == 1
