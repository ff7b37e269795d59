"""The toolchain of this host that runs a language, and the paths that the jail must show for it to work.

Theory of operation: engines are tried in the table's order; the first engine with all its programs installed is used.
System folders are searched first, then CLOCHE_TOOLCHAINS, then PATH, its entries below a home last. A program below
/usr works in every jail. Other programs that can print their own root are run to get it, so that shims of rustup, rbenv
and pyenv never enter a jail. Exactly that root is bound: never a home, a folder above one, or a mixed folder such as
~/.local. Python is not searched for: the toolchain is the caller's interpreter with the packages installed for it.
Projects installed in editable form stay outside, because their folders hold more than packages.
"""

from __future__ import annotations

import functools
import os
import re
import site
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType

from cloche.core.errors import BackendUnavailable, LanguageUnavailable
from cloche.core.languages import LANGUAGES, Engine, Language, language_named
from cloche.core.record import dataclass, field

SYSTEM_FOLDERS = ("/usr/bin", "/usr/local/bin", "/bin")
# Trees that every jail shows.
SHOWN_TREES = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
# Files of /etc that a program reads besides those of every jail; shown with it if they exist. Without its own, Mono
# finds none of its libraries.
SETTINGS: Mapping[str, tuple[str, ...]] = {"dotnet": ("/etc/dotnet",), "mono": ("/etc/mono",)}
FOLDERS_VARIABLE = "CLOCHE_TOOLCHAINS"
PROBE_TIMEOUT_S = 20.0
_PROBE_INHERITS = ("HOME", "RUSTUP_HOME", "CARGO_HOME")
_PROBE_ENV: Mapping[str, str] = {
    "PATH": os.pathsep.join(SYSTEM_FOLDERS),
    "LANG": "C.UTF-8",
    "DENO_NO_UPDATE_CHECK": "1",
    "DOTNET_NOLOGO": "1",
    "DOTNET_CLI_TELEMETRY_OPTOUT": "1",
}

# Arguments that make a program print its real path. The folder above `bin` in the answer is its root.
_ASK_PATH: Mapping[str, tuple[str, ...]] = {
    "node": ("-p", "process.execPath"),
    "python3": ("-c", "import sys; print(sys.executable)"),
    "ruby": ("-e", "print RbConfig.ruby"),
}
# Arguments that make a program print its root; the real program is `bin/NAME` below it.
_ASK_ROOT: Mapping[str, tuple[str, ...]] = {"go": ("env", "GOROOT"), "rustc": ("--print", "sysroot")}
_ASK_VERSION: Mapping[str, tuple[str, ...]] = {"go": ("version",)}
# Programs that need no other file: they can be shown alone if their folder is not their own root.
_ALONE = frozenset({"bash", "deno", "node", "sh"})
# Programs whose root is the folder they are in.
_ROOT_IS_FOLDER = frozenset({"dotnet"})
# Programs that only work from within the packages of a node_modules folder.
_PACKAGED = frozenset({"tsx"})
# One binary under many names: following the last link would lose the name.
_MULTICALL = frozenset({"busybox", "coreutils", "toybox"})
# Folders of a home that mix toolchains with private data; the home itself and all above it are refused
# anyway.
_GRAB_BAGS = (".cache", ".cargo", ".config", ".deno", ".local", ".ssh", "bin")
# Variables by which version managers find installed versions, by the name of the folder.
_ROOT_VARIABLES: Mapping[str, str] = {
    ".rustup": "RUSTUP_HOME", ".pyenv": "PYENV_ROOT", ".rbenv": "RBENV_ROOT", ".volta": "VOLTA_HOME",
}  # fmt: skip
# Variables of the interpreter itself take effect at its start only, so a run that sets one starts a new interpreter.
_HARMLESS = frozenset({"PYTHONDONTWRITEBYTECODE", "PYTHONUSERBASE"})
_INSTALLERS = re.compile(
    r"(pip|pipx|uv|uvx|conda|mamba|poetry|npm|npx|yarn|pnpm|corepack|gem|bundle|bundler|cargo|nuget"
    r"|apt|apt-get|aptitude|apk|dnf|microdnf|yum|zypper|pacman)[0-9.]*"
)
_INSTALLING_MODULES = ("pip", "uv", "ensurepip")
_PYTHON = re.compile(r"(python|pypy)[0-9.]*$")
_VERSION = re.compile(r"\d+(?:\.\d+)+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Toolchain:
    """Hold the programs that run a language here.

    `programs` maps the engine's program names to absolute paths. `binds` lists the paths that the jail must show
    read-only, at the same place, besides the system's own trees: folders, or single files for programs that need
    nothing else. `env` holds variables that this toolchain needs besides the engine's own.
    """

    engine: Engine
    programs: Mapping[str, str]
    binds: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)

    @property
    def version(self) -> str:
        """Return the first line of the main program's version output, read when first needed."""
        return engine_version(self)


# Not a language: the program that resolves packages for one.
NPM = Engine(name="npm", programs=("node", "npm"), commands=(), package="apt-get install npm")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """Hold a program's real path and the paths to show for it."""

    path: str
    binds: tuple[str, ...]


def find_toolchain(language: Language, *, search_path: Sequence[str] | None = None) -> Toolchain:
    """Return the toolchain that runs `language` on this host.

    `search_path` replaces the default search path, and then even Python is searched for. Raises BackendUnavailable
    naming the missing programs and the command that installs them.
    """
    if search_path is None and language.name == "python" and _runs_in_python():
        return _own_python(language.engines[0])
    folders = tuple(search_path) if search_path is not None else default_search_path()
    lacks = []
    for engine in language.engines:
        toolchain, lack = _try_engine(engine, folders)
        if toolchain is not None:
            return toolchain
        lacks.append(f"{lack} (`{engine.package}`)")
    raise LanguageUnavailable(
        f"{language.name} cannot run here; install what is missing: {'; or '.join(dict.fromkeys(lacks))}"
    )


def npm_toolchain() -> Toolchain:
    """Return npm with its Node. Raises BackendUnavailable naming the missing program and the command that installs
    it.
    """
    toolchain, lack = _try_engine(NPM, default_search_path())
    if toolchain is None:
        raise BackendUnavailable(f"{lack}.", remedy=f"Install it: {NPM.package}")
    return toolchain


def all_shown() -> tuple[str, ...]:
    """Return the paths shown for any language's programs, whether or not their version suffices."""
    return _outermost((*_own_python(LANGUAGES["python"].engines[0]).binds, *other_languages()[0]))


def other_languages() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the paths shown for the programs of all languages but Python, and the folders of these programs.

    Folders that are on every system's PATH are left out. The programs are run once per process to get their roots.
    """
    return _programs_in(default_search_path())


@lru_cache(maxsize=4)
def _programs_in(folders: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    binds: list[str] = []
    program_folders: list[str] = []
    for engine in (engine for name, language in LANGUAGES.items() if name != "python" for engine in language.engines):
        programs = [(name, _find_program(name, folders)) for name in engine.programs]
        for name, program in programs:
            if program is not None and all(program_path for _, program_path in programs):
                binds += program.binds
                if os.path.basename(program.path) == name:
                    program_folders.append(os.path.dirname(program.path))
    return _outermost(binds), tuple(folder for folder in dict.fromkeys(program_folders) if folder not in SYSTEM_FOLDERS)


def languages_here() -> tuple[str, ...]:
    """Return the languages that a toolchain of this host runs."""
    return tuple(name for name, language in LANGUAGES.items() if _has_toolchain(language))


def _has_toolchain(language: Language) -> bool:
    try:
        find_toolchain(language)
    except BackendUnavailable:
        return False
    return True


@lru_cache(maxsize=16)
def package_managers(shown: tuple[str, ...]) -> tuple[str, ...]:
    """Return the programs and modules that install packages and are visible in a jail that shows these paths."""
    tops = (*SHOWN_TREES, *shown)
    programs = [
        os.path.realpath(entry.path)
        for folder in (*SYSTEM_FOLDERS, *(f"{path}/bin" for path in shown), *map(os.path.dirname, shown))
        if _is_below(folder, tops) and os.path.isdir(folder)
        for entry in os.scandir(folder)
        if _INSTALLERS.fullmatch(entry.name)
    ]
    libraries = [
        entry.path
        for top in ("/usr", "/usr/local", *shown)
        if os.path.isdir(f"{top}/lib")
        for entry in os.scandir(f"{top}/lib")
        if entry.name.startswith("python3")
    ]
    module_folders = [
        *libraries,
        *(f"{library}/{kind}-packages" for library in libraries for kind in ("site", "dist")),
        *shown,
    ]
    modules = [os.path.realpath(f"{folder}/{name}") for folder in module_folders for name in _INSTALLING_MODULES]
    installers = [program for program in programs if os.path.basename(program) not in _MULTICALL] + list(
        filter(os.path.exists, modules)
    )
    return _outermost(path for path in installers if _is_below(path, tops))


def default_search_path(environ: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """Return the folders to search: system, CLOCHE_TOOLCHAINS, PATH outside homes, PATH below homes."""
    environ = os.environ if environ is None else environ
    return _search_path(environ.get(FOLDERS_VARIABLE, ""), environ.get("PATH", ""), os.environ.get("HOME"))


@lru_cache(maxsize=4)
def _search_path(own: str, usual: str, _home: str | None) -> tuple[str, ...]:
    """Return the folders of two search paths; cached, because every started command asks for them."""
    chosen, homes = _absolute(own), _homes()
    listed = [*chosen, *_absolute(usual)]
    at_home = [p for p in listed if p not in chosen and _is_below(os.path.realpath(p), homes)]
    elsewhere = [p for p in listed if p not in at_home]
    return tuple(dict.fromkeys((*SYSTEM_FOLDERS, *elsewhere, *at_home)))


def engine_version(toolchain: Toolchain) -> str:
    """Return the first line of the main program's version output, or its file name if it prints none, as dash does.

    The answer is cached by path and modification time.
    """
    name = toolchain.engine.programs[0]
    path = toolchain.programs[name]
    return _program_version(name, path) or os.path.basename(os.path.realpath(path))


def _try_engine(engine: Engine, folders: tuple[str, ...]) -> tuple[Toolchain | None, str]:
    found_programs: dict[str, _Found] = {}
    for name in engine.programs:
        program = _find_program(name, folders)
        if program is None:
            return None, f"{name} is missing"
        found_programs[name] = program
    main = engine.programs[0]
    if engine.least_version:
        version = _program_version(main, found_programs[main].path)
        if version_numbers(version) < engine.least_version:
            least_version = ".".join(map(str, engine.least_version))
            return None, f"{main} is {version or 'of unknown version'}, older than {least_version}"
    programs = MappingProxyType({name: program.path for name, program in found_programs.items()})
    binds = _outermost([*(bind for program in found_programs.values() for bind in program.binds), *_settings(engine)])
    return Toolchain(engine=engine, programs=programs, binds=binds), ""


def _settings(engine: Engine) -> list[str]:
    return [path for name in engine.programs for path in SETTINGS.get(name, ()) if os.path.exists(path)]


def _find_program(name: str, folders: Iterable[str]) -> _Found | None:
    for folder in folders:
        path = os.path.join(folder, name)
        if os.path.isfile(path) and os.access(path, os.X_OK):
            resolved = _resolve(name, path)
            if resolved is not None:
                return resolved
    return None


def _resolve(name: str, path: str) -> _Found | None:
    """Follow `path` to the real program; None if it could only be shown along with private files."""
    real = _follow(name, path)
    if _is_shown(real):
        return _Found(path=real, binds=())
    folder = _node_modules(real)
    if folder:
        return _Found(path=real, binds=(real,) if name in _ALONE else (folder,))
    if name in _PACKAGED:
        return None
    if name in _ASK_PATH or name in _ASK_ROOT:
        # Run by the path at which it was found: some shims choose the program by argv[0].
        real = _own_path(name, path)
    return _with_root(name, real) if real else None


def _with_root(name: str, real: str) -> _Found | None:
    """Return the paths to show for a program outside the system's trees."""
    if _is_shown(real):
        return _Found(path=real, binds=())
    root = os.path.dirname(real)
    if os.path.basename(root) == "bin" and name not in _ROOT_IS_FOLDER:
        root = os.path.dirname(root)
    if not _is_private(root):
        return _Found(path=real, binds=(root,))
    return _Found(path=real, binds=(real,)) if name in _ALONE else None


def _follow(name: str, path: str) -> str:
    real = os.path.realpath(path)
    if os.path.basename(real) in _MULTICALL:
        return path
    if name == "deno" and real.endswith((".cjs", ".js")):
        # npm's package starts the real program, which is in a separate package beside it.
        native = f"@deno/linux-{'arm64' if os.uname().machine == 'aarch64' else 'x64'}-glibc/deno"
        beside = os.path.join(_node_modules(real), native)
        return beside if os.access(beside, os.X_OK) else real
    return real


def _own_path(name: str, path: str) -> str:
    """Ask a program outside the system's trees for its real path; empty if it does not tell."""
    answer = _ask(path, _ASK_PATH.get(name) or _ASK_ROOT[name], _age(path))
    if not os.path.isabs(answer):
        return ""
    real = os.path.realpath(answer if name in _ASK_PATH else os.path.join(answer, "bin", name))
    return real if os.access(real, os.X_OK) else ""


def _node_modules(path: str) -> str:
    """Return the outermost node_modules folder above `path`, in which a package finds its dependencies."""
    above, middle, _ = path.partition("/node_modules/")
    return f"{above}/node_modules" if middle else ""


def _program_version(name: str, path: str) -> str:
    return _ask(path, _ASK_VERSION.get(name, ("--version",)), _age(path))


def find_version(line: str) -> str:
    """Return the version number in a program's version output; empty if there is none."""
    match = _VERSION.search(line)
    return match[0] if match else ""


def version_numbers(line: str) -> tuple[int, ...]:
    """Return the version number in a program's version output, as a tuple."""
    return tuple(int(number) for number in find_version(line).split(".") if number)


def _age(path: str) -> int:
    try:
        return os.stat(path).st_mtime_ns
    except OSError:
        return 0


@lru_cache(maxsize=64)
def _ask(path: str, arguments: tuple[str, ...], age: int) -> str:  # noqa: ARG001 - part of the cache's key
    """Return the first line that a program of this host prints; empty when it fails.

    It runs in / and with a minimal environment, so that no file of the working directory chooses a version.
    """
    env = {name: os.environ[name] for name in _PROBE_INHERITS if name in os.environ}
    try:
        answer = subprocess.run(
            [path, *arguments],
            capture_output=True,
            cwd="/",
            env={**env, **_PROBE_ENV},
            stdin=subprocess.DEVNULL,
            timeout=PROBE_TIMEOUT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return (answer.stdout.decode("utf-8", "replace").strip().splitlines() or [""])[0].strip()


def _runs_in_python() -> bool:
    """Tell whether `sys.executable` is a Python interpreter, not a program that embeds one."""
    return _PYTHON.match(os.path.basename(sys.executable or "")) is not None


def _own_python(engine: Engine) -> Toolchain:
    """Describe the interpreter of this process, with the packages of its environment."""
    is_environment = sys.prefix != sys.base_prefix
    # Python finds a virtual environment by the path of its link to the interpreter (PEP 405): do not resolve that link.
    path = os.path.abspath(sys.executable) if is_environment else os.path.realpath(sys.executable)
    binds: list[str] = []
    for root in _python_roots(path):
        binds += _python_parts(path) if _is_private(root) else [root]
    env = {}
    user_packages = site.getusersitepackages()
    if site.ENABLE_USER_SITE and os.path.isdir(user_packages):
        binds.append(user_packages)
        env["PYTHONUSERBASE"] = site.getuserbase()
    return Toolchain(
        engine=engine,
        programs=MappingProxyType({engine.programs[0]: path}),
        binds=_outermost(bind for bind in binds if not _is_shown(bind)),
        env=MappingProxyType(env),
    )


def _python_roots(path: str) -> list[str]:
    """Return the roots of the environment and of its interpreter, one for each link on the way to it."""
    roots = [sys.prefix, sys.base_prefix, sys.base_exec_prefix, os.path.realpath(sys.base_prefix)]
    while os.path.islink(path):
        path = os.path.normpath(os.path.join(os.path.dirname(path), os.readlink(path)))
        roots.append(os.path.dirname(os.path.dirname(path)))
    return roots


def _python_parts(path: str) -> list[str]:
    import sysconfig

    paths = sysconfig.get_paths()
    folders = [paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    folders += [path, os.path.realpath(path), f"{sys.prefix}/pyvenv.cfg"]
    return [folder for folder in folders if os.path.exists(folder)]


def _is_shown(path: str) -> bool:
    return _is_below(path, SHOWN_TREES)


def _is_below(path: str, tops: Iterable[str]) -> bool:
    return any(path == top or path.startswith(top + "/") for top in tops)


def _is_private(root: str) -> bool:
    """Tell whether a folder may hold other files than a toolchain: a home, a mixed folder, a parent of one, or a
    top folder.
    """
    if root.count("/") < 2:
        return True
    homes = _homes()
    bags = [f"{home}/{bag}" for home in homes for bag in _GRAB_BAGS]
    return root in bags or any(_is_below(home, (root,)) for home in homes)


def _homes() -> tuple[str, ...]:
    import pwd

    homes = [os.path.expanduser("~")]
    try:
        homes.append(pwd.getpwuid(os.getuid()).pw_dir)
    except KeyError:
        pass  # a container may run this process under an id without an account
    return tuple(dict.fromkeys(os.path.realpath(home) for home in homes if os.path.isabs(home) and home != "/"))


def _absolute(path_list: str) -> list[str]:
    """Split a search path and drop relative entries, which depend on the working directory."""
    return [os.path.normpath(entry) for entry in path_list.split(os.pathsep) if os.path.isabs(entry)]


def _outermost(paths: Iterable[str]) -> tuple[str, ...]:
    outermost: list[str] = []
    for path in sorted(set(paths)):
        if not _is_below(path, outermost):
            outermost.append(path)
    return tuple(outermost)


def root_variables(prefixes: Iterable[str]) -> dict[str, str]:
    """Return the variables that tell version managers where these folders hold installed versions."""
    return {_ROOT_VARIABLES[name]: path for path in prefixes if (name := os.path.basename(path)) in _ROOT_VARIABLES}


def suggested_prefixes(path: str) -> tuple[str, ...]:
    """Return the folders to show for a program: its own, its interpreter's, and those of its links' targets."""
    paths = [path]
    for shown_path in paths:  # grows while it is iterated, up to 16
        if len(paths) < 16:
            paths += [
                further for further in (*_link_of(shown_path), *_interpreter_of(shown_path)) if further not in paths
            ]
    if os.path.basename(os.path.realpath(path)) == "rustup":
        paths.append(os.path.join(os.environ.get("RUSTUP_HOME") or os.path.expanduser("~/.rustup"), "bin", "rustc"))
    return _outermost(_prefix_of(path) for path in paths if not _is_shown(path))


def _link_of(path: str) -> list[str]:
    if not os.path.islink(path):
        return []
    return [os.path.normpath(os.path.join(os.path.dirname(path), os.readlink(path)))]


def _interpreter_of(path: str) -> list[str]:
    try:
        with open(path, "rb") as file:
            line = file.readline(256)
    except OSError:
        return []
    arguments = os.fsdecode(line[2:]).split() if line.startswith(b"#!") else []
    return arguments[:1]


def _prefix_of(path: str) -> str:
    """Return the folder to show for a program: its hidden folder in a home, or the folder above its `bin`."""
    for home in _homes():
        top = path.removeprefix(f"{home}/").partition("/")[0]
        if _is_below(path, (home,)) and top.startswith(".") and top not in (".local", ".config", ".cache"):
            return f"{home}/{top}"
    folder = os.path.dirname(path)
    above = os.path.dirname(folder)
    return above if os.path.basename(folder) == "bin" and not _is_private(above) else folder


@functools.cache
def has_customization() -> bool:
    """Tell whether this environment has a `sitecustomize` or `usercustomize`, which every interpreter runs at its
    start.
    """
    from importlib.util import find_spec

    return any(find_spec(name) is not None for name in ("sitecustomize", "usercustomize"))


def sets_interpreter_variables(env: Mapping[str, str]) -> bool:
    """Tell whether `env` has a variable that Python reads only at the interpreter's start."""
    return bool(env) and any(name.startswith("PYTHON") and name not in _HARMLESS for name in env)


@functools.cache
def user_site() -> tuple[str, ...]:
    """Return the user's own site-packages when the caller's interpreter uses it."""
    folder = site.getusersitepackages() if site.ENABLE_USER_SITE else ""
    return (folder,) if folder and folder in sys.path and os.path.isdir(folder) else ()


@functools.cache
def python_toolchain() -> Toolchain:
    """Return the caller's own interpreter."""
    return find_toolchain(language_named("python"))
