"""An environment of verifiers, run by its own episodes, with a stand-in for the model."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import verifiers.v1 as vf
from verifiers.v1.utils.loaders import load_environment

from tests.harness.models import says, scripted

HERE, EXAMPLES = Path(__file__).parent, Path(__file__).parents[2] / "examples"


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the example's environment, as `vf-eval` loads it."""
    for folder in (HERE, EXAMPLES):
        monkeypatch.syspath_prepend(str(folder))
    agent = {"harness": {"id": "speaking_harness"}, "runtime": {"type": "subprocess"}}
    return load_environment(vf.resolve_env_config({"taskset": {"id": "verifiers_environment"}, "agent": agent}))


def _episodes(environment: Any, monkeypatch: pytest.MonkeyPatch, *answers: str) -> list[Any]:
    """Return an episode of the one task for each answer of the model."""

    async def main(address: str) -> list[Any]:
        client = vf.EvalClientConfig(base_url=address, api_key_var="MODEL_KEY")
        context = vf.ModelContext(client=client, model="scripted", sampling=vf.SamplingConfig())
        async with environment.serving():
            return [await environment.run_episode(next(iter(environment.taskset)), context) for _ in answers]

    with scripted(*map(says, answers)) as (variables, _):
        monkeypatch.setenv("MODEL_KEY", variables["OPENAI_API_KEY"])
        return asyncio.run(main(variables["OPENAI_BASE_URL"]))


def _program(line: str) -> str:
    return f"```python\n{line}\n```"


def test_a_program_is_rewarded_by_the_cases_that_it_passes(environment: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """All, half, none, and no program at all."""
    answers = [*map(_program, ("print(int(input()) * 2)", "print(6)", "exit(1)")), "no program"]
    episodes = _episodes(environment, monkeypatch, *answers)
    assert [episode.ok for episode in episodes] == [True] * 4
    assert [episode.traces[0].reward for episode in episodes] == [1.0, 0.5, 0.0, 0.0]


def test_what_could_not_be_run_is_an_error_and_no_reward(environment: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Verifiers leaves such rollouts out."""
    monkeypatch.setenv("SANDBOX_TYPE", "docker")
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere.sock")
    (episode,) = _episodes(environment, monkeypatch, _program("print(1)"))
    (trace,) = episode.traces
    assert (episode.ok, [error.type for error in trace.errors]) == (False, ["SandboxError"])
    assert trace.reward is None or not trace.rewards.get("cases_passed")
