"""Stand-ins of providers: each answers as the provider does to whom shows the real value, and to nobody else.

A streamed answer of the model `waits` goes on after another request (`/v1/models`): only a client that gets each piece
as it is sent can have asked.
"""

from __future__ import annotations

import base64
import json
import os
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from .aws import HOSTS, aws
from .logins import STATE
from .web import Request, Response

VALUES: Mapping[str, str] = {
    "api.openai.com": "sk-proj-RealValueOfOpenAi0123456789abcdefXYZ",
    "api.anthropic.com": "sk-ant-api03-RealValueOfAnthropic0123456789XYZ",
    "generativelanguage.googleapis.com": "AIzaRealValueOfGoogle0123456789abcdefXY",
    "github.com": "ghp_RealValueOfGitHub0123456789abcdefXY",
    "npm.example": "npm_RealValueOfNpm0123456789abcdefXYZ12",
    "pypi.example": "pypi-RealValueOfPypi0123456789abcdefXYZ",
}
WORDS = ("Streamed ", "in ", "pieces")
STREAM_S = 20.0
_asked = threading.Event()
Answer = Callable[[Request], Response]


def _json(body: Any, status: str = "200 OK") -> Response:
    return Response(json.dumps(body).encode(), status, {"Content-Type": "application/json"})


def _streamed(events: Iterator[str], *, waits: bool) -> Response:
    """Return server-sent events in chunks; if it `waits`, those after the first one come after the other request."""
    _asked.clear()

    def chunks() -> Iterator[bytes]:
        for number, event in enumerate(events):
            if waits and number == 1 and not _asked.wait(STREAM_S):
                return
            yield b"%x\r\n%b\r\n" % (len(event.encode()), event.encode())
        yield b"0\r\n\r\n"

    return Response(chunks(), headers={"Content-Type": "text/event-stream", "Transfer-Encoding": "chunked"})


def openai(request: Request) -> Response:
    """Answer as OpenAI's API does: models, and chat completions, streamed where asked for."""
    if request.headers.get("authorization") != f"Bearer {VALUES['api.openai.com']}":
        error = {"message": "Incorrect API key provided", "type": "invalid_request_error", "code": "invalid_api_key"}
        return _json({"error": error}, "401 Unauthorized")
    if request.path == "/v1/models":
        _asked.set()
        return _json({"object": "list", "data": [{"id": "a-model", "object": "model", "created": 0, "owned_by": "a"}]})
    base = {"id": "chatcmpl-1", "created": 1, "model": "a-model"}
    asked = json.loads(request.body)
    if asked.get("stream"):
        return _streamed(_chat_events(base), waits=asked["model"] == "waits")
    message = {"role": "assistant", "content": "".join(WORDS)}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    return _json({**base, "object": "chat.completion", "choices": [choice]})


def _chat_events(base: Mapping[str, Any]) -> Iterator[str]:
    for word in WORDS:
        choice = {"index": 0, "delta": {"content": word}, "finish_reason": None}
        yield f"data: {json.dumps({**base, 'object': 'chat.completion.chunk', 'choices': [choice]})}\n\n"
    yield "data: [DONE]\n\n"


def anthropic(request: Request) -> Response:
    """Answer as Anthropic's API does: models, and messages, streamed where asked for."""
    value = VALUES["api.anthropic.com"]
    bearer = request.headers.get("authorization", "")
    if request.headers.get("x-api-key") != value and bearer != f"Bearer {value}" and not STATE.is_good(bearer):
        error = {"type": "authentication_error", "message": "invalid x-api-key"}
        return _json({"type": "error", "error": error}, "401 Unauthorized")
    if request.path == "/v1/models":
        _asked.set()
        return _json({"data": [], "has_more": False, "first_id": None, "last_id": None})
    usage = {"input_tokens": 1, "output_tokens": 1}
    message = {"id": "msg_1", "type": "message", "role": "assistant", "model": "a-model", "usage": usage}
    asked = json.loads(request.body)
    if asked.get("stream"):
        begun = {**message, "content": [], "stop_reason": None, "stop_sequence": None}
        return _streamed(_message_events(begun), waits=asked["model"] == "waits")
    content = [{"type": "text", "text": "".join(WORDS)}]
    return _json({**message, "content": content, "stop_reason": "end_turn", "stop_sequence": None})


def _message_events(message: Mapping[str, Any]) -> Iterator[str]:
    def event(kind: str, **more: Any) -> str:
        return f"event: {kind}\ndata: {json.dumps({'type': kind, **more})}\n\n"

    begins = event("message_start", message=message)
    begins += event("content_block_start", index=0, content_block={"type": "text", "text": ""})
    for word in WORDS:
        yield begins + event("content_block_delta", index=0, delta={"type": "text_delta", "text": word})
        begins = ""
    delta = {"stop_reason": "end_turn", "stop_sequence": None}
    yield event("content_block_stop", index=0)
    yield event("message_delta", delta=delta, usage={"output_tokens": 3}) + event("message_stop")


def is_basic(request: Request, user: str) -> bool:
    """Tell whether a request shows Basic credentials with the value of its host."""
    packed = base64.b64encode(f"{user}:{VALUES[request.host]}".encode()).decode()
    return request.headers.get("authorization") == f"Basic {packed}"


def refused(request: Request) -> Response:
    """Ask for Basic credentials."""
    return Response(b"who are you?\n", "401 Unauthorized", {"WWW-Authenticate": 'Basic realm="tests"'})


def github(folder: Path, request: Request) -> Response:
    """Serve a private repository over git's HTTP, to be read and written with a token."""
    if not is_basic(request, "x-access-token"):
        return refused(request)
    return run_backend(private_repository(folder), request, {"http.receivepack": "true"})


_making = threading.Lock()


def private_repository(folder: Path) -> Path:
    """Return the folder with the repository `acme/private.git`, which is empty at first."""
    with _making:
        repository = folder / "github" / "acme" / "private.git"
        if not repository.exists():
            env = {"PATH": os.environ["PATH"], "GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_NOSYSTEM": "1"}
            words = ["git", "init", "--quiet", "--bare", "--initial-branch=main", str(repository)]
            subprocess.run(words, env=env, check=True)
    return folder / "github"


def run_backend(root: Path, request: Request, settings: Mapping[str, str]) -> Response:
    """Have git's own program answer a request for the repositories in a folder."""
    config = {
        "GIT_CONFIG_COUNT": str(len(settings) + 1),
        "GIT_CONFIG_KEY_0": "safe.directory",
        "GIT_CONFIG_VALUE_0": "*",
    }
    for at, (key, value) in enumerate(settings.items(), 1):
        config |= {f"GIT_CONFIG_KEY_{at}": key, f"GIT_CONFIG_VALUE_{at}": value}
    env = {
        "PATH": os.environ["PATH"],
        "GIT_PROJECT_ROOT": str(root),
        "GIT_HTTP_EXPORT_ALL": "1",
        **config,
        "PATH_INFO": request.path,
        "QUERY_STRING": request.target.partition("?")[2],
        "REQUEST_METHOD": request.method,
        "CONTENT_TYPE": request.headers.get("content-type", ""),
        "CONTENT_LENGTH": str(len(request.body)),
        "HTTP_CONTENT_ENCODING": request.headers.get("content-encoding", ""),
        "GIT_PROTOCOL": request.headers.get("git-protocol", ""),
    }
    done = subprocess.run(["git", "http-backend"], input=request.body, env=env, capture_output=True, check=True)
    head, _, body = done.stdout.partition(b"\r\n\r\n")
    headers = dict(line.split(": ", 1) for line in head.decode().split("\r\n"))
    return Response(body, headers.pop("Status", "200 OK"), headers)


def npm(serve: Answer, request: Request) -> Response:
    """Serve and take packages as a registry does, with a token."""
    if request.headers.get("authorization") != f"Bearer {VALUES['npm.example']}":
        return _json({"error": "unauthorized"}, "401 Unauthorized")
    if request.method == "PUT":
        sent = json.loads(request.body)
        return _json({"ok": True, "id": sent["_id"]}, "201 Created")
    return serve(request)


def pypi(serve: Answer, request: Request) -> Response:
    """Serve an index and its files, and take uploads, with Basic credentials."""
    if not is_basic(request, "__token__"):
        return refused(request)
    if request.method == "POST":
        is_upload = b'name=":action"' in request.body and b"file_upload" in request.body
        return Response(b"", "200 OK" if is_upload else "400 Bad Request")
    return serve(request)


def answers(folder: Path, registry: Answer, index: Answer) -> dict[str, tuple[str, Answer]]:
    """Return, for each host, the beginning of the paths that its stand-in serves, and the stand-in."""
    return {
        "api.openai.com": ("/v1/", openai),
        "api.anthropic.com": ("/v1/", anthropic),
        "github.com": ("/acme/", partial(github, folder)),
        "npm.example": ("/", partial(npm, registry)),
        "pypi.example": ("/", partial(pypi, index)),
        **dict.fromkeys(HOSTS, ("/", aws)),
    }
