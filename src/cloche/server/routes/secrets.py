"""`/api/secrets`: the secrets that the service holds for a project. A value comes in, and never out."""

from __future__ import annotations

import random
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Response
from pydantic import Field, SecretStr, StringConstraints

from cloche.core.secret_names import check_names
from cloche.core.secrets import MOST_BYTES, MOST_FILES, MOST_HOSTS, Secret, check_value, make_placeholder, read_secret
from cloche.records.secrets import remove_secret, store_secret
from cloche.wire.callers import Caller
from cloche.wire.exec_options import WireModel, Word

from ..auth import Admin, Reader, TheService
from ..bodies import JsonRoute
from ..problems import RESPONSES
from ..service import Service

router = APIRouter(prefix="/api/secrets", tags=["secrets"], route_class=JsonRoute)


class NewSecret(WireModel):
    """A secret to store. The hosts of a known provider's name may be left out."""

    value: Annotated[SecretStr, StringConstraints(max_length=MOST_BYTES)]
    hosts: list[Word] = Field(default_factory=list, max_length=MOST_HOSTS)
    format: Word = ""
    foreign: Literal["refuse", "allow"] = "refuse"
    places: list[Word] = Field(default=["headers"], max_length=MOST_HOSTS)
    files_inside: dict[Word, str] = Field(default_factory=dict, max_length=MOST_FILES)


@router.get("", responses=RESPONSES)
async def secrets(caller: Reader, service: TheService) -> dict[str, Any]:
    """List the secrets of the project: names, hosts and times. Values are never in an answer."""
    return {"items": await service.secret_store.list(caller.project), "nextCursor": None}


@router.put("/{name}", status_code=201, responses=RESPONSES)
async def store(name: str, body: NewSecret, caller: Admin, service: TheService, response: Response) -> dict[str, Any]:
    """Store a secret, or replace it. The answer is 201 for a new one and 200 otherwise, and has no value."""
    document, is_new = await put(service, caller, name, body)
    response.status_code = 201 if is_new else 200
    return document


@router.delete("/{name}", responses=RESPONSES)
async def remove(name: str, caller: Admin, service: TheService) -> dict[str, Any]:
    """Remove a secret. Sandboxes that have it keep it until they end."""
    return await take_away(service, caller, name)


async def put(service: Service, caller: Caller, name: str, body: NewSecret) -> tuple[dict[str, Any], bool]:
    """Store a secret; return its facts, and whether it is new. Raises InvalidRequest, Conflict, BackendUnavailable."""
    secret = _checked(name, body)
    key = await service.secret_store.key_for(name, caller.project)
    await service.record("secret", what="stored", name=name, hosts=list(secret.hosts))
    storing = partial(store_secret, key=key, name=name, secret=secret, project=caller.project, by=caller.name)
    facts, is_new = await service.write(storing)
    return facts.as_dict(key.mark), is_new


async def take_away(service: Service, caller: Caller, name: str) -> dict[str, Any]:
    """Remove a secret, and return its facts. Raises NotFound, InvalidRequest."""
    check_names([name])
    await service.record("secret", what="removed", name=name)
    facts = await service.write(partial(remove_secret, name=name, project=caller.project))
    return facts.as_dict(None)


def _checked(name: str, body: NewSecret) -> Secret:
    """Return the secret. Raises InvalidRequest, without any of its value."""
    check_names([name])
    value = check_value(name, body.value.get_secret_value().encode())
    make_placeholder(name, value, random.choice)  # for a value without one
    return read_secret(name, Secret(**{**body.model_dump(), "value": value}))
