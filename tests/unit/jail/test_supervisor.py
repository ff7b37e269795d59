"""What the helper does when a sandbox cannot be born: it lives on for the next one, as closed as before."""

import errno
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cloche.jail import cgroups, supervisor
from cloche.jail.cgroups import Cgroup


def _watch(folder: Path) -> supervisor.Watch:
    helper: Any = SimpleNamespace(
        spec=SimpleNamespace(level="jail", outside=None),
        generation=0,
        timer=-1,
        cgroup=Cgroup(2, {"memory": str(folder)}),
    )
    return supervisor.Watch(helper, None)


@pytest.mark.parametrize("number", [errno.EAGAIN, errno.ENOMEM, errno.EACCES, errno.EBUSY])
def test_a_refused_birth_in_a_group_is_no_birth_outside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Nothing is forked without its limits, nothing stays open, and nobody may look into the helper afterwards."""
    tried, settings = list[int](), list[int]()

    def clone(flags: int, group_fd: int = -1) -> int:
        tried.append(group_fd)
        assert flags == supervisor.CLONED_NAMESPACES
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(cgroups, "clone", clone)
    monkeypatch.setattr(supervisor, "prctl", lambda *words: settings.append(words[1]))
    before = os.listdir("/proc/self/fd")
    one = _watch(tmp_path)
    with pytest.raises(OSError, match=os.strerror(number)):
        one.start(-1, [])
    assert len(tried) == 1
    assert tried[0] >= 0
    assert settings == [1, 0]
    assert os.listdir("/proc/self/fd") == before
    assert one.last_words() is None


def test_a_group_that_is_not_there_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then there are no limits, and so there is nothing to be born in."""
    settings = list[int]()
    monkeypatch.setattr(cgroups, "clone", lambda *_: pytest.fail("born without limits"))
    monkeypatch.setattr(supervisor, "prctl", lambda *words: settings.append(words[1]))
    before = os.listdir("/proc/self/fd")
    one = _watch(tmp_path / "gone")
    with pytest.raises(FileNotFoundError):
        one.start(-1, [])
    assert settings == [1, 0]
    assert os.listdir("/proc/self/fd") == before
