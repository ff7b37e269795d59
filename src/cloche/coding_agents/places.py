"""Where an agent of a project lives: the name of its sandbox, and its folders in Cloche's state.

    agents/NAME/about.json    which agent, which project, when
    agents/NAME/home/         the home folder of the agent, bound into its sandbox: written by the guest
    agents/NAME/saved/        archives of its work, written by Cloche
    agents/logins/            logins, once per user

The folders have mode 0700, and belong to the user; `home` belongs to the guest.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat

from cloche.config.state import state_file
from cloche.core.errors import InvalidRequest
from cloche.core.record import dataclass

MOST_NAME_CHARS, HASH_CHARS = 24, 8


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentPlace:
    """Name the sandbox of one agent on one project. `folder` is the project's real path; `number` counts forks."""

    agent: str
    folder: str
    number: int = 0

    @property
    def sandbox(self) -> str:
        """Return the name of its sandbox: the same for the same agent, folder and number."""
        word = re.sub(r"[^a-z0-9]+", "-", os.path.basename(self.folder).lower()).strip("-")[:MOST_NAME_CHARS]
        digest = hashlib.sha256(os.fsencode(f"{self.agent}\0{self.folder}")).hexdigest()[:HASH_CHARS]
        name = f"{self.agent}-{word}-{digest}" if word else f"{self.agent}-{digest}"
        return f"{name}-{self.number}" if self.number else name

    @property
    def state(self) -> str:
        """Return its folder in Cloche's state."""
        return f"{agents_folder()}/{self.sandbox}"

    @property
    def home(self) -> str:
        """Return the folder that is bound as the home folder inside."""
        return f"{self.state}/home"

    @property
    def saved(self) -> str:
        """Return the folder of the archives."""
        return f"{self.state}/saved"


def agents_folder() -> str:
    """Return the folder of all agents' state. Raises InvalidRequest for a user without a home."""
    folder = state_file("agents")
    if folder is None:
        raise InvalidRequest("agent: this user has no home folder, where an agent's state is kept; set XDG_STATE_HOME")
    return folder


def logins_folder() -> str:
    """Return the folder of the logins, which all projects share."""
    return f"{agents_folder()}/logins"


def project_folder(cwd: str) -> str:
    """Return the project that a folder belongs to: the nearest repository above, else the folder itself.

    A repository of another user does not count, since anyone can make one in a folder such as /tmp.
    """
    folder = real = os.path.realpath(cwd)
    home = os.path.realpath(os.path.expanduser("~"))
    owners = {os.geteuid(), os.stat(real).st_uid}
    while folder not in ("/", home):
        if _is_repository(f"{folder}/.git", owners):
            return folder
        folder = os.path.dirname(folder)
    return real


def _is_repository(path: str, owners: set[int]) -> bool:
    try:
        status = os.lstat(path)
    except OSError:
        return False
    return status.st_uid in owners and (stat.S_ISREG(status.st_mode) or os.path.lexists(f"{path}/HEAD"))
