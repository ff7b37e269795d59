"""An environment for `verifiers`: programs are asked for, checked in Cloche, and rewarded by the cases they pass."""

import re
from typing import Any

import verifiers.v1 as vf

import cloche

DOUBLE = [{"stdin": "3", "stdout": "6"}, {"stdin": "-4", "stdout": "-8"}]
CASES = {"Print the double of the number on standard input.": DOUBLE}


class ProgramData(vf.TaskData):
    """A task: its prompt, and the cases of `cloche.check`."""

    cases: list[dict[str, Any]]


class ProgramTask(vf.Task[ProgramData]):
    """Reward a program; a failure of the infrastructure is an error of the rollout, never a reward of 0."""

    @vf.reward
    async def cases_passed(self, trace: vf.Trace) -> float:
        """Return the fraction of the cases that the program passes."""
        blocks = re.findall(r"```python\n(.*?)```", trace.last_reply, re.DOTALL)
        if not blocks:
            return 0.0
        verdict = await cloche.acheck(blocks[-1], self.data.cases, timeout="10s")
        if verdict.score is None:
            raise vf.SandboxError(verdict.why)
        return verdict.score


class ProgramTaskset(vf.Taskset[ProgramTask, vf.TasksetConfig]):
    """The tasks of `CASES`."""

    def load(self) -> list[ProgramTask]:
        """Return all tasks."""
        return [ProgramTask(ProgramData(prompt=prompt, cases=cases)) for prompt, cases in CASES.items()]


__all__ = ["ProgramTaskset"]
