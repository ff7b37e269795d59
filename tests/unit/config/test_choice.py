"""Which backend the settings mean: a name, a preference among those that are here, or what a level takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cloche.config.keys import Settings
from cloche.config.settings import load_settings
from cloche.core.errors import InvalidRequest


class Host:
    """A home and a working directory of the test's own."""

    def __init__(self, root: Path) -> None:
        self.home, self.cwd = root / "home", root / "work"
        self.own = self.home / ".config" / "cloche" / "config.yaml"
        for folder in (self.own.parent, self.cwd):
            folder.mkdir(parents=True)

    def load(self, arguments: dict[str, Any] | None = None, **environ: str) -> Settings:
        return load_settings(arguments, environ=environ, cwd=self.cwd, home=self.home)


@pytest.fixture
def host(tmp_path: Path) -> Host:
    """A host with empty folders."""
    return Host(tmp_path)


def test_local_stays_the_default(host: Host) -> None:
    """Nobody's preference changes nothing; `auto` prefers the strongest."""
    settings = host.load()
    assert (settings.backend, settings.prefer, settings.policy.fallback) == ("local", "strongest", "none")
    assert (host.load({"backend": "auto"}).backend, host.load({"require": "jail"}).backend) == ("auto", "local")


def test_a_preference_means_auto(host: Host) -> None:
    """In a file, in the environment and as an argument, at the rank of who said it."""
    host.own.write_text("sandbox: {prefer: fastest}\n")
    assert (host.load().backend, host.load().prefer) == ("auto", "fastest")
    assert host.load().origins["backend"] == str(host.own)
    assert host.load(CLOCHE_PREFER="strongest").prefer == "strongest"
    host.own.write_text("sandbox: {backend: docker}\n")
    settings = host.load({"prefer": "Fastest"})
    assert (settings.backend, settings.prefer, settings.origins["backend"]) == ("auto", "fastest", "argument")


def test_a_name_above_a_preference_wins(host: Host) -> None:
    """As with any other word."""
    host.own.write_text("sandbox: {prefer: fastest}\n")
    assert host.load(SANDBOX_TYPE="docker").backend == "docker"
    assert host.load({"backend": "local"}).backend == "local"


def test_a_name_beside_a_preference_is_a_contradiction(host: Host) -> None:
    """One source cannot name a backend and leave the choice; `auto` and a preference go together."""
    with pytest.raises(InvalidRequest, match="prefer is for a choice among backends but backend names local"):
        host.load({"backend": "local", "prefer": "strongest"})
    with pytest.raises(InvalidRequest, match=r"^environment .*names docker"):
        host.load(SANDBOX_TYPE="docker", CLOCHE_PREFER="fastest")
    assert host.load(SANDBOX_TYPE="auto", CLOCHE_PREFER="fastest").prefer == "fastest"


@pytest.mark.parametrize("word", ["require", "level"])
@pytest.mark.parametrize("level", ["gvisor", "vm"])
def test_a_level_above_the_jail_is_looked_for(host: Host, word: str, level: str) -> None:
    """The default backend never has it; whoever names a backend gets that one's refusal."""
    settings = host.load({word: level})
    assert (settings.backend, settings.origins["backend"]) == ("auto", "argument")
    assert host.load({word: level, "tier": 3}).backend == "auto"
    assert host.load({word: level, "backend": "local"}).backend == "local"
    assert host.load({word: level}, SANDBOX_TYPE="docker").backend == "docker"


@pytest.mark.parametrize("value", ["quickest", 3, ["fastest"]])
def test_an_unknown_preference_is_refused(host: Host, value: object) -> None:
    """With the words that are known."""
    with pytest.raises(InvalidRequest, match=r"prefer: .* is unknown; use one of strongest, fastest"):
        host.load({"prefer": value})


def test_a_fallback_is_the_operators(host: Host) -> None:
    """Their files, the environment and arguments may name one."""
    host.own.write_text("sandbox: {backend: docker, fallback: process}\n")
    assert host.load().policy.fallback == "process"
    assert host.load({"fallback": "none"}).policy.fallback == "none"
    assert host.load(CLOCHE_FALLBACK="none").policy.fallback == "none"
    with pytest.raises(InvalidRequest, match="fallback: 'jail' is unknown; use one of none, process"):
        host.load({"fallback": "jail"})


def test_trust_is_an_argument_only(host: Host) -> None:
    """No file and no variable makes code trusted that somebody else wrote."""
    assert host.load({"trusted": True}).policy.trusted
    assert not host.load().policy.trusted
    with pytest.raises(InvalidRequest, match="trusted: 'yes' is neither True nor False"):
        host.load({"trusted": "yes"})
    host.own.write_text("sandbox: {trusted: true}\n")
    with pytest.raises(InvalidRequest, match=r"unknown key 'sandbox\.trusted'"):
        host.load()


@pytest.mark.parametrize(
    ("file", "text", "said"),
    [
        ("cloche.yaml", "sandbox: {fallback: process}", "fallback process; without it none holds"),
        ("cloche.yaml", "sandbox: {prefer: fastest}", "asks for (prefer fastest|backend auto)"),
        ("cloche.yaml", "sandbox: {backend: auto}", "backend auto; without it local holds"),
        (".env", "CLOCHE_FALLBACK=process", "fallback process"),
    ],
)
def test_a_checkout_may_not_loosen_it(host: Host, file: str, text: str, said: str) -> None:
    """A file of the working directory is anybody's."""
    (host.cwd / file).write_text(text)
    with pytest.raises(InvalidRequest, match=said):
        host.load()


def test_a_checkout_may_tighten_it(host: Host) -> None:
    """No fallback after all, and the strongest rather than the fastest."""
    host.own.write_text("sandbox: {prefer: fastest, fallback: process}\n")
    (host.cwd / "cloche.yaml").write_text("sandbox: {prefer: strongest, fallback: none}\n")
    settings = host.load()
    assert (settings.backend, settings.prefer, settings.policy.fallback) == ("auto", "strongest", "none")


def test_what_holds_is_shown(host: Host) -> None:
    """`cloche config show` has rows for it."""
    rows = {key: (value, origin) for key, value, origin in host.load({"prefer": "fastest"}).as_rows()}
    assert (rows["backend"], rows["prefer"]) == (("auto", "argument"), ("fastest", "argument"))
    assert (rows["fallback"], rows["trusted"]) == (("none", "default"), ("false", "default"))
