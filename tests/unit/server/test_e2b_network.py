"""E2B's fields about the network, as rules of ours."""

from typing import Any

import pytest

from cloche.core.network import NetworkRules
from cloche.server.e2b.errors import E2BError
from cloche.server.e2b.network import Rules, rules_of
from cloche.server.e2b.new_sandbox import Network

ALL = "0.0.0.0/0"


@pytest.mark.parametrize(
    ("fields", "access", "rules"),
    [
        ({}, None, Rules()),
        ({}, True, Rules()),
        ({}, False, Rules(mode="allowlist")),
        ({"denyOut": [ALL]}, None, Rules(mode="allowlist")),
        ({"denyOut": [ALL], "allowOut": ["a.example", "*.b.example", "8.8.8.8"]}, None,
         Rules(mode="allowlist", allow=("a.example", "*.b.example", "8.8.8.8"))),
        ({"allowOut": ["a.example"]}, False, Rules(mode="allowlist", allow=("a.example",))),
        ({"denyOut": [ALL], "allowOut": ["8.8.8.9/24"]}, None, Rules(mode="allowlist", allow=("8.8.8.0/24",))),
        ({"denyOut": [ALL], "allowOut": [ALL]}, None, Rules()),
        ({"denyOut": ["8.8.8.0/30"], "allowOut": ["8.8.8.1"]}, None, Rules(deny=("8.8.8.2/31", "8.8.8.0/32"))),
        ({"denyOut": ["8.8.8.8"], "allowOut": ["8.8.0.0/16"]}, None, Rules()),
        ({"allowPublicTraffic": False, "maskRequestHost": "localhost:${PORT}", "dnsServers": ["8.8.8.8"],
          "rules": {"a.example": [{}]}, "httpsPorts": [3000]}, None, Rules()),
        ({"rules": {"*.a.example": [{"transform": {"headers": {"X-A": "b"}}}]}}, None,
         Rules(headers={"*.a.example": {"X-A": "b"}})),
    ],
)  # fmt: skip
def test_what_is_allowed_beats_what_is_denied(fields: dict[str, Any], access: bool | None, rules: Rules) -> None:
    """The same connections are allowed as by E2B's order; our own order denies first."""
    assert rules_of(Network.model_validate(fields), access) == rules


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"allowOut": ["a.example"]}, "you must include 'ALL_TRAFFIC' in deny out"),
        ({"denyOut": ["a.example"]}, "invalid denied CIDR a.example"),
        ({"denyOut": ["10.0.0.0/8:22"]}, "invalid denied CIDR"),
        ({"denyOut": ["10.0.0.0/33"]}, "invalid denied CIDR"),
        ({"allowOut": ["8.8.8.8/"], "denyOut": [ALL]}, None),
        ({"egressProxy": {"address": "a.example:1080"}}, "network.egressProxy"),
        ({"egressProxy": {}}, "network.egressProxy"),
        ({"rules": {"a.example": [{}, {}]}}, "at most 1 transform rule"),
        ({"rules": {"a.example": [{"transform": {"headers": {"A": "${e2b.identity.tokens.a}"}}}]}}, "identities"),
        ({"dnsServers": ["1.1.1.1"]}, "network.dnsServers"),
        ({"httpsPorts": [3000, 49983]}, "network.httpsPorts"),
        ({"maskRequestHost": "a\r\nX: b"}, "mask request host is not valid"),
        ({"maskRequestHost": "a/b"}, "mask request host is not valid"),
    ],
)
def test_what_is_wrong_or_not_supported_is_refused(fields: dict[str, Any], message: str | None) -> None:
    """It is refused by its name, never ignored; a wrong host by the rules themselves."""
    if message is None:
        with pytest.raises(Exception, match=r"8\.8\.8\.8/"):
            NetworkRules.parse(mode="allowlist", allow=rules_of(Network.model_validate(fields), None).allow)
        return
    with pytest.raises(E2BError, match=message.replace(".", r"\.")) as error:
        rules_of(Network.model_validate(fields), None)
    assert error.value.status == 400
