"""Figures in guests: matplotlib's list of fonts is made once, and no guest reads what another one wrote."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import cloche

pytestmark = [
    pytest.mark.skipif(find_spec("matplotlib") is None, reason="missing: matplotlib"),
    pytest.mark.user_soak,
    pytest.mark.usefixtures("settings_of_nobody"),
]

# What matplotlib says when it has looked through all fonts, and where its list is then.
LOOK = """
import logging, sys
logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
from matplotlib import font_manager
import matplotlib, os
(path,) = [os.path.join(matplotlib.get_cachedir(), name) for name in os.listdir(matplotlib.get_cachedir())]
found = len(font_manager.fontManager.ttflist)
"""
QUICK: dict[str, Any] = {"timeout": 60, "cpus": 2}
MADE = "generated new fontManager"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder in which this user's lists are kept, not there yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "cloche" / "fonts"


def test_fonts_are_looked_for_once_in_an_environment(cache: Path) -> None:
    """The first run finds the list made; so do sessions, modules of the workspace, and programs that Bash starts."""
    first = cloche.run(LOOK + "found", **QUICK)
    assert MADE not in first.stdout
    assert first.value >= 30  # matplotlib brings more with it
    (kept,) = cache.glob("*.list")
    assert not kept.stat().st_mode & 0o077
    before = kept.stat().st_mtime_ns
    with cloche.Sandbox(**QUICK) as sandbox:
        sandbox.write_file("drawing.py", LOOK)
        results = [
            sandbox.run("import drawing"),
            sandbox.run("python3 drawing.py", language="bash"),
            sandbox.session().run(LOOK),
            cloche.run(LOOK, **QUICK, warm=False),
        ]
    for result in results:
        assert result.ok, result
        assert MADE not in result.stdout
    assert kept.stat().st_mtime_ns == before


def test_a_guest_changes_only_its_own_copy(cache: Path) -> None:
    """What it writes over its list, or beside it, is neither the next guest's nor the host's."""
    changing = (
        LOOK
        + "open(path, 'w').write('{}'); open(os.path.dirname(path) + '/more', 'w').close(); os.listdir('/tmp/.cache')"
    )
    with cloche.Sandbox(live=False, **QUICK) as sandbox:
        assert sandbox.run(changing).value == ["matplotlib"]
        (kept,) = cache.glob("*.list")
        content, names = kept.read_bytes(), sorted(os.listdir(cache))
        again = sandbox.run(LOOK + "sorted(os.listdir(os.path.dirname(path)))")
    assert MADE not in again.stdout
    assert len(again.value) == 1
    assert (kept.read_bytes(), sorted(os.listdir(cache))) == (content, names)


def test_a_cache_that_others_may_write_to_is_not_used(cache: Path) -> None:
    """Then, and where there is no room for the list or matplotlib's cache is elsewhere, a guest makes its own."""
    cache.mkdir(parents=True)
    cache.chmod(0o777)
    assert MADE in cloche.run(LOOK, **QUICK).stdout
    assert not [*cache.iterdir()]
    cache.chmod(0o700)
    assert MADE in cloche.run(LOOK, **QUICK, disk="100k").stdout
    assert MADE in cloche.run(LOOK, **QUICK, env={"MPLCONFIGDIR": "/workspace"}).stdout
    assert MADE not in cloche.run(LOOK, **QUICK).stdout
