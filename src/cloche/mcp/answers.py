"""What a client gets of a call: text and figures for the model, and the same as data with a schema."""

from __future__ import annotations

import json
from typing import Any

from mcp_types import CallToolResult, ContentBlock, ImageContent, TextContent
from pydantic import BaseModel, Field

from cloche.agent.answering import Answer
from cloche.agent.wording import MOST_CHARS, clip, value_text
from cloche.core.plain import sendable
from cloche.core.result import Result

MOST_DEPTH = 64  # what takes messages apart stops at some depth


class Told(BaseModel):
    """What a tool did."""

    text: str = Field(description="What the model is told, in words.")


class Ran(Told):
    """What a run did."""

    status: str = Field(
        description="ok, error, timeout, out_of_memory, output_limit, pids_limit, disk_limit, signaled or denied."
    )
    exit_code: int = Field(description="The program's exit code; 128 plus the number for a signal; -1 on time-out.")
    stdout: str = Field(description="Standard output, head and tail where it is long.")
    stderr: str = Field(description="Standard error, likewise.")
    value: Any = Field(default=None, description="The value of the last expression: as JSON, else its representation.")
    value_is_repr: bool = Field(default=False, description="Whether value is a representation.")
    duration_s: float = Field(description="Seconds of wall clock.")
    state: str = Field(
        description="What became of what earlier calls defined: it was kept, it is new (this call began in a new "
        "interpreter, which goes on), it is lost (the interpreter ended with this call), or none is ever kept."
    )
    truncated: bool = Field(description="Whether output was left out.")
    figures: int = Field(description="How many images come with it.")
    backend: str = Field(description="What it ran on.")
    level: str | None = Field(default=None, description="The level of isolation that was enforced.")


class Opened(Told):
    """A session that was opened."""

    session: str = Field(description="The handle to pass as `session`.")


def result_of(answer: Answer, *, runs_code: bool) -> CallToolResult:
    """Return an answer as the protocol has it; a call that did not come to run anything has text alone."""
    content: list[ContentBlock] = [TextContent(type="text", text=answer.text)]
    content += [ImageContent(type="image", data=image.base64, mime_type=image.mime) for image in answer.images]
    structured: BaseModel | None = None
    if answer.result is not None:
        structured = _ran(answer, answer.result)
    elif not runs_code and not answer.is_error:
        structured = Told(text=answer.text)
    return CallToolResult(
        content=content,
        structured_content=None if structured is None else structured.model_dump(mode="json"),
        is_error=answer.is_error,
    )


def text_result(text: str, *, is_error: bool) -> CallToolResult:
    """Return plain text as the protocol has it."""
    told = sendable(clip(text))
    structured = None if is_error else Told(text=told).model_dump(mode="json")
    return CallToolResult(
        content=[TextContent(type="text", text=told)], structured_content=structured, is_error=is_error
    )


def _ran(answer: Answer, result: Result) -> Ran:
    value, value_is_repr = _value(result)
    return Ran(
        text=answer.text,
        status=str(result.status),
        exit_code=result.exit_code,
        stdout=sendable(clip(result.stdout)),
        stderr=sendable(clip(result.stderr)),
        value=value,
        value_is_repr=value_is_repr,
        duration_s=result.duration,
        state=answer.state,
        truncated=result.truncated,
        figures=len(answer.images),
        backend=str(result.meta.get("backend", "")),
        level=result.meta.get("level"),
    )


def _value(result: Result) -> tuple[Any, bool]:
    """Return a value that every client can read and that is not long or deep, else its text; and whether it is that."""
    try:
        told = json.dumps(result.value, allow_nan=False, ensure_ascii=False)
        if len(told.encode()) <= MOST_CHARS and _is_shallow(result.value, MOST_DEPTH):
            return json.loads(told), result.value_is_repr
    except (ValueError, TypeError, RecursionError):  # half of a character pair is a ValueError, too
        pass
    return sendable(clip(value_text(result))), True


def _is_shallow(value: object, depth: int) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return depth > 0 and all(_is_shallow(one, depth - 1) for one in inner)


def opened_result(handle: str) -> CallToolResult:
    """Return what a client gets of a session that was opened."""
    told = Opened(text=f"Opened session {handle}", session=handle)
    return CallToolResult(content=[TextContent(type="text", text=told.text)], structured_content=told.model_dump())
