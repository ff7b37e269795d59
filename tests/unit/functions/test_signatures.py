"""A function's signature, as it is read for a run."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import BaseModel

from cloche.functions.tool import BoundTool, Tool, stubs


def test_a_signature_is_read_once_while_its_function_is_the_same() -> None:
    """A second run reads nothing again; after a change of the function, it does."""

    def add(a: int, b: int = 1) -> int:
        """Add."""
        return a + b

    first = BoundTool(Tool(add))
    assert BoundTool(Tool(add))._signature is first._signature
    assert BoundTool(Tool(add, name="plus")).source().startswith("def plus(a: int, b: int = 1)")
    add.__defaults__ = (2,)
    add.__doc__ = "Sum."
    assert BoundTool(Tool(add)).arguments({"a": 1}, []) == ([], {"a": 1, "b": 2})
    assert "Sum." in BoundTool(Tool(add)).source()
    assert BoundTool(Tool(add)).source().startswith("def add(")


class Line(BaseModel):
    """Be a model in another one."""

    item: str
    count: int = 1


@dataclass
class Order:
    """Be a record that has models."""

    lines: list[Line]
    note: str | None = None


def test_stubs_show_the_fields_of_models_and_records() -> None:
    """A model of language cannot know them, and its programs have them as dicts."""

    def place(order: Order) -> list[Line]:
        return order.lines

    text = stubs([place])
    assert "class Order(TypedDict):\n    lines: list[Line]\n    note: NotRequired[str | None]\n" in text
    assert "class Line(TypedDict):\n    item: str\n    count: NotRequired[int]\n" in text
    assert "def place(order: Order) -> list[Line]: ..." in text
    compile(text, "stubs", "exec")
