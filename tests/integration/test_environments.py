"""The caller's interpreter lies in a place that a guest has for itself: below /tmp or /workspace, say."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.harness.environments import make_environment, root_with, run_there

pytestmark = [pytest.mark.user_soak, pytest.mark.usefixtures("settings_of_nobody")]


@dataclass
class There:
    """An interpreter below a place, and the words before a command that sees it where the host has no such folder."""

    python: Path
    inside: list[str]

    def run(self, program: str) -> Any:
        """Run a program with it and return the JSON that it prints last."""
        return run_there(self.python, program, self.inside)


@pytest.fixture(scope="module", params=["/tmp", "/dev/shm", "/workspace"])
def there(request: pytest.FixtureRequest) -> Iterator[There]:
    """Return the interpreter of an environment below a place."""
    is_workspace = request.param == "/workspace"
    folder = Path(tempfile.mkdtemp(prefix="cloche-environment-", dir="/var/tmp" if is_workspace else request.param))
    folder.chmod(0o755)
    inside = root_with(folder, "/workspace") if is_workspace else []
    top = Path("/workspace") if is_workspace else folder
    yield There(make_environment(top / "of" / "mine", inside), inside)
    shutil.rmtree(folder)


def test_runs_start_warm_and_find_what_is_installed(there: There) -> None:
    """In a jail that waits, as everywhere; nothing of the environment is a file of the run's, or can be written to."""
    found = there.run(
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
        assert value[:2] + value[3:4] == ["within", str(there.python.parents[1]), 1]
        assert value[2] in {"Read-only file system", "Permission denied"}
        assert value[5] == ["out"]
    assert "pooled" in [value[4] for value in found]


FONT_MANAGER = """
class FontManager: __version__ = 1
fontManager = "fonts"
def json_dump(fonts, path): open(path, "w").write(fonts)
"""


def test_what_cloche_puts_into_tmp_may_have_an_environment_beside_it() -> None:
    """A cache of environments, in the home folder of a container's user, is where the list of fonts goes, too."""
    top = Path("/tmp/.cache")
    top.mkdir(exist_ok=True)
    folder = Path(tempfile.mkdtemp(dir=top))
    folder.chmod(0o755)
    try:
        python = make_environment(folder / "mine")
        (packages,) = (folder / "mine/lib").glob("python3*/site-packages")
        for name, text in {
            "matplotlib/__init__.py": "", "matplotlib/font_manager.py": FONT_MANAGER,
            "matplotlib-1.dist-info/METADATA": "Metadata-Version: 2.1\nName: matplotlib\nVersion: 1\n",
        }.items():  # fmt: skip
            (packages / name).parent.mkdir(exist_ok=True)
            (packages / name).write_text(text)
        found = run_there(
            python,
            f"""
import json, os, cloche
os.environ["XDG_CACHE_HOME"] = {str(folder)!r}
look = "import os; print(os.listdir('/tmp/.cache/matplotlib'), 'plot')"
print(json.dumps([cloche.run(look).stdout, cloche.run("echo 1", language="bash").stdout]))
""",
        )
    finally:
        shutil.rmtree(folder)
        with contextlib.suppress(OSError):
            top.rmdir()
    assert found == ["['fontlist-v1.json'] plot\n", "1\n"]


def test_no_file_of_the_host_is_locked(there: There) -> None:
    """What is shown in a place is none of the guest's own files, whatever its path; those it may lock."""
    found = there.run(
        """
import fcntl, json, sys, cloche
CODE = '''
import fcntl, sys
def lock(path, mode):
    try:
        fcntl.flock(open(path, mode), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.strerror
    return "locked"
[lock(sys.prefix + "/bin/python", "rb"), lock("/tmp/own", "w"), lock("/workspace/own", "w")]
'''
with open(sys.prefix + "/bin/python", "rb") as file:
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
print(json.dumps(cloche.run(CODE).value))
""",
    )
    assert found == ["No locks available", "locked", "locked"]


def test_own_files_are_locked_on_an_overlay_of_several_file_systems(tmp_path: Path) -> None:
    """Without a mount of its own, a workspace is where the temporary folder is, and there each file has a device."""
    program = """
import fcntl, cloche
CODE = "import fcntl; fcntl.flock(open('own', 'w'), fcntl.LOCK_EX | fcntl.LOCK_NB); print('locked')"
print(cloche.run(CODE, level="confined").stdout, end="")
"""
    mounts = """
mount -t tmpfs none "$0" && cd "$0" && mkdir low other there && mount -t tmpfs none other && mkdir other/up other/work
mount -t overlay none -o userxattr,lowerdir=low,upperdir=other/up,workdir=other/work there
touch there/file && test "$(stat -c %d there)" != "$(stat -c %d there/file)" && TMPDIR=$PWD/there exec "$@"
"""
    powers, none = ([], []) if os.geteuid() == 0 else (["--user", "--map-root-user"], ["unshare", "--map-user=1000"])
    inside = ["unshare", "--mount", *powers, "sh", "-c", mounts, str(tmp_path), *none]
    done = subprocess.run(
        [*inside, sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (0, "locked\n"), done.stderr


def test_sessions_have_checkpoints_and_forks(there: There) -> None:
    """What is shown in a place is taken along, not copied, and what is mapped of it stands in no way."""
    found = there.run(
        """
import json, cloche
LOOK = "import importlib, inner, os; importlib.reload(inner); [x, inner.WORD, sorted(os.listdir('/tmp/mine'))]"
with cloche.Sandbox(live=False) as sandbox:
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


def test_a_fork_can_write_to_nothing_of_its_parents(there: There) -> None:
    """What a guest has put in the place of what is mounted there is taken along read-only, if at all."""
    found = there.run(
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
    with cloche.Sandbox(live=False) as sandbox:
        session = sandbox.session()
        assert session.run(f"import os; top = {TOP!r}; os.rename(f'{{top}}/of', f'{{top}}/old')\\n{other}").ok
        first, second = session.fork(2)
        values.append([first.run(WRITE).value, second.run(f"os.path.exists('{TOP}/of/mine/new')").value])
print(json.dumps(values))
""",
    )
    assert found[0] == [["Read-only file system", False], False]
    assert found[1][1] is False


def test_a_link_that_a_guest_left_is_not_followed_to_what_is_mounted(tmp_path: Path) -> None:
    """In a workspace that stays: nothing is made on the host where it points, the next run is refused, and says why."""
    folder, target = tmp_path / "workspace", tmp_path / "target"
    folder.mkdir()
    target.mkdir(mode=0o777)
    inside = root_with(folder, "/workspace")
    python = make_environment(Path("/workspace/of/mine"), inside)
    found = run_there(
        python,
        f"""
import json, cloche
said = []
for warm in (True, False):
    with cloche.Sandbox(live=False, warm=warm) as sandbox:
        assert sandbox.run("import os; os.rename('of', 'old'); os.symlink({str(target)!r}, 'of')").ok
        try:
            said.append(sandbox.run("1").status)
        except cloche.StartFailed as error:
            said.append(str(error))
print(json.dumps(said))
""",
        inside,
    )
    assert ["Not a directory" in one for one in found] == [True, True], found
    assert list(target.iterdir()) == []
