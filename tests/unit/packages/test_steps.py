"""What a step that failed tells its user."""

from __future__ import annotations

import pytest

from cloche.core.network import NetworkRules, parse_address, parse_rule
from cloche.core.result import Result, Status
from cloche.packages.steps import Step, failed

OPERATOR = "if that is right, the operator can name"


def _refused(host: str, port: int, why: str) -> Result:
    row = {"host": host, "port": port, "why": why, "is_allowed": False, "connections": 1}
    return Result(
        stdout="",
        stderr="Connection reset\n",
        exit_code=2,
        duration=1.0,
        status=Status.ERROR,
        meta={"network": [row, row]},
    )


@pytest.mark.parametrize(
    ("address", "advice"),
    [
        (
            "203.0.113.80",
            f"resolves to 203.0.113.80, a documentation address; {OPERATOR} a.example in packages_hosts",
        ),
        (
            "10.0.0.1",
            f"resolves to 10.0.0.1, a private address; {OPERATOR} a.example in packages_hosts",
        ),
        ("127.0.0.1", "resolves to 127.0.0.1, a loopback address; no rule can allow that"),
    ],
)
def test_a_step_that_was_refused_says_why_and_who_can_open_it(address: str, advice: str) -> None:
    """Its programs do not know: to them a connection was reset."""
    found = parse_address(address)
    assert found is not None
    rules = NetworkRules.parse(mode="allowlist", allow=("a.example",), deny=(), ports=())
    why = rules.decide_address(parse_rule("a.example"), found, host="a.example", port=443)
    said = str(failed(Step(name="resolve"), _refused("a.example", 443, why)))
    assert said == f"packages: cannot resolve: Connection reset; refused: a.example:443 is not allowed; it {advice}"
    said = str(failed(Step(name="resolve"), _refused("b.example", 8443, rules.decide("b.example", 8443).why)))
    assert said.endswith(f"is not allowed; the rules are a.example; {OPERATOR} b.example:8443 in packages_hosts")
