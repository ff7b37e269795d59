"""Servers on loopback that speak the protocol of an OpenAI-compatible endpoint, and answer from a script.

For auto-fix an answer is text, streamed or whole as it is asked for; a `Reply`, which says more; or a function of the
handler that does anything at all. For agents it is a message that a test prepared.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MODEL = "scripted-1"
KEY = "sk-0123456789-secret"
ESCAPES = "\x1b]0;owned\x07\x1b[2J\u202e"
PIECE = 7  # characters of a piece of a stream


def block(code: str, tag: str = "python") -> str:
    """Return an answer with one block of code."""
    return f"The mistake is a small one.\n\n```{tag}\n{code}```\n\nNow it works."


@dataclass(frozen=True, kw_only=True)
class Reply:
    """Say how to answer: `status` other than 200 is an error with `text` as its message."""

    text: str = ""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    usage: Any = None
    finish_reason: str | None = "stop"
    breaks_off: bool = False
    thoughts: str = ""


Answer = str | Reply | Callable[["Handler"], None]


@dataclass(kw_only=True)
class Asked:
    """Hold one request as it came."""

    path: str
    headers: dict[str, str]
    body: dict[str, Any]

    @property
    def prompt(self) -> str:
        """Return the last message."""
        return str(self.body["messages"][-1]["content"])


class Handler(BaseHTTPRequestHandler):
    """Answer one request."""

    protocol_version = "HTTP/1.1"
    server: Scripted

    def do_POST(self) -> None:
        """Take the next answer of the script."""
        length = int(self.headers.get("Content-Length", 0))
        self.asked = Asked(
            path=self.path,
            headers={name.title(): text for name, text in self.headers.items()},
            body=json.loads(self.rfile.read(length) or b"{}"),
        )
        self.server.asked.append(self.asked)
        if self.asked.body.get("stream") and self.server.refuses_streams == "loudly":
            self.send_json({"error": {"message": "streaming is not supported", "type": "scripted"}}, 400)
            return
        answer = self.server.next_answer()
        if callable(answer):
            answer(self)
        else:
            self.answer(answer if isinstance(answer, Reply) else Reply(text=answer))

    def answer(self, reply: Reply) -> None:
        """Send an answer: a stream where one was asked for and may be had."""
        if reply.status != 200:
            self.send_json({"error": {"message": reply.text, "type": "scripted"}}, reply.status, reply.headers)
        elif self.asked.body.get("stream") and not self.server.refuses_streams:
            self.send_stream(reply)
        else:
            message = {"role": "assistant", "content": reply.text}
            choice = {"index": 0, "message": message, "finish_reason": reply.finish_reason}
            self.send_json({**self.head("chat.completion"), "choices": [choice], "usage": reply.usage})

    def head(self, kind: str) -> dict[str, Any]:
        """Return what every object of the protocol begins with."""
        return {"id": "one", "object": kind, "created": 1, "model": MODEL}

    def send_stream(self, reply: Reply) -> None:
        """Send server-sent events, in chunks."""
        self.begin("text/event-stream", reply.headers)
        if reply.thoughts:
            delta = {"reasoning_content": reply.thoughts, "reasoning": reply.thoughts}  # as some do
            choice = {"index": 0, "delta": delta, "finish_reason": None}
            self.send_event({**self.head("chat.completion.chunk"), "choices": [choice]})
        pieces = [reply.text[at : at + PIECE] for at in range(0, len(reply.text), PIECE)]
        for piece in pieces[: len(pieces) // 2] if reply.breaks_off else pieces:
            choice = {"index": 0, "delta": {"content": piece}, "finish_reason": None}
            self.send_event({**self.head("chat.completion.chunk"), "choices": [choice]})
        if reply.breaks_off:
            self.close_connection = True
            return
        choice = {"index": 0, "delta": {}, "finish_reason": reply.finish_reason}
        self.send_event({**self.head("chat.completion.chunk"), "choices": [choice]})
        if reply.usage is not None and self.asked.body.get("stream_options"):
            self.send_event({**self.head("chat.completion.chunk"), "choices": [], "usage": reply.usage})
        self.send_chunk(b"data: [DONE]\n\n")
        self.send_chunk(b"")

    def begin(self, kind: str, headers: dict[str, str] | None = None) -> None:
        """Send the head of an answer that comes in chunks."""
        self.send_response(200)
        for name, value in {"Content-Type": kind, "Transfer-Encoding": "chunked", **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()

    def send_event(self, event: Any) -> None:
        """Send one server-sent event."""
        self.send_chunk(b"data: " + json.dumps(event).encode() + b"\n\n")

    def send_chunk(self, data: bytes) -> None:
        """Send one chunk; an empty one ends the answer."""
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))

    def send_json(self, answer: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        """Send an answer in one piece."""
        data = json.dumps(answer).encode()
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: Any) -> None:
        """Say nothing."""


class Scripted(ThreadingHTTPServer):
    """Hold the script and what was asked. `refuses_streams`: "loudly" with an error, "quietly" with a whole answer."""

    daemon_threads = True

    def __init__(self, script: Iterable[Answer], refuses_streams: str = ""):
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[Asked] = []
        self.refuses_streams = refuses_streams
        self._script = iter(script)

    @property
    def host(self) -> str:
        """Return host and port."""
        return f"127.0.0.1:{self.server_address[1]}"

    @property
    def base_url(self) -> str:
        """Return what clients are configured with."""
        return f"http://{self.host}/v1"

    def script(self, answers: Iterable[Answer]) -> None:
        """Answer with these from now on."""
        self._script = iter(answers)

    def next_answer(self) -> Answer:
        """Return the next answer; a script that is used up is an error that no client tries again."""
        return next(self._script, Reply(status=403, text="the script is used up"))

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of clients that left."""


@contextmanager
def serving(script: Iterable[Answer], refuses_streams: str = "") -> Iterator[Scripted]:
    """Serve a script until the block ends."""
    server = Scripted(script, refuses_streams)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


Message = dict[str, Any]


def calls(*named: tuple[str, Mapping[str, Any]]) -> Message:
    """Return an assistant's message that calls tools."""
    asked = [
        {"id": f"call-{number}", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
        for number, (name, arguments) in enumerate(named)
    ]
    return {"role": "assistant", "content": None, "tool_calls": asked}


def says(text: str) -> Message:
    """Return an assistant's message in words; `{last}` in it is what it heard last."""
    return {"role": "assistant", "content": text}


@contextmanager
def scripted(*answers: Message) -> Iterator[tuple[dict[str, str], list[dict[str, Any]]]]:
    """Serve the answers in their order; give the variables of a client, and the requests as they come."""
    heard: list[dict[str, Any]] = []

    class Answers(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            is_known = self.path == "/v1/chat/completions" and self.headers["Authorization"] == "Bearer a-key"
            answer = dict(answers[len(heard)])
            heard.append(body)
            if isinstance(answer["content"], str):
                answer["content"] = answer["content"].format(last=body["messages"][-1]["content"])
            reason = "tool_calls" if answer.get("tool_calls") else "stop"
            told = {
                "id": "c", "object": "chat.completion", "created": 0, "model": body["model"],
                "choices": [{"index": 0, "finish_reason": reason, "logprobs": None, "message": answer}],
            }  # fmt: skip
            data = json.dumps(told).encode()
            self.send_response(200 if is_known else 404)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            """Keep quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield {"OPENAI_BASE_URL": f"http://127.0.0.1:{server.server_port}/v1", "OPENAI_API_KEY": "a-key"}, heard
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
