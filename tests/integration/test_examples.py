"""The agents of five lines are what they say, and run as they stand."""

import ast
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.harness.models import calls, says, scripted
from tests.harness.texts import blocks

EXAMPLES = Path(__file__).parents[2] / "examples"
MOST_LINES = 6


def run(name: str, *arguments: str, **variables: str) -> str:
    """Return what an example prints."""
    kept: Mapping[str, str] = {name: value for name, value in os.environ.items() if "_proxy" not in name.lower()}
    done = subprocess.run(
        [sys.executable, EXAMPLES / name, *arguments],
        env={**kept, **variables}, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_an_agent_behind_openais_protocol_runs_code() -> None:
    """The protocol itself: tools offered, a call, its answer, the model's words."""
    program = {"code": "print(sum(n * n for n in range(1, 101)))"}
    with scripted(
        calls(("run_code", program), ("read_file", {"path": "missing.txt"})),
        calls(("run_code", {"code": "1 / 0"})),
        says("It heard: {last}"),
    ) as (variables, heard):
        told = run("openai_agent.py", "What", "is", "it?", MODEL="scripted", **variables)
    assert "ZeroDivisionError" in told
    assert told.startswith("It heard: [stderr]")
    assert [request["model"] for request in heard] == ["scripted"] * 3
    assert "run_code" in [tool["function"]["name"] for tool in heard[0]["tools"]]
    assert heard[0]["messages"] == [{"role": "user", "content": "What is it?"}]
    first, second = heard[1]["messages"][-2:]
    assert first == {"role": "tool", "tool_call_id": "call-0", "content": "338350"}
    assert "missing.txt" in second["content"]


def test_plain_functions_are_called_like_any_other() -> None:
    """One writes, one runs what reads."""
    assert run("plain_functions.py") == "Wrote 6 characters to numbers.txt.\n12\n"


def test_a_network_by_name_needs_no_network() -> None:
    """What is refused is told with the reason, and a live sandbox is given more."""
    told = run("network_by_name.py").splitlines()
    assert told[0] == "index.example.org is 198.18.1.0"
    assert told[1].startswith("403 198.51.100.7:80 is not in the allowlist")
    assert told[2] == "denied"
    assert [line.split(":")[1].split()[0] for line in told[3:5]] == ["198.51.100.7", "api.example.com"]
    assert told[5] == "now 198.18.1.1"


def test_what_the_documents_show_is_what_runs() -> None:
    """Line by line."""
    (shown,) = blocks(EXAMPLES.parent / "docs" / "agents.md", "py")
    assert shown in (EXAMPLES / "langchain_agent.py").read_text()


@pytest.mark.parametrize(
    ("name", "function"), [("langchain_agent.py", "ask"), ("openai_agent.py", "ask"), ("plain_functions.py", "main")]
)
def test_an_agent_takes_about_five_lines(name: str, function: str) -> None:
    """Statements of the function that is the user's own, its docstring left out."""
    (found,) = (
        node
        for node in ast.parse((EXAMPLES / name).read_text()).body
        if isinstance(node, ast.AsyncFunctionDef) and node.name == function
    )
    statements = [node for node in ast.walk(found) if isinstance(node, ast.stmt)][2:]
    assert len(statements) <= MOST_LINES
