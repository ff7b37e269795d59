"""Templates of sandboxes and snapshots: rows by project, each with builds, and tags that name one of them.

The archive of a build's files is written before its row says `ready`, and removed after the row.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import delete, func, select, update
from sqlalchemy.orm import Session

from cloche.core.errors import Conflict, InvalidRequest, NotFound
from cloche.core.escape import escape_name
from cloche.core.record import dataclass

from .ids import new_id, now
from .tables import StoredTemplate, TemplateBuild, TemplateTag

PREFIX = "tpl"
TEMPLATE, SNAPSHOT = "template", "snapshot"
WAITING, BUILDING, READY, ERROR = "waiting", "building", "ready", "error"
DEFAULT_TAG = "default"
MOST_TEMPLATES, MOST_TAGS = 500, 100  # of a project; of a template
KEPT_BUILDS = 20  # rows of a template's ended builds without a tag
IS_NAME = re.compile(r"[a-z0-9][a-z0-9_.-]{0,127}").fullmatch
IS_ID = re.compile(r"[0-9a-z]{20}").fullmatch
IS_TAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}").fullmatch


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateFacts:
    """Hold the facts about one template."""

    id: str
    project: str
    kind: str
    name: str | None
    api_key: str | None
    created_at: str
    changed_at: str
    spawned_at: str | None
    spawn_count: int
    document: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildFacts:
    """Hold the facts about one build."""

    id: str
    template_id: str
    status: str
    worker: str
    size: int
    created_at: str
    ended_at: str | None
    document: Mapping[str, Any]


def check_name(name: str) -> str:
    """Return a valid name. Raises InvalidRequest."""
    if IS_NAME(name) is None:
        raise InvalidRequest(f"name: {escape_name(name[:140])} is not one; use a-z, 0-9, -, _ and ., 128 at the most")
    if IS_ID(name.removeprefix(f"{PREFIX}_")) is not None:  # that of another one, which may be deleted
        raise InvalidRequest(f"name: {name} has the form of an id; take another name")
    return name


def check_tag(tag: str) -> str:
    """Return a valid tag. Raises InvalidRequest."""
    if IS_TAG(tag) is None:
        raise InvalidRequest(f"tag: {escape_name(tag[:140])} is not one; use letters, digits, -, _ and .")
    return tag


def begin(
    session: Session, *, project: str, api_key: str | None, kind: str, name: str | None, worker: str,
    document: Mapping[str, Any], build: Mapping[str, Any], tags: Sequence[str] = (),
) -> tuple[TemplateFacts, BuildFacts]:  # fmt: skip
    """Add a build, and its template unless there is one of that name. Tags are given when it is ready.

    Raises Conflict for too many, or for a name of the other kind.
    """
    row = _named(session, project, name) if name is not None else None
    if row is None:
        row = _add(session, project=project, api_key=api_key, kind=kind, name=name, document=dict(document))
    elif row.kind != kind:
        raise Conflict(f"{row.name} is the name of a {row.kind} already; take another one, or delete that")
    else:
        row.document, row.changed_at = dict(document), now()
    build_row = TemplateBuild(
        id=str(uuid.uuid4()), project=project, created_at=now(), template_id=row.id, status=WAITING, worker=worker,
        size=0, document={**build, "tags": list(tags) or [DEFAULT_TAG]},
    )  # fmt: skip
    session.add(build_row)
    session.flush()
    return _facts(row), _build(build_row)


def _add(session: Session, **values: Any) -> StoredTemplate:  # noqa: ANN401 - of the columns
    count = session.scalar(
        select(func.count()).select_from(StoredTemplate).where(StoredTemplate.project == values["project"])
    )
    if count is not None and count >= MOST_TEMPLATES:
        raise Conflict(f"this project has {count} templates and snapshots, the most there may be; delete one")
    row = StoredTemplate(id=new_id(PREFIX), created_at=now(), changed_at=now(), spawn_count=0, **values)
    session.add(row)
    session.flush()
    return row


def note_build(session: Session, build_id: str, status: str, *, size: int | None = None, **more: Any) -> bool:  # noqa: ANN401 - JSON
    """Store the status of a build, and further fields of its document; return False if it was deleted.

    A ready one gets its tags.
    """
    row = session.get(TemplateBuild, build_id)
    if row is None:
        return False
    row.status, row.document = status, {**row.document, **more}
    row.size = row.size if size is None else size
    row.ended_at = now() if status in (READY, ERROR) else None
    if status == READY:
        set_tags(session, row.template_id, build_id, row.document["tags"])
    template = session.get(StoredTemplate, row.template_id)
    if template is not None:
        template.changed_at = now()
    return True


def set_tags(session: Session, template_id: str, build_id: str, tags: Sequence[str]) -> None:
    """Let tags name a build. Raises Conflict for too many."""
    for tag in tags:
        row = session.get(TemplateTag, (template_id, tag))
        if row is None:
            row = TemplateTag(template_id=template_id, tag=tag, build_id=build_id, created_at=now())
            session.add(row)
        row.build_id, row.created_at = build_id, now()
    session.flush()
    if len(tags_of(session, template_id)) > MOST_TAGS:
        raise Conflict(f"this template has {MOST_TAGS} tags, the most there may be; remove one")


def remove_tags(session: Session, template_id: str, tags: Sequence[str]) -> int:
    """Remove tags; return how many there were."""
    rows = [row for tag in tags if (row := session.get(TemplateTag, (template_id, tag))) is not None]
    for row in rows:
        session.delete(row)
    return len(rows)


def tags_of(session: Session, template_id: str) -> list[tuple[str, str, str]]:
    """Return the tags of a template with the id of their build and their time, by name."""
    query = select(TemplateTag).where(TemplateTag.template_id == template_id).order_by(TemplateTag.tag)
    return [(row.tag, row.build_id, row.created_at) for row in session.scalars(query)]


def find_any(session: Session, template_id: str) -> TemplateFacts | None:
    """Return a template of any project by its id, None for an unknown one."""
    row = session.get(StoredTemplate, template_id)
    return None if row is None else _facts(row)


def find(session: Session, reference: str, *, project: str) -> TemplateFacts:
    """Return a template by its id, also without its prefix, or its name. Raises NotFound."""
    row = session.get(StoredTemplate, f"{PREFIX}_{reference.removeprefix(f'{PREFIX}_')}")
    if row is None or row.project != project:
        row = _named(session, project, reference)
    if row is None:
        raise NotFound(f"there is no template and no snapshot {escape_name(reference[:140])}")
    return _facts(row)


def has_name(session: Session, name: str, *, project: str) -> bool:
    """Tell whether a template of a project has a name."""
    return _named(session, project, name) is not None


def find_build(session: Session, reference: str, tag: str, *, project: str) -> tuple[TemplateFacts, BuildFacts]:
    """Return a template, by its id or its name, and the build that a tag names. Raises NotFound."""
    template = find(session, reference, project=project)
    named = session.get(TemplateTag, (template.id, tag))
    row = session.get(TemplateBuild, named.build_id) if named is not None else None
    if row is None:
        raise NotFound(f"{escape_name(reference[:140])} has no build with the tag {escape_name(tag[:140])}")
    return template, _build(row)


def build_of(session: Session, template_id: str, build_id: str) -> BuildFacts:
    """Return a build of a template. Raises NotFound."""
    row = session.get(TemplateBuild, build_id)
    if row is None or row.template_id != template_id:
        raise NotFound(f"this template has no build {escape_name(build_id[:80])}")
    return _build(row)


def builds_of(session: Session, template_id: str) -> list[BuildFacts]:
    """Return the builds of a template, the newest first."""
    query = select(TemplateBuild).where(TemplateBuild.template_id == template_id)
    return [_build(row) for row in session.scalars(query.order_by(TemplateBuild.created_at.desc(), TemplateBuild.id))]


def ready_builds(session: Session, *, project: str) -> list[BuildFacts]:
    """Return all builds of a project whose files are there."""
    query = select(TemplateBuild).where(TemplateBuild.project == project, TemplateBuild.size > 0)
    return [_build(row) for row in session.scalars(query)]


def unfinished_builds(session: Session) -> list[BuildFacts]:
    """Return the builds that a worker has yet to end."""
    query = select(TemplateBuild).where(TemplateBuild.status.in_((WAITING, BUILDING)))
    return [_build(row) for row in session.scalars(query)]


def all_builds(session: Session) -> set[str]:
    """Return the ids of all builds."""
    return set(session.scalars(select(TemplateBuild.id)))


def total_size(session: Session, *, project: str) -> int:
    """Return the bytes of all archives of a project."""
    return session.scalar(select(func.sum(TemplateBuild.size)).where(TemplateBuild.project == project)) or 0


def listed(
    session: Session, *, project: str, kind: str, limit: int, before: str | None = None, source: str | None = None,
    name: str | None = None, api_key: str | None = None,
) -> tuple[list[TemplateFacts], str | None]:  # fmt: skip
    """Return a page of templates of a kind, the newest first, and the cursor of the next one.

    `source` is the sandbox of a snapshot, `api_key` the key that made them. A snapshot is listed once it has files.
    """
    query = select(StoredTemplate).where(StoredTemplate.project == project, StoredTemplate.kind == kind)
    if before is not None:
        query = query.where(StoredTemplate.id < before)
    if name is not None:
        query = query.where(StoredTemplate.name == name)
    if source is not None:
        query = query.where(StoredTemplate.document["sandbox"].as_string() == source)
    if api_key is not None:
        query = query.where(StoredTemplate.api_key == api_key)
    if kind == SNAPSHOT:
        query = query.where(StoredTemplate.id.in_(select(TemplateTag.template_id)))
    rows = list(session.scalars(query.order_by(StoredTemplate.id.desc()).limit(limit + 1)))
    return [_facts(row) for row in rows[:limit]], rows[limit - 1].id if len(rows) > limit else None


def change(session: Session, template_id: str, **values: Any) -> None:  # noqa: ANN401 - JSON
    """Store further fields of a template's document."""
    row = session.get(StoredTemplate, template_id)
    if row is not None:
        row.document, row.changed_at = {**row.document, **values}, now()


def note_spawn(session: Session, template_id: str) -> None:
    """Count a sandbox that began from a template."""
    session.execute(
        update(StoredTemplate)
        .where(StoredTemplate.id == template_id)
        .values(spawned_at=now(), spawn_count=StoredTemplate.spawn_count + 1)
    )


def remove(session: Session, template_id: str) -> list[str]:
    """Remove a template with its builds and tags; return the ids of the builds, whose files are to be removed."""
    builds = [build.id for build in builds_of(session, template_id)]
    _remove_builds(session, builds)
    session.execute(delete(StoredTemplate).where(StoredTemplate.id == template_id))
    return builds


def supersede(session: Session, template_id: str) -> list[str]:
    """Let builds that no tag names any more have no files, and remove old rows; return the ids of these builds."""
    tagged = {build_id for _, build_id, _ in tags_of(session, template_id)}
    old = [build for build in builds_of(session, template_id) if build.id not in tagged and build.ended_at is not None]
    ids = [build.id for build in old if build.size]
    session.execute(update(TemplateBuild).where(TemplateBuild.id.in_(ids)).values(size=0))
    _remove_builds(session, [build.id for build in old[KEPT_BUILDS:]])
    return ids


def _remove_builds(session: Session, builds: Sequence[str]) -> None:
    session.execute(delete(TemplateTag).where(TemplateTag.build_id.in_(builds)))
    session.execute(delete(TemplateBuild).where(TemplateBuild.id.in_(builds)))


def _named(session: Session, project: str, name: str) -> StoredTemplate | None:
    query = select(StoredTemplate).where(StoredTemplate.project == project, StoredTemplate.name == name)
    return session.scalars(query).first()


def _facts(row: StoredTemplate) -> TemplateFacts:
    return TemplateFacts(
        id=row.id, project=row.project, kind=row.kind, name=row.name, api_key=row.api_key, created_at=row.created_at,
        changed_at=row.changed_at, spawned_at=row.spawned_at, spawn_count=row.spawn_count, document=row.document,
    )  # fmt: skip


def _build(row: TemplateBuild) -> BuildFacts:
    return BuildFacts(
        id=row.id, template_id=row.template_id, status=row.status, worker=row.worker, size=row.size,
        created_at=row.created_at, ended_at=row.ended_at, document=row.document,
    )  # fmt: skip
