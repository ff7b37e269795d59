"""Values of commands that are fetched anew when a host refuses them, by whoever can run the command."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.escape.test_secrets_held import ASKS, HOST, TABLE
from tests.harness.world import World, open_world

pytestmark = pytest.mark.both_users
FIRST, SECOND = "sk-proj-FirstValue0123456789abcdef-one", "sk-proj-TheSecondValue0123456789abcdefghijkl-two"
# Asks until a host takes the value, in one connection after the other; then for a third value.
USES = """
import time
K = os.environ["KEY"]
tries = [ask(K, "/only/two")]
while tries[-1].startswith("401") and len(tries) < 200:
    time.sleep(0.05)
    tries.append(ask(K, "/only/two"))
print(K, len(tries), tries[0].replace("\\n", " "), tries[-1].replace("\\n", " "), ask(K, "/only/three").split()[0])
"""
RUNS = """
import cloche, os, subprocess, sys
secrets = {"KEY": cloche.Secret(command=ARGUMENT["command"], hosts=["api.openai.com"])}
result = cloche.run(ARGUMENT["code"], secrets=secrets, timeout=60)
print(json.dumps([result.stdout or result.stderr, result.meta.get("network", [])]))
"""
OPENS = """
import cloche, sys
secrets = {"KEY": cloche.Secret(command=sys.argv[1], hosts=["api.openai.com"])}
with cloche.Sandbox(name="renewed", keep="10m", timeout=60, secrets=secrets):
    pass
"""
KEEPS = """
import cloche, ctypes, os, subprocess, sys
PR_SET_CHILD_SUBREAPER = 36
ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
subprocess.run([sys.executable, "-c", ARGUMENT["opens"], ARGUMENT["command"]], env={**os.environ, "OTHER": "Of_Others"})
children = open(f"/proc/self/task/{os.getpid()}/children").read().split()
(server,) = [pid for pid in children if b"cloche.egress.commands" in open(f"/proc/{pid}/cmdline", "rb").read()]
with cloche.Sandbox.attach("renewed") as sandbox:
    result = sandbox.run(ARGUMENT["code"])
    environ = open(f"/proc/{server}/environ").read()
    sandbox.kill()
os.waitpid(int(server), 0)
print(json.dumps([result.stdout or result.stderr, result.meta.get("network", []), "Of_Others" in environ]))
"""


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """Open a world with a provider."""
    with open_world(TABLE) as world:
        yield world


def command(folder: Path, *values: str) -> str:
    """Return a command that writes one value after the other, and counts how often it ran."""
    script = 'cd "${0%/*}"; n=$(($(cat count) + 1)); echo $n > count; sed -n "${n}p" values'
    for name, text in (("count", "0"), ("values", "\n".join(values)), ("next.sh", script)):
        (folder / name).write_text(text)
    return f"sh {folder}/next.sh"


def check(world: World, folder: Path, said: str, rows: list[dict[str, Any]]) -> None:
    """See that the second value came in place of the first one, once, and that neither was read."""
    placeholder, tries, *_ = said.split()
    assert int(tries) > 1
    assert f"401 host: {HOST}" in said
    assert said.count(f"Bearer {placeholder}") == 2, said
    assert said.rsplit(maxsplit=1)[-1] == "401"
    assert FIRST[8:] not in said
    assert SECOND[8:] not in said
    texts = [one["text"] for one in world.seen().arrivals]
    assert [any(f"bearer {value}".lower() in text for text in texts) for value in (FIRST, SECOND)] == [True, True]
    assert (folder / "count").read_text().strip() == "2", "at most once a minute"
    assert "the value of KEY was refused with status 401; its command is run again" in [row["why"] for row in rows]


def test_a_value_that_a_host_refuses_is_fetched_anew(world: World, tmp_path: Path) -> None:
    """Also one of another length; the placeholder stays, and both values are taken out of answers."""
    world.forget()
    said, rows = world.run(RUNS, {"command": command(tmp_path, FIRST, SECOND), "code": ASKS + USES})
    check(world, tmp_path, said, rows)


def test_a_sandbox_with_a_name_fetches_it_without_its_opener(world: World, tmp_path: Path) -> None:
    """In a process that has none of the opener's other variables, and ends with the sandbox."""
    world.forget()
    (tmp_path / "run").mkdir(mode=0o700)
    argument = {"command": command(tmp_path, FIRST, SECOND), "code": ASKS + USES, "opens": OPENS}
    said, rows, has_others = world.run(KEEPS, argument, env={"XDG_RUNTIME_DIR": str(tmp_path / "run")})
    check(world, tmp_path, said, rows)
    assert not has_others
