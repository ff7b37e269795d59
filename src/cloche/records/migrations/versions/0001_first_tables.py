"""The first tables."""

from typing import Any

import sqlalchemy as sa
from alembic import op

revision, down_revision = "0001", None
OWNED = (("id", sa.String(40)), ("project", sa.String(64)), ("created_at", sa.String(32)))


def _owned(name: str, *columns: sa.Column[Any] | sa.UniqueConstraint, has_session: bool = False) -> None:
    session = [sa.Column("session_id", sa.String(64)), sa.Column("document", sa.JSON, nullable=False)]
    owned = [sa.Column(column, kind, nullable=False, primary_key=column == "id") for column, kind in OWNED]
    op.create_table(name, *owned, *(session if has_session else ()), *columns)
    op.create_index(f"ix_{name}_project", name, ["project"])
    if has_session:
        op.create_index(f"ix_{name}_session_id", name, ["session_id"])


def upgrade() -> None:
    """Create the tables."""
    _owned(
        "api_keys",
        sa.Column("name", sa.String(64), nullable=False),
        sa.Column("scopes", sa.String(64), nullable=False),
        sa.Column("sha256", sa.LargeBinary(32), nullable=False, unique=True),
        sa.Column("expires_at", sa.String(32)),
        sa.Column("revoked_at", sa.String(32)),
        sa.Column("last_used_at", sa.String(32)),
    )
    _owned(
        "browser_sessions",
        sa.Column("kind", sa.String(8), nullable=False),
        sa.Column("sha256", sa.LargeBinary(32), nullable=False, unique=True),
        sa.Column("expires_at", sa.String(32), nullable=False),
    )
    op.create_table(
        "settings",
        sa.Column("name", sa.String(64), primary_key=True),
        sa.Column("value", sa.JSON, nullable=False),
        sa.Column("version", sa.Integer, nullable=False, index=True),
        sa.Column("changed_at", sa.String(32), nullable=False),
        sa.Column("changed_by", sa.String(64), nullable=False),
    )
    op.create_table(
        "debug_namespaces",
        sa.Column("name", sa.String(64), primary_key=True),
        sa.Column("is_on", sa.Boolean, nullable=False),
        sa.Column("changed_at", sa.String(32), nullable=False),
        sa.Column("changed_by", sa.String(64), nullable=False),
    )
    _owned(
        "runs",
        sa.Column("status", sa.String(16), nullable=False, index=True),
        sa.Column("api_key", sa.String(40)),
        sa.Column("idempotency_key", sa.String(255)),
        sa.Column("request_sha256", sa.LargeBinary(32)),
        sa.Column("worker", sa.String(64), nullable=False, index=True),
        sa.Column("ended_at", sa.String(32)),
        sa.UniqueConstraint("project", "api_key", "idempotency_key"),
        has_session=True,
    )
    op.create_index("runs_by_status", "runs", ["project", "status", "id"])
    _owned("environment_snapshots", has_session=True)
    _owned("workspace_snapshots", sa.Column("tree", sa.JSON, nullable=False), has_session=True)
    op.create_table(
        "kept_contents",
        sa.Column("sha256", sa.String(64), primary_key=True),
        sa.Column(
            "snapshot_id", sa.String(40), sa.ForeignKey("workspace_snapshots.id", ondelete="CASCADE"), primary_key=True,
            index=True,
        ),
    )  # fmt: skip
    _owned(
        "manifests",
        sa.Column("name", sa.String(128), nullable=False),
        sa.Column("workspace_path", sa.Text, nullable=False),
        sa.Column("document", sa.JSON, nullable=False),
        sa.UniqueConstraint("project", "workspace_path"),
    )
    _owned(
        "reproductions",
        sa.Column("status", sa.String(16), nullable=False, index=True),
        sa.Column("worker", sa.String(64)),
        has_session=True,
    )
    _owned(
        "sandboxes",
        sa.Column("name", sa.String(64), nullable=False, unique=True),
        sa.Column("status", sa.String(16), nullable=False, index=True),
        sa.Column("api_key", sa.String(40)),
        sa.Column("worker", sa.String(64), nullable=False),
        sa.Column("ended_at", sa.String(32)),
        sa.Column("document", sa.JSON, nullable=False),
    )

    _approvals()


def _approvals() -> None:
    """Create the queue of approvals, unless an agent has already done so (`cloche.agent.queue_file`)."""
    if sa.inspect(op.get_bind()).has_table("approvals"):
        return
    op.create_table(
        "approvals",
        sa.Column("id", sa.Integer, nullable=False, primary_key=True),
        sa.Column("project", sa.String(64), nullable=False, server_default="default", index=True),
        sa.Column("asked_by", sa.String(40)),
        sa.Column("asked_at", sa.Float, nullable=False),
        sa.Column("expires_at", sa.Float, nullable=False),
        sa.Column("request", sa.Text, nullable=False),
        sa.Column("first_decision", sa.Text),
        sa.Column("decision", sa.Text),
        sa.Column("decided_at", sa.Float),
        sa.Column("decided_from", sa.String(64)),
        sa.Column("version", sa.Integer, nullable=False, server_default="0", index=True),
        sqlite_autoincrement=True,
    )


def downgrade() -> None:
    """Drop the tables."""
    op.drop_table("kept_contents")  # which refers to workspace_snapshots
    for name in (
        "approvals", "sandboxes", "reproductions", "manifests", "workspace_snapshots", "environment_snapshots", "runs",
        "debug_namespaces", "settings", "browser_sessions", "api_keys",
    ):  # fmt: skip
        op.drop_table(name)
