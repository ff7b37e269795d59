"""Accounts come from the environment, a file that was named and the user's own files, never from what was found."""

from __future__ import annotations

from pathlib import Path

import pytest

from cloche.config.settings import load_settings
from cloche.core.errors import InvalidRequest
from cloche.core.policy import BACKEND_ROWS
from cloche.execution.accounts import accounts_of
from cloche.execution.registry import OPTIONS

KEY, THEIRS = "e2b_0123456789abcdef", "e2b_ffffffffffffffff"


def loaded(tmp_path: Path, **environ: str) -> dict[str, str]:
    """Return what the settings say of E2B, in a folder with whatever the test has put there."""
    settings = load_settings({}, environ=environ, cwd=tmp_path / "cwd", home=tmp_path / "home")
    account = accounts_of(settings).get("e2b")
    return {} if account is None else {"key": account.api_key.reveal(), "domain": account.domain}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with a working directory and a home."""
    for name in ("cwd", "home/.config/cloche"):
        (tmp_path / name).mkdir(parents=True)
    return tmp_path


@pytest.mark.parametrize("name", [".env", ".env.local"])
def test_a_checkout_gives_no_account(folder: Path, name: str) -> None:
    """Its `.env` is for other programs: the key and the domain in it are nothing to us."""
    (folder / "cwd" / name).write_text(f"E2B_API_KEY={THEIRS}\nE2B_DOMAIN=theirs.example.test\nE2B_API_URL=x y\n")
    assert loaded(folder) == {}
    assert loaded(folder, E2B_API_KEY=KEY) == {"key": KEY, "domain": ""}


@pytest.mark.parametrize(
    ("file", "text"),
    [
        (".env", "CLOCHE_REMOTE_URL=https://theirs.example.test\n"),
        (".env", f"CLOCHE_REMOTE_KEY={THEIRS}\n"),
        (".env", "SANDBOX_TYPE=e2b\n"),
        ("cloche.yaml", f"sandbox:\n  e2b:\n    api_key: {THEIRS}\n"),
        ("cloche.yaml", "sandbox:\n  e2b:\n    domain: theirs.example.test\n"),
        ("cloche.yaml", "sandbox:\n  e2b:\n    runs_per_day: 1000000\n"),
        ("cloche.yaml", "sandbox:\n  accept_claimed: true\n"),
        ("cloche.yaml", "sandbox:\n  backend: daytona\n"),
    ],
)
def test_what_a_checkout_asks_of_an_account_is_refused(folder: Path, file: str, text: str) -> None:
    """Where it is clearly meant for us it is an error, which names file and key and repeats no secret."""
    (folder / "cwd" / file).write_text(text)
    with pytest.raises(InvalidRequest, match=r"found in the working directory may only tighten") as caught:
        loaded(folder)
    assert THEIRS not in str(caught.value)


def test_a_file_that_is_named_and_the_users_own_do(folder: Path) -> None:
    """The environment wins over a named `.env`, which wins over the user's own file."""
    own = folder / "home/.config/cloche/cloche.yaml"
    own.write_text(f"sandbox:\n  e2b:\n    api_key: {KEY}1\n    domain: own.example.test\n    runs_per_day: 5\n")
    assert loaded(folder) == {"key": f"{KEY}1", "domain": "own.example.test"}
    named = folder / "keys.env"
    named.write_text(f"E2B_API_KEY={KEY}2\nSANDBOX_TYPE=e2b\n")
    assert loaded(folder, CLOCHE_ENV_FILE=str(named))["key"] == f"{KEY}2"
    assert loaded(folder, CLOCHE_ENV_FILE=str(named), E2B_API_KEY=KEY)["key"] == KEY
    settings = load_settings({}, environ={"CLOCHE_ENV_FILE": str(named)}, cwd=folder / "cwd", home=folder / "home")
    assert settings.backend == "e2b"
    assert accounts_of(settings)["e2b"].quota.runs_per_day == 5
    shown = str(settings.as_rows()) + repr(settings)
    assert "set (hidden)" in shown
    assert KEY not in shown


def test_only_a_tiers_level_is_enough_when_claimed(folder: Path) -> None:
    """What `require` or a ceiling says of the level has to be measured."""

    def accepts(**arguments: object) -> bool:
        settings = load_settings(arguments, environ={}, cwd=folder / "cwd", home=folder / "home")
        return settings.policy.accept_claimed_level

    assert accepts(tier=3, backend="e2b")
    assert accepts(tier=3, backend="e2b", require="memory")
    assert not accepts(tier=3, backend="e2b", require="jail")
    assert not accepts(backend="e2b")


def test_only_a_name_sends_code_away() -> None:
    """No provider is among what `auto` may choose, and none has a strength by which a file could move to it."""
    remote = {name for name, row in BACKEND_ROWS.items() if row.is_remote}
    assert remote == {"e2b", "daytona", "cloche", "kubernetes", "ray"}
    assert not remote & {option.backend for option in OPTIONS}
    assert not [name for name in remote if BACKEND_ROWS[name].strength is not None]


def test_an_audit_log_elsewhere_has_no_quota_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where a call writes its audit log does not change what it may use of an account."""
    monkeypatch.setenv("E2B_API_KEY", "e2b_0123456789abcdef0123")
    monkeypatch.setenv("CLOCHE_E2B_RUNS_PER_DAY", "1")
    files = {accounts_of(load_settings(said))["e2b"].quota_file for said in ({}, {"audit": str(tmp_path)})}
    assert len(files) == 1
