"""A function's signature, as it is read for a run."""

from __future__ import annotations

from cloche.functions.tool import BoundTool, Tool


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
