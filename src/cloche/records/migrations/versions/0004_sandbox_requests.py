"""Idempotency keys of requests that open a sandbox."""

import sqlalchemy as sa
from alembic import op

revision, down_revision = "0004", "0003"
INDEX = "sandboxes_by_request"


def upgrade() -> None:
    """Add the columns and their index."""
    op.add_column("sandboxes", sa.Column("idempotency_key", sa.String(255)))
    op.add_column("sandboxes", sa.Column("request_sha256", sa.LargeBinary(32)))
    op.create_index(INDEX, "sandboxes", ["project", "api_key", "idempotency_key"], unique=True)


def downgrade() -> None:
    """Remove them."""
    op.drop_index(INDEX, "sandboxes")
    op.drop_column("sandboxes", "request_sha256")
    op.drop_column("sandboxes", "idempotency_key")
