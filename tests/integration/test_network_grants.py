"""Hosts that an approver allows for a folder, always: a later toolbox there reaches them without a question."""

from __future__ import annotations

from pathlib import Path

from tests.harness.world import NAMES, open_world

PROGRAM = """
import asyncio, os
from pathlib import Path
from cloche.agent.approval import Decision, callback, deny
from cloche.agent.toolbox import Toolbox

FETCH = "import urllib.request as u; print(u.urlopen('http://%s/', timeout=20).read())"
asked = []

def keeps(request):
    asked.append(dict(request.arguments))
    return Decision(is_approved=True, by="test", is_for_folder=request.tool == "network")

async def reached(approve, host="good.example", **options):
    options = {"network": "allowlist", "on_network": "ask", "timeout": 30, **options}
    async with Toolbox(approve=approve, live=True, **options) as tools:
        return "HELLO" in (await tools.call("run_python_code", {"code": FETCH % host})).text

def in_folder(name, *arguments, files=(), **options):
    os.makedirs(name, exist_ok=True)
    for file, text in files:
        Path(name, file).write_text(text)
    here = os.getcwd()
    os.chdir(name)
    try:
        return asyncio.run(reached(*arguments, **options))
    except Exception as error:
        return type(error).__name__ + ": " + str(error)
    finally:
        os.chdir(here)

yes = callback(lambda request: request.tool != "network")  # to programs, and to no host
os.environ["XDG_STATE_HOME"] = ARGUMENT
os.chdir(ARGUMENT)
told = {"before": in_folder("a", yes), "kept": in_folder("a", callback(keeps)), "later": in_folder("a", yes)}
told["asked"] = [row for row in asked if "host" in row]
told["denied"] = in_folder("a", yes, network_deny=["good.example"])
told["a project's file"] = in_folder("c", yes, files=[("cloche.yaml", "network: [good.example]")])
os.rename("a", "moved")
told["in its place"] = in_folder("a", yes)
os.chmod("cloche/network-grants.json", 0o644)
told["of others"] = in_folder("a", yes)
print(json.dumps(told))
"""


def test_a_yes_for_a_folder_holds_there_and_nowhere_else(tmp_path: Path) -> None:
    """Not in another folder at its path, not against a denying rule; and no file of a project gives one."""
    with open_world(NAMES) as world:
        told = world.run(PROGRAM, str(tmp_path))
    assert (told["before"], told["kept"], told["later"]) == (False, True, True), told
    assert told["asked"] == [{"host": "good.example", "port": 80, "folder": str(tmp_path / "a")}]
    assert (told["denied"], told["in its place"]) == (False, False), told
    assert "may only tighten" in told["a project's file"]
    assert "its mode is 644, and others could use it" in told["of others"]
