"""TOML of strangers: what would take the square of its length is refused before it is read."""

from __future__ import annotations

import time
import tracemalloc

import pytest

from cloche.core.toml import read_toml

PARTS = ".".join(["a"] * 5_000)
HOSTILE = {
    "key": f"{PARTS} = 1",
    "quoted key": ".".join(['"a"'] * 5_000) + " = 1",
    "table": f"[{PARTS}]\na = 1",
    "list of tables": f"  [[{PARTS}]]\na = 1",
    "within a table": f"x = {{ {PARTS} = 1 }}",
    "behind a text of many lines": f'x = {{ a = """\n\'"""  , {PARTS} = "\'" }}',
    "keys below a long table": f"[{PARTS[:600]}]\n" + "".join(f"k{n} = 1\n" for n in range(50_000)),
    "a table forgotten": f"[{PARTS[:1600]}]\na = [\n[1],\n]\n" + "".join(f"k{n} = 1\n" for n in range(50_000)),
    "many long keys": "".join(f"{PARTS[:800]}.b{n} = 1\n" for n in range(1_000)),
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_keys_of_many_parts_are_refused_at_once(text: str) -> None:
    """Wherever such a key stands, no memory is taken for its parts, and hardly any time."""
    tracemalloc.start()
    begun = time.process_time()
    try:
        with pytest.raises(ValueError, match="too many parts"):
            read_toml(text)
        assert time.process_time() - begun < 1
        assert tracemalloc.get_traced_memory()[1] < 5 * len(text) + (4 << 20)
    finally:
        tracemalloc.stop()


def test_what_people_write_is_read() -> None:
    """Dots of versions and addresses in a long line, tables within tables and deep lists are as they were."""
    listed = [f"package-{n}==1.2.{n}" for n in range(200)]
    found = read_toml(f"dependencies = {listed!r}\n[tool.a.b.c]\nd.e = 1.5\n" + "f = " + "[" * 50 + "]" * 50)
    assert found["dependencies"] == listed
    assert found["tool"]["a"]["b"]["c"]["d"] == {"e": 1.5}
    with pytest.raises(ValueError, match="nested too deeply"):
        read_toml("a = " + "[" * 100_000)
