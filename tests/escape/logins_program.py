"""What a program does with a login: it logs in, refreshes, says who it is, and looks for the tokens everywhere."""

from __future__ import annotations

import json
import os
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

LOGIN, API = "https://platform.claude.com", "https://api.anthropic.com"
TOKEN, STATE = f"{LOGIN}/v1/oauth/token", f"{LOGIN}/state"
WANTED = b"OfTheLogin"  # both tokens have it before a digit


def ask(url: str, body: Any = None, **headers: str) -> tuple[int, Any]:
    """Return the status and what a host says."""
    data = json.dumps(body).encode() if body is not None else None
    headers |= {"Content-Type": "application/json"} if data is not None else {}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=30) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def log_in() -> Any:
    """Return the tokens of a new login."""
    return ask(TOKEN, {"grant_type": "authorization_code", "code": "abc", "client_id": "c"})[1]


def refresh(tokens: dict[str, str], **more: str) -> tuple[int, Any]:
    """Return the answer to a refresh."""
    asked = {"grant_type": "refresh_token", "refresh_token": tokens["refresh_token"], "client_id": "c"}
    return ask(TOKEN, {**asked, **more})


def is_good(tokens: dict[str, str]) -> bool:
    """Tell whether the access token is that of now."""
    return ask(f"{API}/api/oauth/profile", Authorization="Bearer " + tokens["access_token"])[0] == 200


def at_once(count: int, work: Callable[[], Any]) -> list[Any]:
    """Return what some threads return."""
    results: list[Any] = []
    threads = [threading.Thread(target=lambda: results.append(work())) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def has_token(data: bytes) -> bool:
    """Tell whether there is a token in some bytes."""
    at = data.find(WANTED)
    while at >= 0:
        if data[at + len(WANTED) : at + len(WANTED) + 1].isdigit():
            return True
        at = data.find(WANTED, at + 1)
    return False


def looked_through() -> list[str]:
    """Return where a token stands: the environment, files, the memory of this process."""
    places = []
    if has_token(Path("/proc/self/environ").read_bytes()):
        places.append("environment")
    for root in {os.path.expanduser("~"), os.getcwd()}:
        for folder, _, names in os.walk(root):
            for name in names:
                path = os.path.join(folder, name)
                if os.path.isfile(path) and has_token(Path(path).read_bytes()):
                    places.append(path)
    with open("/proc/self/maps") as maps, open("/proc/self/mem", "rb", 0) as memory:
        for line in maps:
            start, end = (int(part, 16) for part in line.split()[0].split("-"))
            if line.split()[1].startswith("rw") and "[v" not in line:
                memory.seek(start)
                if has_token(memory.read(end - start)):
                    places.append("memory")
    return sorted(set(places))
