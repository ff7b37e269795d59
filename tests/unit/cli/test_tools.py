"""The table of tools on the command line."""

import json
import re

import pytest

from cloche import InvalidRequest
from cloche.agent.exports import anthropic_tools, openai_response_tools, openai_tools
from cloche.agent.toolbox import Toolbox
from cloche.cli.tools import FORMATS, call_tool, list_tools


@pytest.mark.parametrize("tier", [1, 2, 3, 4])
def test_a_tiers_tools_are_listed_with_their_risks(tier: int, capsys: pytest.CaptureFixture[str]) -> None:
    """A row each, and the words that hold in that tier."""
    assert list_tools(tier, "table") == 0
    table = capsys.readouterr().out
    rows = dict(re.findall(r"^ ([a-z_.]+) +(low|medium|high|critical) ", table, re.MULTILINE))
    assert list(rows) == [tool.name for tool in Toolbox(tier=tier).tools]
    code = {risk for name, risk in rows.items() if "file" not in name}
    assert code == {1: set(), 2: set(), 3: {"high"}, 4: {"critical"}}[tier]
    assert ("with no sandbox" in table) == (tier == 4)


def test_the_usual_tier_is_3(capsys: pytest.CaptureFixture[str]) -> None:
    """As it is for a toolbox."""
    list_tools(None, "json")
    told = json.loads(capsys.readouterr().out)
    assert [tool["name"] for tool in told] == [tool.name for tool in Toolbox(tier=3).tools]
    assert told[0]["schema"] == Toolbox(tier=3).tools[0].schema
    assert told[0]["risk"] == "high"


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        ("openai", openai_tools(Toolbox(tier=3).tools)),
        ("openai-strict", openai_tools(Toolbox(tier=3).tools, is_strict=True)),
        ("openai-responses", openai_response_tools(Toolbox(tier=3).tools)),
        ("anthropic", anthropic_tools(Toolbox(tier=3).tools)),
    ],
)
def test_they_are_exported_for_providers(form: str, expected: object, capsys: pytest.CaptureFixture[str]) -> None:
    """What goes into `tools=`."""
    list_tools(3, form)
    assert json.loads(capsys.readouterr().out) == expected


def test_what_cannot_be_meant_is_named() -> None:
    """With what can."""
    with pytest.raises(InvalidRequest, match=f"--format: 'yaml' is unknown; use one of table, {', '.join(FORMATS)}"):
        list_tools(3, "yaml")
    with pytest.raises(InvalidRequest, match="unknown tier 5"):
        list_tools(5, "table")


@pytest.mark.parametrize(
    ("arguments", "approve", "complaint"),
    [
        ("{'path': 1}", "deny", "the arguments are not JSON"),
        ("{}", "everything", "--approve: 'everything' is unknown; use one of terminal, queue, auto:high, deny"),
        ("{}", "auto:critical", "never approved automatically"),
        ("{}", "auto:huge", "unknown risk 'huge'"),
    ],
)
def test_a_call_that_cannot_be_made_is_refused_before_it(arguments: str, approve: str, complaint: str) -> None:
    """In words."""
    with pytest.raises(InvalidRequest, match=complaint):
        call_tool("run_code", arguments, approve=approve, queue=None, patience_s=None, out=None, options={})


def test_a_call_prints_what_a_model_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    """With exit code 1 where that is an error; nothing runs that nobody approved."""
    for arguments, told, code in (
        ('{"path": "a", "content": "b"}', "Wrote 1 characters to a.\n", 0),
        ('{"path": "/etc/a", "content": "b"}', "InvalidRequest: write_file: /etc/a is not in the workspace", 1),
        ("[]", "InvalidRequest: write_file: give the arguments as an object, not list", 1),
    ):
        done = call_tool("write_file", arguments, approve="deny", queue=None, patience_s=None, out=None, options={})
        assert done == code
        assert capsys.readouterr().out.startswith(told)
    call_tool("run_code", '{"code": "1"}', approve="deny", queue=None, patience_s=None, out=None, options={})
    assert capsys.readouterr().out.startswith("ApprovalDenied: run_code was not approved by cli")
