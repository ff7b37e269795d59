"""Tools, tiers and risks, row by row."""

import re

import pytest

from cloche import InvalidRequest, Secret
from cloche.agent.approval import Risk
from cloche.agent.catalog import (
    TOOLS,
    Tool,
    describe_with_interpreters,
    describe_with_languages,
    read_arguments,
    risk_of,
    tool_named,
    tools_of,
)
from cloche.agent.code_mode import code_mode
from cloche.agent.toolbox import Toolbox
from cloche.config.options import SandboxOptions

FILES = ["read_file", "list_files", "write_file", "edit_file"]
SANDBOXED = ["run_code", "run_python_code", "code_exec", "code.execute", "os.execute_sandboxed"]
RISKS = {
    **dict.fromkeys(SANDBOXED, (Risk.HIGH, Risk.CRITICAL)),
    "os.execute": (Risk.CRITICAL, Risk.CRITICAL),
    "read_file": (Risk.LOW, Risk.LOW),
    "list_files": (Risk.LOW, Risk.LOW),
    "write_file": (Risk.MEDIUM, Risk.MEDIUM),
    "edit_file": (Risk.MEDIUM, Risk.MEDIUM),
}


@pytest.mark.parametrize(
    ("tier", "names"), [(1, FILES), (2, FILES), (3, [*SANDBOXED, *FILES]), (4, [*SANDBOXED, "os.execute", *FILES])]
)
def test_each_tier_has_its_tools(tier: int, names: list[str]) -> None:
    """Tiers 1 and 2 have files, tier 3 code in a sandbox, tier 4 the host besides."""
    assert [tool.name for tool in tools_of(tier)] == names


@pytest.mark.parametrize("name", TOOLS)
def test_each_tool_has_its_risk(name: str) -> None:
    """In a sandbox, and where code runs on the host."""
    found = tuple(risk_of(TOOLS[name], is_on_host=is_on_host) for is_on_host in (False, True))
    assert found == RISKS[name]


@pytest.mark.parametrize(("tier", "name"), [(1, "run_code"), (2, "os.execute_sandboxed"), (3, "os.execute")])
def test_a_tool_that_a_tier_does_not_have_is_an_error_that_names_its_tiers(tier: int, name: str) -> None:
    """It says which tier has it."""
    with pytest.raises(InvalidRequest, match=f"tier {tier} has no tool '{name}': it is for tier .*4"):
        tool_named(name, tier)


def test_a_tool_that_nobody_knows_is_an_error_that_names_those_there_are() -> None:
    """So that a model can choose again."""
    with pytest.raises(InvalidRequest, match=r"no tool 'fly'; tier 3 has: run_code, "):
        tool_named("fly", 3)


@pytest.mark.parametrize("tool", TOOLS.values(), ids=TOOLS)
def test_a_tool_is_found_by_the_name_that_providers_allow(tool: Tool) -> None:
    """Letters, digits, `_` and `-` alone, and no two the same."""
    assert re.fullmatch(r"[A-Za-z0-9_-]{1,64}", tool.wire_name)
    assert tool_named(tool.wire_name, 4) is tool


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({}, "the argument 'code' is missing"),
        ([], "give the arguments as an object, not list"),
        ({"code": 1}, "code must be of type string, not int"),
        ({"code": "1", "timeout": True}, "timeout must be of type number, not bool"),
        ({"code": "1", "timeout": 0}, "timeout must be more than 0, not 0"),
        ({"code": "1", "timeout": float("nan")}, "timeout must be more than 0, not nan"),
        ({"code": "1", "language": "cobol"}, "language 'cobol' is not one of: python, "),
        ({"code": "1", "network": "open"}, "there is no argument 'network'; it takes: code, language, timeout"),
        ({"code": "1", "backend": "none"}, "there is no argument 'backend'"),
    ],
)
def test_arguments_that_do_not_fit_are_named(arguments: object, complaint: str) -> None:
    """Nothing unknown and nothing of another kind gets further."""
    with pytest.raises(InvalidRequest, match=f"run_code: {re.escape(complaint)}"):
        read_arguments(TOOLS["run_code"], arguments)


OF_MODELS = {
    "code", "command", "shell", "language", "timeout", "path", "offset", "lines", "content", "old", "new",
    "restart",
}  # fmt: skip


@pytest.mark.parametrize("tool", TOOLS.values(), ids=TOOLS)
def test_no_tool_takes_what_makes_a_sandbox(tool: Tool) -> None:
    """None of the operator's keywords but `timeout`, which can only be shortened; each is refused by name."""
    tool = describe_with_interpreters(tool, tool.languages)
    assert set(tool.properties) <= OF_MODELS
    given = {name: "x" for name, about in tool.properties.items() if "default" not in about}
    keywords = {*SandboxOptions.__annotations__, "env", "files", "argv", "stdin", "approve", "roots", "cwd", "user"}
    for name in keywords - {"timeout"}:
        with pytest.raises(InvalidRequest, match=f"there is no argument '{name}'"):
            read_arguments(tool, {**given, name: "x"})


# By tool: in which of its languages interpreters go on, where there are some of all three.
LIVE = {
    "run_code": "python, javascript and bash", "run_python_code": "python", "code_exec": "python, javascript and bash",
    "code.execute": "python",
}  # fmt: skip


@pytest.mark.parametrize("name", TOOLS)
def test_each_tool_is_told_where_interpreters_go_on(name: str) -> None:
    """Those that run programs take `restart` besides, a truth value, and say in which languages; no other changes."""
    tool, live = TOOLS[name], describe_with_interpreters(TOOLS[name], ("python", "javascript", "bash"))
    if name not in LIVE:
        assert live is tool
        return
    assert set(live.properties) == {*tool.properties, "restart"}
    assert f"In {LIVE[name]} so are variables" in live.description
    assert ("Other languages begin anew" in live.description) is (name != "run_python_code")
    assert (live.tiers, live.action, live.languages) == (tool.tiers, tool.action, tool.languages)
    assert read_arguments(live, {"code": "1"})["restart"] is False
    assert read_arguments(live, {"code": "1", "restart": True})["restart"] is True
    for wrong in (1, 0, "true", [], 1.0):
        with pytest.raises(InvalidRequest, match="restart must be of type boolean"):
            read_arguments(live, {"code": "1", "restart": wrong})
    assert set(live.schema["required"]) == {"code"}


@pytest.mark.parametrize("name", TOOLS)
def test_each_tool_is_told_where_none_go_on(name: str) -> None:
    """What runs programs says so; nothing takes another argument."""
    tool, told = TOOLS[name], describe_with_interpreters(TOOLS[name], ())
    assert told.properties is tool.properties
    assert told.description.endswith("earlier ones are not there.") is (name in LIVE)


def test_arguments_come_complete() -> None:
    """What was left out has its default."""
    assert read_arguments(TOOLS["run_code"], {"code": "1"}) == {"code": "1", "language": "python", "timeout": 30}


def test_a_schema_that_was_given_away_changes_no_tool() -> None:
    """Frameworks write into what they get, enumerations too."""
    schema = TOOLS["run_code"].schema
    schema["properties"]["language"]["enum"].append("cobol")
    schema["properties"]["backend"] = {"type": "string"}
    assert "cobol" not in TOOLS["run_code"].schema["properties"]["language"]["enum"]
    with pytest.raises(InvalidRequest, match="'cobol' is not one of"):
        read_arguments(TOOLS["run_code"], {"code": "1", "language": "cobol"})


@pytest.mark.parametrize("name", [None, [], {}, 3])
def test_a_name_that_is_no_text_is_an_error(name: object) -> None:
    """Of the kind that a model is told of."""
    with pytest.raises(InvalidRequest, match="a tool's name is text"):
        tool_named(name, 3)  # type: ignore[arg-type]


def test_languages_that_cannot_run_are_not_offered() -> None:
    """Neither in the schema nor in words; a tool that has none left stays as it is, and says why when it is called."""
    tool = describe_with_languages(TOOLS["run_code"], ("python", "bash", "csharp"))
    assert tool.properties["language"] == {**TOOLS["run_code"].properties["language"], "enum": ["python", "bash"]}
    assert tool.languages == ("python", "bash")
    with pytest.raises(InvalidRequest, match="language 'typescript' is not one of: python, bash"):
        read_arguments(tool, {"code": "1", "language": "typescript"})
    alone = describe_with_languages(TOOLS["code.execute"], ("python",))
    assert "language" not in alone.properties
    assert "C#" not in alone.description
    for name in ("run_python_code", "os.execute_sandboxed", "read_file"):
        assert describe_with_languages(TOOLS[name], ("ruby",)) is TOOLS[name]


def test_a_model_is_told_of_secrets() -> None:
    """The tools that run code name the variables and their hosts: nothing else says that they are there."""
    secrets = {"TOKEN": Secret(value="0123456789abcdefghij", hosts=("api.example.com",))}
    tools = {tool.name: tool.description for tool in Toolbox(secrets=secrets).tools}
    assert tools["run_code"].endswith("a placeholder that works at its hosts alone: TOKEN (api.example.com).")
    assert "TOKEN" not in tools["read_file"]
    assert "Credentials" not in str([tool.description for tool in Toolbox().tools])
    assert "alone: TOKEN (api.example.com)." in str(code_mode([], secrets=secrets).__doc__)
