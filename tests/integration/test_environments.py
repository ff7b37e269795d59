"""The caller's interpreter lies in a place that a guest has for itself: below /tmp or /workspace, say."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.environments import make_environment, run_there

pytestmark = [pytest.mark.both_users, pytest.mark.usefixtures("settings_of_nobody")]


@pytest.fixture(scope="module", params=["/tmp", "/dev/shm"])
def python(request: pytest.FixtureRequest) -> Iterator[Path]:
    """Return the interpreter of an environment below a place."""
    folder = Path(tempfile.mkdtemp(prefix="cloche-environment-", dir=request.param))
    folder.chmod(0o755)
    yield make_environment(folder / "of" / "mine")
    shutil.rmtree(folder)


def test_runs_start_warm_and_find_what_is_installed(python: Path) -> None:
    """In a jail that waits, as everywhere; nothing of the environment is a file of the run's, or can be written to."""
    found = run_there(
        python,
        """
import json, time, cloche
CODE = '''
import inner, os, sys
os.makedirs("/tmp/made"); open("/tmp/made/f", "w").write("x"); open("out", "w").write("x")
try:
    open(inner.__file__, "a")
except OSError as error:
    why = error.strerror
[inner.WORD, sys.prefix, why, len(os.listdir("/tmp/made"))]
'''
deadline = time.monotonic() + 60
while (result := cloche.run(CODE)).meta["start"] != "pooled" and time.monotonic() < deadline:
    pass
results = [result, *(cloche.run(CODE) for _ in range(5))]
values = [r.value + [r.meta["start"], [f.path for f in r.files], r.meta.get("files_skipped")] for r in results]
print(json.dumps(values))
""",
    )
    assert {value[6] for value in found} == {None}
    for value in found:
        assert value[:2] + value[3:4] == ["within", str(python.parents[1]), 1]
        assert value[2] in {"Read-only file system", "Permission denied"}
        assert value[5] == ["out"]
    assert "pooled" in [value[4] for value in found]


def test_sessions_have_checkpoints_and_forks(python: Path) -> None:
    """What is shown in a place is taken along, not copied, and what is mapped of it stands in no way."""
    found = run_there(
        python,
        """
import json, cloche
LOOK = "import importlib, inner, os; importlib.reload(inner); [x, inner.WORD, sorted(os.listdir('/tmp/mine'))]"
with cloche.Sandbox() as sandbox:
    session = sandbox.session()
    assert session.run("import os; x = 1; os.makedirs('/tmp/mine'); open('/tmp/mine/a', 'w').close()").ok
    session.checkpoint("first")
    session.run("x = 2; open('/tmp/mine/b', 'w').close()")
    session.rollback("first")
    values = [session.run(LOOK).value]
    for one in session.fork(2):
        one.run("x += 10")
        values.append(one.run(LOOK).value)
        values.append(one.fork(1)[0].run(LOOK).value)
    values.append([*sandbox.list_files()])
print(json.dumps(values))
""",
    )
    assert found == [[1, "within", ["a"]], *[[11, "within", ["a"]]] * 4, []]


def test_a_fork_can_write_to_nothing_of_its_parents(python: Path) -> None:
    """What a guest has put in the place of what is mounted there is taken along read-only, if at all."""
    found = run_there(
        python,
        """
import json, os, sys, cloche
TOP = sys.prefix.rpartition("/of/mine")[0]
WRITE = f'''
try:
    made = open("{TOP}/of/mine/new", "w") and "written"
except OSError as error:
    made = error.strerror
[made, os.path.exists("{TOP}/old/mine/new")]
'''
values = []
for other in ("os.makedirs(f'{top}/of/mine')", "os.symlink(f'{top}/old', f'{top}/of')"):
    with cloche.Sandbox() as sandbox:
        session = sandbox.session()
        assert session.run(f"import os; top = {TOP!r}; os.rename(f'{{top}}/of', f'{{top}}/old')\\n{other}").ok
        first, second = session.fork(2)
        values.append([first.run(WRITE).value, second.run(f"os.path.exists('{TOP}/of/mine/new')").value])
print(json.dumps(values))
""",
    )
    assert found[0] == [["Read-only file system", False], False]
    assert found[1][1] is False
