"""Apply the manifests of a fleet, by server-side apply, and show what that changes."""

from __future__ import annotations

import base64
import difflib
import json
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from typing import Any

import yaml

from cloche.core.errors import InvalidRequest
from cloche.core.fleet_settings import FleetSettings
from cloche.core.record import dataclass

from ..signing import Signer
from .api import APPLY, ApiError, KubernetesApi
from .manifests import OBJECT, Manifest, Served, left_out, manifests, secret_object
from .pooled import check_served

_PLURALS = {"NetworkPolicy": "networkpolicies"}
_SERVERS_OWN = ("managedFields", "resourceVersion", "uid", "creationTimestamp", "generation", "selfLink")


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """An object before and after its manifest is applied; `before` is empty for a new one."""

    manifest: Manifest
    before: Mapping[str, Any]
    after: Mapping[str, Any]

    @property
    def name(self) -> str:
        """Return the kind and the name."""
        return f"{self.manifest['kind']}/{self.manifest['metadata']['name']}"

    def lines(self) -> list[str]:
        """Return the difference, no lines for equal objects."""
        before, after = (as_yaml(_plain(row)).splitlines() if row else [] for row in (self.before, self.after))
        where = self.name if self.before else "/dev/null"
        return list(difflib.unified_diff(before, after, where, self.name, lineterm="", n=2))


def check_image(settings: FleetSettings) -> None:
    """Raise InvalidRequest where there is no image for the pods."""
    if not settings.image:
        raise InvalidRequest(
            "fleet.image (CLOCHE_FLEET_IMAGE): name the image of the pods, which has this version of Cloche with the "
            "extra node: deploy/Dockerfile with EXTRAS=node"
        )


def printed(settings: FleetSettings, *, as_json: bool = False) -> str:
    """Return the manifests as YAML or a List in JSON for `kubectl apply`; the key comes with `--apply`."""
    check_image(settings)
    rows = manifests(settings)
    if as_json:
        return json.dumps({"apiVersion": "v1", "kind": "List", "items": rows}) + "\n"
    return "---\n".join(map(as_yaml, rows))


def as_yaml(row: Mapping[str, Any]) -> str:
    """Return an object as YAML."""
    return yaml.dump(dict(row), Dumper=_Plain, sort_keys=False, width=120)


class _Plain(yaml.SafeDumper):
    """Write equal parts twice, without anchors."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ANN401, ARG002 - the package's own method
        return True


async def plan(api: KubernetesApi, settings: FleetSettings) -> tuple[list[Change], list[str]]:
    """Return the changes, and sentences about missing features of the server. Raises ApiError, BackendUnavailable."""
    check_image(settings)
    served = await served_by(api)
    if settings.mode == "agent-sandbox":
        await check_served(api)
    private_key = await _private_key(api, settings)
    signer = Signer(private_key)
    data = {"publicKey": signer.public_key, "version": metadata.version("cloche")}
    rows = manifests(settings, served, data=data)
    if private_key is None:
        secret = secret_object(settings, base64.b64encode(signer.private_key).decode())
        rows.insert(1, secret)
    return [await _change(api, row) for row in rows], left_out(settings, served)


async def served_by(api: KubernetesApi) -> Served:
    """Return the version of the server."""
    minor = str((await api.get("/version")).get("minor", ""))
    digits = "".join(char for char in minor if char.isdecimal())
    return Served(minor=int(digits)) if digits else Served()


async def _private_key(api: KubernetesApi, settings: FleetSettings) -> bytes | None:
    try:
        row = await api.get(f"/api/v1/namespaces/{settings.namespace}/secrets/{OBJECT}")
    except ApiError as error:
        if error.status != 404:
            raise
        return None
    return base64.b64decode(row["data"]["privateKey"])


async def _change(api: KubernetesApi, row: Manifest) -> Change:
    try:
        before = await api.get(path_of(row))
    except ApiError as error:
        if error.status != 404:
            raise
        return Change(manifest=row, before={}, after=row)
    return Change(manifest=row, before=before, after=await _applied(api, row, dryRun="All"))


async def apply(api: KubernetesApi, changes: Sequence[Change]) -> None:
    """Apply the manifests that differ."""
    for change in changes:
        if change.lines():
            await _applied(api, change.manifest)


async def _applied(api: KubernetesApi, row: Manifest, **query: str) -> dict[str, Any]:
    return await api.patch(path_of(row), row, kind=APPLY, fieldManager="cloche", force="true", **query)


def path_of(row: Mapping[str, Any]) -> str:
    """Return the path of an object."""
    version, kind, meta = row["apiVersion"], row["kind"], row["metadata"]
    root = f"/api/{version}" if "/" not in version else f"/apis/{version}"
    within = f"/namespaces/{meta['namespace']}" if "namespace" in meta else ""
    return f"{root}{within}/{_PLURALS.get(kind, kind.lower() + 's')}/{meta['name']}"


def _plain(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return an object without the fields that the server adds, and without a key."""
    meta = {name: value for name, value in row["metadata"].items() if name not in _SERVERS_OWN}
    rest = {name: value for name, value in row.items() if name not in ("metadata", "status")}
    if row.get("kind") == "Secret":
        rest["data"] = dict.fromkeys(row.get("data") or {}, "(hidden)")
    return dict(_sorted({"metadata": meta, **rest}))


def _sorted(row: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name in sorted(row):
        value = row[name]
        yield name, dict(_sorted(value)) if isinstance(value, dict) else value
