"""LangChain's package for E2B, unmodified, against `cloche serve --e2b`: LangChain's standard tests of a sandbox."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import e2b
import pytest
from langchain_core.language_models import GenericFakeChatModel
from langchain_core.messages import AIMessage
from langchain_e2b import E2BSandbox
from langchain_tests.integration_tests import SandboxIntegrationTests

from tests.harness.e2b import E2BService, serving, variables


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[E2BService]:
    """Serve for all tests here."""
    with serving(tmp_path_factory.mktemp("e2b")) as service, variables(service):
        yield service


class TestSandbox(SandboxIntegrationTests):
    """All of them."""

    @pytest.fixture(scope="class")
    def sandbox(self, service: E2BService) -> Iterator[E2BSandbox]:
        """Open one for all."""
        with e2b.Sandbox.create(timeout=600) as sandbox:
            yield E2BSandbox(sandbox=sandbox)


class Scripted(GenericFakeChatModel):
    """A model that says what it is told to."""

    def bind_tools(self, *words: object, **options: object) -> Scripted:
        """Know the tools already."""
        return self


def test_an_agent_works_in_the_sandbox(service: E2BService, tmp_path: Path) -> None:
    """An agent of deepagents whose model writes a file and runs it."""
    from deepagents import create_deep_agent

    calls = [
        ("write_file", {"file_path": "/home/user/sum.py", "content": "print(sum(range(10)))"}),
        ("execute", {"command": "python3 sum.py"}),
    ]
    steps = [
        AIMessage(content="", tool_calls=[{"name": name, "args": arguments, "id": f"call-{number}"}])
        for number, (name, arguments) in enumerate(calls)
    ]
    model = Scripted(messages=iter([*steps, AIMessage(content="done")]))
    with e2b.Sandbox.create(timeout=600) as sandbox:
        agent = create_deep_agent(model=model, backend=E2BSandbox(sandbox=sandbox))
        answer = agent.invoke({"messages": [{"role": "user", "content": "Add them."}]})
        assert sandbox.files.read("sum.py") == "print(sum(range(10)))"
    assert any("45" in str(message.content) for message in answer["messages"])
