"""The languages Cloche runs: one literal table for all backends (R5).

A language is run by an *engine*. The engines of a language are listed in order of preference; a backend takes the
first one whose programs it has, and names every engine but the first in the result's `meta`. An engine's commands run
one after the other, inside the sandbox and under one set of limits: all but the last compile, the first that fails ends
the run, and the program's own arguments follow the last. The texts below have three kinds of placeholder: `{source}` is
the code's file, `{build}` a fresh private folder whose programs may be started, and a program's name stands for its
path.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping
from types import MappingProxyType

from .errors import InvalidRequest
from .limits import MIB, Limits, format_size
from .record import dataclass, field, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """Say how one toolchain runs a language.

    `programs` must all exist. `generated` holds files to write into `{build}` first. `package` is the command that
    installs the toolchain, `least_version` the oldest version that works (of the first program). `advised` names limits
    with the amount this engine needs for more than small programs: a hint for messages, never applied. `stand_in` says
    how the engine differs from the language that its name promises. `with_modules` maps words of its commands to
    replacements for sandboxes that have npm packages.
    """

    name: str
    programs: tuple[str, ...]
    commands: tuple[tuple[str, ...], ...]
    env: Mapping[str, str] = field(default_factory=dict)
    generated: Mapping[str, str] = field(default_factory=dict)
    package: str
    least_version: tuple[int, ...] = ()
    advised: Mapping[str, int] = field(default_factory=dict)
    stand_in: str = ""
    with_modules: Mapping[str, str] = field(default_factory=dict)

    def for_modules(self) -> Engine:
        """Return the engine as it runs programs where there are packages of npm's."""
        replacements = self.with_modules
        commands = tuple(
            tuple(replacements.get(argument, argument) for argument in command) for command in self.commands
        )
        return replace(self, commands=commands) if replacements else self


@dataclass(frozen=True, slots=True, kw_only=True)
class Language:
    """Name a language, the file its code is written to in /workspace, its container image and its engines.

    `file_name` is one that no user has: relative imports are looked for beside it, among the user's own files.
    `image_engine` names the engine that the default image holds.
    """

    name: str
    aliases: tuple[str, ...]
    suffixes: tuple[str, ...]
    file_name: str
    image: str
    engines: tuple[Engine, ...]
    image_engine: str


def _commands(*lines: str) -> tuple[tuple[str, ...], ...]:
    """Split command lines into words; placeholders are filled later, so a path with spaces stays one word."""
    return tuple(tuple(line.split()) for line in lines)


_NODE_PACKAGE = "apt-get install nodejs"

_DENO = Engine(
    name="deno",
    programs=("deno",),
    # Everything is allowed because the sandbox is the wall, so nothing ever prompts; nothing is ever fetched.
    commands=_commands(
        "{deno} run --quiet --allow-all --no-prompt --no-remote --no-npm --cached-only"
        " --no-config --no-lock --no-check {source}",
    ),
    env={"DENO_DIR": "{build}/deno", "DENO_NO_UPDATE_CHECK": "1"},
    package="npm install --global deno",
    # Else a bare name is an error, whatever folder lies above; it keeps to that folder, and fetches nothing.
    with_modules={"--no-npm": "--node-modules-dir=manual"},
)

_TSX = Engine(
    name="tsx",
    programs=("node", "tsx"),
    commands=_commands("{node} {tsx} {source}"),
    env={"TSX_DISABLE_CACHE": "1"},
    package="npm install --global tsx",
    stand_in="tsx compiles to CommonJS: no await outside of functions",
)

_NODE_TYPES = Engine(
    name="node",
    programs=("node",),
    commands=_commands("{node} --disable-warning=ExperimentalWarning {source}"),
    package=_NODE_PACKAGE,
    least_version=(22, 18),
    stand_in="node only strips types: no enums, no namespaces",
)


def _go(name: str, *, flags: str = "", least_version: tuple[int, ...] = ()) -> Engine:
    """Describe one generation of Go.

    Packages are compiled one at a time on two threads: on a host with many CPUs the compiler would exceed the limits on
    memory and pids. That and the compiler's own notes (telemetry goes to the configuration folder) are set for the
    compiler alone: the program may use all its CPUs. No modules: one file, and nothing can be fetched. CGO_ENABLED
    stays unset, because Go chooses better by itself.
    """
    return Engine(
        name=name,
        programs=("go", "env"),
        commands=_commands(
            "{env} GOMAXPROCS=2 XDG_CONFIG_HOME={build}/config"
            f" {{go}} build -p=1 {flags} -o {{build}}/program {{source}}",
            "{build}/program",
        ),
        env={
            "GOCACHE": "{build}/go-cache",
            "GOTMPDIR": "{build}",
            "GOPATH": "{build}/go-path",
            "GOENV": "off",
            "GO111MODULE": "off",
            "GOTOOLCHAIN": "local",
            "GOPROXY": "off",
            "GOFLAGS": "",
        },
        package="apt-get install golang-go",
        least_version=least_version,
        advised={"tmp_bytes": 256 * MIB, "memory_bytes": 512 * MIB, "timeout_s": 90},
    )


# Go 1.20 and later compile their library anew in every fresh sandbox. Without debugging tables it fits the default
# limits for programs on fmt, os and the like (15 to 20 s at half a CPU, 50 of 64 MiB in /tmp), not for net/http.
_GO = _go("go", flags="-gcflags=all=-dwarf=false", least_version=(1, 20))
# Older ones bring their library compiled (0.3 s), but only for the flags they were built with.
_OLD_GO = _go("old-go")

_RUST = Engine(
    name="rustc",
    programs=("rustc", "cc"),
    commands=_commands(
        "{rustc} --crate-name=main --edition=2021 -Copt-level=1 -Ccodegen-units=1 -Cdebuginfo=0 -Clinker={cc}"
        " -o {build}/program {source}",
        "{build}/program",
    ),
    package="apt-get install rustc",
)

_PROJECT = """\
<Project Sdk="Microsoft.NET.Sdk">
  <PropertyGroup>
    <OutputType>Exe</OutputType>
    <TargetFramework>net$(BundledNETCoreAppTargetFrameworkVersion)</TargetFramework>
    <AssemblyName>program</AssemblyName>
    <RootNamespace>Program</RootNamespace>
    <LangVersion>latest</LangVersion>
    <ImplicitUsings>enable</ImplicitUsings>
    <EnableDefaultItems>false</EnableDefaultItems>
    <UseAppHost>false</UseAppHost>
    <UseSharedCompilation>false</UseSharedCompilation>
    <InvariantGlobalization>true</InvariantGlobalization>
    <NuGetAudit>false</NuGetAudit>
  </PropertyGroup>
  <ItemGroup>
    <Compile Include="{source}" />
  </ItemGroup>
</Project>
"""

_OFFLINE_NUGET = """\
<?xml version="1.0" encoding="utf-8"?>
<configuration>
  <packageSources>
    <clear />
  </packageSources>
  <fallbackPackageFolders>
    <clear />
  </fallbackPackageFolders>
  <config>
    <add key="globalPackagesFolder" value="{build}/packages" />
  </config>
</configuration>
"""

_DOTNET = Engine(
    name="dotnet",
    programs=("dotnet",),
    # Two steps, so that the compiler's words and the program's output are told apart.
    commands=_commands(
        "{dotnet} build {build}/program.csproj --nologo --verbosity quiet -maxcpucount:1 -nodeReuse:false",
        "{dotnet} run --no-build --no-launch-profile --project {build}/program.csproj --",
    ),
    env={
        "DOTNET_CLI_HOME": "{build}/home",
        "DOTNET_CLI_TELEMETRY_OPTOUT": "1",
        "DOTNET_CLI_UI_LANGUAGE": "en",
        "DOTNET_CLI_USE_MSBUILD_SERVER": "0",
        "DOTNET_CLI_WORKLOAD_UPDATE_NOTIFY_DISABLE": "1",
        "DOTNET_EnableDiagnostics": "0",
        "DOTNET_NOLOGO": "1",
        "MSBUILDDISABLENODEREUSE": "1",
        "NUGET_PACKAGES": "{build}/packages",
    },
    generated={"program.csproj": _PROJECT, "NuGet.config": _OFFLINE_NUGET},
    package="apt-get install dotnet-sdk-10.0",
    least_version=(6,),
    advised={"memory_bytes": 512 * MIB, "tmp_bytes": 256 * MIB, "pids": 128, "timeout_s": 90},
)

_MONO = Engine(
    name="mono",
    programs=("mono", "mcs"),
    commands=_commands("{mcs} -nologo -out:{build}/program.exe {source}", "{mono} {build}/program.exe"),
    package="apt-get install mono-mcs mono-runtime",
    stand_in="Mono stands in for .NET: C# 7, no top-level statements",
)


def _interpreter(name: str, *, package: str, stand_in: str = "") -> Engine:
    """Describe an engine that runs the source as it is."""
    commands = _commands(f"{{{name}}} {{source}}")
    return Engine(name=name, programs=(name,), commands=commands, package=package, stand_in=stand_in)


# What is printed to the run's own output is written at once, as other languages do it, and is not lost at a kill: see
# `interpreter/sitecustomize.py`.
_WRITE_AT_ONCE = """\
about = $stdout.stat
$stdout.sync = true if ENV["CLOCHE_OUTPUT"].to_s.split.include?([about.dev, about.ino].join(":"))
"""
_RUBY = replace(
    _interpreter("ruby", package="apt-get install ruby"),
    env={"RUBYOPT": "-r{build}/output.rb"},
    generated={"output.rb": _WRITE_AT_ONCE},
)

LANGUAGES: Mapping[str, Language] = {
    language.name: language
    for language in (
        Language(
            name="python",
            aliases=("py", "python3"),
            suffixes=(".py", ".pyw"),
            file_name="cloche-main.py",  # pytest, called with `__file__`, imports no file whose name begins with a dot
            image="python:3.12-alpine",
            engines=(_interpreter("python3", package="apt-get install python3"),),
            image_engine="python3",
        ),
        Language(
            name="javascript",
            aliases=("js", "node", "nodejs"),
            suffixes=(".js", ".mjs", ".cjs"),
            file_name=".cloche-main.js",
            image="node:22-alpine",
            engines=(_interpreter("node", package=_NODE_PACKAGE),),
            image_engine="node",
        ),
        Language(
            name="typescript",
            aliases=("ts", "deno", "tsx", "ts-node"),
            suffixes=(".ts", ".mts", ".cts"),
            file_name=".cloche-main.ts",
            image="denoland/deno:alpine",
            engines=(_DENO, _TSX, _NODE_TYPES),
            image_engine="deno",
        ),
        Language(
            name="bash",
            aliases=("sh", "shell", "dash"),
            suffixes=(".sh", ".bash"),
            file_name=".cloche-main.sh",
            image="alpine:3.20",
            engines=(
                _interpreter("bash", package="apt-get install bash"),
                _interpreter("sh", package="apt-get install dash", stand_in="sh stands in for Bash"),
            ),
            image_engine="sh",
        ),
        Language(
            name="ruby",
            aliases=("rb",),
            suffixes=(".rb",),
            file_name=".cloche-main.rb",
            image="ruby:3.3-alpine",
            engines=(_RUBY,),
            image_engine="ruby",
        ),
        Language(
            name="go",
            aliases=("golang",),
            suffixes=(".go",),
            file_name="cloche-main.go",  # the compiler takes no file whose name begins with a dot
            image="golang:1.22-alpine",
            engines=(_GO, _OLD_GO),
            image_engine="go",
        ),
        Language(
            name="rust",
            aliases=("rs", "rustc"),
            suffixes=(".rs",),
            file_name=".cloche-main.rs",
            image="rust:1.78-alpine",
            engines=(_RUST,),
            image_engine="rustc",
        ),
        Language(
            name="csharp",
            aliases=("c#", "cs", "dotnet"),
            suffixes=(".cs",),
            file_name=".cloche-main.cs",
            image="dotnet/sdk:10.0-alpine",
            engines=(_DOTNET, _MONO),
            image_engine="dotnet",
        ),
    )
}

# Languages that have sessions and no runs.
SESSION_LANGUAGES: Mapping[str, Language] = {
    "r": Language(
        name="r",
        aliases=(),
        suffixes=(),
        file_name=".cloche-main.R",
        image="",
        engines=(
            Engine(name="r", programs=("Rscript", "bash"), commands=(), package="apt-get install r-base-core"),
        ),
        image_engine="r",
    ),
    "java": Language(
        name="java",
        aliases=(),
        suffixes=(),
        file_name=".cloche-main.java",
        image="",
        engines=(
            Engine(
                name="java", programs=("java", "jshell", "bash"), commands=(),
                package="apt-get install default-jdk-headless",
            ),
        ),
        image_engine="java",
    ),
}  # fmt: skip

# Where programs lie in /workspace: no listing shows them, and no user's file may have such a name.
PROGRAM_FILES = frozenset(language.file_name for language in LANGUAGES.values())
_BY_NAME: Mapping[str, Language] = {
    alias: language for language in LANGUAGES.values() for alias in (language.name, *language.aliases)
}
_BY_SUFFIX: Mapping[str, Language] = {
    suffix: language for language in LANGUAGES.values() for suffix in language.suffixes
}
_VERSION_TAIL = re.compile(r"[0-9.]+$")
_NUMBER = re.compile(r"-[0-9]+(?=\.[^.]+$)")


def is_program_file(path: str) -> bool:
    """Tell whether a path is where a program lies, also one of several that run in the same workspace."""
    return path in PROGRAM_FILES or _NUMBER.sub("", path) in PROGRAM_FILES


def language_named(name: str) -> Language:
    """Return the language of that name or alias (any case), or raise InvalidRequest naming the known ones."""
    try:
        return _BY_NAME[name.strip().lower()]
    except KeyError:
        raise InvalidRequest(f"unknown language {name!r}; known languages: {', '.join(LANGUAGES)}") from None


def session_language_named(name: str) -> Language:
    """Return the language of a session, also one without runs. Raises InvalidRequest."""
    return SESSION_LANGUAGES.get(name.strip().lower()) or language_named(name)


def detect_language(file_name: str, first_line: bytes | str = b"") -> Language:
    """Return the language of a file by its suffix, else by its first line (`#!`), or raise InvalidRequest."""
    suffix = posixpath.splitext(file_name)[1].lower()
    language = _BY_SUFFIX.get(suffix) or _BY_NAME.get(_shebang_program(first_line))
    if language is None:
        known_names = ", ".join(LANGUAGES)
        raise InvalidRequest(f"cannot tell the language of {file_name!r}; name one with --language: {known_names}")
    return language


def _shebang_program(first_line: bytes | str) -> str:
    """Return the interpreter's bare name (`python` for `#!/usr/bin/env -S python3.11 -u`), or nothing."""
    line = first_line.decode("utf-8", "replace") if isinstance(first_line, bytes) else first_line
    if not line.startswith("#!"):
        return ""
    arguments = (line[2:].splitlines() or [""])[0].split()
    if arguments and posixpath.basename(arguments[0]) == "env":
        arguments = [argument for argument in arguments[1:] if not argument.startswith("-") and "=" not in argument]
    return _VERSION_TAIL.sub("", posixpath.basename(arguments[0]).lower()) if arguments else ""


def render(
    engine: Engine, programs: Mapping[str, str], source: str, build: str, argv: tuple[str, ...] = ()
) -> tuple[tuple[str, ...], ...]:
    """Return the commands to run one after the other; `argv` follows the last one.

    `programs` maps program names to paths; one that is missing is called by its bare name, as images want it.
    """
    values = _placeholders(engine, programs, source, build)
    commands = [tuple(argument.format_map(values) for argument in command) for command in engine.commands]
    return (*commands[:-1], (*commands[-1], *argv))


def render_env(engine: Engine, source: str, build: str) -> Mapping[str, str]:
    """Return the variables that all of the engine's commands need."""
    values = _placeholders(engine, {}, source, build)
    return MappingProxyType({name: value.format_map(values) for name, value in engine.env.items()})


def render_generated(engine: Engine, source: str, build: str) -> Mapping[str, str]:
    """Return the files to write before the first command: absolute path, text."""
    values = _placeholders(engine, {}, source, build)
    files = {f"{build}/{name}": text.format_map(values) for name, text in engine.generated.items()}
    return MappingProxyType(files)


def _placeholders(engine: Engine, programs: Mapping[str, str], source: str, build: str) -> Mapping[str, str]:
    return {"source": source, "build": build, **{name: programs.get(name, name) for name in engine.programs}}


def limits_note(engine: Engine, limits: Limits) -> str:
    """Name the limits below the amounts that the engine needs for more than small programs; empty if there are none."""
    low = [name for name, amount in engine.advised.items() if getattr(limits, name) < amount]
    if not low:
        return ""
    advised = ", ".join(f"{name}={_format_amount(name, engine.advised[name])}" for name in low)
    return f"{engine.name} may need more than these limits for larger programs: {advised}"


def _format_amount(name: str, amount: int) -> str:
    return format_size(amount) if name.endswith("_bytes") else str(amount)
