"""The agents of five lines are what they say, and run as they stand."""

import ast
import asyncio
import contextlib
import inspect
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.harness.callers import load_file, trl_method
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


def test_ten_calls_are_one_program() -> None:
    """In place of ten turns of a model."""
    assert run("code_mode.py").endswith("in all 539.20, most of it nails\n\n")


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
    assert told[1].startswith("403 198.51.100.7:80 is not allowed; the rules are")
    assert told[2] == "denied"
    assert [line.split(":")[1].split()[0] for line in told[3:5]] == ["198.51.100.7", "api.example.com"]
    assert told[5] == "now 198.18.1.1"


def test_what_the_documents_show_is_what_runs() -> None:
    """Line by line."""
    for page, name in (("agents.md", "langchain_agent.py"), ("fleet.md", "ray_data.py")):
        (shown,) = blocks(EXAMPLES.parent / "docs" / page, "py")
        assert shown in (EXAMPLES / name).read_text()


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


class Flags:
    """Stand in for a tensor of truth values."""

    def __init__(self, values: Any) -> None:
        self.values = values

    def all(self, dim: int) -> "Flags":
        """Reduce one dimension."""
        return Flags(self.values.all(axis=dim))

    def any(self) -> bool:
        """Reduce all."""
        return bool(self.values.any())

    def nonzero(self, *, as_tuple: bool) -> Any:
        """Return where they are true."""
        assert as_tuple
        return self.values.nonzero()


TORCH = SimpleNamespace(
    nan=np.nan, float32=np.float32, isnan=lambda values: Flags(np.isnan(values)),
    zeros=lambda *shape, **_: np.zeros(shape), tensor=lambda values, dtype, **_: np.array(values, dtype),
)  # fmt: skip


@pytest.fixture
def running_loop() -> Iterator[asyncio.AbstractEventLoop]:
    """Return the loop of another thread, as a trainer has one."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def test_trl_is_told_of_programs_that_could_not_be_run(
    running_loop: asyncio.AbstractEventLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer's own code calls the reward: fractions of the cases, and no number where nothing ran."""
    reward = load_file("trl_reward", EXAMPLES / "trl_reward.py").cases_passed
    calculate = trl_method(
        "_calculate_rewards", torch=TORCH, nn=SimpleNamespace(Module=type(None)), asyncio=asyncio,
        profiling_context=lambda *_: contextlib.nullcontext(), is_async_callable=inspect.iscoroutinefunction,
        logger=logging.getLogger("trl"), gather=lambda values: values, is_conversational=None,
    )  # fmt: skip
    trainer = SimpleNamespace(
        accelerator=SimpleNamespace(device="cpu"), reward_funcs=[reward], reward_processing_classes=[None],
        reward_func_names=["cases_passed"], state=None, _log_completion_extra=None, _log_metric=None,
        environments=None, async_loop=running_loop,
    )  # fmt: skip
    texts = [f"So:\n```python\n{line}\n```" for line in ("print(int(input()) * 2)", "print(6)", "exit(1)")] + ["?"]
    completions: list[Any] = [texts[0], *([{"role": "assistant", "content": text}] for text in texts[1:])]
    cases = [{"stdin": "3", "stdout": "6"}, {"stdin": "-4", "stdout": "-8"}]
    inputs = [{"prompt": "double", "cases": cases} for _ in texts]

    def rewards() -> list[float]:
        values = calculate(trainer, inputs, ["double"] * len(texts), completions, [[1]] * len(texts))
        return [float(value) for value in values[:, 0]]

    assert rewards() == [1.0, 0.5, 0.0, 0.0]
    monkeypatch.setenv("SANDBOX_TYPE", "docker")
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere.sock")
    assert np.isnan(rewards()[:3]).all()
