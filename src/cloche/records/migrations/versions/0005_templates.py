"""Tables for templates, snapshots of sandboxes, their builds and tags."""

import sqlalchemy as sa
from alembic import op

revision, down_revision = "0005", "0004"


def upgrade() -> None:
    """Add the tables."""
    op.create_table(
        "templates",
        sa.Column("id", sa.String(40), primary_key=True),
        sa.Column("project", sa.String(64), nullable=False),
        sa.Column("created_at", sa.String(32), nullable=False),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("name", sa.String(128)),
        sa.Column("api_key", sa.String(40)),
        sa.Column("changed_at", sa.String(32), nullable=False),
        sa.Column("spawned_at", sa.String(32)),
        sa.Column("spawn_count", sa.Integer, nullable=False),
        sa.Column("document", sa.JSON, nullable=False),
        sa.UniqueConstraint("project", "name"),
    )
    op.create_index("ix_templates_project", "templates", ["project", "id"])
    op.create_table(
        "template_builds",
        sa.Column("id", sa.String(40), primary_key=True),
        sa.Column("project", sa.String(64), nullable=False),
        sa.Column("created_at", sa.String(32), nullable=False),
        sa.Column("template_id", sa.String(40), sa.ForeignKey("templates.id", ondelete="CASCADE"), nullable=False),
        sa.Column("status", sa.String(16), nullable=False),
        sa.Column("worker", sa.String(64), nullable=False),
        sa.Column("size", sa.BigInteger, nullable=False),
        sa.Column("ended_at", sa.String(32)),
        sa.Column("document", sa.JSON, nullable=False),
    )
    op.create_index("ix_template_builds_project", "template_builds", ["project", "id"])
    op.create_index("ix_template_builds_template_id", "template_builds", ["template_id"])
    op.create_table(
        "template_tags",
        sa.Column("template_id", sa.String(40), sa.ForeignKey("templates.id", ondelete="CASCADE"), primary_key=True),
        sa.Column("tag", sa.String(128), primary_key=True),
        sa.Column("build_id", sa.String(40), sa.ForeignKey("template_builds.id", ondelete="CASCADE"), nullable=False),
        sa.Column("created_at", sa.String(32), nullable=False),
    )
    op.create_index("ix_template_tags_build_id", "template_tags", ["build_id"])


def downgrade() -> None:
    """Remove them."""
    for table in ("template_tags", "template_builds", "templates"):
        op.drop_table(table)
