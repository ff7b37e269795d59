"""The additions of `docs/contributing.md`, carried out on a copy of Cloche: in so many files, and all else follows."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import cloche
from cloche.core.policy import BACKENDS
from tests.harness.service import serving

PACKAGE = Path(cloche.__file__).parent

# A new module. Below it and in the other tables: a line that only one file has, and the text to insert before it.
MODULE = '''
"""A backend that runs nothing: it says what it was asked."""

from cloche import Level, Result
from cloche.testing import FakeBackend


class ExampleBackend(FakeBackend):
    name = "example"

    def __init__(self):
        super().__init__([Result("from the example", "", 0, 0.0)], level=Level.VM)
'''
BACKEND = {
    '    "docker": BackendRow(': """    "example": BackendRow(
        summary="an example", provider="cloche.backends.example:ExampleBackend", strength=6, auto_max_level=Level.VM
    ),
""",
}
CONTROL = {
    '    IDENTITY = "identity"': '    CLOCK = "clock"\n',
    "        Control.OUTPUT: _OUTPUT,": (
        '        Control.CLOCK: _partial("a time namespace", "the wall clock is the host\'s"),\n'
    ),
}
# A row and its field with its type and default, in one file; its keyword, in another.
KEY = {
    '    Key(name="audit_folder", ': """    Key(
        name="example", variable="CLOCHE_EXAMPLE", parse=parse_count, settings_field="example", is_looser=operator.gt
    ),
""",
    "    audit_folder: str | None = None": "    example: int = 7\n",
    "    config: str | PathLike[str] | None\n": "    example: int | None\n",
}

# A field and its row, in one file; its keyword; its field of a request.
LIMIT = {
    "    inodes: int = 32_768": "    open_files: int = 1024\n",
    '    LimitRow(field="inodes", ': """    LimitRow(
        field="open_files", keyword="open_files", parse=parse_count, variable="CLOCHE_OPEN_FILES",
        wire="openFilesLimit", title="Open files", metavar="N", number=int, help="Open files of each process.",
    ),
""",
    "    config: str | PathLike[str] | None\n": "    open_files: int | None\n",
    "    disk_limit: Amount | None = None": "    open_files_limit: int | None = None\n",
}

# A row of the table, and with the second file a place in the default allowlist.
LANGUAGE = {
    '        Language(\n            name="rust",': """        Language(
            name="perl", aliases=("pl",), suffixes=(".pl",), file_name=".cloche-main.pl", image="perl:5-slim",
            engines=(_interpreter("perl", package="apt-get install perl"),), image_engine="perl",
        ),
""",
    '"ruby", "go", "rust")': '"perl", ',
}

# A new module, and its name in the list.
ROUTE = {'    "health",\n)': '    "example",'}
ROUTE_MODULE = '''
"""`/api/example`: adds numbers."""

from typing import Any

from fastapi import APIRouter

from cloche.wire.exec_options import WireModel
from cloche.wire.problems import Refused

from ..auth import Runner
from ..bodies import JsonRoute
from ..problems import RESPONSES

router = APIRouter(prefix="/api/example", tags=["example"], route_class=JsonRoute)


class Numbers(WireModel):
    """The numbers to add."""

    numbers: list[int]


@router.post("", responses=RESPONSES)
async def add(body: Numbers, caller: Runner) -> dict[str, Any]:
    """Return the sum of numbers."""
    if not body.numbers:
        raise Refused(422, "invalid-request", "numbers: there are none; send at least one", field="numbers")
    return {"sum": sum(body.numbers), "caller": caller.name}
'''

# One module: programs import it, and nothing of Cloche does.
PROVIDER_MODULE = '''
"""A framework that wants a class with `execute`, called from any event loop."""

from typing import Unpack

from cloche.config.options import SandboxOptions

from .environment import Environment


class Example:
    def __init__(self, **options: Unpack[SandboxOptions]):
        self._environment = Environment(**options)

    async def execute(self, command: str) -> str:
        return (await self._environment.use(lambda sandbox: sandbox.exec(shell=command))).stdout

    def close(self) -> None:
        self._environment.close_and_wait()
'''

DANGER = {'    *_rows("prefix", CLOCHE, ': '    *_rows("name", BUILD, "examplefile", guards=True),\n'}

AGENT = {
    '        CodingAgent(\n            name="claude",': """\
        CodingAgent(name="example", title="Example", program="example-agent", env={"EXAMPLE_TELEMETRY": "0"}),
"""
}


class Copy:
    """A copy of Cloche's sources with a change, run in processes of their own and with nobody's settings."""

    def __init__(self, folder: Path, lines: Mapping[str, str], **modules: str) -> None:
        self.folder = folder / "work"
        self.folder.mkdir()
        package = shutil.copytree(PACKAGE, folder / "cloche", ignore=shutil.ignore_patterns("__pycache__"))
        for line, text in lines.items():
            (file,) = (file for file in package.rglob("*.py") if line in file.read_text())
            file.write_text(file.read_text().replace(line, text + line))
        for layer, text in modules.items():
            (package / layer / "example.py").write_text(text)
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("CLOCHE_", "SANDBOX_"))}
        nothing = {"DOCKER_HOST": f"unix://{folder}/none", "CLOCHE_RUNSC": "none", "CLOCHE_MICROVM_IMAGE": str(folder)}
        self._env = {**kept, **nothing, "PYTHONPATH": str(folder), "XDG_CONFIG_HOME": str(folder / "settings")}

    def run(self, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run this interpreter with the changed Cloche."""
        command = [sys.executable, *words]
        env = {**self._env, **variables}
        return subprocess.run(
            command, cwd=self.folder, env=env, capture_output=True, text=True, timeout=200, check=False
        )

    def cloche(self, *words: str, **variables: str) -> str:
        """Return what the changed command line prints."""
        done = self.run("-m", "cloche", *words, **variables)
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def with_backend(tmp_path_factory: pytest.TempPathFactory) -> Copy:
    """Have one more backend: its module and its row."""
    return Copy(tmp_path_factory.mktemp("backend"), BACKEND, backends=MODULE)


@pytest.mark.parametrize(
    ("words", "variables", "file"),
    [
        (["--backend", "example"], {}, ""),
        ([], {"SANDBOX_TYPE": "example"}, ""),
        ([], {}, "backend: example"),
        (["--backend", "auto", "--require", "vm"], {}, ""),
        (["--tier", "3", "--backend", "Example"], {}, ""),
    ],
    ids=["by name", "by the environment", "by a file that nobody vetted", "by its level", "within a tier"],
)
def test_a_new_backend_is_found(with_backend: Copy, words: list[str], variables: dict[str, str], file: str) -> None:
    """Wherever a backend can be chosen."""
    (with_backend.folder / "cloche.yaml").write_text(file)
    assert with_backend.cloche("run", "-c", "1", *words, **variables) == "from the example"


def test_a_new_backend_is_listed(with_backend: Copy) -> None:
    """In the table of backends, in the error for a wrong name, and as that which `auto` would choose."""
    rows = {row["backend"]: row for row in json.loads(with_backend.cloche("backends", "--json"))}
    assert set(rows) == {*BACKENDS, "example"}
    assert (rows["example"]["available"], rows["example"]["level"]) == (True, "vm")
    assert rows["auto"]["reason"] == "it would choose example"
    wrong = with_backend.run("-m", "cloche", "run", "-c", "1", "--backend", "exmaple")
    assert wrong.returncode != 0
    assert "example" in wrong.stderr.partition("known backends")[2]


def test_a_new_control_is_reported_required_and_excused(tmp_path: Path) -> None:
    """By every backend, in each result, and by the words of a policy."""
    copy = Copy(tmp_path, CONTROL)
    ran = json.loads(copy.cloche("run", "-c", "print(1)", "--json", "--best-effort", "clock"))
    assert ran["enforcement"]["controls"]["clock"] == {
        "state": "partial", "mechanism": "a time namespace", "reason": "the wall clock is the host's",
    }  # fmt: skip
    refused = copy.run("-m", "cloche", "run", "-c", "print(1)", "--require", "clock")
    assert "clock is required but would be partial: the wall clock is the host's" in refused.stderr
    held = copy.run("-c", EVERY_BACKEND, str(Path(__file__).parents[2]))
    assert held.returncode == 0, held.stderr


EVERY_BACKEND = """
import sys
sys.path.append(sys.argv[1])
from cloche.core.enforcement import Control
from tests.unit.backends.test_enforcement import CASES, test_every_control_has_a_row
assert "clock" in set(Control)
for case in CASES.values():
    test_every_control_has_a_row(*case)
"""


@pytest.fixture(scope="module")
def with_key(tmp_path_factory: pytest.TempPathFactory) -> Copy:
    """Have one more configuration key."""
    return Copy(tmp_path_factory.mktemp("key"), KEY)


OWN, FOUND, SHARED = "settings/cloche/cloche.yaml", "work/cloche.yaml", "work/config.yaml"
ASK = """
import json, sys
import cloche
from cloche.config.settings import load_settings
settings = load_settings(json.loads(sys.argv[1]))
print(json.dumps([settings.example, [row for row in settings.as_rows() if row[0] == "example"]]))
"""


def asked(copy: Copy, files: Mapping[str, str], said: Mapping[str, Any]) -> subprocess.CompletedProcess[str]:
    """Settle the configuration of these files and variables, and of arguments in small letters."""
    for name in (OWN, FOUND, SHARED):
        path = copy.folder.parent / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(files.get(name, ""))
    arguments = json.dumps({word: value for word, value in said.items() if word.islower()})
    return copy.run("-c", ASK, arguments, **{word: value for word, value in said.items() if word.isupper()})


@pytest.mark.parametrize(
    ("files", "said", "value", "origin"),
    [
        ({}, {}, 7, "default"),
        ({OWN: "example: 5"}, {}, 5, OWN),
        ({OWN: "example: 5"}, {"CLOCHE_EXAMPLE": "4"}, 4, "environment CLOCHE_EXAMPLE"),
        ({}, {"CLOCHE_EXAMPLE": "4", "example": 9}, 9, "argument"),
        ({FOUND: "sandbox: {example: 2}"}, {}, 2, FOUND),
        ({FOUND: "example: 2", SHARED: "sandbox: {example: 1}"}, {}, 1, SHARED),
    ],
    ids=["default", "own file", "variable", "argument", "a file that nobody vetted", "the tighter of two"],
)
def test_a_new_key_is_read_and_listed(
    with_key: Copy, files: dict[str, str], said: dict[str, Any], value: int, origin: str
) -> None:
    """From every source, in their order, with where it came from."""
    done = asked(with_key, files, said)
    assert done.returncode == 0, done.stderr
    held, ((name, shown, found),) = json.loads(done.stdout)
    assert (held, name, shown) == (value, "example", str(value))
    assert found.endswith(origin)


@pytest.mark.parametrize(
    ("files", "said", "problem"),
    [
        ({FOUND: "example: 8"}, {}, "example asks for example 8; without it 7 holds (default)"),
        ({OWN: "example: 5", FOUND: "example: 6"}, {}, "may only tighten"),
        ({OWN: "exampel: 5"}, {}, "unknown key 'exampel'; did you mean 'example'?"),
        ({}, {"CLOCHE_EXAMPLE": "no"}, "environment CLOCHE_EXAMPLE: 'no'"),
    ],
    ids=["more than holds", "more than the owner said", "misspelled", "no number"],
)
def test_a_new_key_refuses(with_key: Copy, files: dict[str, str], said: dict[str, Any], problem: str) -> None:
    """What asks for more in a file that nobody vetted, and what makes no sense, as every other key does."""
    done = asked(with_key, files, said)
    assert done.returncode != 0
    assert problem in done.stderr


def test_a_new_key_is_a_keyword(with_key: Copy) -> None:
    """`cloche.run` takes it, and shows it in its signature."""
    asked(with_key, {}, {})
    done = with_key.run("-c", "import cloche; help(cloche.run); cloche.run('print(1)', example=0)")
    assert "example: 'int | None' = None" in done.stdout
    assert "InvalidRequest: example: 0" in done.stderr


EVERY_FACE = """
import json
from cloche.backends.cloche.fields import option_fields
from cloche.config.settings import load_settings
from cloche.core.limits import Limits
from cloche.core.policy import Policy
from cloche.records.devenv import LIMITS
from cloche.server.routes.page_settings import FIELDS
from cloche.server.routes.sandbox import shown_values
from cloche.skills.manifest import LIMIT_KEYS
from cloche.wire.exec_options import ExecRequest
settings = load_settings({"open_files": 9})
request = ExecRequest.model_validate({"code": "1", "openFilesLimit": 8})
print(json.dumps([
    settings.limits.open_files, [row[:2] for row in settings.as_rows() if row[0] == "open_files"],
    request.options(), shown_values(settings)["openFilesLimit"],
    option_fields(Policy(), Limits(open_files=7))["openFilesLimit"],
    LIMITS["openFiles"], "open_files" in LIMIT_KEYS, any(row[:2] == ("openFilesLimit", "Open files") for row in FIELDS),
]))
"""


def test_a_new_limit_is_read_from_one_row(tmp_path: Path) -> None:
    """By library, configuration, ceilings, command line, requests, the service's settings and page, manifests."""
    copy = Copy(tmp_path, LIMIT)
    done = copy.run("-c", EVERY_FACE)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [
        9, [["open_files", "9"]], {"open_files": 8}, 9, 7, "open_files", True, True,
    ]  # fmt: skip
    assert "--open-files N" in copy.cloche("run", "--help")
    (copy.folder / "cloche.yaml").write_text("open_files: 2048")
    refused = copy.run("-m", "cloche", "run", "-c", "print(1)")
    assert "open_files asks for open_files 2048; without it 1024 holds" in refused.stderr
    (copy.folder / "cloche.yaml").write_text("ceilings: {open_files: 512}")
    capped = copy.run("-m", "cloche", "run", "-c", "print(1)", CLOCHE_OPEN_FILES="600")
    assert "512" in capped.stderr


def test_a_new_language_is_one_row(tmp_path: Path) -> None:
    """It runs by name, alias and suffix. It is listed, allowed by default, offered to models, and can be refused."""
    copy = Copy(tmp_path, LANGUAGE)
    (copy.folder / "hello.pl").write_text("print 'from a file'")
    assert copy.cloche("run", "hello.pl") == "from a file"
    assert copy.cloche("run", "--language", "pl", "-c", "print 'from perl'") == "from perl"
    assert "perl" in copy.cloche("languages")
    assert "perl" in copy.cloche("tools", "--format", "json")
    (copy.folder / "cloche.yaml").write_text("languages: [python]")
    refused = copy.run("-m", "cloche", "run", "hello.pl")
    assert 'language "perl" is not allowed here' in refused.stderr


def test_a_new_route_is_one_module_and_its_name(tmp_path: Path) -> None:
    """It has the scopes, the problems, the bounds and the place in the OpenAPI document that all routes have."""
    copy = Copy(tmp_path, ROUTE, **{"server/routes": ROUTE_MODULE})
    variables = {"PYTHONPATH": str(tmp_path), "CLOCHE_AUDIT": "off"}
    with serving(copy.folder, program=["cloche"], **variables) as service, service.client() as client:
        document = client.get("/api/openapi.json").json()["paths"]["/api/example"]["post"]
        assert document["summary"] == "Return the sum of numbers"
        assert client.post("/api/example", json={"numbers": [1, 2]}).json()["sum"] == 3
        for body, field in (({"numbers": []}, "numbers"), ({"numbers": [1], "more": 1}, "more")):
            problem = client.post("/api/example", json=body)
            assert (problem.status_code, problem.json()["field"]) == (422, field)
        with service.client(service.new_key("read")) as reader:
            assert reader.post("/api/example", json={"numbers": [1]}).status_code == 403


USE = """
import asyncio
from cloche.integrations.example import Example
sandbox = Example(memory="100m")
print(asyncio.run(sandbox.execute("echo a > b; cat b")), asyncio.run(sandbox.execute("cat b")), end="")
sandbox.close()
"""


def test_a_new_provider_of_a_framework_is_one_module(tmp_path: Path) -> None:
    """Its sandbox is kept from one event loop to the next."""
    done = Copy(tmp_path, {}, integrations=PROVIDER_MODULE).run("-c", USE)
    assert (done.stdout, done.stderr) == ("a\n a\n", "")


NAMES = """
from cloche.core.changes import Change
from cloche.workspace.danger_table import BUILD
from cloche.workspace.dangers import dangers_of
for path, what in (("a/ExampleFile", "added"), ("examplefile", "removed")):
    assert dangers_of(Change(path=path, what=what, kind="file", mode=0o644)) == (BUILD,), path
"""


def test_a_new_dangerous_name_is_one_row(tmp_path: Path) -> None:
    """A file of that name needs its own confirmation, at any depth and in any case; `guards` includes its removal."""
    done = Copy(tmp_path, DANGER).run("-c", NAMES)
    assert done.stderr == ""


def test_a_new_agent_is_one_row(tmp_path: Path) -> None:
    """It is listed, and found on PATH."""
    copy = Copy(tmp_path, AGENT)
    program = tmp_path / "bin/example-agent"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    rows = json.loads(copy.cloche("agent", "list", "--json", PATH=f"{program.parent}:{os.environ['PATH']}"))
    assert {row["agent"]: row["installed"] for row in rows}["example"] == os.path.realpath(program)
