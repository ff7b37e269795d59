"""The request that creates a sandbox: its fields, and what of them is stored in the sandbox's row.

`document["e2b"]` of a row has `templateID`, `alias`, `metadata`, `envVars`, `secrets` (names of variables that are not
among these), `templateEnvVars`, `workdir` and `user` (of the template, or None), `autoResume`, `timeout` (seconds asked
for at creation), `network`, `allowInternetAccess` and `volumeMounts` as they were sent. Beside it, `endsAt` and `atEnd`
are the end of the life and what happens then, of each sandbox of the service.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, StringConstraints

from cloche.records.sandboxes import SandboxFacts
from cloche.wire.callers import Caller
from cloche.wire.sandboxes import MOST_LIFETIME_S

from .calls import E2BModel, e2b_id
from .errors import E2BError
from .filled import named_secrets, without_secrets
from .states import ENDS, KEEPS_FILES, PAUSES
from .templates import Template

MOST_TEXT_BYTES = 256 << 10  # of the metadata, and of the variables, of one sandbox
Seconds = Annotated[int, Field(ge=0, le=366 * 24 * 3600)]
Host = Annotated[str, StringConstraints(max_length=512)]
Hosts = Annotated[list[Host], Field(max_length=1_000)]


class AutoResume(E2BModel):
    """Whether traffic resumes a paused sandbox."""

    enabled: bool = False


class VolumeMount(E2BModel):
    """A volume by name, and the path where it is shown."""

    name: str
    path: str


class Transform(E2BModel):
    """What a rule changes in a request."""

    headers: dict[str, str] | None = None


class NetworkRule(E2BModel):
    """A rule for requests to one host."""

    transform: Transform | None = None


class Network(E2BModel):
    """The network of a sandbox."""

    allow_public_traffic: bool | None = None
    allow_out: Hosts | None = None
    deny_out: Hosts | None = None
    dns_servers: Hosts | None = None
    egress_proxy: dict[str, Any] | None = None
    mask_request_host: Host | None = None
    https_ports: list[int] | None = None
    rules: dict[Host, list[NetworkRule]] | None = None


class NewSandbox(E2BModel):
    """A sandbox to create, in both versions of the route."""

    template_id: Annotated[str, StringConstraints(min_length=1, max_length=256)]
    timeout: Seconds | None = None
    auto_pause: bool | None = None
    auto_pause_memory: bool | None = None
    auto_resume: AutoResume | None = None
    secure: bool | None = None  # of version 1; all sandboxes are secure
    allow_internet_access: Annotated[bool | None, Field(alias="allow_internet_access")] = None
    network: Network | None = None
    metadata: dict[str, str] | None = None
    env_vars: dict[str, str] | None = None
    mcp: dict[str, Any] | None = None
    iam: dict[str, Any] | None = None
    volume_mounts: Annotated[list[VolumeMount], Field(max_length=32)] | None = None

    @property
    def at_end(self) -> str:
        """Return what the sandbox does when its time ends."""
        if not self.auto_pause:
            return ENDS
        return KEEPS_FILES if self.auto_pause_memory is False else PAUSES


def check_supported(body: NewSandbox) -> None:
    """Raise E2BError for fields that are not supported, or not together."""
    if body.mcp:
        raise E2BError(
            501, "mcp: there is no MCP gateway inside; run the MCP server as a command and reach it by get_host(port), "
            "or let the agent use `cloche mcp`",
        )  # fmt: skip
    if body.iam and body.iam.get("tokens"):
        raise E2BError(501, "iam: there is no workload identity; give the token as a secret or in envs")
    if body.auto_resume and body.auto_resume.enabled and body.at_end == KEEPS_FILES:
        raise E2BError(
            400, "autoResume: with autoPauseMemory false a sandbox is resumed by connect only; leave out one"
        )
    for name, values in (("metadata", body.metadata), ("envVars", body.env_vars)):
        if sum(len(key.encode()) + len(value.encode()) for key, value in (values or {}).items()) > MOST_TEXT_BYTES:
            raise E2BError(413, f"{name}: these have more than {MOST_TEXT_BYTES} bytes")
    for name, value in (body.env_vars or {}).items():
        if not name or "=" in name or "\0" in name + value:
            raise E2BError(400, f"envVars: {name[:64]!r} cannot be a variable of a process")
    if body.volume_mounts:
        raise E2BError(501, "volumeMounts: there are no volumes; write files with files.write, or use a template")


def check_timeout(timeout_s: int, caller: Caller) -> int:
    """Return a time within the caller's bound. Raises E2BError."""
    if timeout_s > MOST_LIFETIME_S and not caller.has("admin"):
        raise E2BError(400, f"timeout: it cannot be greater than {MOST_LIFETIME_S / 3600:g} hours for this key")
    return timeout_s


def document_of(body: NewSandbox, template: Template, timeout_s: int) -> dict[str, Any]:
    """Return the document of a new sandbox's row."""
    sent = body.model_dump(by_alias=True, exclude_none=True)
    return {
        "name": None, "labels": {"template": template.id}, "lifetime": timeout_s, "idle": None, "lease": None,
        "atEnd": body.at_end,
        "e2b": {
            "templateID": template.id, "alias": template.alias, "templateEnvVars": dict(template.env),
            "workdir": template.workdir, "user": template.user,
            "metadata": body.metadata or {}, "envVars": without_secrets(body.env_vars or {}), "timeout": timeout_s,
            "secrets": named_secrets(body.env_vars or {}),
            "autoResume": bool(body.auto_resume and body.auto_resume.enabled), "network": sent.get("network"),
            "allowInternetAccess": body.allow_internet_access, "volumeMounts": sent.get("volumeMounts", []),
        },
    }  # fmt: skip


def environment_of(facts: SandboxFacts) -> dict[str, str]:
    """Return the variables of all commands and of all languages of run_code: the template's, then the caller's."""
    return environment(facts.id, facts.document["e2b"])


def environment(row: str, own: Mapping[str, Any]) -> dict[str, str]:
    """Return the same by the id of the row and what the row has of E2B's."""
    return {
        "E2B_SANDBOX": "true", "E2B_SANDBOX_ID": e2b_id(row), "E2B_TEMPLATE_ID": own["templateID"],
        **own.get("templateEnvVars", {}), **own["envVars"],
    }  # fmt: skip
