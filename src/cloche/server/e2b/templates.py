"""Templates: what a sandbox of each begins with. They are the operator's, or rows of the project (`builder.py`)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from cloche.core.errors import NotFound
from cloche.core.record import dataclass, field
from cloche.records import templates as records
from cloche.records.templates import DEFAULT_TAG, BuildFacts, TemplateFacts
from cloche.wire.callers import Caller

from .calls import E2B, Call
from .defaults import sandbox_options
from .errors import E2BError
from .own_templates import BASE, OwnTemplate, OwnTemplates

ROW_PREFIX = "tpl_"


@dataclass(frozen=True, slots=True, kw_only=True)
class Template:
    """Hold a template: its id, its first name, the options of its sandboxes, and their variables.

    `options` may have `snapshot`, the archive of its files. `base` is the operator's template below it.
    """

    id: str
    alias: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    workdir: str | None = None
    user: str | None = None
    start: str | None = None
    ready: str | None = None
    base: str = BASE
    chain: str = ""  # the hash of the steps that made its files
    row: str | None = None  # the id of its row

    def as_build(self) -> dict[str, Any]:
        """Return what a build has that begins with this one."""
        return {
            "base": self.base, "env": dict(self.env), "workdir": self.workdir, "user": self.user, "start": self.start,
            "ready": self.ready, "size": {key: self.options[key] for key in ("cpus", "memory") if key in self.options},
        }  # fmt: skip


def own_templates(e2b: E2B) -> OwnTemplates:
    """Return the operator's templates."""
    templates = e2b.options.templates
    return OwnTemplates() if templates is None else templates


async def find_template(call: Call, caller: Caller, name: str) -> Template:
    """Return a template by its id or name, with or without a tag. Raises E2BError (404, 403, 501)."""
    reference, tag = split(name, caller)
    own = own_templates(call.e2b).find(reference)
    if own is not None and tag == DEFAULT_TAG:
        return await of_own(call, own)
    template, build = await find_row(call, caller, reference, tag)
    if build.status != records.READY:
        raise E2BError(400, f"template {name[:200]!r} has no build that is ready")
    return await of_build(call, template, build)


async def of_own(call: Call, own: OwnTemplate) -> Template:
    """Return one of the operator's as a template."""
    return Template(
        id=own.name, alias=own.name, options={**await sandbox_options(call.service), **own.options}, env=own.env,
        workdir=own.workdir, user=own.user, start=own.start, ready=own.ready, base=own.name,
    )  # fmt: skip


async def of_build(call: Call, template: TemplateFacts, build: BuildFacts) -> Template:
    """Return a build as a template. Raises E2BError for one whose base is gone."""
    fields = build.document
    own = own_templates(call.e2b).find(fields["base"])
    if own is None:
        raise E2BError(
            400, f"template {template.name or template.id}: its base {fields['base']!r} is not here any more"
        )
    archive = await call.service.templates.archive(build)
    options = {**await sandbox_options(call.service), **own.options, **fields.get("size", {}), "snapshot": archive}
    return Template(
        id=e2b_id(template.id), alias=template.name, options=options, env=fields.get("env", {}),
        workdir=fields.get("workdir"), user=fields.get("user"), start=fields.get("start"), ready=fields.get("ready"),
        base=fields["base"], chain=fields.get("chain", ""), row=template.id,
    )  # fmt: skip


async def find_row(
    call: Call, caller: Caller, reference: str, tag: str = DEFAULT_TAG
) -> tuple[TemplateFacts, BuildFacts]:
    """Return the row of a template that the caller may use, and the build of a tag. Raises E2BError (404)."""
    finding = partial(records.find_build, reference=reference, tag=tag, project=caller.project)
    try:
        template, build = await call.service.templates.read(finding)
    except NotFound as error:
        raise not_found(reference, tag) from error
    if not (may_change(caller, template) or template.document.get("public")):
        raise not_found(reference, tag)
    return template, build


async def find_own(call: Call, caller: Caller, reference: str) -> TemplateFacts:
    """Return the row of a template that the caller may change. Raises E2BError (404, 403)."""
    name, _ = split(reference, caller)
    if own_templates(call.e2b).find(name) is not None:
        raise E2BError(403, f"template {name!r} is the operator's, and cannot be changed here")
    try:
        template = await call.service.templates.read(partial(records.find, reference=name, project=caller.project))
    except NotFound as error:
        raise not_found(name) from error
    if not may_change(caller, template):
        is_public = template.document.get("public")
        raise E2BError(403, f"template {name!r} is another key's") if is_public else not_found(name)
    return template


def may_change(caller: Caller, template: TemplateFacts) -> bool:
    """Tell whether a template is the caller's, or the caller has scope admin."""
    return caller.has("admin") or template.api_key == caller.key_id


def split(name: str, caller: Caller) -> tuple[str, str]:
    """Return the name or id and the tag of `project/name:tag`. Raises E2BError (404) for another project's."""
    namespace, slash, rest = name.rpartition("/")
    if slash and namespace != caller.project:
        raise not_found(name)
    reference, colon, tag = rest.partition(":")
    return reference, tag if colon else DEFAULT_TAG


def e2b_id(row: str) -> str:
    """Return E2B's id of a template with a row's id."""
    return row.removeprefix(ROW_PREFIX)


def not_found(reference: str, tag: str = DEFAULT_TAG) -> E2BError:
    """Return the error for a template that there is not, or that another key has."""
    shown = reference[:200] if tag == DEFAULT_TAG else f"{reference[:200]}:{tag[:100]}"
    return E2BError(404, f"template {shown!r} was not found")
