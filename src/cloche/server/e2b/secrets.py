"""Secrets, which are the service's own: stored encrypted, and put into requests to their hosts outside of sandboxes.

E2B's name `openai-api-key` is the service's `OPENAI_API_KEY`. The hosts that get a value are those of the known
provider, or `metadata["hosts"]`, separated by commas; without any it is stored, and no sandbox can have it. A sandbox
has the secrets whose placeholder (`Secret.fill`) is the value of the variable with their name in `envVars`.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any

from pydantic import Field, SecretStr
from starlette.responses import JSONResponse, Response

from cloche.core.errors import InvalidRequest
from cloche.core.secrets import MOST_BYTES, Secret, check_value, make_placeholder, read_secret
from cloche.records.secrets import SecretFacts, list_secrets, remove_secret, store_secret
from cloche.wire.callers import Caller

from .calls import Call, E2BModel, Row
from .errors import E2BError
from .filled import FILLED, variable
from .paging import page_of

ID_PREFIX, HOSTS = "sec_", "hosts"
MOST_ENTRIES, MOST_METADATA = 32, 8_192
Text = Annotated[str, Field(max_length=1_024)]


class SecretChange(E2BModel):
    """Another value of a secret."""

    value: Annotated[SecretStr, Field(max_length=MOST_BYTES)]
    metadata: dict[str, Text] | None = None


class E2BSecret(SecretChange):
    """A secret to store."""

    name: Annotated[str, Field(min_length=1, max_length=128)]


async def _stored(call: Call, caller: Caller) -> list[SecretFacts]:
    return await call.service.read(partial(list_secrets, project=caller.project))


async def _find(call: Call, caller: Caller) -> SecretFacts:
    """Return the secret of the path, by id or name. Raises E2BError (404)."""
    reference = call.path["secret_id"]
    rows = await _stored(call, caller)
    for row in rows:
        if _id(row) == reference or _name(row) == reference.lower():
            return row
    raise E2BError(404, f"secret {reference[:128]!r} was not found")


def _id(row: SecretFacts) -> str:
    return ID_PREFIX + row.id.removeprefix("secret_")


def _name(row: SecretFacts) -> str:
    return str(row.notes.get("name") or row.name.lower().replace("_", "-"))


def as_dict(row: SecretFacts) -> dict[str, Any]:
    """Return a secret as E2B describes it, without its value."""
    metadata = row.notes.get("metadata", {HOSTS: ",".join(row.hosts)})
    return {
        "secretID": _id(row), "name": _name(row), "currentVersion": row.notes.get("version", 1), "metadata": metadata,
        "createdAt": row.created_at, "updatedAt": row.changed_at,
    }  # fmt: skip


async def _store(
    call: Call, caller: Caller, name: str, value: SecretStr, metadata: Mapping[str, str], version: int
) -> dict[str, Any]:
    """Store a value. Raises InvalidRequest, without any of it; Conflict, BackendUnavailable."""
    size = sum(len(key.encode()) + len(text.encode()) for key, text in metadata.items())
    if len(metadata) > MOST_ENTRIES or size > MOST_METADATA:
        raise E2BError(400, f"metadata: there are more than {MOST_ENTRIES} entries, or {MOST_METADATA} bytes")
    own = variable(name)
    hosts = tuple(host.strip() for host in metadata.get(HOSTS, "").split(",") if host.strip())
    text = check_value(own, value.get_secret_value().encode())
    make_placeholder(own, text, random.choice)  # for a value without one
    secret = _with_hosts(own, Secret(value=text, hosts=hosts))
    key = await call.service.secret_store.key_for(own, caller.project)
    await call.service.record("secret", what="stored", name=own, hosts=list(secret.hosts))
    notes = {"name": name.strip().lower(), "metadata": dict(metadata), "version": version}
    storing = partial(
        store_secret, key=key, name=own, secret=secret, project=caller.project, by=caller.name, notes=notes
    )
    facts, _ = await call.service.write(storing)
    return as_dict(facts)


def _with_hosts(name: str, secret: Secret) -> Secret:
    """Return a secret with the hosts of its provider. One without hosts is stored, and no sandbox can have it."""
    try:
        return read_secret(name, secret)
    except InvalidRequest:
        if secret.hosts:
            raise
        return secret


async def create(call: Call) -> Response:
    """Store a secret."""
    caller = await call.caller("admin")
    body: E2BSecret = await call.body(E2BSecret)
    own = variable(body.name)
    if own in [row.name for row in await _stored(call, caller)]:
        raise E2BError(409, f"secret {body.name!r} is stored already; update it")
    return JSONResponse(await _store(call, caller, body.name, body.value, body.metadata or {}, 1), 201)


async def change(call: Call) -> Response:
    """Store another value of a secret."""
    caller = await call.caller("admin")
    row = await _find(call, caller)
    body: SecretChange = await call.body(SecretChange)
    before = as_dict(row)
    metadata = before["metadata"] if body.metadata is None else body.metadata
    version = before["currentVersion"] + 1
    return JSONResponse(await _store(call, caller, before["name"], body.value, metadata, version))


async def look(call: Call) -> Response:
    """Describe a secret."""
    return JSONResponse(as_dict(await _find(call, await call.caller("read"))))


async def listed(call: Call) -> Response:
    """List secrets by name, a page at a time."""
    caller = await call.caller("read")
    limit, token = page_of(call)
    rows = sorted(map(as_dict, await _stored(call, caller)), key=lambda row: row["name"])
    rest = [row for row in rows if token is None or row["name"] > token]
    headers = {"x-next-token": rest[limit - 1]["name"]} if len(rest) > limit else {}
    return JSONResponse(rest[:limit], headers=headers)


async def remove(call: Call) -> Response:
    """Remove a secret. Sandboxes that have it keep it until they end."""
    caller = await call.caller("admin")
    row = await _find(call, caller)
    await call.service.record("secret", what="removed", name=row.name)
    await call.service.write(partial(remove_secret, name=row.name, project=caller.project))
    return Response(status_code=204)


async def secret_options(call: Call, caller: Caller, variables: Mapping[str, str]) -> dict[str, Any]:
    """Return the option `secrets` of a new sandbox for the placeholders among its variables. Raises E2BError (400)."""
    names = []
    for name, value in variables.items():
        found = FILLED.fullmatch(value)
        if found is None and FILLED.search(value):
            raise E2BError(
                400, f"envVars: {name[:64]}: a secret is the whole value of a variable, with no text around it"
            )
        if found is None:
            continue
        if variable(found[1]) != name:
            raise E2BError(400, f"envVars: the secret {found[1][:64]!r} goes into the variable {variable(found[1])}")
        names.append(name)
    return {"secrets": (await call.service.allowed_options(caller, {"secrets": names}))["secrets"]} if names else {}


ROWS = (
    Row(method="POST", path="/secrets", handler=create),
    Row(method="GET", path="/secrets", handler=listed),
    Row(method="GET", path="/secrets/{secret_id}", handler=look),
    Row(method="POST", path="/secrets/{secret_id}", handler=change),
    Row(method="DELETE", path="/secrets/{secret_id}", handler=remove),
)
