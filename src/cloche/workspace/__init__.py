"""A folder of the host as a transaction: the changes of a sandbox are compared with the host's files, then written or
not.

Input: a stream of the sandbox's changes (written by `init/changes.py`) and a descriptor of the host's folder. Output:
`core.changes.Diff`, and files on the host. The sandbox's data and all names are hostile. The host's folder is accessed
by descriptors, and no link in it is followed. Only files that the host's own settings name are read by path.

- `snapshot.py` stores the stream in one unnamed file and reads an entry for each path. `rows.py` keeps up to a million
  such entries on disk.
- `hidden.py` decides which paths are hidden, `ignore.py` matches patterns, `tracked.py` finds hidden paths that git
  tracks. `allowed.py` decides which folders may be shown. `archive.py` packs host files for a sandbox that works on a
  copy, or gets files restored.
- `host_files.py` reads the host's folder by descriptors, through no link and no mount (`mounts.py`).
- `compare.py` turns entries and host files into changes.
- `patch.py` writes unified diffs; `lines.py` compares lines with bounded work; `hunks.py` takes a patch apart into
  hunks, and applies some of them. `dangers.py` finds changes that need
  their own approval, by the names in `danger_table.py`. `host_names.py` finds the other names by which the host reaches
  a path: through its links (`host_links.py`), and through settings of git and agents' files (`host_settings.py`).
- `commit.py` stages, journals and renames. `recover.py` completes or undoes an interrupted commit. `journal.py` stores
  its journal in the user's state folder. `renames.py` has the system calls.
- `git_ignored.py` asks git which paths it ignores. `git.py` imports a guest's commits as references. `git_commits.py`
  lists them, and makes a branch of them. `git_branch.py` writes changes as a new branch, `git_signing.py` signs.
  `git_identity.py` reads the user's settings. `git_folder.py` opens the repository that a `.git` file names, if it
  belongs to the folder.
"""
