"""An environment for `verifiers`: programs are asked for, run in Cloche, and rewarded by the cases that they pass."""

import re

import verifiers.v1 as vf

import cloche

CASES = {"Print the double of the number on standard input.": [("3", "6"), ("-4", "-8")]}
INFRASTRUCTURE = (cloche.BackendUnavailable, cloche.StartFailed, cloche.OutcomeUnknown)


class ProgramData(vf.TaskData):
    """A task: its prompt, and pairs of input and expected output."""

    cases: list[tuple[str, str]]


class ProgramTask(vf.Task[ProgramData]):
    """Reward a program; a failure of the infrastructure is an error of the rollout, never a reward of 0."""

    @vf.reward
    async def cases_passed(self, trace: vf.Trace) -> float:
        """Return the fraction of the cases that the program passes."""
        blocks = re.findall(r"```python\n(.*?)```", trace.last_reply, re.DOTALL)
        if not blocks:
            return 0.0
        try:
            results = [await cloche.arun(blocks[-1], stdin=given, timeout="10s") for given, _ in self.data.cases]
        except INFRASTRUCTURE as error:
            raise vf.SandboxError(str(error)) from error
        wanted = [expected for _, expected in self.data.cases]
        passed = [
            result.ok and result.stdout.split() == out.split() for result, out in zip(results, wanted, strict=True)
        ]
        return sum(passed) / len(passed)


class ProgramTaskset(vf.Taskset[ProgramTask, vf.TasksetConfig]):
    """The tasks of `CASES`."""

    def load(self) -> list[ProgramTask]:
        """Return all tasks."""
        return [ProgramTask(ProgramData(prompt=prompt, cases=cases)) for prompt, cases in CASES.items()]


__all__ = ["ProgramTaskset"]
