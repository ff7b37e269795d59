"""Records that outlive a process: keys, settings, runs, snapshots, manifests, reproductions, approvals.

In: plain data of a front end, and paths below folders that the operator named. Out: documents as plain data with the
wire's names (camelCase), and files of Cloche's own. Kept: one database (SQLite by default; `database.py`), and blobs
and JSON files beside it. Nothing here executes what a workspace holds, follows a link out of it, or stores a secret.

- `database.py`: open it, one transaction; `tables.py`: all tables; `migrations/`: how they came to be.
- `git_state.py`: branch, HEAD and status of a repository, read without git; its parts are `git_*.py`.
- `environment.py`: snapshots of an environment; `environment_variables.py`: what is kept of its variables, and masked;
  `replication.py`: a script that sets them again.
- `ids.py`: ids that sort by time; `lists.py`: one page of a list; `debugging.py`: debug namespaces switched in it.
- `workspace.py`: snapshots of workspaces; `workspace_tree.py` reads the files, `workspace_restore.py` puts them back,
  `workspace_entries.py` is what is said of one; `blobs.py`: contents that are kept.
- `dependencies.py`: what a workspace depends on; `dependency_files.py`: readers of lock files and manifests.
- `devenv.py`: manifests of development environments; `devenv_detection.py`: what they are made from; `devenv_store.py`:
  those that are stored; `provision.py`: a sandbox that is set up by one.
- `reproductions.py`: bug reproductions, and their runs; `workers.py`: which process works on a record, and is it gone.

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
            f"records need the extra \"server\" ({', '.join(missing)} is missing); pip install 'cloche[server]'"
        )
