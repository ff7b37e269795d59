"""The table of languages: names, detection, commands, and .NET's project as text."""

from __future__ import annotations

import string
import xml.etree.ElementTree as ET
from collections.abc import Iterator

import pytest

from cloche.core.errors import InvalidRequest
from cloche.core.languages import (
    LANGUAGES,
    Engine,
    Language,
    detect_language,
    language_named,
    limits_note,
    render,
    render_env,
    render_generated,
)
from cloche.core.limits import Limits
from cloche.core.policy import DEFAULT_LANGUAGES

SOURCE, BUILD = "/workspace/main.x", "/tmp/build"
ENGINES = [(language, engine) for language in LANGUAGES.values() for engine in language.engines]
ENGINE_IDS = [f"{language.name}-{engine.name}" for language, engine in ENGINES]


def test_the_table_has_the_default_seven_and_csharp() -> None:
    """The default allowlist is in the table, and C# is the only language beyond it."""
    assert set(LANGUAGES) == {*DEFAULT_LANGUAGES, "csharp"}


def test_images_are_the_published_ones() -> None:
    """The default container images are those of R5."""
    assert {name: language.image for name, language in LANGUAGES.items() if name != "csharp"} == {
        "python": "python:3.12-alpine",
        "javascript": "node:22-alpine",
        "typescript": "denoland/deno:alpine",
        "bash": "alpine:3.20",
        "ruby": "ruby:3.3-alpine",
        "go": "golang:1.22-alpine",
        "rust": "rust:1.78-alpine",
    }
    assert LANGUAGES["csharp"].image.endswith("dotnet/sdk:10.0-alpine")


def test_engines_stand_in_order_of_preference() -> None:
    """TypeScript prefers deno, then tsx, then a new node; C# prefers .NET to Mono; new Go comes before old."""
    order = {name: [engine.name for engine in language.engines] for name, language in LANGUAGES.items()}
    assert order["typescript"] == ["deno", "tsx", "node"]
    assert order["csharp"] == ["dotnet", "mono"]
    assert order["bash"] == ["bash", "sh"]
    assert order["go"] == ["go", "old-go"]


def test_names_aliases_and_suffixes_are_unique() -> None:
    """No word and no suffix leads to two languages."""
    words = [word for language in LANGUAGES.values() for word in (language.name, *language.aliases)]
    suffixes = [suffix for language in LANGUAGES.values() for suffix in language.suffixes]
    assert len(set(words)) == len(words)
    assert len(set(suffixes)) == len(suffixes)


@pytest.mark.parametrize("language", LANGUAGES.values(), ids=list(LANGUAGES))
def test_a_language_is_consistent(language: Language) -> None:
    """The file name has a suffix of the language, and the image holds one of its engines."""
    assert detect_language(language.file_name) is language
    assert language.image_engine in {engine.name for engine in language.engines}


@pytest.mark.parametrize(
    ("word", "name"),
    [
        ("Python", "python"), ("py", "python"), ("JS", "javascript"), ("node", "javascript"),
        ("ts", "typescript"), ("sh", "bash"), (" bash ", "bash"), ("rb", "ruby"), ("golang", "go"),
        ("rs", "rust"), ("C#", "csharp"), ("cs", "csharp"),
    ],
)  # fmt: skip
def test_a_language_answers_to_its_aliases(word: str, name: str) -> None:
    """Names and aliases are accepted in any case."""
    assert language_named(word).name == name


def test_an_unknown_language_is_refused_with_the_known_ones() -> None:
    """The error names what was asked for and what there is."""
    with pytest.raises(InvalidRequest, match=r"unknown language 'cobol'.*python.*csharp"):
        language_named("cobol")


@pytest.mark.parametrize(
    ("file_name", "first_line", "name"),
    [
        ("a.py", "", "python"),
        ("A.PY", "", "python"),
        ("dir.rb/a.mjs", "", "javascript"),
        ("a.ts", "#!/usr/bin/env python3", "typescript"),
        ("tool", "#!/usr/bin/env python3", "python"),
        ("tool", b"#!/usr/bin/python3.11\n", "python"),
        ("tool", "#! /bin/bash -e", "bash"),
        ("tool", "#!/bin/sh", "bash"),
        ("tool", "#!/usr/bin/env -S deno run --allow-all", "typescript"),
        ("tool", "#!/usr/bin/env -S A=b node --harmony", "javascript"),
        ("tool", "#!/usr/bin/env ruby3.1\r\n", "ruby"),
        ("tool.txt", b"#!/usr/bin/env ruby\n\xff", "ruby"),
    ],
)
def test_a_files_language_is_told_by_suffix_then_by_its_first_line(
    file_name: str, first_line: bytes | str, name: str
) -> None:
    """A known suffix decides; else the program that the first line names, without folder and version."""
    assert detect_language(file_name, first_line).name == name


@pytest.mark.parametrize("first_line", ["", "#!", "#!/usr/bin/env", "#!/usr/bin/perl", "print(1)", b"\xff\xfe\x00"])
def test_a_file_that_tells_no_language_is_refused(first_line: bytes | str) -> None:
    """Nothing is guessed: the error asks for --language."""
    with pytest.raises(InvalidRequest, match=r"cannot tell the language of 'notes\.txt'.*--language"):
        detect_language("notes.txt", first_line)


@pytest.mark.parametrize(("language", "engine"), ENGINES, ids=ENGINE_IDS)
def test_every_template_renders(language: Language, engine: Engine) -> None:
    """No text of the table names a placeholder that does not exist, and no brace is left over."""
    programs = {name: f"/opt/{name}" for name in engine.programs}
    commands = render(engine, programs, SOURCE, BUILD)
    variables = render_env(engine, SOURCE, BUILD)
    words = [*(word for command in commands for word in command), *variables.values()]
    assert all(word and "{" not in word for word in words if word != variables.get("GOFLAGS"))
    assert engine.package


@pytest.mark.parametrize(("language", "engine"), ENGINES, ids=ENGINE_IDS)
def test_the_programs_arguments_follow_the_last_command(language: Language, engine: Engine) -> None:
    """Arguments go to the program alone and are never read as templates."""
    plain = render(engine, {}, SOURCE, BUILD)
    given = render(engine, {}, SOURCE, BUILD, ("-x", "{source}", "a b"))
    assert given == (*plain[:-1], (*plain[-1], "-x", "{source}", "a b"))


def test_a_path_with_spaces_stays_one_word() -> None:
    """Commands are split before paths are put in."""
    engine = LANGUAGES["rust"].engines[0]
    commands = render(engine, {"cc": "/opt/my tools/cc"}, "/workspace/my file.rs", BUILD)
    assert "-Clinker=/opt/my tools/cc" in commands[0]
    assert commands[0][-1] == "/workspace/my file.rs"


def test_a_program_without_a_path_is_called_by_its_name() -> None:
    """In a container image, programs are found on its own PATH."""
    assert render(LANGUAGES["python"].engines[0], {}, SOURCE, BUILD) == (("python3", SOURCE),)


def _placeholders(engine: Engine) -> Iterator[str]:
    for text in (word for command in engine.commands for word in command):
        yield from (name for _, name, _, _ in string.Formatter().parse(text) if name)


@pytest.mark.parametrize(("language", "engine"), ENGINES, ids=ENGINE_IDS)
def test_every_program_of_an_engine_is_used(language: Language, engine: Engine) -> None:
    """The programs that must exist are exactly those that the commands name."""
    assert set(_placeholders(engine)) - {"source", "build"} == set(engine.programs)


@pytest.mark.parametrize(("language", "engine"), ENGINES, ids=ENGINE_IDS)
def test_nothing_is_written_outside_the_build_folder(language: Language, engine: Engine) -> None:
    """Every path in the environment of a toolchain lies in the run's own build folder."""
    paths = [value for value in render_env(engine, SOURCE, BUILD).values() if value.startswith("/")]
    assert all(path == BUILD or path.startswith(f"{BUILD}/") for path in paths)


def test_deno_neither_prompts_nor_fetches() -> None:
    """Deno runs offline: no remote module, no npm package, no question, no check for a newer version."""
    engine = LANGUAGES["typescript"].engines[0]
    command = render(engine, {}, SOURCE, BUILD)[0]
    assert {"--no-remote", "--no-npm", "--cached-only", "--no-prompt", "--allow-all"} <= set(command)
    assert command[-1] == SOURCE
    assert render_env(engine, SOURCE, BUILD) == {"DENO_DIR": f"{BUILD}/deno", "DENO_NO_UPDATE_CHECK": "1"}


def test_go_leaves_its_notes_in_the_build_folder() -> None:
    """The compiler's telemetry does not land in the workspace, and the program's own environment is untouched."""
    for engine in LANGUAGES["go"].engines:
        build, run = render(engine, {"env": "/usr/bin/env", "go": "/usr/bin/go"}, SOURCE, BUILD)
        assert build[:4] == ("/usr/bin/env", "GOMAXPROCS=2", f"XDG_CONFIG_HOME={BUILD}/config", "/usr/bin/go")
        assert run == (f"{BUILD}/program",)


def test_go_fetches_nothing() -> None:
    """Go uses the toolchain that is there, and no module proxy."""
    variables = render_env(LANGUAGES["go"].engines[0], SOURCE, BUILD)
    assert {"GOPROXY": "off", "GOTOOLCHAIN": "local", "GO111MODULE": "off"}.items() <= variables.items()


def test_dotnets_project_compiles_the_source_alone() -> None:
    """The project is XML that names exactly the source, and needs no compiler server and no package."""
    files = render_generated(LANGUAGES["csharp"].engines[0], "/workspace/Program.cs", BUILD)
    project = ET.fromstring(files[f"{BUILD}/program.csproj"])
    assert project.get("Sdk") == "Microsoft.NET.Sdk"
    assert [item.get("Include") for item in project.iter("Compile")] == ["/workspace/Program.cs"]
    properties = {item.tag: item.text for group in project.iter("PropertyGroup") for item in group}
    assert properties["OutputType"] == "Exe"
    assert properties["TargetFramework"] == "net$(BundledNETCoreAppTargetFrameworkVersion)"
    off = ("EnableDefaultItems", "UseAppHost", "UseSharedCompilation", "NuGetAudit")
    assert {name: properties[name] for name in off} == dict.fromkeys(off, "false")
    assert list(project.iter("PackageReference")) == []


def test_dotnets_nuget_configuration_is_offline() -> None:
    """Package sources are cleared and none is added; packages would land in the build folder."""
    files = render_generated(LANGUAGES["csharp"].engines[0], "/workspace/Program.cs", BUILD)
    config = ET.fromstring(files[f"{BUILD}/NuGet.config"])
    sources = config.find("packageSources")
    assert sources is not None
    assert [item.tag for item in sources] == ["clear"]
    folders = {item.get("key"): item.get("value") for item in config.iter("add")}
    assert folders == {"globalPackagesFolder": f"{BUILD}/packages"}


def test_dotnet_builds_then_runs_with_dotnet_run() -> None:
    """The command is `dotnet run` on the generated project; what it built before it does not build again."""
    engine = LANGUAGES["csharp"].engines[0]
    build, run = render(engine, {"dotnet": "/usr/bin/dotnet"}, SOURCE, BUILD, ("-v", "x"))
    assert build[:3] == ("/usr/bin/dotnet", "build", f"{BUILD}/program.csproj")
    assert run[:3] == ("/usr/bin/dotnet", "run", "--no-build")
    assert run[-5:] == ("--project", f"{BUILD}/program.csproj", "--", "-v", "x")
    variables = render_env(engine, SOURCE, BUILD)
    assert variables["DOTNET_CLI_TELEMETRY_OPTOUT"] == "1"
    assert variables["MSBUILDDISABLENODEREUSE"] == "1"


def test_stand_ins_say_so() -> None:
    """Mono, plain sh, tsx and node's type stripping are named as what they are."""
    spoken = {engine.name: engine.stand_in for _, engine in ENGINES if engine.stand_in}
    assert set(spoken) == {"mono", "sh", "tsx", "node"}
    assert "Mono stands in for .NET" in spoken["mono"]


def test_low_limits_are_noted_and_never_raised() -> None:
    """What an engine may need is a sentence; with enough of everything there is none."""
    engine = LANGUAGES["go"].engines[0]
    assert "tmp_bytes=256MiB" in limits_note(engine, Limits())
    enough = Limits(tmp_bytes=engine.advised["tmp_bytes"], memory_bytes=engine.advised["memory_bytes"], timeout_s=90)
    assert limits_note(engine, enough) == ""
    assert limits_note(LANGUAGES["python"].engines[0], Limits()) == ""
