"""What a model is told of a run."""

import cloche
from cloche.agent.answers import displayed_text
from cloche.core.result import Output

PICTURE = Output(data={"image/png": b"\x89PNG", "text/plain": "<Figure>"})


def test_what_was_displayed_is_told_once() -> None:
    """Text of each output, or its formats; no figure, which is seen, and not the look of the value, which is told."""
    outputs = (
        Output(data={"text/html": "<b>", "text/plain": "a table"}),
        PICTURE,
        Output(data={"text/html": "x" * 2048}),
        Output(data={"text/plain": "[1,\n 2]"}),
    )
    shown = displayed_text(cloche.Result("", "", 0, 0.0, outputs=outputs, value=[1, 2]))
    assert shown == "a table\n[text/html, 2KiB]"
    assert displayed_text(cloche.Result("", "", 0, 0.0, outputs=outputs[-1:])) == "[1,\n 2]"
    long = list(range(5000))
    pretty = Output(data={"text/plain": str(long).replace(" ", "\n ")})
    assert displayed_text(cloche.Result("", "", 0, 0.0, outputs=(pretty,), value=long)) == ""
    hostile = Output(data={"text/plain": "[" * 100 + "1," * 8_000_000})  # seconds, and gigabytes, for a parser
    assert displayed_text(cloche.Result("", "", 0, 0.0, outputs=(hostile,), value=[1])).startswith("[[[")
    many = tuple(Output(data={"text/plain": "x" * 60_000}) for _ in range(500))
    assert len(displayed_text(cloche.Result("", "", 0, 0.0, outputs=many))) < 10_000
    unhashable = Output(data={"text/plain": "{[]: 1}"})
    assert displayed_text(cloche.Result("", "", 0, 0.0, outputs=(unhashable,), value=[1])) == "{[]: 1}"
