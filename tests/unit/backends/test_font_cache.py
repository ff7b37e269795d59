"""When matplotlib's list of fonts is made, and when the one that is kept serves."""

from __future__ import annotations

import asyncio
import importlib.metadata
import os
from pathlib import Path

import pytest

from cloche.backends.local import font_cache

LIST = b'fontlist-v1.json\n{"ttf": []}'


class Maker:
    """Make what it is told to, and count."""

    def __init__(self, made: bytes) -> None:
        self.made, self.count = made, 0

    async def __call__(self) -> bytes:
        self.count += 1
        return self.made

    def find(self, *shown: str) -> font_cache.FontList | None:
        return asyncio.run(font_cache.find_fonts(shown, self))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with a place for fonts, which is this user's cache as well."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "fonts").mkdir()
    monkeypatch.setattr(font_cache, "_FONT_FOLDERS", (str(tmp_path / "fonts"),))
    return tmp_path


def test_a_list_is_made_again_when_what_it_depends_on_has_changed(cache: Path) -> None:
    """A font that comes or goes, and what else a jail shows."""
    maker = Maker(LIST)
    found = maker.find("/opt/python")
    assert found == maker.find("/opt/python") == font_cache.FontList(name="fontlist-v1.json", text='{"ttf": []}')
    assert maker.count == 1
    (cache / "fonts" / "new.ttf").touch()
    assert found == maker.find("/opt/python") == maker.find("/opt/python")
    assert maker.count == 2
    maker.find("/opt/other")
    assert maker.count == 3


def test_a_list_whose_making_was_interrupted_is_made_by_the_next() -> None:
    """By Ctrl-C in the first run that draws, say."""

    async def interrupted() -> bytes:
        raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(font_cache.find_fonts((), interrupted))
    assert Maker(LIST).find() is not None


def test_a_version_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """That takes ten milliseconds, more than a warm run."""
    maker, read = Maker(LIST), []
    found = maker.find()
    monkeypatch.setattr(importlib.metadata.PathDistribution, "read_text", lambda *_: read.append(1))
    assert maker.find() == found
    assert read == []


@pytest.mark.parametrize(
    "made", [b"", b"../name\n{}", b"fontlist-v1.json\n\xff", b"fontlist-v1.json\n" + b" " * (8 << 20) + b"{"]
)
def test_what_is_no_list_is_neither_given_nor_made_by_every_run(made: bytes) -> None:
    """Each would take longer for it than without."""
    maker = Maker(made)
    assert maker.find() is None
    assert maker.find() is None
    assert maker.count == 1


def test_nothing_is_made_where_nothing_can_be_kept(cache: Path) -> None:
    """Else every run would make it."""
    (cache / "cloche").write_text("no folder")
    maker = Maker(LIST)
    assert maker.find() is None
    assert maker.count == 0


def test_a_list_that_another_user_could_have_written_is_not_read(cache: Path) -> None:
    """It would be given to guests."""
    maker = Maker(LIST)
    maker.find()
    (kept,) = (cache / "cloche" / "fonts").glob("*.list")
    os.chmod(kept, 0o666)
    maker.find()
    assert maker.find() is None
    assert maker.count == 1
