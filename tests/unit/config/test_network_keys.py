"""Keys of the network, and the ceilings that are no amounts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from cloche.config.keys import Settings
from cloche.config.settings import check_runnable, load_settings
from cloche.core.ceilings import NetworkCeiling
from cloche.core.enforcement import Level
from cloche.core.errors import InvalidRequest, PolicyDenied


class Operator:
    """A home and a working directory of the test's own."""

    def __init__(self, root: Path) -> None:
        self.home, self.cwd = root / "home", root / "work"
        (self.home / ".config" / "cloche").mkdir(parents=True)
        self.cwd.mkdir()
        self.file = self.home / ".config" / "cloche" / "cloche.yaml"

    def load(
        self, arguments: Mapping[str, Any] | None = None, *, named: Path | None = None, **environ: str
    ) -> Settings:
        return load_settings(arguments, environ=environ, cwd=self.cwd, home=self.home, config_file=named)


@pytest.fixture
def operator(tmp_path: Path) -> Operator:
    """An operator without files."""
    return Operator(tmp_path)


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("[A.example, '*.B.example:8443']", ("a.example", "*.b.example:8443")),
        ("'a.example, b.example'", ("a.example", "b.example")),
        ("'a.example:80,8443,b.example'", ("a.example:80,8443", "b.example")),
        ("'db:5432,6432@10.0.0.0/8,fd00::/8,b.example'", ("db:5432,6432@10.0.0.0/8,fd00::/8", "b.example")),
        ("['db:5432,6432@10.0.0.0/8']", ("db:5432,6432@10.0.0.0/8",)),
        ("'db:5432@10.0.0.0/8,10.0.0.5:22'", ("db:5432@10.0.0.0/8", "10.0.0.5:22")),
        ("'a.example:80,8443,b.example:80,8443'", ("a.example:80,8443", "b.example:80,8443")),
        ("'A.example:80,443/GET,POST:/X,b.example'", ("a.example:80,443/GET,POST:/X", "b.example")),
        (
            "'a@10.0.0.0/8,b.example/GET,PUT:/,c.example/GET,PUT:/'",
            ("a@10.0.0.0/8", "b.example/GET,PUT:/", "c.example/GET,PUT:/"),
        ),
        ("['A.example/GET:/a,B']", ("a.example/GET:/a,B",)),
    ],
)
def test_hosts_are_a_list_or_text(operator: Operator, text: str, hosts: tuple[str, ...]) -> None:
    """In text with commas, a port, a network and a method belong to the rule before them."""
    operator.file.write_text(f"network_allow: {text}")
    assert operator.load().policy.network_allow == hosts


@pytest.mark.parametrize(
    ("text", "ports"),
    [("8443", (8443,)), ("'8443, 22'", (22, 8443)), ("[8443, '22']", (22, 8443)), ("[]", ())],
)
def test_ports_are_one_a_list_or_text(operator: Operator, text: str, ports: tuple[int, ...]) -> None:
    """Every spelling of further ports is read."""
    operator.file.write_text(f"network_ports: {text}")
    assert operator.load().policy.network_ports == ports


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("network_allow: ['https://a.example/x']", "network_allow: 'https://a.example/x' has a scheme"),
        ("network_allow: [443]", "network_allow: 443 is not text"),
        ("network_allow: '443'", "network_allow: '443' is an unspecified address"),
        ("network_deny: ['a.example/x']", "network_deny: 'a.example/x' has a path"),
        ("network_deny: ['*']", "network_deny: '*' means every host"),
        ("network_ports: [https]", "network_ports: \"'https'\" is not a port"),
        ("network_ports: [53]", "network_ports: 53 is used by the sandbox's own name server"),
        ("network_ports: true", "network_ports: 'True' is not a port"),
        ("on_network: maybe", "on_network: 'maybe' is unknown; use one of refuse, ask"),
        ("network: bridge\nnetwork_allow: [a.example]", "network is bridge but network_allow lists hosts"),
        ("network: open\nnetwork_allow: [a.example]", "network is open but network_allow lists hosts"),
        (
            "network: open\nnetwork_ports: 22\nnetwork_allow: ['a.example:22']",
            "network is open but network_allow lists",
        ),
        ("ceilings: {network: lan}", "ceilings.network.mode: 'lan' is not a network setting"),
        ("ceilings: {network: {hosts: ['*']}}", "ceilings.network.hosts: '*' means every host"),
        ("ceilings: {network: {mode: open, hosts: [a.example]}}", "ceilings.network.hosts: mode 'open' has no list"),
        ("ceilings: {network: {networks: [127.0.0.0/8]}}", "ceilings.network.networks: '127.0.0.0/8' has the network"),
        (
            "ceilings: {network: {ports: [1]}}",
            "ceilings.network: unknown key 'ports'; known keys: mode, hosts, networks",
        ),
        ("ceilings: {packages: auto}", "ceilings.packages: 'auto' is not a list"),
        ("ceilings: {packages: ['pandas<2']}", "ceilings.packages"),
        ("ceilings: {level: high}", "ceilings.level: unknown level 'high'"),
    ],
)
def test_wrong_values_are_named(operator: Operator, text: str, named: str) -> None:
    """A wrong value is refused by its key, with the reason."""
    operator.file.write_text(text)
    with pytest.raises(InvalidRequest) as caught:
        operator.load()
    assert named in str(caught.value)


def test_mode_open_takes_hosts_that_add_to_it(operator: Operator) -> None:
    """A host on another port, or one that may resolve to an address that is not public."""
    operator.file.write_text("network: open\nnetwork_allow: ['db:5432@10.0.0.0/8', 'git.example:22', '10.0.0.5']")
    assert operator.load().policy.network == "open"


@pytest.mark.parametrize(
    ("own", "arguments", "mode"),
    [
        ("", {"network_allow": ["a.example"]}, "allowlist"),
        ("network: open", {"network_allow": ["a.example"]}, "allowlist"),
        ("", {"network_allow": ["a.example"], "network": "off"}, "off"),
        ("", {"network_allow": ["a.example"], "network": True}, "allowlist"),
        ("", {"network_allow": "a.example", "preset": "network-allowlist"}, "allowlist"),
        ("", {"network_allow": []}, "off"),
        ("network_allow: [a.example]", {}, "off"),
        ("network_allow: [a.example]", {"network": True}, "allowlist"),
        ("", {"network": ["a.example"]}, "allowlist"),
        ("", {"network": "bridge"}, "bridge"),
        ("", {"preset": "network-open"}, "open"),
    ],
)
def test_hosts_that_are_listed_for_one_run_are_meant(
    operator: Operator, own: str, arguments: dict[str, Any], mode: str
) -> None:
    """A list among the arguments is an allowlist by itself; one in a file waits until the network is on."""
    operator.file.write_text(own)
    assert operator.load(arguments).policy.network == mode


def test_what_is_denied_adds_up(operator: Operator) -> None:
    """An argument denies more, and the origin names both."""
    operator.file.write_text("network_deny: [a.example]")
    settings = operator.load({"network_deny": ["b.example"]})
    assert settings.policy.network_deny == ("a.example", "b.example")
    assert settings.origins["network_deny"] == f"{operator.file}; argument"


@pytest.mark.parametrize(
    ("text", "ceiling"),
    [
        ("off", NetworkCeiling(mode="off")),
        ("open", NetworkCeiling(mode="open")),
        ("[A.example]", NetworkCeiling(mode="allowlist", hosts=("a.example",))),
        ("{hosts: [a.example]}", NetworkCeiling(mode="allowlist", hosts=("a.example",))),
        ("{mode: allowlist}", NetworkCeiling(mode="allowlist")),
        ("{mode: allowlist, hosts: []}", NetworkCeiling(mode="allowlist", hosts=())),
        ("{networks: [10.0.0.0/8]}", NetworkCeiling(mode="open", networks=("10.0.0.0/8",))),
    ],
)
def test_spellings_of_a_ceiling_of_the_network(operator: Operator, text: str, ceiling: NetworkCeiling) -> None:
    """A mode, a list of hosts, or both with networks."""
    operator.file.write_text(f"ceilings: {{network: {text}}}")
    assert operator.load().ceilings == {"network": ceiling}


@pytest.mark.parametrize(
    ("ceilings", "asked", "above"),
    [
        ("network: allowlist", {"network": "open"}, "network: open (argument)"),
        ("network: [a.example]", {"network_allow": ["b.example"]}, "network_allow: b.example (argument)"),
        ("network: open", {"network": ["db@10.0.0.0/8"]}, "network: db@10.0.0.0/8 (argument)"),
        ("network: open", {"network": "bridge"}, "network: bridge (argument)"),
        ("network: open", {"preset": "network-open"}, ""),
        ("network: off", {"preset": "network-open"}, "preset: open (preset network-open (argument))"),
        ("network: ['*.a.example']", {"network_allow": ["b.a.example"]}, ""),
        ("network: [a.example]", {"network": "allowlist"}, ""),
        ("network: [a.example]", {"network": "off", "network_allow": ["b.example"]}, ""),
        ("packages: [numpy]", {"packages": ["numpy>=2"]}, ""),
        ("packages: [numpy]", {"packages": ["rich"]}, "packages: rich (argument)"),
        ("packages: none", {"packages": ["rich"]}, "packages: rich (argument)"),
        ("packages: [numpy]", {"packages": "auto"}, "packages: auto (argument)"),
    ],
)
def test_more_than_a_ceiling_is_denied(operator: Operator, ceilings: str, asked: dict[str, Any], above: str) -> None:
    """What is no amount is not lowered: the error names what is asked for, by whom, and the ceiling's file."""
    operator.file.write_text(f"ceilings: {{{ceilings}}}")
    if not above:
        operator.load(asked)
        return
    with pytest.raises(PolicyDenied) as caught:
        operator.load(asked)
    assert str(caught.value).startswith(f"{above} is above the ceiling in {operator.file} (ceilings.")


def test_a_ceiling_with_methods_and_paths_is_told_as_it_is(operator: Operator) -> None:
    """A request within it passes, and no other host or method; its text keeps its capitals."""
    operator.file.write_text("ceilings: {network: {hosts: ['a.example/GET:/X/*']}}")
    assert operator.load({"network_allow": ["a.example/GET:/X/y"]}).policy.network_allow == ("a.example/GET:/X/y",)
    for rule in ("a.example", "a.example/POST:/X/y", "a.example/GET:/x/y"):
        with pytest.raises(PolicyDenied, match=r"\(ceilings.network: allowlist: a.example/GET:/X/\*\)"):
            operator.load({"network_allow": [rule]})


def test_ceilings_of_several_files_hold_together(operator: Operator, tmp_path: Path) -> None:
    """Naming another file lifts none of them."""
    operator.file.write_text("ceilings: {network: [a.example, b.example], packages: [numpy], level: jail}")
    named = tmp_path / "mine.yaml"
    named.write_text("ceilings: {network: [b.example, c.example], packages: [numpy, rich], level: confined}")
    assert operator.load(named=named).ceilings == {
        "network": NetworkCeiling(mode="allowlist", hosts=("b.example",)), "packages": ("numpy",), "level": Level.JAIL,
    }  # fmt: skip


def test_ceilings_are_shown(operator: Operator) -> None:
    """Each on one line, with its file."""
    operator.file.write_text(
        "ceilings: {network: {hosts: [a.example], networks: [10.0.0.0/8]}, packages: none, level: jail}"
    )
    rows = {key: value for key, value, _ in operator.load().as_rows()}
    assert {name: rows[f"ceilings.{name}"] for name in ("network", "packages", "level")} == {
        "network": "allowlist: a.example, addresses in 10.0.0.0/8", "packages": "none", "level": "jail",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("asked", "required", "is_denied"),
    [
        ({}, Level.JAIL, False),
        ({"level": "jail"}, Level.JAIL, False),
        ({"require": "vm"}, Level.VM, False),
        ({"require": "process"}, Level.JAIL, False),
        ({"level": "process"}, Level.JAIL, True),
        ({"level": "confined"}, Level.JAIL, True),
        ({"backend": "subprocess"}, Level.JAIL, True),
        ({"tier": 4, "backend": "none"}, Level.JAIL, True),
    ],
)
def test_a_ceiling_of_the_level_is_the_weakest_that_runs(
    operator: Operator, asked: dict[str, Any], required: Level, is_denied: bool
) -> None:
    """A weaker level gives a program more: it is required, whatever else is, and no source may ask for less."""
    operator.file.write_text("ceilings: {level: jail}")
    settings = operator.load(asked)
    assert settings.policy.require_level is required
    if is_denied:
        with pytest.raises(PolicyDenied, match=f"level jail is required \\(ceiling in {operator.file}"):
            check_runnable(settings)
    else:
        check_runnable(settings)
