"""Whom auto-fix asks is the operator's word alone, and the key is nobody's to see."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cloche.config.autofix_settings import AutoFixSettings
from cloche.config.keys import Settings
from cloche.config.readers import HiddenText
from cloche.config.settings import load_settings
from cloche.core.errors import InvalidRequest

KEY = "sk-very-secret"
SECTION = {"base_url": "http://localhost:8000/v1", "model": "m", "api_key": KEY, "max_rounds": 6, "time_budget": "2m"}


def load(tmp_path: Path, *, own: object = None, strange: object = None, **variables: str) -> Settings:
    """Return the settings of an operator's file, a file of the working directory, and an environment."""
    home, cwd = tmp_path / "home", tmp_path / "cwd"
    (home / ".cloche").mkdir(parents=True, exist_ok=True)
    cwd.mkdir(exist_ok=True)
    if own is not None:
        (home / ".cloche" / "config.json").write_text(json.dumps(own))
    if strange is not None:
        (cwd / "cloche.yaml").write_text(json.dumps(strange))
    return load_settings({}, environ=variables, cwd=cwd, home=home)


def test_a_file_names_the_endpoint(tmp_path: Path) -> None:
    """The section may stand at the top or below `sandbox`, and each key knows where it came from."""
    for document in ({"autofix": SECTION}, {"sandbox": {"autofix": SECTION}}):
        settings = load(tmp_path, own=document)
        found = settings.autofix
        assert (found.base_url, found.model, found.max_rounds) == ("http://localhost:8000/v1", "m", 6)
        assert (found.time_budget_s, found.token_budget) == (120.0, 100_000)
        assert found.api_key.reveal() == KEY
        assert settings.origins["autofix.model"].endswith("config.json")
        assert settings.origins["autofix.token_budget"] == "default"


def test_the_environment_wins(tmp_path: Path) -> None:
    """Every key has a variable."""
    found = load(
        tmp_path, own={"autofix": SECTION}, CLOCHE_AUTOFIX_MODEL="other", CLOCHE_AUTOFIX_MAX_ROUNDS="2"
    ).autofix
    assert (found.model, found.max_rounds, found.base_url) == ("other", 2, "http://localhost:8000/v1")


def test_the_key_is_never_shown(tmp_path: Path) -> None:
    """Neither rows, nor reprs, nor formatting have it."""
    settings = load(tmp_path, own={"autofix": SECTION}, CLOCHE_AUTOFIX_API_KEY=KEY)
    rows = {key: (value, origin) for key, value, origin in settings.as_rows()}
    assert rows["autofix.api_key"] == ("set (hidden)", "environment CLOCHE_AUTOFIX_API_KEY")
    secret = HiddenText(KEY)
    for shown in (repr(settings), str(settings.autofix), repr(secret), str(secret), f"{secret}", "%s" % secret):  # noqa: UP031
        assert KEY not in shown
    assert secret.reveal() == KEY


def test_a_password_in_an_address_is_not_shown(tmp_path: Path) -> None:
    """Such an address is refused where it is used, and shown without the password until then."""
    settings = load(tmp_path, own={"autofix": {**SECTION, "base_url": "http://user:p@ss@host/v1"}})
    rows = {key: value for key, value, _ in settings.as_rows()}
    assert rows["autofix.base_url"] == "http://(hidden)@host/v1"


@pytest.mark.parametrize("key", ["base_url", "model", "api_key"])
def test_a_stranger_names_neither_endpoint_nor_key(tmp_path: Path, key: str) -> None:
    """A file of the working directory that says where code is to go is refused, and its key not repeated."""
    with pytest.raises(InvalidRequest, match=f"autofix.{key}") as caught:
        load(tmp_path, own={"autofix": SECTION}, strange={"autofix": {key: SECTION[key]}})
    assert KEY not in str(caught.value)


def test_a_stranger_may_lower_what_it_costs(tmp_path: Path) -> None:
    """Fewer rounds, yes; more, no."""
    assert load(tmp_path, own={"autofix": SECTION}, strange={"autofix": {"max_rounds": 1}}).autofix.max_rounds == 1
    with pytest.raises(InvalidRequest, match=r"autofix\.max_rounds"):
        load(tmp_path, strange={"autofix": {"max_rounds": 7}})


@pytest.mark.parametrize(
    "section",
    ["yes", {"url": "x"}, {"max_rounds": 0}, {"max_rounds": 101}, {"token_budget": -1}, {"time_budget": "soon"},
     {"api_key": 5}, {"api_key": f"{KEY}\n"+KEY}, {"model": ""}, {"base_url": "http://a\u001b[2J/"}],
)  # fmt: skip
def test_a_section_that_makes_no_sense_is_refused(tmp_path: Path, section: object) -> None:
    """The message names the key, and never the secret."""
    with pytest.raises(InvalidRequest, match="autofix") as caught:
        load(tmp_path, own={"autofix": section})
    assert KEY not in str(caught.value)


def test_the_variable_of_openai_goes_to_openai_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its key is taken for its host where no other is set, and for no host that merely looks like it."""
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    assert AutoFixSettings(base_url="https://api.openai.com/v1").key_for_endpoint() == KEY
    own = AutoFixSettings(base_url="https://api.openai.com/v1", api_key=HiddenText("mine"))
    assert own.key_for_endpoint() == "mine"
    for url in ("https://api.openai.com.evil/v1", "https://evil/api.openai.com", "http://localhost/v1", "",
                "http://api.openai.com/v1", "http://[bad"):  # fmt: skip
        assert AutoFixSettings(base_url=url).key_for_endpoint() == ""
