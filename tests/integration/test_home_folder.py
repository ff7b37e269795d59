"""A folder of Cloche's state as a sandbox's home: kept for the next one, and no way out of it."""

import os
import stat
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest

import cloche
from cloche.config.state import state_file
from cloche.core.errors import InvalidRequest
from cloche.execution.home_folder import ROOTS_OWNER, give_home

pytestmark = pytest.mark.both_users

Opening = Callable[[], AbstractAsyncContextManager[Callable[[str], Awaitable[str]]]]


@pytest.fixture
def home(request: pytest.FixtureRequest) -> Path:
    """Return a folder for homes in Cloche's state that does not exist yet."""
    return Path(str(state_file("agents"))) / request.node.name / "home"


@pytest.fixture
def opening(home: Path, tmp_path: Path) -> Opening:
    """Return how a sandbox with this home is opened; its project lies below the home inside."""
    project = tmp_path / "user" / "project"
    project.mkdir(parents=True)
    (project / "file").write_text("project\n")

    @asynccontextmanager
    async def opened() -> AsyncIterator[Callable[[str], Awaitable[str]]]:
        sandbox = cloche.AsyncSandbox(workspace=project, backend="local")
        give_home(sandbox, str(home), str(tmp_path / "user"))

        async def shell(line: str) -> str:
            result = await sandbox.exec(shell=line)
            return result.stdout + result.stderr

        async with sandbox:
            yield shell

    return opened


async def test_what_is_written_in_the_home_is_there_in_the_next_sandbox(opening: Opening, home: Path) -> None:
    """Also a rename over a file; on the host the files belong to an id that is nobody's, or to the user."""
    async with opening() as shell:
        assert (
            await shell("cd; echo one > new; mv new .settings; cat project/file; chmod 4755 .settings") == "project\n"
        )
    async with opening() as shell:
        assert await shell("cat ~/.settings file; stat -c %U ~/.settings") == "one\nproject\nsandbox\n"
    owner = ROOTS_OWNER if os.geteuid() == 0 else os.geteuid()
    assert (home / ".settings").lstat().st_uid == owner
    assert stat.S_IMODE(home.parent.lstat().st_mode) == 0o700


async def test_a_link_in_place_of_a_mount_point_is_not_followed(opening: Opening, home: Path, tmp_path: Path) -> None:
    """The next sandbox shows the project at its path, and makes nothing where the link leads."""
    outside = tmp_path / "outside"
    outside.mkdir()
    async with opening() as shell:
        await shell("true")
    (home / "project").rmdir()
    (home / "project").symlink_to(outside)  # as the guest could, had nothing been mounted there
    (home / "project.cloche-moved/full").mkdir(parents=True)
    async with opening() as shell:
        assert await shell("cat ~/project/file; cat /workspace/file") == "project\nproject\n"
    assert list(outside.iterdir()) == []
    aside = [name for name in os.listdir(home) if name.startswith("project.cloche-moved-")]
    assert [os.readlink(home / name) for name in aside] == [str(outside)]


async def test_a_program_in_the_home_gets_no_other_id(opening: Opening, home: Path) -> None:
    """Its set-uid bit is not heeded, and a device cannot be made there."""
    async with opening() as shell:
        assert "nosuid,nodev" in await shell('grep -F " $HOME " /proc/self/mounts')
        assert "denied" in (text := await shell("mknod ~/disk b 254 0")) or "not permitted" in text
    assert not (home / "disk").exists()


def test_only_a_folder_of_cloches_state_can_be_a_home(home: Path, tmp_path: Path) -> None:
    """Any other would be written to by the guest; and no path of the system's own can be the home inside."""
    sandbox = cloche.AsyncSandbox(live=True, backend="local")
    with pytest.raises(InvalidRequest, match="not below"):
        give_home(sandbox, str(tmp_path), "/root")
    with pytest.raises(InvalidRequest, match="not below"):
        give_home(sandbox, f"{home}/../../../../outside", "/root")
    with pytest.raises(InvalidRequest, match="cannot be a home"):
        give_home(sandbox, str(home), "/usr/local")
    home.parent.mkdir(parents=True, exist_ok=True)
    home.symlink_to(tmp_path)
    with pytest.raises(InvalidRequest, match="not a folder that Cloche made"):
        give_home(sandbox, str(home), "/root")
