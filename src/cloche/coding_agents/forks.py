"""Several sandboxes of one agent on one folder: `cloche agent NAME --fork`.

A fork has its own view of the folder, which begins with the folder's files, not with another sandbox's changes; and its
own home folder, which begins with a copy of the first one's. That is the guest's: it is packed on the host by
descriptors, without following a link, up to a bound, and unpacked inside the fork, as its guest.
"""

from __future__ import annotations

import os

from cloche.core.errors import InvalidRequest
from cloche.core.record import replace
from cloche.execution.home_folder import fill_home
from cloche.execution.sandbox import AsyncSandbox

from .places import AgentPlace, agents_folder

MOST_FORKS = 64  # of an agent on a folder
MOST_FILES, MOST_BYTES = 100_000, 512 << 20
NOT_COPIED = (".cache", ".npm", ".local/share/uv", "go/pkg", ".cargo/registry")  # of packages: they are made again


def with_number(place: AgentPlace, number: int, *, is_new: bool) -> AgentPlace:
    """Return the place of a fork: a new one, or one that there is; 0 is the first sandbox. Raises InvalidRequest."""
    if is_new:
        if number:
            raise InvalidRequest("--fork starts a new one, --number goes on in one; give one of them")
        return new_fork(place)
    fork = replace(place, number=number)
    if number and not os.path.isdir(fork.state):
        raise InvalidRequest(f"--number: {place.folder} has no fork {number} of {place.agent}; --fork starts one")
    return fork


def new_fork(place: AgentPlace) -> AgentPlace:
    """Return the place of a new fork, whose folder of state is made; another caller gets another one."""
    for number in range(1, MOST_FORKS + 1):
        fork = replace(place, number=number)
        os.makedirs(agents_folder(), mode=0o700, exist_ok=True)
        try:
            os.mkdir(fork.state, 0o700)
        except FileExistsError:
            continue
        return fork
    raise InvalidRequest(
        f"agent: {place.folder} has {MOST_FORKS} forks of {place.agent}; remove the folders {place.state}-NUMBER of "
        "those that are not needed any more"
    )


async def copy_home(sandbox: AsyncSandbox, place: AgentPlace) -> tuple[str, ...]:
    """Copy the home folder of the first sandbox into that of a fork, whose sandbox is open; return what it lacks.

    What the first one's agent writes meanwhile may be incomplete. Raises InvalidRequest if it is too large.
    """
    source = replace(place, number=0).home
    try:
        return await fill_home(sandbox, source, without=NOT_COPIED, max_files=MOST_FILES, max_bytes=MOST_BYTES)
    except InvalidRequest as error:
        raise InvalidRequest(f"agent: the home folder of the first sandbox cannot be copied: {error}") from error
