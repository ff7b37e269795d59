"""A model that follows a script, as the providers serve it at their own hosts: the tests' internet answers with it.

Theory of operation. A script is a list of steps; a step calls one tool of the agent's own, or says something. Which one
is next follows from the request alone: as many as the conversation has turns of the script. So a request that comes
again has the same answer, and an agent that goes on with a conversation goes on with the script. A request without
tools to run commands with is one beside the conversation (a title, a classification), and no step. A request without
the real key of its host is refused, and all are recorded with their headers.

Spoken are Anthropic's Messages, OpenAI's Responses and Chat Completions, and Google's `generateContent`, whole or as
server-sent events. A web socket is refused with 426, whereupon codex goes on without one.
"""

from __future__ import annotations

import json
import shlex
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from tests.harness.internet.providers import VALUES
from tests.harness.internet.web import Request, Response

Step = Mapping[str, str]
Json = dict[str, Any]
Call = tuple[str, Any]  # a tool and its arguments, or its text
HOSTS = ("api.anthropic.com", "api.openai.com", "generativelanguage.googleapis.com")
REPLACES = """
import sys
path, old, new = sys.argv[1:]
text = open(path).read()
assert old in text
open(path, "w").write(text.replace(old, new))
"""
KEPT_BYTES = 1 << 19  # of the body of one request
RUNS = "declare const tools: { exec_command("  # in the description of codex's `exec`
CALLS = ("function_call", "custom_tool_call")  # items of OpenAI's Responses
USAGE = 10  # tokens, of whatever is counted


def say(text: str) -> Step:
    """Return the step that says something, and so ends the agent's turn."""
    return {"do": "say", "text": text}


def run(command: str) -> Step:
    """Return the step that runs a command of a shell."""
    return {"do": "run", "command": command}


def read(path: str) -> Step:
    """Return the step that reads a file, by its whole path."""
    return {"do": "read", "path": path, "command": f"cat {path}"}


def edit(path: str, old: str, new: str) -> Step:
    """Return the step that replaces a text, whole lines, in a file, which was read before."""
    lines = [f"-{line}\n" for line in old.splitlines()] + [f"+{line}\n" for line in new.splitlines()]
    patch = f"*** Begin Patch\n*** Update File: {path}\n@@\n{''.join(lines)}*** End Patch\n"
    return {"do": "edit", "path": path, "old": old, "new": new, "patch": patch}


def write(path: str, text: str) -> Step:
    """Return the step that writes a new file, by its whole path."""
    lines = "".join(f"+{line}\n" for line in text.splitlines())
    patch = f"*** Begin Patch\n*** Add File: {path}\n{lines}*** End Patch\n"
    return {"do": "write", "path": path, "text": text, "patch": patch}


# For each kind of step the tools of the agents that do it, and their arguments as a step has them. Those of a tool that
# takes free text, a program of JavaScript here, are that text.
TOOLS: Mapping[str, Mapping[str, Json | str]] = {
    "run": {
        "Bash": {"command": "{command}", "description": "Run a command"},  # claude
        "exec": "text((await tools.exec_command({cmd: {command}})).output)",  # codex
        "exec_command": {"cmd": "{command}"},
        "shell_command": {"command": "{command}"},
        "shell": {"command": ["bash", "-c", "{command}"]},
        "run_shell_command": {"command": "{command}", "description": "Run a command", "is_background": False},  # gemini
        "bash": {"command": "{command}", "description": "Run a command"},  # opencode, copilot, mini-swe-agent
        "terminal": {"command": "{command}"},  # openhands
        "execute_bash": {"command": "{command}"},
    },
    "read": {
        "Read": {"file_path": "{path}"},
        "read_file": {"file_path": "{path}"},
        "read": {"filePath": "{path}"},
        "view": {"path": "{path}"},
        "file_editor": {"command": "view", "path": "{path}"},
    },
    "edit": {
        "Edit": {"file_path": "{path}", "old_string": "{old}", "new_string": "{new}"},
        "exec": "text(await tools.apply_patch({patch}))",
        "replace": {"file_path": "{path}", "old_string": "{old}", "new_string": "{new}", "instruction": "Mend it"},
        "edit": {
            "filePath": "{path}",
            "oldString": "{old}",
            "newString": "{new}",  # opencode
            "file_path": "{path}",
            "old_string": "{old}",
            "new_string": "{new}",  # qwen
        },
        "str_replace": {"path": "{path}", "old_str": "{old}", "new_str": "{new}"},
        "file_editor": {"command": "str_replace", "path": "{path}", "old_str": "{old}", "new_str": "{new}"},
    },
    "write": {
        "Write": {"file_path": "{path}", "content": "{text}"},
        "exec": "text(await tools.apply_patch({patch}))",
        "write_file": {"file_path": "{path}", "content": "{text}"},
        "write": {"filePath": "{path}", "content": "{text}"},
        "create": {"path": "{path}", "file_text": "{text}"},
        "file_editor": {"command": "create", "path": "{path}", "file_text": "{text}"},
        "str_replace_editor": {"command": "create", "path": "{path}", "file_text": "{text}"},
    },
}


class Script:
    """Hold the steps, and the requests as they came."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._steps: Sequence[Step] | None = None
        self._asked: list[Json] = []

    def set(self, steps: Sequence[Step]) -> None:
        """Follow these steps from now on, and begin a new record."""
        with self._lock:
            self._steps, self._asked = steps, []

    def asked(self) -> list[Json]:
        """Return the requests so far."""
        with self._lock:
            return [*self._asked]

    def is_set(self) -> bool:
        """Tell whether there is a script."""
        return self._steps is not None

    def note(self, request: Request, status: str) -> None:
        """Record a request, and how it was answered."""
        row = {
            "host": request.host, "method": request.method, "target": request.target, "headers": request.headers,
            "body": request.body[:KEPT_BYTES].decode("utf-8", "replace"), "status": status, "at": time.time(),
        }  # fmt: skip
        with self._lock:
            self._asked.append(row)

    def turns(self, said: Sequence[str | None]) -> int:
        """Return how many turns of a conversation are the script's: calls (None), and texts that it says.

        Some agents begin a conversation with a text of the model's that it never said.
        """
        texts = {step.get("text") for step in self._steps or () if step["do"] == "say"}
        return sum(text is None or text.strip() in texts for text in said)

    def step(self, turns: int) -> Step:
        """Return the step after so many turns; a script that is used up says so."""
        steps = self._steps or ()
        return steps[turns] if turns < len(steps) else say("The script is used up.")


SCRIPT = Script()


def answer(request: Request) -> Response | None:
    """Answer for a host of a model, if there is a script."""
    if not SCRIPT.is_set() or request.host not in HOSTS:
        return None
    response = _answer(request)
    SCRIPT.note(request, response.status)
    return response


def _answer(request: Request) -> Response:
    if request.headers.get("upgrade", "").lower() == "websocket":
        return _json({"error": {"message": "use HTTP"}}, "426 Upgrade Required")
    if VALUES[request.host] not in _credentials(request):
        return _json(
            {"type": "error", "error": {"type": "authentication_error", "message": "no such key"}}, "401 Unauthorized"
        )
    speak = next((speak for end, speak in PATHS.items() if request.path.endswith(end)), None)
    if speak is None or request.method != "POST":
        return _json({"error": {"type": "not_found_error", "message": "not here"}}, "404 Not Found")
    return speak(request, json.loads(request.body))


def _credentials(request: Request) -> list[str]:
    """Return what a request shows as a key, in the headers of all providers."""
    names = ("x-api-key", "x-goog-api-key", "authorization")
    return [request.headers.get(name, "").removeprefix("Bearer ") for name in names]


def _json(body: Any, status: str = "200 OK") -> Response:
    return Response(json.dumps(body).encode(), status, {"Content-Type": "application/json"})


def _events(events: Iterator[Json], *, named: bool = False, end: str = "") -> Response:
    """Return server-sent events."""
    lines = [(f"event: {event['type']}\n" if named else "") + f"data: {json.dumps(event)}\n\n" for event in events]
    return Response("".join([*lines, end]).encode(), headers={"Content-Type": "text/event-stream"})


def _filled(form: Any, step: Step) -> Any:
    """Return a tool's arguments with the words of a step in them."""
    if isinstance(form, str):
        return step[form[1:-1]] if form.startswith("{") else form
    if isinstance(form, list):
        return [_filled(one, step) for one in form]
    return {key: _filled(one, step) for key, one in form.items()} if isinstance(form, dict) else form


def _program(form: str, step: Step) -> str:
    """Return a program with the words of a step in it, as literals."""
    for word, text in step.items():
        form = form.replace(f"{{{word}}}", json.dumps(text))
    return form


def _call(step: Step, tools: Sequence[str]) -> Call | None:
    """Return the tool that a step calls, of those that are there, and its arguments; nothing for one that speaks."""
    if step["do"] == "say":
        return None
    kind = step["do"]
    name = next((name for name in TOOLS[kind] if name in tools), None)
    if name is not None:
        form = TOOLS[kind][name]
        return name, _program(form, step) if isinstance(form, str) else _filled(form, step)
    return _call(run(_by_shell(step)), tools)  # as agents do that have no other tool


def _by_shell(step: Step) -> str:
    if step["do"] == "write":
        return f"cat > {step['path']} <<'END_OF_FILE'\n{step['text']}END_OF_FILE"
    if step["do"] == "edit":
        return shlex.join(["python3", "-c", REPLACES, step["path"], step["old"], step["new"]])
    return step["command"]


def _next(tools: Sequence[str], turns: int) -> tuple[str, Call | None]:
    """Return what the model says, and the tool that it calls."""
    if not any(name in tools for name in TOOLS["run"]):
        return '{"title": "A task"}', None
    step = SCRIPT.step(turns)
    call = _call(step, tools)
    return ("" if call else step["text"]), call


def _said(content: str | Sequence[Json]) -> str | None:
    """Return the text of a message; nothing where it calls a tool."""
    if isinstance(content, str):
        return content
    if any(part.get("type") in ("tool_use", *CALLS) or "functionCall" in part for part in content):
        return None
    return "".join(part.get("text", "") for part in content)


def messages(request: Request, asked: Json) -> Response:
    """Answer as Anthropic's Messages."""
    said = [_said(message["content"]) for message in asked["messages"] if message["role"] == "assistant"]
    turns = SCRIPT.turns(said)
    text, call = _next([tool.get("name", "") for tool in asked.get("tools", ())], turns)
    block: Json = {"type": "text", "text": text}
    if call:
        block = {"type": "tool_use", "id": f"toolu_{turns}", "name": call[0], "input": call[1]}
    reason = "tool_use" if call else "end_turn"
    usage = {"input_tokens": USAGE, "output_tokens": USAGE}
    message = {
        "id": f"msg_{turns}", "type": "message", "role": "assistant", "model": asked["model"], "usage": usage,
        "stop_sequence": None,
    }  # fmt: skip
    if not asked.get("stream"):
        return _json({**message, "content": [block], "stop_reason": reason})

    def events() -> Iterator[Json]:
        yield {"type": "message_start", "message": {**message, "content": [], "stop_reason": None}}
        begun = {**block, "input": {}} if call else {**block, "text": ""}
        yield {"type": "content_block_start", "index": 0, "content_block": begun}
        delta = {"type": "text_delta", "text": text}
        if call:
            delta = {"type": "input_json_delta", "partial_json": json.dumps(call[1])}
        yield {"type": "content_block_delta", "index": 0, "delta": delta}
        yield {"type": "content_block_stop", "index": 0}
        yield {"type": "message_delta", "delta": {"stop_reason": reason, "stop_sequence": None}, "usage": usage}
        yield {"type": "message_stop"}

    return _events(events(), named=True)


def count_tokens(request: Request, asked: Json) -> Response:
    """Count the tokens of a request, as Anthropic and Google call it."""
    return _json({"input_tokens": USAGE, "totalTokens": USAGE})


def _names(tools: Sequence[Json]) -> list[str]:
    """Return the names of tools, also of those in namespaces.

    Codex has conversations beside the user's, for a title: there, programs of `exec` can run no command.
    """
    own = [tool.get("name", "") for tool in tools if tool.get("name") != "exec" or RUNS in tool.get("description", "")]
    return [*own, *(name for tool in tools for name in _names(tool.get("tools", ())))]


def responses(request: Request, asked: Json) -> Response:
    """Answer as OpenAI's Responses: one item, a function's call or a message."""
    items = asked["input"] if isinstance(asked["input"], list) else []
    ours = [item for item in items if item.get("type") in CALLS or item.get("role") == "assistant"]
    turns = SCRIPT.turns([None if item.get("type") in CALLS else _said(item["content"]) for item in ours])
    text, call = _next([*_names(asked.get("tools", ())), *_names(items)], turns)
    item: Json = {
        "type": "message", "id": f"msg_{turns}", "role": "assistant", "status": "completed",
        "content": [{"type": "output_text", "text": text, "annotations": []}],
    }  # fmt: skip
    if call:
        item = {
            "type": "function_call", "id": f"fc_{turns}", "call_id": f"call_{turns}", "name": call[0],
            "arguments": json.dumps(call[1]), "status": "completed",
        }  # fmt: skip
    if call and isinstance(call[1], str):
        item = {
            "type": "custom_tool_call", "id": f"ctc_{turns}", "call_id": f"call_{turns}", "name": call[0],
            "input": call[1], "status": "completed",
        }  # fmt: skip
    details = {"input_tokens_details": {"cached_tokens": 0}, "output_tokens_details": {"reasoning_tokens": 0}}
    usage = {"input_tokens": USAGE, "output_tokens": USAGE, "total_tokens": 2 * USAGE, **details}
    base = {"id": f"resp_{turns}", "object": "response", "created_at": 1, "model": asked["model"]}
    whole = {**base, "status": "completed", "output": [item], "usage": usage}
    if not asked.get("stream"):
        return _json(whole)

    def events() -> Iterator[Json]:
        yield {"type": "response.created", "response": {**base, "status": "in_progress", "output": []}}
        yield {"type": "response.output_item.added", "output_index": 0, "item": item}
        if not call:
            where = {"item_id": item["id"], "output_index": 0, "content_index": 0}
            yield {"type": "response.output_text.delta", **where, "delta": text}
        yield {"type": "response.output_item.done", "output_index": 0, "item": item}
        yield {"type": "response.completed", "response": whole}

    return _events(events(), named=True)


def completions(request: Request, asked: Json) -> Response:
    """Answer as OpenAI's Chat Completions."""
    ours = [message for message in asked["messages"] if message["role"] == "assistant"]
    turns = SCRIPT.turns([None if message.get("tool_calls") else _said(message["content"]) for message in ours])
    text, call = _next([tool.get("function", {}).get("name", "") for tool in asked.get("tools") or ()], turns)
    message: Json = {"role": "assistant", "content": text or None}
    if call:
        function = {"name": call[0], "arguments": json.dumps(call[1])}
        message["tool_calls"] = [{"index": 0, "id": f"call_{turns}", "type": "function", "function": function}]
    reason = "tool_calls" if call else "stop"
    usage = {"prompt_tokens": USAGE, "completion_tokens": USAGE, "total_tokens": 2 * USAGE}
    base = {"id": f"chatcmpl-{turns}", "created": 1, "model": asked["model"]}
    if not asked.get("stream"):
        choice = {"index": 0, "message": message, "finish_reason": reason}
        return _json({**base, "object": "chat.completion", "choices": [choice], "usage": usage})

    def events() -> Iterator[Json]:
        chunk = {**base, "object": "chat.completion.chunk"}
        yield {**chunk, "choices": [{"index": 0, "delta": message, "finish_reason": None}]}
        yield {**chunk, "choices": [{"index": 0, "delta": {}, "finish_reason": reason}], "usage": usage}

    return _events(events(), end="data: [DONE]\n\n")


def generate(request: Request, asked: Json) -> Response:
    """Answer as Google's `generateContent` and `streamGenerateContent`."""
    turns = SCRIPT.turns([_said(content["parts"]) for content in asked["contents"] if content.get("role") == "model"])
    declared = [one for tool in asked.get("tools", ()) for one in tool.get("functionDeclarations", ())]
    text, call = _next([one["name"] for one in declared], turns)
    part: Json = {"functionCall": {"name": call[0], "args": call[1]}} if call else {"text": text}
    candidate = {"index": 0, "content": {"role": "model", "parts": [part]}, "finishReason": "STOP"}
    usage = {"promptTokenCount": USAGE, "candidatesTokenCount": USAGE, "totalTokenCount": 2 * USAGE}
    whole = {"candidates": [candidate], "usageMetadata": usage, "modelVersion": "scripted"}
    return _events(iter([whole])) if ":stream" in request.path else _json(whole)


def results(asked: Sequence[Json]) -> list[str]:
    """Return what the agent's tools gave, from the last request that has all of it."""
    bodies = [json.loads(row["body"]) for row in asked if row["method"] == "POST" and row["status"] == "200 OK"]
    return max((list(_results(body)) for body in bodies), key=len, default=[])


def _results(value: Any) -> Iterator[str]:
    if isinstance(value, list):
        for one in value:
            yield from _results(one)
    elif isinstance(value, dict):
        kind = str(value.get("type"))
        if (
            kind == "tool_result"
            or "tool_call_id" in value
            or kind.endswith("call_output")
            or "functionResponse" in value
        ):
            yield _text(value)
        else:
            for inner in value.values():
                yield from _results(inner)


def _text(value: Any) -> str:
    """Return all texts in a value."""
    if isinstance(value, str):
        return value
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return "\n".join(filter(None, map(_text, parts)))


PATHS: Mapping[str, Callable[[Request, Json], Response]] = {
    "/count_tokens": count_tokens,
    ":countTokens": count_tokens,
    "/messages": messages,
    "/responses": responses,
    "/chat/completions": completions,
    ":generateContent": generate,
    ":streamGenerateContent": generate,
}
