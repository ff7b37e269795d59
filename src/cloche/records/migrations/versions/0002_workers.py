"""Tables for workers that reach each other, the stored request of a run, and the indexes of lists.

A database at 0001 may already have some of it: before this migration existed, 0001 was changed in place.
"""

import sqlalchemy as sa
from alembic import op

revision, down_revision = "0002", "0001"
LISTED = ("manifests", "sandboxes", "api_keys", "browser_sessions")
LABELLED = ("runs", "environment_snapshots", "workspace_snapshots", "reproductions")


def upgrade() -> None:
    """Add missing tables, columns and indexes. All rows stay."""
    inspector = sa.inspect(op.get_bind())
    if not inspector.has_table("workers"):
        op.create_table(
            "workers",
            sa.Column("name", sa.String(64), primary_key=True),
            sa.Column("address", sa.Text, nullable=False),
            sa.Column("certificate", sa.Text),
            sa.Column("beat", sa.Integer, nullable=False),
        )
    if not inspector.has_table("shared_secrets"):
        op.create_table(
            "shared_secrets",
            sa.Column("name", sa.String(64), primary_key=True),
            sa.Column("value", sa.String(64), nullable=False),
        )
    if not any(column["name"] == "asked" for column in inspector.get_columns("runs")):
        op.add_column("runs", sa.Column("asked", sa.JSON))
    for name in (*LISTED, *LABELLED):
        _index(inspector, name, "project", ["project", "id"])
    for name in LABELLED:
        _index(inspector, name, "session_id", ["project", "session_id", "id"])


def _index(inspector: sa.Inspector, table: str, column: str, columns: list[str]) -> None:
    """Recreate an index with these columns, unless it has them."""
    name = f"ix_{table}_{column}"
    existing = next(index for index in inspector.get_indexes(table) if index["name"] == name)
    if existing["column_names"] != columns:
        op.drop_index(name, table)
        op.create_index(name, table, columns)


def downgrade() -> None:
    """Remove them."""
    inspector = sa.inspect(op.get_bind())
    for name in LABELLED:
        _index(inspector, name, "session_id", ["session_id"])
    for name in (*LISTED, *LABELLED):
        _index(inspector, name, "project", ["project"])
    op.drop_column("runs", "asked")
    op.drop_table("shared_secrets")
    op.drop_table("workers")
