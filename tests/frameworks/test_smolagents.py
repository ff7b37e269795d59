"""smolagents, whose agent has its Python in a sandbox of E2B's, unmodified, against `cloche serve --e2b`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from smolagents import ChatMessage, CodeAgent, MessageRole, Model, tool

from tests.harness.e2b import E2BService, serving, variables

STEPS = (
    "state = {'a': list(range(10))}\nprint('sum', sum(state['a']))",
    "import os\nprint(os.getcwd())\ndoubled = double(sum(state['a']))",
    "final_answer(doubled)",
)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[E2BService]:
    """Serve for all tests here."""
    with serving(tmp_path_factory.mktemp("e2b")) as service, variables(service):
        yield service


class Scripted(Model):
    """A model that writes one program after the other."""

    def generate(self, messages: object, **options: object) -> ChatMessage:
        """Return the next one."""
        self.steps = getattr(self, "steps", iter(STEPS))
        return ChatMessage(role=MessageRole.ASSISTANT, content=f"Thought: next.\n<code>\n{next(self.steps)}\n</code>")


@tool
def double(number: int) -> int:
    """Double a number.

    Args:
        number: The number.
    """
    return 2 * number


def test_an_agent_keeps_its_state_in_the_sandbox(service: E2BService) -> None:
    """Its programs share their names, call its tool inside, and its answer comes back."""
    with CodeAgent(tools=[double], model=Scripted(), executor_type="e2b", max_steps=4) as agent:
        assert agent.run("Add them, doubled.") == 90
        printed = "\n".join(str(step.observations) for step in agent.memory.steps if hasattr(step, "observations"))
    assert "sum 45" in printed
    assert "/home/user" in printed
