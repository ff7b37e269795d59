"""Ray's Jobs API over HTTP: run a command of Cloche in a cluster, from a machine that has no Ray.

Documented at docs.ray.io, "Ray Jobs REST API". Four calls of it: submit, look, read the log, stop. No proxy of the
environment is used and no redirect is followed, since the token would go there.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import shlex
import ssl
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from cloche.core.errors import BackendUnavailable, InvalidRequest
from cloche.core.record import dataclass, field
from cloche.core.remote import HiddenText

ANSWER_S, LOOK_S = 60.0, 0.5  # the first job waits for the cluster's agent of jobs
MOST_ANSWER, MOST_TOKEN = 8 << 20, 16 << 10
LAST_LINES, MOST_LINE = 12, 400
ENDED = ("SUCCEEDED", "FAILED", "STOPPED")
INSTALLED = "cloche-installed:"
# The cluster's Cloche must be of this version: arguments and answers of its commands are not kept compatible.
CHECK = (
    "import sys, importlib.metadata as m; has = [d.version for d in m.distributions(name='cloche')][:1]; "
    f"has == sys.argv[1:] or sys.exit('{INSTALLED} ' + ''.join(has) + ' ' + sys.executable)"
)


def is_jobs_address(address: str) -> bool:
    """Tell whether a fleet's address is that of a dashboard, and not of the cluster itself."""
    return address.startswith(("http://", "https://"))


def token_of(variables: Mapping[str, str]) -> HiddenText:
    """Return the token of RAY_AUTH_TOKEN, or of the file RAY_AUTH_TOKEN_PATH, as Ray does. Raises InvalidRequest."""
    text, path = variables.get("RAY_AUTH_TOKEN", ""), variables.get("RAY_AUTH_TOKEN_PATH", "")
    if not text and path:
        try:
            with Path(path).expanduser().open(encoding="ascii") as file:
                text = file.read(MOST_TOKEN)
        except (OSError, ValueError) as error:
            raise InvalidRequest(f"RAY_AUTH_TOKEN_PATH: the file cannot be read: {error}") from error
    if not text.strip().isascii() or not (text.strip() or " ").isprintable():
        raise InvalidRequest("RAY_AUTH_TOKEN: this is not a token; a token is one line of printable ASCII characters")
    return HiddenText(text.strip())


@dataclass(frozen=True, slots=True, kw_only=True)
class RayJobs:
    """Run commands by the dashboard at an address, with the cluster's token if it asks for one.

    `pip` has requirements that Ray installs for the job, and so for the fleet that it starts.
    """

    address: str
    token: HiddenText = field(default=HiddenText(), repr=False)
    pip: tuple[str, ...] = ()
    version: str

    async def run(self, words: Sequence[str], variables: Mapping[str, str], *, timeout_s: float) -> dict[str, Any]:
        """Run `cloche WORDS` in the cluster, and return the JSON that it printed. Raises BackendUnavailable.

        A job that is not done within `timeout_s`, or whose caller ends, is stopped.
        """
        body = {"entrypoint": self._entrypoint(words, variables), "metadata": {"name": "cloche " + " ".join(words[:2])}}
        if self.pip:
            body["runtime_env"] = {"pip": list(self.pip)}
        job = str((await self._ask("POST", "/api/jobs/", body)).get("submission_id", ""))
        if not job:
            raise self._stranger("it names no job")
        path = f"/api/jobs/{quote(job, safe='')}"
        try:
            details = await self._ended(job, path, timeout_s)
        except BaseException:
            await asyncio.shield(self._stop(path))
            raise
        log = str((await self._ask("GET", f"{path}/logs")).get("logs", ""))
        if details["status"] != "SUCCEEDED":
            raise self._failed(job, details, log)
        return self._printed(job, log)

    async def version_of_ray(self) -> str:
        """Return the version of the cluster's Ray. Raises BackendUnavailable where no dashboard answers."""
        return str((await self._ask("GET", "/api/version")).get("ray_version", ""))[:MOST_LINE]

    def _entrypoint(self, words: Sequence[str], variables: Mapping[str, str]) -> str:
        checked = shlex.join(["python", "-c", CHECK, self.version])
        settings = [f"{name}={value}" for name, value in variables.items()]
        return f"{checked} && {shlex.join(['env', *settings, 'python', '-P', '-m', 'cloche', *words])}"

    async def _ended(self, job: str, path: str, timeout_s: float) -> dict[str, Any]:
        ends = time.monotonic() + timeout_s
        while (details := await self._ask("GET", path)).get("status") not in ENDED:
            if time.monotonic() > ends:
                raise BackendUnavailable(
                    f"job {job} at {self.address} is {str(details.get('status'))[:20]} after {timeout_s:g} s, and is "
                    "stopped.",
                    remedy="The dashboard shows what it waits for; a cluster needs a moment to start its first worker.",
                )
            await asyncio.sleep(LOOK_S)
        return details

    async def _stop(self, path: str) -> None:
        try:
            await self._ask("POST", f"{path}/stop")
        except BackendUnavailable:  # the caller raises the earlier error
            return

    # Answers.

    def _printed(self, job: str, log: str) -> dict[str, Any]:
        """Return the last line of a log that is a JSON object."""
        for line in reversed(log.splitlines()):
            if (document := _read(line)) is not None:
                return document
        raise BackendUnavailable(
            f"job {job} at {self.address} printed no answer: {_last_lines(log)}",
            remedy="The dashboard shows its log.",
        )

    def _failed(self, job: str, details: Mapping[str, Any], log: str) -> BackendUnavailable:
        for line in log.splitlines():
            if line.startswith(INSTALLED):
                return self._other_version(line.removeprefix(INSTALLED).strip())
            if isinstance(error := (_read(line) or {}).get("error"), dict):
                return BackendUnavailable(str(error.get("message")))  # of the command, with its remedy
        lines = _last_lines(log) or str(details.get("message", ""))[-MOST_LINE:]
        return BackendUnavailable(
            f"job {job} at {self.address} has failed ({details['status']}): {lines}",
            remedy="The dashboard shows all of its log.",
        )

    def _other_version(self, what: str) -> BackendUnavailable:
        version, _, python = what.rpartition(" ")
        has = f"has Cloche {version}" if version else "has no Cloche"
        needed = f"cloche[node,server]=={self.version}"
        return BackendUnavailable(
            f"the cluster's Python ({python}) {has}, and this one has {self.version}.",
            remedy=f"Install {needed} in the image of its nodes, or let Ray do so: --runtime-env-pip '{needed}'.",
        )

    # HTTP.

    async def _ask(self, method: str, path: str, body: object = None) -> dict[str, Any]:
        """Return the JSON object of an answer. Raises BackendUnavailable."""
        return await asyncio.to_thread(self._asked, method, path, body)

    def _asked(self, method: str, path: str, body: object) -> dict[str, Any]:
        try:
            status, text = self._exchange(method, path, None if body is None else json.dumps(body))
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise BackendUnavailable(
                f"no dashboard of Ray answers at {self.address}: {str(error) or type(error).__name__}.",
                remedy="Give that of the cluster's head, such as http://HEAD:8265. It needs \"pip install "
                '\'ray[default]\'" there, and "ray start --head --dashboard-host=0.0.0.0" for other machines.',
            ) from error
        document = _read(text)
        if status == http.client.OK and document is not None:
            return document
        raise self._refused(status, text)

    def _exchange(self, method: str, path: str, body: str | None) -> tuple[int, str]:
        parts = urlsplit(self.address)
        host, port, headers = parts.hostname or "", parts.port, {"Content-Type": "application/json"}
        if token := self.token.reveal():
            headers["Authorization"] = f"Bearer {token}"
        connection = http.client.HTTPConnection(host, port, timeout=ANSWER_S)
        if parts.scheme == "https":
            context = ssl.create_default_context()
            connection = http.client.HTTPSConnection(host, port, timeout=ANSWER_S, context=context)
        try:
            connection.request(method, parts.path.rstrip("/") + path, body, headers)
            answer = connection.getresponse()
            return answer.status, answer.read(MOST_ANSWER).decode(errors="replace")
        finally:
            connection.close()

    def _refused(self, status: int, text: str) -> BackendUnavailable:
        if status in (http.client.UNAUTHORIZED, http.client.FORBIDDEN):
            wants = "refuses this token" if self.token.reveal() else "asks for a token"
            return BackendUnavailable(
                f"the dashboard at {self.address} {wants} ({status}).",
                remedy="Set RAY_AUTH_TOKEN to the cluster's token, or RAY_AUTH_TOKEN_PATH to a file with it: "
                "~/.ray/auth_token is Ray's own.",
            )
        if status in (http.client.OK, http.client.NOT_FOUND):
            return self._stranger(f"status {status}")
        return BackendUnavailable(
            f"the dashboard at {self.address} answers {status}: {_last_lines(text)}",
            remedy='"dashboard.log" of the cluster\'s head says more.',
        )

    def _stranger(self, why: str) -> BackendUnavailable:
        return BackendUnavailable(
            f"what answers at {self.address} is not the Jobs API of Ray: {why}.",
            remedy="Give the address of the cluster's dashboard, such as http://HEAD:8265.",
        )


def jobs_at(address: str, *, pip: Sequence[str], version: str) -> RayJobs:
    """Return what runs commands at a dashboard, with the token of the environment. Raises InvalidRequest."""
    try:
        parts = urlsplit(address)
        host, _ = parts.hostname, parts.port
    except ValueError:
        host, parts = None, urlsplit("")
    if not host or "@" in parts.netloc or parts.query or parts.fragment:
        raise InvalidRequest("fleet.address: write a dashboard's as http://HOST:PORT or https://HOST:PORT")
    return RayJobs(address=address, token=token_of(os.environ), pip=tuple(pip), version=version)


def _read(text: str) -> dict[str, Any] | None:
    try:
        document = json.loads(text) if text.lstrip().startswith("{") else None
    except (ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) else None


def _last_lines(text: str) -> str:
    lines = [line[:MOST_LINE] for line in text.strip().splitlines()[-LAST_LINES:]]
    return "\n".join(lines)
