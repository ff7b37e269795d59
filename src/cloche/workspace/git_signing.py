"""Sign a commit on the host, as git does for the caller: with OpenPGP, SSH or X.509.

Git makes the commit in a repository of Cloche's own, which borrows the objects of the folder's repository. So the
folder's configuration, which a guest may have written, names no program and no key. The signing program is the
caller's: it gets the caller's environment, agents and terminal.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence

from cloche import hostfs
from cloche.core.errors import BackendUnavailable, WorkspaceFailed
from cloche.core.escape import escape_line

PATIENCE_S = 300.0  # a passphrase may be asked for
MOST_SHOWN = 300
_PROGRAMS = {"gpg.program": "gpg", "gpg.x509.program": "gpgsm", "gpg.ssh.program": "ssh-keygen"}
_REMEDY = "Make the key available (ssh-add, gpg-agent), or turn commit.gpgSign off."


def signed_commit(
    objects: str,
    object_format: str,
    tree: str,
    parents: Sequence[str],
    *,
    people: Mapping[str, str],
    message: bytes,
    settings: Mapping[str, str],
) -> bytes:
    """Return a signed commit as git stores it. `objects` is the folder with the tree and the parents.

    `people` are git's variables for author and committer, `settings` those of `git_identity.user_settings`. Raises
    BackendUnavailable if it cannot be signed, WorkspaceFailed after PATIENCE_S.
    """
    git = shutil.which("git") or "git"
    with tempfile.TemporaryDirectory(prefix="cloche-sign-", dir=hostfs.temporary_folder()) as folder:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
        environment |= {**people, "GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": os.devnull, "GIT_DIR": folder}

        def run(*words: str, data: bytes = b"") -> bytes:
            return _run([git, *words], environment, data)

        run("init", "--quiet", "--bare", f"--object-format={object_format}", "--template=", folder)
        os.makedirs(f"{folder}/objects/info", exist_ok=True)
        with open(f"{folder}/objects/info/alternates", "w", encoding="utf-8", errors="surrogateescape") as file:
            file.write(f"{objects}\n")
        above = [word for parent in parents for word in ("-p", parent)]
        made = run(*_options(settings), "commit-tree", "-S", tree, *above, data=message).decode().strip()
        return run("cat-file", "commit", made)


def _options(settings: Mapping[str, str]) -> list[str]:
    """Return the caller's settings as options of git, and git's own defaults for programs."""
    own = {key: value for key, value in settings.items() if key == "user.signingkey" or key.startswith("gpg.")}
    return [word for key, value in {**_PROGRAMS, **own}.items() for word in ("-c", f"{key}={value}")]


def _run(command: Sequence[str], environment: Mapping[str, str], data: bytes) -> bytes:
    """Run git in the caller's session, as a program may ask for a passphrase on its terminal."""
    try:
        done = subprocess.run(
            command, env=environment, input=data, capture_output=True, timeout=PATIENCE_S, check=False, cwd="/"
        )
    except subprocess.TimeoutExpired as error:
        raise WorkspaceFailed(f"nothing was written: signing took more than {PATIENCE_S:.0f} s") from error
    if done.returncode:
        why = escape_line(done.stderr.decode(errors="replace"))[:MOST_SHOWN]
        raise BackendUnavailable(f"nothing was written: the commit could not be signed: {why}", remedy=_REMEDY)
    return done.stdout
