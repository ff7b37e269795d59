"""A server on this machine that speaks OpenAI's chat completions, with answers that a test prepared."""

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

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
