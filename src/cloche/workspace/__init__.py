"""A folder of the host as a transaction: what a sandbox has changed in its view of it, compared, and written or not.

Comes in: a stream of the sandbox's own changes (`init/changes.py` writes it), and a descriptor of the host's folder.
Goes out: `core.changes.Diff`, and files on the host. What must be kept: whatever comes from the sandbox is hostile, and
so are names; the host's folder is worked on by descriptors alone, and no link in it is followed. Only what the host's
own settings name is read by its path.

- `snapshot.py`: keep the stream in one unnamed file, and read a row for each path; `rows.py`: such rows on disk, since
  there may be a million.
- `hidden.py`: what is not shown, `ignore.py`: by patterns, `tracked.py`: what git tracks of it. `allowed.py`: which
  folders may be shown at all. `archive.py`: files of the host's for a sandbox that has a copy, or gets them back.
- `host_files.py`: the host's folder by descriptors, through no link and no mount (`mounts.py`).
- `compare.py`: rows and the host's files become changes.
- `patch.py`: unified diffs, `lines.py`: with bounded work. `dangers.py`: changes that need a yes of their own, by the
  names in `danger_table.py`. `host_names.py`: by which names the host reaches a path: by its links (`host_links.py`),
  and by what settings of git's and agents' files name (`host_settings.py`).
- `commit.py`: stage, journal, rename. `recover.py`: complete or undo what was interrupted. `journal.py`: what is
  written down of it in the user's state folder. `renames.py`: system calls for it.
- `git.py`: a guest's commits as references; changes as a new branch. `git_identity.py`: who makes commits here.
  `git_folder.py`: the repository that a `.git` file names, if it is the folder's.
"""
