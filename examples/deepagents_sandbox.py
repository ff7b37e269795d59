"""Give a LangChain deep agent a sandbox. The model here is scripted and needs no key. Needs `cloche[deepagents]`."""

from typing import Any

from deepagents import create_deep_agent
from langchain_core.language_models.fake_chat_models import GenericFakeChatModel
from langchain_core.messages import AIMessage

from cloche.integrations.deepagents import Cloche


class Scripted(GenericFakeChatModel):
    def bind_tools(self, tools: Any, **_: Any) -> Any:
        return self


call = {"name": "execute", "args": {"command": "echo $((6 * 7)) | tee /tmp/answer"}, "id": "call-1"}
with Cloche() as backend:
    agent = create_deep_agent(Scripted(messages=iter([AIMessage("", tool_calls=[call]), "Done."])), backend=backend)
    print(*(message.text for message in agent.invoke({"messages": "What is 6 * 7?"})["messages"]), sep="\n")
