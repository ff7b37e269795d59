"""Records that outlive a process: keys, settings, runs, snapshots, manifests, reproductions, approvals.

Input: plain data from a front end, and paths below folders that the operator named. Output: documents as plain data
with the wire's names (camelCase), and Cloche's own files. State: one database (SQLite by default; `database.py`), with
blobs and JSON files beside it. This package never executes a workspace's content, follows a link out of it, or stores a
secret.

- `database.py`: opening and transactions; `tables.py`: all tables; `migrations/`: their history.
- `git_state.py`: branch, HEAD and status of a repository, read without git; `git_*.py` are its parts.
- `environment.py`: snapshots of an environment; `environment_variables.py`: stored and masked variables;
  `replication.py`: a script that sets them.
- `ids.py`: ids that sort by time; `lists.py`: one page of a list; `debugging.py`: stored debug namespaces.
- `workspace.py`: snapshots of workspaces; `workspace_tree.py` reads files, `workspace_restore.py` restores them,
  `workspace_entries.py` describes one; `blobs.py`: stored contents.
- `dependencies.py`: the dependencies of a workspace; `dependency_files.py`: readers of lock files and manifests.
- `devenv.py`: manifests of development environments; `devenv_detection.py`: detection from files; `devenv_store.py`:
  stored manifests; `provision.py`: a sandbox set up by a manifest.
- `reproductions.py`: bug reproductions and their runs; `workers.py`: which process works on a record, and whether it
  has ended.

Needs the extra `server`.
"""

from __future__ import annotations


def require_extra() -> None:
    """Raise InvalidRequest where the packages of records are not installed."""
    from importlib import util

    from cloche.core.errors import InvalidRequest

    missing = [name for name in ("sqlalchemy", "alembic") if util.find_spec(name) is None]
    if missing:
        raise InvalidRequest(
            f'records, keys and commands that ask a service need the extra "server" (missing: {", ".join(missing)}); '
            "pip install 'cloche[server]'"
        )
