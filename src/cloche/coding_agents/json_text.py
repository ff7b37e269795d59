"""Edit JSON as text, so that all else of a user's file stays as it is: order, blanks, comments, commas at the end.

`parse` returns a tree of nodes with their places in the text. `put` and `append` return the text with one more member
or item, `remove` without one. Comments are those of JSONC, `//` and `/* */`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from cloche.core.errors import InvalidRequest
from cloche.core.record import dataclass, field

MOST_CHARS, MOST_DEPTH = 4 << 20, 200
_BLANK = re.compile(r"(?:\s+|//[^\n]*|/\*.*?\*/)*", re.DOTALL)
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_PLAIN = re.compile(r"[-+.\w]+")
INDENT = "  "


@dataclass(slots=True, kw_only=True)
class Node:
    """Hold a value and its place. `members` are those of an object by name; `items` all children, `starts` theirs."""

    start: int
    end: int = 0
    value: Any = None
    members: dict[str, Node] = field(default_factory=dict)
    items: list[Node] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)

    def at(self, path: Sequence[str]) -> Node | None:
        """Return the member at a path of names."""
        node: Node | None = self
        for name in path:
            node = node.members.get(name) if node is not None else None
        return node


def parse(text: str, name: str) -> Node:
    """Return the tree of a text. Raises InvalidRequest with the file's name if it is not JSON."""
    try:
        if len(text) > MOST_CHARS:
            raise ValueError(f"it has more than {MOST_CHARS} characters")
        node = _parse(text, _skip(text, 0), 0)
        if _skip(text, node.end) != len(text):
            raise ValueError(f"something follows at {node.end}")
    except (ValueError, IndexError) as error:
        raise InvalidRequest(f"{name}: is not JSON ({error}); mend it, or move it away") from error
    return node


def _skip(text: str, position: int) -> int:
    match = _BLANK.match(text, position)
    return match.end() if match else position


def _parse(text: str, position: int, depth: int) -> Node:
    if depth > MOST_DEPTH:
        raise ValueError("it is too deep")
    node = Node(start=position)
    if text[position] in "{[":
        _parse_inner(text, node, depth)
    else:
        match = (_STRING if text[position] == '"' else _PLAIN).match(text, position)
        if match is None:
            raise ValueError(f"no value at {position}")
        node.value, node.end = json.loads(match[0]), match.end()
    return node


def _parse_inner(text: str, node: Node, depth: int) -> None:
    is_object = text[node.start] == "{"
    node.value = {} if is_object else []
    position = _skip(text, node.start + 1)
    while text[position] not in "}]":
        node.starts.append(position)
        name = ""
        if is_object:
            match = _STRING.match(text, position)
            if match is None:
                raise ValueError(f"no name at {position}")
            name, position = json.loads(match[0]), _skip(text, match.end())
            if text[position] != ":":
                raise ValueError(f"no colon at {position}")
            position = _skip(text, position + 1)
        child = _parse(text, position, depth + 1)
        node.items.append(child)
        if is_object:
            node.members[name], node.value[name] = child, child.value
        else:
            node.value.append(child.value)
        position = _skip(text, child.end)
        if text[position] == ",":
            position = _skip(text, position + 1)
        elif text[position] not in "}]":
            raise ValueError(f"no comma at {position}")
    if (text[position] == "}") is not is_object:
        raise ValueError(f"the wrong bracket at {position}")
    node.end = position + 1


def put(text: str, path: Sequence[str], value: Any, name: str) -> str:  # noqa: ANN401 - any JSON
    """Return the text with a value at a path of names, in place of one that is there; objects above are made."""
    tree = parse(text or "{}", name)
    text = text or "{}\n"
    present = tree.at(path)
    if present is not None:
        return text[: present.start] + _written(value, len(path)) + text[present.end :]
    above = tree
    for depth, step in enumerate(path):
        below = above.members.get(step)
        if below is None:
            for inner in reversed(path[depth + 1 :]):
                value = {inner: value}
            return _inserted(text, above, f"{json.dumps(step)}: {_written(value, depth + 1)}", depth + 1, name)
        above = below
    raise AssertionError(path)


def append(text: str, path: Sequence[str], value: Any, name: str) -> str:  # noqa: ANN401 - any JSON
    """Return the text with one more item in the list at a path, which is made if it is missing."""
    node = parse(text or "{}", name).at(path)
    if node is None:
        return put(text, path, [value], name)
    return _inserted(text, node, _written(value, len(path) + 1), len(path) + 1, name)


def _inserted(text: str, above: Node, written: str, depth: int, name: str) -> str:
    """Return the text with one more child at the end of an object or list."""
    if not isinstance(above.value, dict | list):
        raise InvalidRequest(f"{name}: has no object or list where one belongs; mend it, or move it away")
    pad = INDENT * depth
    if not above.items:
        return text[: above.start + 1] + f"\n{pad}{written}\n{INDENT * (depth - 1)}" + text[above.end - 1 :]
    last, is_long = above.items[-1].end, "\n" in text[above.start : above.end]
    return text[:last] + (f",\n{pad}" if is_long else ", ") + written + text[last:].removeprefix(",")


def _written(value: Any, depth: int) -> str:  # noqa: ANN401 - any JSON
    return json.dumps(value, indent=len(INDENT), ensure_ascii=False).replace("\n", f"\n{INDENT * depth}")


def remove(text: str, path: Sequence[str | int], name: str) -> str:
    """Return the text without the child at a path of names and indices, and without what is empty above it then."""
    above, chain = parse(text, name), []
    for step in path:
        index = step if isinstance(step, int) else list(above.members).index(step)
        chain.append((above, index))
        above = above.items[index]
    while len(chain) > 1 and len(chain[-1][0].items) == 1:
        chain.pop()
    node, index = chain[-1]
    if len(node.items) == 1:
        return text[: node.start + 1] + text[node.end - 1 :]
    if index + 1 < len(node.items):
        return text[: node.starts[index]] + text[node.starts[index + 1] :]
    return text[: node.items[index - 1].end] + text[node.items[index].end :]
