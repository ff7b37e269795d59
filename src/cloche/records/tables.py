"""All tables. What is asked for by column is a column; the rest of a record is its document, as the wire has it.

Every object belongs to a project. There is one for now, `default`; whoever asks for another's object finds nothing.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy
from sqlalchemy import (
    JSON,
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
    """Be a table."""


class Owned:
    """Have an id that sorts by time, and a project. Times are RFC 3339 in UTC."""

    id: Mapped[str] = mapped_column(String(40), primary_key=True)
    project: Mapped[str] = mapped_column(String(64), default=DEFAULT_PROJECT)
    created_at: Mapped[str] = mapped_column(String(32))


class Documented(Owned):
    """Have a document, and the caller's own label (`sessionId`)."""

    session_id: Mapped[str | None] = mapped_column(String(64))
    document: Mapped[dict[str, Any]] = mapped_column(JSON)


class ApiKey(Owned, Table):
    """A key of the service, of which only the SHA-256 is stored. `scopes` are words with spaces between."""

    __tablename__ = "api_keys"
    name: Mapped[str] = mapped_column(String(64))
    scopes: Mapped[str] = mapped_column(String(64))
    sha256: Mapped[bytes] = mapped_column(LargeBinary(32), unique=True)
    expires_at: Mapped[str | None] = mapped_column(String(32))
    revoked_at: Mapped[str | None] = mapped_column(String(32))
    last_used_at: Mapped[str | None] = mapped_column(String(32))


class BrowserSession(Owned, Table):
    """A one-time link (`link`) or the cookie of a browser (`cookie`), of which only the SHA-256 is stored."""

    __tablename__ = "browser_sessions"
    kind: Mapped[str] = mapped_column(String(8))
    sha256: Mapped[bytes] = mapped_column(LargeBinary(32), unique=True)
    expires_at: Mapped[str] = mapped_column(String(32))


class Setting(Table):
    """A setting that `PUT` stored. The highest `version` of all says whether another worker must read them again."""

    __tablename__ = "settings"
    name: Mapped[str] = mapped_column(String(64), primary_key=True)
    value: Mapped[Any] = mapped_column(JSON)
    version: Mapped[int] = mapped_column(index=True)
    changed_at: Mapped[str] = mapped_column(String(32))
    changed_by: Mapped[str] = mapped_column(String(64))


class Worker(Table):
    """A worker that serves: where the others reach it, and its certificate (PEM) where it speaks TLS.

    `beat` rises for as long as it lives, where workers of other machines must see that.
    """

    __tablename__ = "workers"
    name: Mapped[str] = mapped_column(String(64), primary_key=True)
    address: Mapped[str] = mapped_column(Text)
    certificate: Mapped[str | None] = mapped_column(Text)
    beat: Mapped[int]


class SharedSecret(Table):
    """What all workers of this database know, and nobody else."""

    __tablename__ = "shared_secrets"
    name: Mapped[str] = mapped_column(String(64), primary_key=True)
    value: Mapped[str] = mapped_column(String(64))


class DebugNamespace(Table):
    """Whether a debug namespace is on, where somebody stored that."""

    __tablename__ = "debug_namespaces"
    name: Mapped[str] = mapped_column(String(64), primary_key=True)
    is_on: Mapped[bool]
    changed_at: Mapped[str] = mapped_column(String(32))
    changed_by: Mapped[str] = mapped_column(String(64))


class Run(Documented, Table):
    """A run: `queued`, `running`, then the result's status; `worker` is who runs it, for after a crash.

    `asked` is what is kept of its request; it is loaded when it is asked for.
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
    """Variables, dependencies, git and settings of a workspace (C10); its JSON file is written before the row."""

    __tablename__ = "environment_snapshots"


class WorkspaceSnapshot(Documented, Table):
    """The files of a workspace with their hashes (C11). `tree` (`files`, `excluded`) is loaded when it is asked for."""

    __tablename__ = "workspace_snapshots"
    tree: Mapped[dict[str, Any]] = mapped_column(JSON, deferred=True)


class KeptContent(Table):
    """A blob that a snapshot of a workspace names, so that it is not removed."""

    __tablename__ = "kept_contents"
    sha256: Mapped[str] = mapped_column(String(64), primary_key=True)
    snapshot_id: Mapped[str] = mapped_column(
        ForeignKey("workspace_snapshots.id", ondelete="CASCADE"), primary_key=True, index=True
    )


class Manifest(Owned, Table):
    """A manifest of a development environment (C12), by its name and the host folder it stands in."""

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


class LiveSandbox(Owned, Table):
    """A sandbox that lives: its name is known to the keeper's registry; here is whose it is, and its labels.

    `starting` while its `worker` opens it, then `running` or `paused`, at last `ended`.
    """

    __tablename__ = "sandboxes"
    name: Mapped[str] = mapped_column(String(64), unique=True)
    status: Mapped[str] = mapped_column(String(16), default="running", index=True)
    api_key: Mapped[str | None] = mapped_column(String(40))
    worker: Mapped[str] = mapped_column(String(64), default="")
    ended_at: Mapped[str | None] = mapped_column(String(32))
    document: Mapped[dict[str, Any]] = mapped_column(JSON)


# The queue of `cloche.agent.queue`, which makes this table, too, where it comes first.
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


Index("runs_by_status", Run.project, Run.status, Run.id)

# Lists are by project, perhaps by the caller's label, and the newest first.
for _table in Table.metadata.tables.values():
    if _table is not APPROVALS and "project" in _table.c:
        Index(f"ix_{_table.name}_project", _table.c.project, _table.c.id)
    if "session_id" in _table.c:
        Index(f"ix_{_table.name}_session_id", _table.c.project, _table.c.session_id, _table.c.id)
