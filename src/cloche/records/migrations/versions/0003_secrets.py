"""A table for the secrets that a service holds for its callers. Their values are encrypted."""

import sqlalchemy as sa
from alembic import op

revision, down_revision = "0003", "0002"


def upgrade() -> None:
    """Add the table."""
    op.create_table(
        "secrets",
        sa.Column("id", sa.String(40), primary_key=True),
        sa.Column("project", sa.String(64), nullable=False),
        sa.Column("created_at", sa.String(32), nullable=False),
        sa.Column("name", sa.String(128), nullable=False),
        sa.Column("terms", sa.JSON, nullable=False),
        sa.Column("sealed", sa.LargeBinary, nullable=False),
        sa.Column("key_mark", sa.String(16), nullable=False),
        sa.Column("changed_at", sa.String(32), nullable=False),
        sa.Column("changed_by", sa.String(64), nullable=False),
        sa.Column("last_used_at", sa.String(32)),
        sa.UniqueConstraint("project", "name"),
    )
    op.create_index("ix_secrets_project", "secrets", ["project", "id"])


def downgrade() -> None:
    """Remove it, with the secrets."""
    op.drop_table("secrets")
