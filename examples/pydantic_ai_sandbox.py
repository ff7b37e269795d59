"""Give a Pydantic AI agent a sandbox as its workspace. The model here calls every tool. Needs `cloche[pydantic-ai]`."""

from pydantic_ai import Agent, RunContext
from pydantic_ai.models.test import TestModel

from cloche.integrations.pydantic_ai import ClocheWorkspace

agent = Agent(TestModel(), capabilities=[ClocheWorkspace()])


@agent.tool
async def count_up(ctx: RunContext[None]) -> str:
    """Append a line to a file, and return the file."""
    return (await ctx.workspace.run("echo line >> notes; cat notes", shell=True)).stdout


first = agent.run_sync("Count.")
again = agent.run_sync("Go on.", workspace=first.workspace.ref)
print(first.output, again.output, sep="\n")
