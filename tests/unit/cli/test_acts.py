"""What nobody can undo is asked about before anything is done."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from cloche.records.database import Database
from cloche.records.keys import create_key, list_keys
from tests.harness.terminals import Terminal
from tests.unit.cli.test_help import COMMANDS

# A command, its arguments where those must be right, and what the question names.
ASKS = {
    "cloche keys rotate": "key_1", "cloche keys revoke": "key_1", "cloche snapshot delete": "snap_1",
    "cloche workspace-snapshot delete": "ws_1", "cloche repro delete": "repro_1", "cloche discard": "box",
    "cloche secrets remove": "API_KEY",
}  # fmt: skip
# These ask once they know what there is to ask about; their own tests show that.
ASK_LATER = {
    "cloche sandbox stop", "cloche sandbox kill", "cloche sandbox rm", "cloche workspace-snapshot restore",
    "cloche audit prune", "cloche agent hook",
}  # fmt: skip


def call(home: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a command without a terminal, with folders of its own."""
    environ = {"HOME": str(home), "XDG_STATE_HOME": str(home / "state"), "XDG_RUNTIME_DIR": str(home)}
    argv = [sys.executable, "-m", "cloche", *words]
    return subprocess.run(
        argv, env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True, cwd=home, check=False
    )


def test_every_command_that_asks_has_the_option() -> None:
    """And no other one has it."""
    found = {name for name, command in COMMANDS.items() if "yes" in {param.name for param in command.params}}
    assert found == {*ASKS, *ASK_LATER}


@pytest.mark.parametrize("command", ASKS)
def test_without_a_terminal_nothing_is_done(command: str, tmp_path: Path) -> None:
    """The error says what would be done, and how; no record was opened."""
    done = call(tmp_path, *command.split()[1:], ASKS[command])
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert ASKS[command] in done.stderr
    assert "so nothing was done; --yes answers it" in done.stderr
    assert list(tmp_path.rglob("*.db")) == []


def test_a_person_says_yes_or_no(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Return alone is a no; --yes asks nobody."""
    monkeypatch.setenv("CLOCHE_AUDIT", "off")
    path = tmp_path / "r.db"
    database = Database(path)
    keys = [create_key(database, name="k", scopes=("run",))[0].id for _ in range(2)]

    def revoked() -> list[bool]:
        return [key.revoked_at is not None for key in list_keys(database)]

    for answer, told, after in (("\r", "nothing was done", False), ("y\r", f"revoked {keys[0]}", True)):
        with Terminal("revoke", keys[0], "--database", str(path), verb="keys") as terminal:
            terminal.see(f"Revoke {keys[0]}? It is refused from then on. [y/N]: ")
            terminal.type(answer)
            terminal.see(told)
        assert revoked() == [after, False]
    done = call(tmp_path, "keys", "revoke", keys[1], "--yes", "--database", str(path))
    assert (done.stdout, revoked()) == (f"revoked {keys[1]}\n", [True, True])
    database.close()
