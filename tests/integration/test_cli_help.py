"""What `--help` says."""

from __future__ import annotations

import json
import subprocess
import sys

WALK = """
import json, click, typer.main
from cloche.cli import skill_verbs
from cloche.cli.app import app
found = {}
def walk(command, parent):
    context = command.make_context(command.name, [], parent=parent, resilient_parsing=True)
    if isinstance(command, click.Group):
        for inner in command.commands.values():
            walk(inner, context)
    else:
        text = context.get_help()
        found[context.command_path] = text, [(one.name, getattr(one, "help", "") or "") for one in command.params]
app.add_typer(skill_verbs.skill, name="skill")
walk(typer.main.get_command(app), None)
print(json.dumps(found))
"""


def test_the_help_says_what_each_argument_and_option_is() -> None:
    """No word of ours is lost between the libraries that write it, and no bracket comes with a backslash."""
    done = subprocess.run([sys.executable, "-c", WALK], capture_output=True, text=True, timeout=60, check=True)
    found = json.loads(done.stdout)
    silent = {verb: [name for name, said in params if said.split()[:1] == []] for verb, (_, params) in found.items()}
    assert {verb: names for verb, names in silent.items() if names} == {}
    assert [verb for verb, (text, _) in found.items() if "\\" in text] == []
    assert "The file to run (- is stdin), then -- and its arguments." in "".join(text for text, _ in found.values())
    assert len(found) > 20
