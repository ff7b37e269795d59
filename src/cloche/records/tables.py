"""All tables. Values that queries use are columns; the other values of a record are its document, in the wire's format.

Every object belongs to a project. There is one for now, `default`. Objects of other projects are not found.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy
from sqlalchemy import (
    JSON,
    BigInteger,
    Column,
    Float,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    String,
    Text,
    UniqueConstraint,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from sqlalchemy.types import TypeEngine

from cloche.agent import queue_file

DEFAULT_PROJECT = "default"
_TEXT = {"VARCHAR(40)": String(40), "VARCHAR(64)": String(64), "TEXT": Text()}
_KINDS: dict[str, TypeEngine[Any]] = {"INTEGER": Integer(), "FLOAT": Float(), **_TEXT}


class Table(DeclarativeBase):
    """The base of all tables."""


class Owned:
    """An id that sorts by time, and a project. Times are RFC 3339 in UTC."""

    id: Mapped[str] = mapped_column(String(40), primary_key=True)
    project: Mapped[str] = mapped_column(String(64), default=DEFAULT_PROJECT)
    created_at: Mapped[str] = mapped_column(String(32))


class Documented(Owned):
    """A document, and the caller's own label (`sessionId`)."""

    session_id: Mapped[str | None] = mapped_column(String(64))
    document: Mapped[dict[str, Any]] = mapped_column(JSON)


class ApiKey(Owned, Table):
    """A key of the service. Only its SHA-256 is stored. `scopes` are separated by spaces."""

    __tablename__ = "api_keys"
    name: Mapped[str] = mapped_column(String(64))
    scopes: Mapped[str] = mapped_column(String(64))
    sha256: Mapped[bytes] = mapped_column(LargeBinary(32), unique=True)
    expires_at: Mapped[str | None] = mapped_column(String(32))
    revoked_at: Mapped[str | None] = mapped_column(String(32))
    last_used_at: Mapped[str | None] = mapped_column(String(32))


class BrowserSession(Owned, Table):
    """A one-time link (`link`) or a browser's cookie (`cookie`). Only its SHA-256 is stored."""

    __tablename__ = "browser_sessions"
    kind: Mapped[str] = mapped_column(String(8))
    sha256: Mapped[bytes] = mapped_column(LargeBinary(32), unique=True)
    expires_at: Mapped[str] = mapped_column(String(32))


class Setting(Table):
    """A setting stored by `PUT`. When the highest `version` rises, the other workers read them again."""

    __tablename__ = "settings"
    name: Mapped[str] = mapped_column(String(64), primary_key=True)
    value: Mapped[Any] = mapped_column(JSON)
    version: Mapped[int] = mapped_column(index=True)
    changed_at: Mapped[str] = mapped_column(String(32))
    changed_by: Mapped[str] = mapped_column(String(64))


class StoredSecret(Owned, Table):
    """A secret of a project, and its value, which only the operator's key opens; `key_mark` tells which key.

    `terms` are the other fields of the `Secret`.
    """

    __tablename__ = "secrets"
    name: Mapped[str] = mapped_column(String(128))
    terms: Mapped[dict[str, Any]] = mapped_column(JSON)
    sealed: Mapped[bytes] = mapped_column(LargeBinary)
    key_mark: Mapped[str] = mapped_column(String(16))
    changed_at: Mapped[str] = mapped_column(String(32))
    changed_by: Mapped[str] = mapped_column(String(64))
    last_used_at: Mapped[str | None] = mapped_column(String(32))
    __table_args__ = (UniqueConstraint("project", "name"),)


class Worker(Table):
    """A serving worker: its address for other workers, and its certificate (PEM) if it uses TLS.

    `beat` rises while it lives, for workers of other machines.
    """

    __tablename__ = "workers"
    name: Mapped[str] = mapped_column(String(64), primary_key=True)
    address: Mapped[str] = mapped_column(Text)
    certificate: Mapped[str | None] = mapped_column(Text)
    beat: Mapped[int]


class SharedSecret(Table):
    """A secret shared by all workers of this database."""

    __tablename__ = "shared_secrets"
    name: Mapped[str] = mapped_column(String(64), primary_key=True)
    value: Mapped[str] = mapped_column(String(64))


class DebugNamespace(Table):
    """Whether a debug namespace was switched on or off."""

    __tablename__ = "debug_namespaces"
    name: Mapped[str] = mapped_column(String(64), primary_key=True)
    is_on: Mapped[bool]
    changed_at: Mapped[str] = mapped_column(String(32))
    changed_by: Mapped[str] = mapped_column(String(64))


class StoredRun(Documented, Table):
    """A run: `queued`, `running`, then the result's status. `worker` runs it, which matters after a crash.

    `asked` is the stored part of its request, loaded on access.
    """

    __tablename__ = "runs"
    status: Mapped[str] = mapped_column(String(16), index=True)
    api_key: Mapped[str | None] = mapped_column(String(40))
    idempotency_key: Mapped[str | None] = mapped_column(String(255))
    request_sha256: Mapped[bytes | None] = mapped_column(LargeBinary(32))
    worker: Mapped[str] = mapped_column(String(64), index=True)
    ended_at: Mapped[str | None] = mapped_column(String(32))
    asked: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True), deferred=True)
    __table_args__ = (UniqueConstraint("project", "api_key", "idempotency_key"),)


class EnvironmentSnapshot(Documented, Table):
    """Variables, dependencies, git state and settings of a workspace (C10). Its JSON file is written before the row."""

    __tablename__ = "environment_snapshots"


class WorkspaceSnapshot(Documented, Table):
    """The files of a workspace with their hashes (C11). `tree` (`files`, `excluded`) is loaded on access."""

    __tablename__ = "workspace_snapshots"
    tree: Mapped[dict[str, Any]] = mapped_column(JSON, deferred=True)


class KeptContent(Table):
    """A reference from a workspace snapshot to a blob, which is not removed meanwhile."""

    __tablename__ = "kept_contents"
    sha256: Mapped[str] = mapped_column(String(64), primary_key=True)
    snapshot_id: Mapped[str] = mapped_column(
        ForeignKey("workspace_snapshots.id", ondelete="CASCADE"), primary_key=True, index=True
    )


class Manifest(Owned, Table):
    """A manifest of a development environment (C12), by its name and host folder."""

    __tablename__ = "manifests"
    name: Mapped[str] = mapped_column(String(128))
    workspace_path: Mapped[str] = mapped_column(Text)
    document: Mapped[dict[str, Any]] = mapped_column(JSON)
    __table_args__ = (UniqueConstraint("project", "workspace_path"),)


class Reproduction(Documented, Table):
    """A bug's reproduction (C13): `queued`, `running`, then `passed`, `failed` or `error`."""

    __tablename__ = "reproductions"
    status: Mapped[str] = mapped_column(String(16), index=True)
    worker: Mapped[str | None] = mapped_column(String(64))


class StoredSandbox(Owned, Table):
    """A sandbox of the service: its name in the keepers' registry, its owner and labels.

    `starting` while its `worker` opens it, then `running` or `paused`, finally `ended`.
    """

    __tablename__ = "sandboxes"
    name: Mapped[str] = mapped_column(String(64), unique=True)
    status: Mapped[str] = mapped_column(String(16), default="running", index=True)
    api_key: Mapped[str | None] = mapped_column(String(40))
    worker: Mapped[str] = mapped_column(String(64), default="")
    ended_at: Mapped[str | None] = mapped_column(String(32))
    document: Mapped[dict[str, Any]] = mapped_column(JSON)
    idempotency_key: Mapped[str | None] = mapped_column(String(255))
    request_sha256: Mapped[bytes | None] = mapped_column(LargeBinary(32))


class StoredTemplate(Owned, Table):
    """What sandboxes begin from: a template that was built, or a snapshot of a sandbox (`kind`). Its builds have files.

    `document` has the options of its sandboxes.
    """

    __tablename__ = "templates"
    kind: Mapped[str] = mapped_column(String(16))
    name: Mapped[str | None] = mapped_column(String(128))
    api_key: Mapped[str | None] = mapped_column(String(40))
    changed_at: Mapped[str] = mapped_column(String(32))
    spawned_at: Mapped[str | None] = mapped_column(String(32))
    spawn_count: Mapped[int] = mapped_column(default=0)
    document: Mapped[dict[str, Any]] = mapped_column(JSON)
    __table_args__ = (UniqueConstraint("project", "name"),)


class TemplateBuild(Owned, Table):
    """One version of a template's files: `waiting`, `building` by `worker`, then `ready` or `error`.

    `size` is that of the archive of its files, which lies on the machine of `worker`; 0 for none.
    """

    __tablename__ = "template_builds"
    template_id: Mapped[str] = mapped_column(ForeignKey("templates.id", ondelete="CASCADE"), index=True)
    status: Mapped[str] = mapped_column(String(16))
    worker: Mapped[str] = mapped_column(String(64))
    size: Mapped[int] = mapped_column(BigInteger, default=0)
    ended_at: Mapped[str | None] = mapped_column(String(32))
    document: Mapped[dict[str, Any]] = mapped_column(JSON)


class TemplateTag(Table):
    """A tag of a template, and the build that it names."""

    __tablename__ = "template_tags"
    template_id: Mapped[str] = mapped_column(ForeignKey("templates.id", ondelete="CASCADE"), primary_key=True)
    tag: Mapped[str] = mapped_column(String(128), primary_key=True)
    build_id: Mapped[str] = mapped_column(ForeignKey("template_builds.id", ondelete="CASCADE"), index=True)
    created_at: Mapped[str] = mapped_column(String(32))


# The queue of `cloche.agent.queue`, which also creates this table if it comes first.
APPROVALS = sqlalchemy.Table(
    "approvals",
    Table.metadata,
    Column("id", Integer, primary_key=True),
    *(
        Column(name, _KINDS[kind], nullable=not is_required, server_default=default, index=is_indexed)
        for name, kind, is_required, default, is_indexed in queue_file.COLUMNS
    ),
    sqlite_autoincrement=True,
)


Index("sandboxes_by_request", StoredSandbox.project, StoredSandbox.api_key, StoredSandbox.idempotency_key, unique=True)
Index("runs_by_status", StoredRun.project, StoredRun.status, StoredRun.id)

# Lists select by project, optionally by the caller's label, and return the newest first.
for _table in Table.metadata.tables.values():
    if _table is not APPROVALS and "project" in _table.c:
        Index(f"ix_{_table.name}_project", _table.c.project, _table.c.id)
    if "session_id" in _table.c:
        Index(f"ix_{_table.name}_session_id", _table.c.project, _table.c.session_id, _table.c.id)
