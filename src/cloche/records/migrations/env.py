"""Run by alembic: the migrations, on the connection and in the transaction of `Database.migrate`."""

from alembic import context

context.configure(connection=context.config.attributes["connection"], render_as_batch=True)
context.run_migrations()
