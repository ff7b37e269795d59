"""The doctor on this host, as root and as an ordinary user: what it says must be what happens."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import cloche
from cloche.core.enforcement import Control, Level
from cloche.core.languages import LANGUAGES
from cloche.execution.doctor import Diagnosis, diagnose


@pytest.fixture(scope="module")
def found() -> Diagnosis:
    """Examine this host once."""
    return diagnose()


def doctor(*words: str, cwd: Path, **environ: str) -> subprocess.CompletedProcess[bytes]:
    """Run the command in an empty folder."""
    command = [sys.executable, "-m", "cloche", "doctor", *words]
    return subprocess.run(command, capture_output=True, check=False, timeout=60, cwd=cwd, env={**os.environ, **environ})


def test_the_level_is_what_a_run_reaches(found: Diagnosis) -> None:
    """A plain run ends at the level that the doctor announced, with the same controls."""
    enforcement = cloche.run("print(1)").enforcement
    assert enforcement.level is found.level
    assert enforcement.controls == found.controls


def test_every_level_was_tried_for_real(found: Diagnosis) -> None:
    """At each level a program ran, was timed and reported all controls; on a test machine all of them work."""
    assert [trial.level for trial in found.trials] == [Level.JAIL, Level.CONFINED, Level.PROCESS]
    for trial in found.trials:
        assert (trial.status, trial.detail) == ("ok", "")
        assert 0 < trial.seconds < 30
        assert set(trial.controls) == set(Control)


def test_it_says_where_sandboxes_live(found: Diagnosis) -> None:
    """Where a command ran in one there is nothing to say; below level confined there is none, and why is said."""
    said = [trial.not_live for trial in found.trials]
    assert said[:2] == ["", ""]
    assert "level jail or confined" in said[2]


def test_every_feature_says_yes_or_why_not(found: Diagnosis) -> None:
    """What does not work comes with the kernel's answer and one line of advice."""
    assert len(found.features) > 20
    for feature in found.features:
        assert feature.needed_for
        if not feature.works:
            assert feature.detail, feature
            assert feature.remedy, feature
            assert "\n" not in feature.remedy


def test_a_jail_needs_all_of_its_features(found: Diagnosis) -> None:
    """Where level jail was reached, no feature that it needs is said to be missing."""
    missing = [feature.name for feature in found.features if feature.needed_for == "jail" and not feature.works]
    assert missing == ([] if found.level >= Level.JAIL else missing)


def test_every_language_has_a_toolchain_or_a_remedy(found: Diagnosis) -> None:
    """One row per language: an engine with version and program, or the package that brings it."""
    assert [toolchain.language for toolchain in found.toolchains] == list(LANGUAGES)
    for toolchain in found.toolchains:
        if toolchain.engine:
            assert toolchain.version
            assert os.access(toolchain.path, os.X_OK)
        else:
            assert "install" in toolchain.note


def test_the_interpreter_is_this_one(found: Diagnosis) -> None:
    """A run's interpreter is the one that the doctor names."""
    assert found.interpreter.path == sys.executable
    assert cloche.run("import sys; print(sys.prefix)").stdout.strip() == sys.prefix


def test_the_command_is_quick(tmp_path: Path) -> None:
    """An examination waits for nothing: it takes about a second, and thirty on no machine."""
    started = time.monotonic()
    done = doctor("--json", cwd=tmp_path)
    assert time.monotonic() - started < 30
    assert done.returncode == 0, done.stderr


def test_the_table_and_the_json_agree(tmp_path: Path, found: Diagnosis) -> None:
    """People and programs are told the same."""
    table = doctor(cwd=tmp_path).stdout.decode()
    data: dict[str, Any] = json.loads(doctor("--json", cwd=tmp_path).stdout)
    assert table.startswith(f"level: {data['level']} ")
    assert data["level"] == str(found.level)
    for name in (*Control, *(feature["name"] for feature in data["features"]), *LANGUAGES):
        assert name in table
    for sentence in data["weak_points"]:
        assert f"weak point: {sentence}" in table


def test_configuration_has_no_say(tmp_path: Path) -> None:
    """A doctor looks at the host: neither a tier that forbids code nor another backend changes the answer."""
    (tmp_path / "cloche.yaml").write_text("tier: 1\n")
    assert doctor("--json", cwd=tmp_path, SANDBOX_TYPE="docker").returncode == 0
