"""A place on the host that a call names for what comes out is looked at before anything runs for it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import cloche

pytestmark = [pytest.mark.both_users, pytest.mark.usefixtures("settings_of_nobody")]
CODE = "open('ran', 'w').close()"


@pytest.mark.parametrize("name", ["a file", "a file/below", "closed/below"])
def test_out_that_cannot_be_a_folder_is_an_error_of_the_caller(name: str, tmp_path: Path) -> None:
    """By a run, a sandbox and a session alike, and nothing has run."""
    (tmp_path / "a file").write_text("kept")
    (tmp_path / "closed").mkdir(mode=0o500)
    if name.startswith("closed") and not os.geteuid():
        name = "a file"  # nothing is closed to root
    with cloche.Sandbox(timeout=60) as sandbox, sandbox.session() as session:
        for run in (cloche.run, sandbox.run, session.run):
            with pytest.raises(cloche.InvalidRequest, match="out: cannot write to the folder"):
                run(CODE, out=tmp_path / name)
        assert not sandbox.list_files()
    assert (tmp_path / "a file").read_text() == "kept"
