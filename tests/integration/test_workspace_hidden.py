"""What is hidden of real projects breaks nothing that is installed in them: Python's, npm's and Go's.

Each is looked at through an overlay whose middle layer is the mask, at the project's own path.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from importlib.metadata import distribution
from pathlib import Path

import pytest

from cloche.workspace.hidden import Hidden, Mask, find_hidden, mask_rows
from tests.harness.masked import run_masked

KEY = "-----BEGIN PRIVATE KEY-----\nMIIE\n-----END PRIVATE KEY-----\n"
# What a developer has in a project, and no guest may see.
SECRETS: Mapping[str, str] = {
    ".env.local": "TOKEN=secret",
    ".envrc": "export TOKEN=secret",
    ".npmrc": "//registry.example/:_authToken=npm_secret",
    "deploy/server.key": KEY,
    "deploy/id_ed25519": KEY,
    "sub/.aws/credentials": "secret",
}
# What looks like that, and a project needs.
NEEDED: Mapping[str, str] = {
    ".env.example": "TOKEN=",
    "deploy/ca.pem": "-----BEGIN CERTIFICATE-----\nMIIE\n",
    "deploy/id_ed25519.pub": "ssh-ed25519 AAAA",
    "sub/.npmrc": "save-exact=true",
}
# Names that rules such as `*.pem`, `id_*`, `*credentials*` and `.env*` would take, of files and folders.
LOOKS_LIKE_A_KEY = ("*.pem", "*.key", "id_*", "*credential*", "*secret*", "*token*", ".env*", ".*rc", "*.asc")
DISTRIBUTIONS = (
    "certifi", "opentelemetry-api", "opentelemetry-sdk", "opentelemetry-semantic-conventions", "python-dotenv",
    "typing-extensions",
)  # fmt: skip

pytestmark = [pytest.mark.timeout(300), pytest.mark.user_soak]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Return a project with secrets, and with what only looks like them."""
    folder = tmp_path / "project"
    _write(folder, {**SECRETS, **NEEDED})
    return folder


def _write(folder: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def _look(folder: Path) -> tuple[Hidden, Mask]:
    fd = os.open(folder, os.O_RDONLY)
    try:
        hidden = find_hidden(fd)
        return hidden, mask_rows(fd, hidden)
    finally:
        os.close(fd)


def _run(folder: Path, *command: str, **env: str) -> str:
    """Run a command in the masked view, and return what it wrote."""
    done = run_masked(os.fspath(folder), _look(folder)[1], list(command), **env)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _program(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"there is no {name}")
    return found


def _listed(folder: Path) -> set[str]:
    """Return all paths below a folder, as the masked view has them."""
    return set(_run(folder, "find", ".", "-mindepth", "1", "-printf", "%P\\0").split("\0")) - {""}


def _paths(folder: Path) -> set[str]:
    return {os.fspath(path.relative_to(folder)) for path in folder.rglob("*")}


def _is_at_or_below(path: str, hidden: Hidden) -> bool:
    return any(path == one or path.startswith(f"{one}/") for one in hidden.paths)


def _check_view(folder: Path) -> None:
    """Check that exactly the secrets are gone, and that folders above them look as on the host."""
    hidden, mask = _look(folder)
    assert {path for path in SECRETS if not _is_at_or_below(path, hidden)} == set()
    assert {path for path in hidden.paths if not _covers_a_secret(path)} == set()
    everything = _paths(folder)
    assert _listed(folder) == {path for path in everything if not _is_at_or_below(path, hidden)}
    for one in mask.folders:
        seen = _run(folder, "stat", "-c", "%a %.9Y", one.path or ".").split()
        assert seen == [f"{one.mode:o}", f"{one.mtime_ns // 10**9}.{one.mtime_ns % 10**9:09d}"], one.path


def _covers_a_secret(path: str) -> bool:
    return any(secret == path or secret.startswith(f"{path}/") for secret in SECRETS)


def test_a_python_project_with_its_environment_works(project: Path) -> None:
    """An environment that is called .env, with certificates and modules that look like keys, is used at its path."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", os.fspath(project / ".env")], check=True)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    _install(project / ".env/lib" / version / "site-packages")
    _check_view(project)
    program = (
        "import ssl, sys, certifi, dotenv, opentelemetry.sdk.trace.id_generator as ids\n"
        "ssl.create_default_context(cafile=certifi.where())\n"
        "print(sys.prefix, all(one.__file__.startswith(sys.prefix) for one in (certifi, dotenv, ids)))\n"
        "print(ids.RandomIdGenerator().generate_trace_id() > 0, dotenv.dotenv_values('.env.example')['TOKEN'] == '')"
    )
    out = _run(project, "env", "-u", "PYTHONPATH", os.fspath(project / ".env/bin/python"), "-c", program)
    assert out == f"{project}/.env True\nTrue True\n"


def _install(target: Path) -> None:
    """Copy installed distributions of this environment into another."""
    for name in DISTRIBUTIONS:
        for file in distribution(name).files or ():
            source, copy = Path(str(file.locate())), target / file
            if ".." not in file.parts and source.is_file() and source.suffix != ".pyc":
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(source, copy)


def test_an_npm_project_with_its_modules_works(project: Path) -> None:
    """Npm itself and the two hundred packages that it brings, as modules of a project."""
    node, npm = _program("node"), Path(_program("npm")).resolve()
    root = next((one for one in npm.parents if one.name == "npm" and (one / "package.json").exists()), None)
    if root is None:
        pytest.skip("npm is here without its own folder")
    shutil.copytree(root, project / "node_modules/npm", symlinks=True)
    _write(project, {"package.json": '{"name": "project", "version": "1.0.0", "dependencies": {"npm": "*"}}'})
    _check_view(project)
    program = (
        "const fs = require('fs'), inner = './node_modules/npm/node_modules/';"
        "for (const one of ['cacache', 'tar', 'semver', 'npm-registry-fetch', 'ssri']) require(inner + one);"
        "console.log(fs.existsSync('.npmrc'), fs.readFileSync('sub/.npmrc', 'utf8'))"
    )
    assert _run(project, node, "-e", program) == "false save-exact=true\n"
    listed = _run(
        project, node, "node_modules/npm/bin/npm-cli.js", "ls", "--offline", "--parseable",
        npm_config_cache=os.fspath(project.parent / "cache"), npm_config_update_notifier="false",
    )  # fmt: skip
    assert f"{project}/node_modules/npm\n" in listed


GO_FILES: Mapping[str, str] = {
    "go.mod": "module example.com/project\n\ngo 1.19\n\nrequire example.com/id v0.0.0\n",
    "vendor/modules.txt": "# example.com/id v0.0.0\n## explicit\nexample.com/id/token\n",
    "vendor/example.com/id/token/id_rsa.go": 'package token\n\nconst Name = "token"\n',
    "credentials/credentials.go": 'package credentials\n\nconst Name = "credentials"\n',
    "internal/env/env.go": 'package env\n\nconst Name = "env"\n',
    "main.go": """package main

import (
	_ "embed"
	"fmt"

	"example.com/id/token"
	"example.com/project/credentials"
	"example.com/project/internal/env"
)

//go:embed deploy/ca.pem
var ca string

func main() { fmt.Println(len(ca), token.Name, credentials.Name, env.Name) }
""",
}


def test_a_go_project_is_built(project: Path) -> None:
    """Packages called credentials, env and token, and vendored ones, are there for the compiler."""
    go = _program("go")
    _write(project, GO_FILES)
    _check_view(project)
    cache = os.fspath(project.parent / "cache")
    out = _run(project, go, "run", ".", GOCACHE=cache, GOPROXY="off", GOFLAGS="-mod=vendor", GOTOOLCHAIN="local")
    assert out == f"{len(NEEDED['deploy/ca.pem'])} token credentials env\n"


def test_nothing_of_this_environment_is_hidden() -> None:
    """Of all that is installed here, whatever name it has, nothing is hidden; plain rules would take some of it."""
    folder = Path(sysconfig.get_path("purelib"))
    if not (folder.parents[2] / "pyvenv.cfg").exists():
        pytest.skip("the tests run in no virtual environment")
    hidden, _ = _look(folder.parents[2])
    assert hidden.paths == ()
    assert hidden.scanned > 1_000
    taken = {path.name for pattern in LOOKS_LIKE_A_KEY for path in folder.rglob(pattern)}
    assert taken >= {"cacert.pem", "id_generator.py"}
