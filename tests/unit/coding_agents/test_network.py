"""What an agent is told of its limits, and what is told of its network afterwards."""

from __future__ import annotations

from cloche.coding_agents.limits_text import BEGIN, END, limit_lines, with_limits
from cloche.coding_agents.network_summary import MOST_ROWS, never_asked, summarize
from cloche.core.limits import Limits
from cloche.core.policy import Policy


def row(host: str, *, is_allowed: bool = True, why: str = "", port: int = 443, sent: int = 1) -> dict[str, object]:
    """Return a row of traffic."""
    return {
        "host": host, "port": port, "is_allowed": is_allowed, "why": why, "connections": 1, "sent": sent, "received": 2,
    }  # fmt: skip


def test_the_users_own_instructions_stay() -> None:
    """The block of limits is written anew each time, at the end, and once."""
    first = with_limits("# Mine\n\nUse tabs.\n", ["one"])
    assert first.startswith("# Mine\n\nUse tabs.\n\n" + BEGIN)
    again = with_limits(first + "\nAppended later.\n", ["two"])
    assert again.count(BEGIN) == again.count(END) == 1
    assert "Use tabs.\nAppended later.\n" in again
    assert "- two" in again
    assert "- one" not in again
    assert with_limits(with_limits("", ["one"]), ["one"]) == with_limits("", ["one"])


def test_limits_name_hosts_ports_and_folders() -> None:
    """And whether somebody is asked about others."""
    policy = Policy(network="allowlist", network_allow=("a.example",), on_network="ask", host_ports=(6006,))
    text = "\n".join(limit_lines(policy, Limits(), folder="/home/me/project", read_only=["/home/me/lib"]))
    for words in ("a.example; for others the user is asked", "127.0.0.1:6006", "/home/me/lib", "/home/me/project"):
        assert words in text
    alone = "\n".join(limit_lines(policy, Limits(), folder="/", is_alone=True))
    assert "others are refused" in alone
    assert "There is no network." in limit_lines(Policy(), Limits(), folder="/")


def test_a_summary_has_telemetry_apart_and_an_end() -> None:
    """Text of a guest is escaped, and rows have a bound."""
    assert "t.example" in never_asked(["t.example"])
    rows = [
        row("a.example"), row("a.example", port=80), row("x.datadoghq.com", is_allowed=False, why="no"),
        row("t.example", is_allowed=False, why="no"), row("b.example", is_allowed=False, why="GET /\x1b[2J is not"),
        row("c.example", why="c.example:443 cannot be connected to", sent=0) | {"received": 0},
        *(row(f"{number}.example", is_allowed=False, why="no") for number in range(200)),
    ]  # fmt: skip
    summary = summarize(rows, ["t.example"])
    assert [one.host for one in summary.reached] == ["a.example"] * 2
    assert summary.telemetry == ("x.datadoghq.com", "t.example")
    assert (len(summary.refused), summary.more) == (MOST_ROWS, 201 - MOST_ROWS)
    assert "\x1b" not in str(summary.as_dict())
    reached, refused, telemetry = summary.lines()
    assert reached == "reached: a.example"
    assert refused.endswith("and 45 more")
    assert telemetry == "telemetry refused: x.datadoghq.com, t.example"
