"""The tools, prompts and resources by fixed names that MCP's conformance suite calls, added to a server of ours.

As a program (`python -m tests.harness.programs.mcp_fixtures`) it serves them beside the tools of `cloche mcp`, at a
free port.
"""

from __future__ import annotations

import asyncio
import base64
import json
import struct
import zlib
from collections.abc import Mapping
from typing import Annotated, Any

from mcp.server.mcpserver import Context, MCPServer
from mcp.server.streamable_http import EventCallback, EventMessage, EventStore
from mcp.shared.exceptions import MCPError
from mcp_types import (
    MISSING_REQUIRED_CLIENT_CAPABILITY,
    AudioContent,
    CallToolResult,
    ClientCapabilities,
    Completion,
    CreateMessageRequest,
    CreateMessageRequestParams,
    ElicitRequest,
    ElicitRequestFormParams,
    ElicitResult,
    EmbeddedResource,
    EmptyResult,
    ImageContent,
    InputRequest,
    InputRequiredResult,
    ListRootsRequest,
    MissingRequiredClientCapabilityErrorData,
    SamplingCapability,
    SamplingMessage,
    SetLevelRequestParams,
    SubscribeRequestParams,
    TextContent,
    TextResourceContents,
    UnsubscribeRequestParams,
)
from pydantic import Field

Ctx = Context[Any, Any]


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


PNG = (
    b"\x89PNG\r\n\x1a\n"
    + _chunk(b"IHDR", struct.pack(">IIBBBBB", 1, 1, 8, 2, 0, 0, 0))
    + _chunk(b"IDAT", zlib.compress(b"\0\xff\0\0"))
    + _chunk(b"IEND", b"")
)
WAV = b"RIFF" + struct.pack("<I", 38) + b"WAVEfmt " + struct.pack("<IHHIIHH", 16, 1, 1, 8000, 8000, 1, 8)
WAV += b"data" + struct.pack("<I", 2) + b"\x80\x80"


def _text(text: str) -> TextContent:
    return TextContent(type="text", text=text)


def _image() -> ImageContent:
    return ImageContent(type="image", data=base64.b64encode(PNG).decode(), mime_type="image/png")


def _embedded(uri: str, mime: str, text: str) -> EmbeddedResource:
    return EmbeddedResource(type="resource", resource=TextResourceContents(uri=uri, mime_type=mime, text=text))


def add_fixtures(server: MCPServer[Any]) -> None:
    """Add everything that the suite looks for."""
    for add in (
        add_contents, add_reports, add_questions, add_input_required, add_capabilities, add_schemas, add_resources,
        add_prompts, add_endpoints,
    ):  # fmt: skip
        add(server)


def add_contents(server: MCPServer[Any]) -> None:
    """Add tools that return each kind of content."""

    @server.tool(description="Return text.")
    def test_simple_text() -> list[TextContent]:
        return [_text("This is a simple text response for testing.")]

    @server.tool(description="Return an image.")
    def test_image_content() -> list[ImageContent]:
        return [_image()]

    @server.tool(description="Return a sound.")
    def test_audio_content() -> list[AudioContent]:
        return [AudioContent(type="audio", data=base64.b64encode(WAV).decode(), mime_type="audio/wav")]

    @server.tool(description="Return a resource.")
    def test_embedded_resource() -> list[EmbeddedResource]:
        return [_embedded("test://embedded-resource", "text/plain", "This is an embedded resource content.")]

    @server.tool(description="Return several kinds of content.")
    def test_multiple_content_types() -> list[TextContent | ImageContent | EmbeddedResource]:
        data = json.dumps({"test": "data", "value": 123})
        return [
            _text("Multiple content types test:"),
            _image(),
            _embedded("test://mixed-content-resource", "application/json", data),
        ]

    @server.tool(description="Fail.")
    def test_error_handling() -> CallToolResult:
        return CallToolResult(content=[_text("This tool intentionally returns an error for testing")], is_error=True)


def add_reports(server: MCPServer[Any]) -> None:
    """Add tools that say something while they work."""

    async def log(context: Ctx) -> list[TextContent]:
        for message in ("Tool execution started", "Tool processing data", "Tool execution completed"):
            await context.session.send_log_message("info", message, related_request_id=context.request_id)
        return [_text("done")]

    server.tool("test_tool_with_logging", description="Log three times.")(log)
    # The suite waits half a second for its answer.
    server.tool("test_logging_tool", description="Log, if the client wants to hear it.")(log)

    @server.tool(description="Report progress.")
    async def test_tool_with_progress(context: Ctx) -> list[TextContent]:
        for progress in (0, 50, 100):
            await context.report_progress(progress, 100)
            await asyncio.sleep(0.05)
        return [_text("done")]

    @server.tool(description="Close the stream of the response while it works.")
    async def test_reconnection(context: Ctx) -> list[TextContent]:
        await context.close_sse_stream()
        await asyncio.sleep(0.1)
        return [_text("The client came back for this.")]


def add_questions(server: MCPServer[Any]) -> None:
    """Add tools that ask the client while a call waits, as up to 2025-11-25."""

    @server.tool(description="Have the client's model say something.")
    async def test_sampling(prompt: str, context: Ctx) -> list[TextContent]:
        message = SamplingMessage(role="user", content=_text(prompt))
        said = await context.session.create_message([message], max_tokens=100, related_request_id=context.request_id)
        return [_text(f"LLM response: {getattr(said.content, 'text', '')}")]

    async def ask(context: Ctx, message: str, schema: dict[str, Any]) -> str:
        form = {"type": "object", **schema}
        said = await context.session.elicit_form(message, form, related_request_id=context.request_id)
        return f"action={said.action}, content={json.dumps(said.content)}"

    @server.tool(description="Ask the user.")
    async def test_elicitation(message: str, context: Ctx) -> list[TextContent]:
        fields = {
            "username": {"type": "string", "description": "User's response"},
            "email": {"type": "string", "description": "User's email address"},
        }
        said = await ask(context, message, {"properties": fields, "required": list(fields)})
        return [_text(f"User response: {said}")]

    @server.tool(description="Ask with a default of every kind.")
    async def test_elicitation_sep1034_defaults(context: Ctx) -> list[TextContent]:
        fields = {
            "name": {"type": "string", "default": "John Doe"},
            "age": {"type": "integer", "default": 30},
            "score": {"type": "number", "default": 95.5},
            "status": {"type": "string", "enum": ["active", "inactive", "pending"], "default": "active"},
            "verified": {"type": "boolean", "default": True},
        }
        said = await ask(context, "Take these?", {"properties": fields})
        return [_text(f"Elicitation completed: {said}")]

    @server.tool(description="Ask with every kind of choice.")
    async def test_elicitation_sep1330_enums(context: Ctx) -> list[TextContent]:
        options = ["option1", "option2", "option3"]
        titled = [{"const": f"value{n}", "title": f"{word} Option"} for n, word in enumerate(("First", "Second"), 1)]
        fields = {
            "untitledSingle": {"type": "string", "enum": options},
            "titledSingle": {"type": "string", "oneOf": titled},
            "legacyEnum": {"type": "string", "enum": ["opt1", "opt2"], "enumNames": ["Option One", "Option Two"]},
            "untitledMulti": {"type": "array", "items": {"type": "string", "enum": options}},
            "titledMulti": {"type": "array", "items": {"anyOf": titled}},
        }
        said = await ask(context, "Choose.", {"properties": fields})
        return [_text(f"Elicitation completed: {said}")]

    @server.tool(description="Ask where only the client's next call can answer.")
    async def test_streaming_elicitation(context: Ctx) -> list[TextContent] | InputRequiredResult:
        return _asked(context, "ok") or [_text("answered")]


def _form(message: str, name: str, kind: str = "string") -> ElicitRequest:
    schema = {"type": "object", "properties": {name: {"type": kind}}, "required": [name]}
    return ElicitRequest(params=ElicitRequestFormParams(message=message, requested_schema=schema))


def _sample(prompt: str, max_tokens: int) -> CreateMessageRequest:
    message = SamplingMessage(role="user", content=_text(prompt))
    return CreateMessageRequest(params=CreateMessageRequestParams(messages=[message], max_tokens=max_tokens))


def _asked(
    context: Ctx, key: str, request: InputRequest | None = None, *, state: str | None = None
) -> InputRequiredResult | None:
    """Return what the client must answer first, None when it did."""
    if _said(context, key) is not None:
        return None
    return InputRequiredResult(input_requests={key: request or _form("OK?", "ok", "boolean")}, request_state=state)


def _said(context: Ctx, key: str) -> Any:
    answer = (context.input_responses or {}).get(key)
    return answer.content if isinstance(answer, ElicitResult) and answer.action == "accept" else answer


def add_input_required(server: MCPServer[Any]) -> None:
    """Add tools that are called again with what they ask for, as from 2026-07-28 on."""

    @server.tool(description="Greet by name.")
    async def test_input_required_result_elicitation(context: Ctx) -> list[TextContent] | InputRequiredResult:
        asked = _asked(context, "user_name", _form("What is your name?", "name"))
        return asked or [_text(f"Hello, {_said(context, 'user_name')['name']}!")]

    @server.tool(description="Tell what the client's model says.")
    async def test_input_required_result_sampling(context: Ctx) -> list[TextContent] | InputRequiredResult:
        asked = _asked(context, "capital_question", _sample("What is the capital of France?", 100))
        return asked or [_text(str(_said(context, "capital_question").content.text))]

    @server.tool(description="Tell the client's roots.")
    async def test_input_required_result_list_roots(context: Ctx) -> list[TextContent] | InputRequiredResult:
        asked = _asked(context, "client_roots", ListRootsRequest())
        return asked or [_text(", ".join(str(root.uri) for root in _said(context, "client_roots").roots))]

    @server.tool(description="Give a state and want it back.")
    async def test_input_required_result_request_state(context: Ctx) -> list[TextContent] | InputRequiredResult:
        asked = _asked(context, "confirm", _form("Please confirm", "ok", "boolean"), state="given")
        return asked or [_text("state-ok" if context.request_state == "given" else "another state")]

    @server.tool(description="Give a state that must not be changed.")
    async def test_input_required_result_tampered_state(context: Ctx) -> list[TextContent] | InputRequiredResult:
        return _asked(context, "confirm", _form("Please confirm", "ok", "boolean"), state="given") or [_text("done")]

    @server.tool(description="Ask for three things at once.")
    async def test_input_required_result_multiple_inputs(context: Ctx) -> list[TextContent] | InputRequiredResult:
        wanted: Mapping[str, InputRequest] = {
            "user_name": _form("What is your name?", "name"),
            "greeting": _sample("Generate a greeting", 50),
            "client_roots": ListRootsRequest(),
        }
        missing = {key: request for key, request in wanted.items() if _said(context, key) is None}
        if missing:
            return InputRequiredResult(input_requests=missing, request_state="three")
        return [_text("all three")]

    @server.tool(description="Ask twice.")
    async def test_input_required_result_multi_round(context: Ctx) -> list[TextContent] | InputRequiredResult:
        if context.request_state == "2":
            return _asked(context, "step2", _color(), state="2") or [_text("done")]
        first = _asked(context, "step1", _form("Step 1: What is your name?", "name"), state="1")
        return first or InputRequiredResult(input_requests={"step2": _color()}, request_state="2")


def _color() -> ElicitRequest:
    return _form("Step 2: What is your favorite color?", "color")


def add_capabilities(server: MCPServer[Any]) -> None:
    """Add tools that heed what a client can do, or wants to hear."""

    @server.tool(description="Ask only for what the client declared.")
    async def test_input_required_result_capabilities(context: Ctx) -> InputRequiredResult:
        has, wanted = context.client_capabilities or ClientCapabilities(), dict[str, InputRequest]()
        if has.elicitation is not None:
            wanted["form"] = _form("OK?", "ok", "boolean")
        if has.sampling is not None:
            wanted["sample"] = _sample("Say something.", 50)
        return InputRequiredResult(input_requests=wanted, request_state="asked")

    @server.tool(description="Need sampling.")
    async def test_missing_capability(context: Ctx) -> list[TextContent]:
        if context.client_capabilities is None or context.client_capabilities.sampling is None:
            needed = ClientCapabilities(sampling=SamplingCapability())
            data = MissingRequiredClientCapabilityErrorData(required_capabilities=needed)
            told = data.model_dump(by_alias=True, mode="json", exclude_none=True)
            raise MCPError(code=MISSING_REQUIRED_CLIENT_CAPABILITY, message="This tool needs sampling.", data=told)
        return [_text("done")]

    @server.tool(description="Say that the tools changed.")
    async def test_trigger_tool_change(context: Ctx) -> list[TextContent]:
        await context.notify_tools_changed()
        return [_text("told")]

    @server.tool(description="Say that the prompts changed.")
    async def test_trigger_prompt_change(context: Ctx) -> list[TextContent]:
        await context.notify_prompts_changed()
        return [_text("told")]


def add_schemas(server: MCPServer[Any]) -> None:
    """Add tools whose schemas are listed as they are."""

    @server.tool(description="Take an argument that a header repeats.")
    def test_headers(
        region: Annotated[str, Field(json_schema_extra={"x-mcp-header": "Region"})] = "",
    ) -> list[TextContent]:
        return [_text(region)]

    @server.tool("json_schema_2020_12_tool", description="Tool with JSON Schema 2020-12 features")
    def json_schema_2020_12(name: str = "") -> list[TextContent]:
        return [_text(name)]

    tool = server._tool_manager.get_tool("json_schema_2020_12_tool")
    assert tool is not None
    street = {"street": {"type": "string"}, "city": {"type": "string"}}
    tool.parameters = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "$defs": {"address": {"$anchor": "addressDef", "type": "object", "properties": street}},
        "properties": {
            "name": {"type": "string"},
            "address": {"$ref": "#/$defs/address"},
            "contactMethod": {"type": "string", "enum": ["phone", "email"]},
            "phone": {"type": "string"},
            "email": {"type": "string"},
        },
        "allOf": [{"anyOf": [{"required": ["phone"]}, {"required": ["email"]}]}],
        "if": {"properties": {"contactMethod": {"const": "phone"}}, "required": ["contactMethod"]},
        "then": {"required": ["phone"]},
        "else": {"required": ["email"]},
        "additionalProperties": False,
    }


def add_resources(server: MCPServer[Any]) -> None:
    """Add resources, one of them by a template."""

    @server.resource("test://static-text", description="Text.", mime_type="text/plain")
    def static_text() -> str:
        return "This is the content of the static text resource."

    @server.resource("test://static-binary", description="An image.", mime_type="image/png")
    def static_binary() -> bytes:
        return PNG

    @server.resource("test://watched-resource", description="What can be watched.", mime_type="text/plain")
    def watched() -> str:
        return "watched"

    @server.resource("test://template/{id}/data", description="Data by number.", mime_type="application/json")
    def template(id: str) -> str:  # noqa: A002 - the template's own name
        return json.dumps({"id": id, "templateTest": True, "data": f"Data for ID: {id}"})


def _message(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def add_prompts(server: MCPServer[Any]) -> None:
    """Add prompts with each kind of content."""

    @server.prompt(description="A simple prompt.")
    def test_simple_prompt() -> list[dict[str, Any]]:
        return [_message(_text("This is a simple prompt for testing."))]

    @server.prompt(description="A prompt with arguments.")
    def test_prompt_with_arguments(arg1: str, arg2: str) -> list[dict[str, Any]]:
        return [_message(_text(f"Prompt with arguments: arg1='{arg1}', arg2='{arg2}'"))]

    @server.prompt(description="A prompt with a resource.")
    def test_prompt_with_embedded_resource(resourceUri: str) -> list[dict[str, Any]]:  # noqa: N803 - the suite's name
        resource = _embedded(resourceUri, "text/plain", "Embedded resource content for testing.")
        return [_message(resource), _message(_text("Please process the embedded resource above."))]

    @server.prompt(description="A prompt with an image.")
    def test_prompt_with_image() -> list[dict[str, Any]]:
        return [_message(_image()), _message(_text("Please analyze the image above."))]

    @server.prompt(description="A prompt that asks first.")
    async def test_input_required_result_prompt(context: Ctx) -> list[dict[str, Any]] | InputRequiredResult:
        asked = _asked(context, "user_context", _form("What context should the prompt use?", "context"))
        return asked or [_message(_text(f"In this context: {_said(context, 'user_context')['context']}"))]


def add_endpoints(server: MCPServer[Any]) -> None:
    """Add what a server may answer besides: completions, subscriptions and the level of logging."""

    @server.completion()
    async def complete(ref: Any, argument: Any, context: Any) -> Completion:
        found = [word for word in ("paris", "park", "party") if word.startswith(argument.value)]
        return Completion(values=found, total=len(found), has_more=False)

    async def accept(_: Any, __: Any) -> EmptyResult:
        return EmptyResult()

    lowlevel = server._lowlevel_server
    lowlevel.add_request_handler("logging/setLevel", SetLevelRequestParams, accept)
    lowlevel.add_request_handler("resources/subscribe", SubscribeRequestParams, accept)
    lowlevel.add_request_handler("resources/unsubscribe", UnsubscribeRequestParams, accept)


class KeptEvents(EventStore):
    """Keep every event, so that a client that comes back gets those it missed."""

    def __init__(self) -> None:
        self._events: list[tuple[str, Any]] = []

    async def store_event(self, stream_id: str, message: Any) -> str:
        self._events.append((stream_id, message))
        return str(len(self._events) - 1)

    async def replay_events_after(self, last_event_id: str, send_callback: EventCallback) -> str | None:
        last = int(last_event_id)
        if not 0 <= last < len(self._events):
            return None
        stream = self._events[last][0]
        for number, (of, message) in enumerate(self._events[last + 1 :], last + 1):
            if of == stream and message is not None:
                await send_callback(EventMessage(message, str(number)))
        return stream


def main() -> None:
    """Serve, with the events of streams kept."""
    from cloche.mcp.http import create_app, serve_http
    from cloche.mcp.server import create_server

    server = create_server()
    add_fixtures(server)
    app = create_app(server, event_store=KeptEvents(), retry_interval_ms=200)
    asyncio.run(serve_http(app, host="127.0.0.1", port=0, path="/mcp", has_tokens=False))


if __name__ == "__main__":
    main()
