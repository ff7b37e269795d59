"""The environment of programs in a live sandbox: toolchains, and a virtual environment for pip and uv.

The caller's environment is shown read-only, and pip refuses `--user` in a virtual environment. So `python3`, `pip` and
`uv` inside use the sandbox's own environment. It finds all packages of the caller's, and those that pip installs for
the user.
"""

from __future__ import annotations

import fcntl
import functools
import os
import site
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from cloche import interpreter
from cloche.core.errors import InternalError, StartFailed
from cloche.core.policy import Policy

from .. import layout
from ..live import ACCOUNT_VARIABLES, for_other_user
from ..toolchain import other_languages, python_toolchain, user_site

WHY_FOLDER = f"{layout.STARTUP_FOLDER}/bin"  # of cloche-why and sudo
SUDO_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"  # as in `interpreter/sudo.py`
FOLDER = "/.venv"  # uv finds it from every folder inside
# `site` treats every value but "true" as no; pip refuses `--user` only if this line matches "false" exactly.
_CONFIGURATION = "home = {home}\ninclude-system-site-packages = no\nversion = {version}\n"
_PIP = """#!{folder}/bin/python3
import os
import sys

ADVICE = "name packages when the sandbox is opened (--packages NAME, packages=[NAME]), or add them with its install"
try:
    from pip._internal.cli.main import main
except ImportError:
    sys.exit(f"pip is not installed here; {{ADVICE}}")
code = main()
if code and "install" in sys.argv[1:2] and os.environ.get("PIP_RETRIES") == "0":
    print(f"pip: this sandbox has no network; {{ADVICE}}", file=sys.stderr)
sys.exit(code)
"""


def has_environment(policy: Policy) -> bool:
    """Tell whether a policy gives a sandbox its environment: it needs package managers, a user, and a free path."""
    shown = python_toolchain().binds
    is_free = not any(layout.is_below(path, FOLDER) for path in shown)
    return bool(policy.package_managers) and policy.user != "nobody" and is_free and os.name == "posix"


@functools.cache
def folders() -> tuple[str, ...]:
    """Return the folders that an installation writes to, relative to the root."""
    return (FOLDER[1:], f"{FOLDER[1:]}/bin", _site(FOLDER)[1:])


def sites(home: str) -> list[str]:
    """Return the folders from which Python imports packages installed inside, system-wide and for the user."""
    return [_site(FOLDER), _site(f"{home}/.local")]


@functools.cache
def rows(home: str) -> tuple[layout.Row, ...]:
    """Return the mounts that create the environment."""
    base = getattr(sys, "_base_executable", "") or os.path.realpath(sys.executable)
    version = ".".join(map(str, sys.version_info[:3]))
    names = ("python3", "python", f"python{version.rpartition('.')[0]}")
    below = FOLDER[1:]
    return (
        ("text", f"{below}/pyvenv.cfg", _CONFIGURATION.format(home=os.path.dirname(base), version=version)),
        *(("symlink", base, f"{below}/bin/{name}") for name in names),
        *(("text", f"{below}/bin/{name}", _PIP.format(folder=FOLDER), 0o755) for name in ("pip", "pip3")),
        ("text", f"{_site(FOLDER)[1:]}/cloche.pth", _paths(home)),
    )


def why_rows(why: str) -> tuple[layout.Row, ...]:
    """Return the mounts of `cloche-why` and of what it knows; none where it knows nothing."""
    if not why:
        return ()
    return _program("cloche-why", "why.py"), ("text", f"{layout.STARTUP_FOLDER[1:]}/why.json", why)


def sudo_rows(policy: Policy, variables: Mapping[str, str]) -> tuple[layout.Row, ...]:
    """Return the mount of `sudo` for a sandbox with several users, whose environment are `variables`."""
    if not policy.users:
        return ()
    path = for_other_user(variables)["PATH"]
    kept = tuple(name for name in variables if name not in ("PATH", *ACCOUNT_VARIABLES))
    settings = {"KEPT: tuple[str, ...] = ()": f"KEPT = {kept!r}", f'SEARCHED = "{SUDO_PATH}"': f"SEARCHED = {path!r}"}
    return (_program("sudo", "sudo.py", settings),)


def _program(name: str, file_name: str, settings: Mapping[str, str] | None = None) -> layout.Row:
    """Return the mount of a program of ours, which runs with the caller's Python."""
    base = getattr(sys, "_base_executable", "") or os.path.realpath(sys.executable)
    with open(f"{os.path.dirname(interpreter.__file__)}/{file_name}", encoding="utf-8") as file:
        text = file.read()
    for line, setting in (settings or {}).items():
        if line not in text:
            raise InternalError(f"{file_name} has no line {line!r}")
        text = text.replace(line, setting)
    return ("text", f"{WHY_FOLDER[1:]}/{name}", f"#!{base} -IS\n{text}", 0o755)


def show(python: dict[str, Any] | None, home: str, is_there: bool) -> None:
    """Let a Python program import packages installed inside, and start interpreters that do so too."""
    if python is not None and is_there:
        python["layers"] = [*sites(home), *python.get("layers", ())]
        python["executable"] = f"{FOLDER}/bin/python3"


def with_own_first(env: Mapping[str, str], home: str, is_there: bool) -> dict[str, str]:
    """Put packages installed inside before the layers, in the variable that started interpreters read."""
    layers = env.get(layout.LAYERS_VARIABLE)
    is_needed = is_there and layers is not None and not layers.startswith(_site(FOLDER))
    return {**env, layout.LAYERS_VARIABLE: os.pathsep.join((*sites(home), layers or ""))} if is_needed else dict(env)


def search_path(home: str, path: str, is_there: bool, why: str = "", *, has_sudo: bool = False) -> str:
    """Return PATH: programs installed inside first, toolchains of all languages last, but for `cloche-why`.

    The host's own `sudo`, which can do nothing here, comes after ours.
    """
    own = [*([WHY_FOLDER] if has_sudo else []), f"{home}/.local/bin", *([f"{FOLDER}/bin"] if is_there else [])]
    return os.pathsep.join((*own, path, *other_languages()[1], *([WHY_FOLDER] if why else [])))


def shown(policy: Policy) -> tuple[str, ...]:
    """Return the paths of all languages' toolchains to show, without those inside a view of a host folder."""
    folder, python = policy.host_folder, python_toolchain().binds
    views = [view.path for view in (folder, *folder.read_only)] if folder is not None else []
    other_paths = [
        path
        for path in other_languages()[0]
        if not any(layout.is_below(path, shown_path) for shown_path in (*views, *python))
    ]
    return (*python, *other_paths)


def mode_of(name: str, mode: int, shown: Sequence[str]) -> int:
    """Return the permission bits of a folder, searchable if a shown toolchain lies below it."""
    is_above = any(layout.is_below(path, f"/{name}") for path in shown)
    return mode | 0o011 if is_above else mode


def _paths(home: str) -> str:
    """Return the .pth lines that make the caller's packages importable, and a bundled pip if the caller has none."""
    ours = [path for path in (*site.getsitepackages(), *user_site()) if os.path.isdir(path)]
    lines = [_site(f"{home}/.local"), *(f"import site; site.addsitedir({path!r})" for path in ours)]
    if not any(os.path.isdir(f"{path}/pip") for path in ours):
        bundled = f"{sysconfig.get_path('stdlib')}/ensurepip/_bundled"
        lines += [
            entry.path
            for folder in (bundled, "/usr/share/python-wheels")
            if os.path.isdir(folder)
            for entry in os.scandir(folder)
            if entry.name.startswith("pip-") and entry.name.endswith(".whl")
        ]
    return "\n".join((*lines, ""))


def _site(base: str) -> str:
    scheme = "venv" if "venv" in sysconfig.get_scheme_names() else "posix_prefix"
    return sysconfig.get_path("purelib", scheme, {"base": base, "platbase": base})


@contextmanager
def hold_layers(layers: Sequence[str]) -> Iterator[dict[str, int]]:
    """Hold the locks that protect package layers from removal; yield their descriptors by name, to be passed on."""
    held: dict[str, int] = {}
    try:
        for number, layer in enumerate(layers):
            held[f"layer{number}"] = fd = os.open(layer, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        yield held
    except OSError as error:
        raise StartFailed(f"packages: a layer is gone: {error}; open the sandbox again", step="packages") from error
    finally:
        for fd in held.values():
            os.close(fd)
