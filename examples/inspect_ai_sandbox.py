"""Let Inspect AI run each sample's program in a sandbox of its own. Needs `cloche[inspect]`, no model and no key."""

from inspect_ai import Task, eval  # noqa: A004 - its name
from inspect_ai.dataset import Sample
from inspect_ai.solver import Generate, Solver, TaskState, solver
from inspect_ai.util import sandbox


@solver
def run_it() -> Solver:
    async def solve(state: TaskState, generate: Generate) -> TaskState:
        state.output.completion = (await sandbox().exec(["python3", "-c", state.input_text])).stdout
        return state

    return solve


samples = [Sample(f"print(6 * {n})") for n in range(1, 4)]
(log,) = eval(Task(samples, solver=run_it(), sandbox="cloche"), model="mockllm/model", display="none")
print(log.status, *(sample.output.completion.strip() for sample in log.samples or ()))
