"""Who has an outside id: claims that no other user of the host can stand in the way of."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from cloche.jail.user_namespaces import FILE, FOLDER, claim_outside_id

FIRST = 1_899_000_000


def claimed(lock_folder: Path, count: int) -> set[int]:
    """Return the ids that a process can claim beside us; they are free again when it has ended."""
    reading, writing = os.pipe()
    if (pid := os.fork()) == 0:
        held = []
        try:
            while True:
                held.append(claim_outside_id(FIRST, count, [str(lock_folder)]))
        except OSError as error:
            ids = " ".join(str(claim.outside_id) for claim in held)
            os.write(writing, ids.encode() if error.errno == errno.EADDRINUSE else str(error).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        output = pipe.read()
    os.waitpid(pid, 0)
    return {int(number) for number in output.split()}


def test_no_id_is_claimed_twice(tmp_path: Path) -> None:
    """Nor where one process's claim is its copy in another alone; and it is free when the last hold is forgotten."""
    everything = {FIRST, FIRST + 1, FIRST + 2}
    assert claimed(tmp_path, 3) == everything
    claim = claim_outside_id(FIRST, 3, [str(tmp_path)])
    assert claimed(tmp_path, 3) == everything - {claim.outside_id}
    shared = claim.share()
    claim.forget()
    assert claimed(tmp_path, 3) == everything - {shared.outside_id}
    shared.forget()
    assert claimed(tmp_path, 3) == everything


def _open_to_others(lock_folder: Path) -> None:
    (lock_folder / FOLDER).mkdir()
    (lock_folder / FOLDER).chmod(0o775)


def _file_open_to_others(lock_folder: Path) -> None:
    (lock_folder / FOLDER).mkdir(mode=0o700)
    (lock_folder / FOLDER / FILE).touch()
    (lock_folder / FOLDER / FILE).chmod(0o644)


def _another_users(lock_folder: Path) -> None:
    (lock_folder / FOLDER).mkdir(mode=0o700)
    os.chown(lock_folder / FOLDER, 65534, 65534)


def _link(lock_folder: Path) -> None:
    (lock_folder / "own").mkdir(mode=0o700)
    (lock_folder / FOLDER).symlink_to("own")


WAYS = [_open_to_others, _file_open_to_others, _link, *([_another_users] if os.geteuid() == 0 else [])]


@pytest.mark.parametrize("way", WAYS)
def test_a_folder_of_locks_that_is_not_ours_alone_is_refused(way: Callable[[Path], None], tmp_path: Path) -> None:
    """Whoever can open the locks can take them all: nothing is claimed there, nor anywhere else instead."""
    lock_folder, other = tmp_path / "place", tmp_path / "other"
    lock_folder.mkdir()
    other.mkdir()
    way(lock_folder)
    with pytest.raises(OSError, match=str(lock_folder)):
        claim_outside_id(FIRST, 3, [str(lock_folder), str(other)])
    assert not list(other.iterdir())


def test_a_folder_where_others_may_write_is_not_used(tmp_path: Path) -> None:
    """Names there are whoever comes first's; the next folder is used, and where there is none, all are named."""
    lock_folder, other = tmp_path / "place", tmp_path / "none" / "other"
    lock_folder.mkdir()
    lock_folder.chmod(0o1777)
    with pytest.raises(OSError, match=f"others may write to {lock_folder}, {other}: No such file"):
        claim_outside_id(FIRST, 3, [str(lock_folder), str(other)])
    other.parent.mkdir()  # ours, so that the folder is made
    claim_outside_id(FIRST, 3, [str(lock_folder), str(other)]).forget()
    assert not list(lock_folder.iterdir())
    assert other.stat().st_mode & 0o777 == 0o700
